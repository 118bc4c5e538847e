"""Parts of transfers that go through staging memory."""

from __future__ import annotations

import numpy as np

from kvferry._transport.transport import TransferPart
from kvferry.geometry import Blocks, EngineGeometry, Group, Interval, MemoryKind, Plane, RankGeometry
from kvferry.planner import Path, PathRule, plan_read
from tests.transport.sources import Memory, Source

HEADS, TOKENS, STATE, BLOCKS = 4, 16, 64, 64
BLOCK_BYTES = HEADS * TOKENS * STATE
GROUP = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)
LAYERS = 4


def planes(base: int, *, heads_first: bool) -> tuple[Plane, ...]:
    """`LAYERS` planes, one behind the other."""
    unit, token = (TOKENS * STATE, STATE) if heads_first else (STATE, HEADS * STATE)
    return tuple(
        Plane(
            layer=f"layers.{layer}",
            component="key",
            group="full",
            format="plain",
            dtype="",
            memory_kind=MemoryKind.DRAM,
            device=0,
            base=base + layer * BLOCKS * BLOCK_BYTES,
            num_blocks=BLOCKS,
            block_stride=BLOCK_BYTES,
            page_tokens=TOKENS,
            page_stride=0,
            block_states=TOKENS,
            unit_stride=unit,
            token_stride=token,
            state_bytes=STATE,
            axis_size=HEADS,
            units=Interval(0, HEADS),
        )
        for layer in range(LAYERS)
    )


def part(source: Source, memory: Memory, theirs: list[int], mine: list[int], at: int = 0) -> TransferPart:
    """Blocks of the source, tokens first there and heads first here, `at` bytes into the memory; expected to arrive."""
    rule = PathRule(Path.STAGED, slot_bytes=3 * BLOCK_BYTES)
    sides = [
        EngineGeometry(name, (GROUP,), (RankGeometry(0, planes(base, heads_first=first)),))
        for name, base, first in (("p", source.base, False), ("d", memory.base + at, True))
    ]
    plan = plan_read(sides[0], sides[1], 0, rule=rule)
    (found,) = plan.expand({"full": Blocks(theirs)}, {"full": Blocks(mine)}).sources
    assert found.descriptors == ()
    size = LAYERS * BLOCKS * BLOCK_BYTES
    given = source.bytes[:size].reshape(LAYERS, BLOCKS, TOKENS, HEADS, STATE)
    wanted = memory.expected[at : at + size].reshape(LAYERS, BLOCKS, HEADS, TOKENS, STATE)
    wanted[:, mine] = given[:, theirs].transpose(0, 1, 3, 2, 4)
    return (source.info, found)


def some(seed: int, count: int = 20) -> list[int]:
    return [int(block) for block in np.random.default_rng(seed).permutation(BLOCKS)[:count]]
