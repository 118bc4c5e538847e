"""Caches above 4 GiB, and their oracle in Python's integers, which do not wrap."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.geometry import EngineGeometry, Group, Interval, MemoryKind, Plane, RankGeometry
from kvferry.planner import Path, PathRule, ReadPlan, plan_read
from kvferry.planner.descriptors import MemoryPair
from kvferry.planner.expansion import Expansion
from tests.support.simulated_memories import address, addresses, copies

HEADS, TOKENS, STATE = 4, 16, 64
BLOCK_BYTES = HEADS * TOKENS * STATE
STRIDE = 1 << 24
"""From block to block, so that 1,280 blocks span 20 GiB."""
BLOCKS = 1280
ALL = Interval(0, HEADS)
DRAM = MemoryPair((MemoryKind.DRAM, 0), (MemoryKind.DRAM, 0))
SLOT_BYTES = 1 << 20


def plane(
    base: int,
    *,
    heads: Interval = ALL,
    heads_first: bool = True,
    tokens: int = TOKENS,
    packed: bool = False,
) -> Plane:
    """Blocks of `tokens` tokens; `packed`: one behind the other, else 16 MiB apart."""
    held = len(heads)
    unit, token = (tokens * STATE, STATE) if heads_first else (STATE, held * STATE)
    return Plane(
        layer="layers.0",
        component="key",
        group="full",
        format="plain",
        dtype="",
        memory_kind=MemoryKind.DRAM,
        device=0,
        base=base,
        num_blocks=STRIDE * BLOCKS // (held * tokens * STATE) if packed else BLOCKS,
        block_stride=held * tokens * STATE if packed else STRIDE,
        page_tokens=tokens,
        page_stride=0,
        block_states=tokens,
        unit_stride=unit,
        token_stride=token,
        state_bytes=STATE,
        axis_size=HEADS,
        units=heads,
    )


def engine(name: str, of: Plane) -> EngineGeometry:
    """An engine of one rank with one plane."""
    return EngineGeometry(
        name, (Group("full", block_tokens=of.block_states, num_blocks=of.num_blocks),), (RankGeometry(0, (of,)),)
    )


def planned(source: Plane, destination: Plane, path: Path = Path.DIRECT) -> ReadPlan:
    """The plan of the one rank."""
    rule = PathRule(path, slot_bytes=SLOT_BYTES)
    return plan_read(engine("p", source), engine("d", destination), 0, rule=rule)


def cells(source: Plane, destination: Plane, theirs: list[int], mine: list[int], tokens: int) -> Mapping[int, int]:
    """Source address by destination address of every cell of a request, by the formula of DESIGN §5."""
    units = range(destination.units.begin, destination.units.end)
    return {
        address(destination, mine[token // destination.block_states], unit, token % destination.block_states): address(
            source, theirs[token // source.block_states], unit, token % source.block_states
        )
        for token in range(tokens)
        for unit in units
    }


def expanded(expansion: Expansion) -> Mapping[int, int]:
    """The same from descriptors, and from copies out of staging memory."""
    found: dict[int, int] = {}
    for source in expansion.sources:
        for descriptors in source.descriptors:
            for theirs, mine, length in copies(descriptors):
                assert length % STATE == 0
                for at in range(0, length, STATE):
                    assert mine + at not in found
                    found[mine + at] = theirs + at
        for read in source.staged:
            for batch in read.batches(SLOT_BYTES):
                staged = {
                    mine + at: theirs + at
                    for theirs, mine, length in copies(batch.descriptors(0, DRAM))
                    for at in range(0, length, STATE)
                }
                for copy in batch.copies(0):
                    assert copy.source.size % STATE == 0
                    for place, block in zip(copy.places.tolist(), copy.ids.tolist(), strict=True):
                        for x, y in zip(addresses(copy.source, place), addresses(copy.destination, block), strict=True):
                            for at in range(0, copy.source.size, STATE):
                                assert y + at not in found
                                found[y + at] = staged[x + at]
    return found
