"""Memories, their contents by definition, and NIXL as numpy copies.

The oracle: every address here comes from the formula of a plane, one state at a time; nothing comes from the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from kvferry.geometry import Blocks, EngineGeometry, Group, GroupKind, Plane
from kvferry.planner import ReadPlan
from kvferry.planner.descriptors import Descriptors
from kvferry.planner.expansion import Copy, Expansion, StagedRead
from kvferry.planner.rows import Cells
from tests.support.geometries import Engine

Bytes = npt.NDArray[np.uint8]

SLOT = 1 << 30
"""Address of the staging memory: below every rank's."""
SLOT_ROOM = 100
"""Bytes by which a slot is longer than the longest row, so that batches hold several rows, but not many."""
POISON = 0xA5
JUNK = 0x3C


def content(plane: Plane, states: int) -> Bytes:
    """The model's tensor, ``[units, states, bytes]``: each byte tells layer, component, unit, state and place."""
    name = sum((index + 1) * ord(char) for index, char in enumerate(plane.name))
    unit, state, byte = np.ogrid[: plane.axis_size, :states, : plane.state_bytes]
    mixed = (name * 2654435761 + unit * 40503 + state * 69069 + byte * 30011 + unit * state * 7 + 12345) & 0xFFFFFFFF
    values: Bytes = ((mixed ^ (mixed >> 13) ^ (mixed >> 7)) & 0xFF).astype(np.uint8)
    return values


def global_state(plane: Plane, block: int, x: int) -> int:
    """Which state of the request is the `x`-th that a rank holds in its `block`-th block."""
    shard = plane.token_shard
    held = block * plane.block_states + x
    if shard.count == 1:
        return held
    interleave = Fraction(shard.interleave) / plane.tokens_per_state
    assert interleave.denominator == 1
    turn, within = divmod(held, int(interleave))
    return (turn * shard.count + shard.index) * int(interleave) + within


def address(plane: Plane, block_id: int, unit: int, x: int) -> int:
    """The formula of DESIGN §5."""
    return (
        plane.base
        + block_id * plane.block_stride
        + (x // plane.page_tokens) * plane.page_stride
        + (unit - plane.units.begin) * plane.unit_stride
        + (x % plane.page_tokens) * plane.token_stride
    )


@dataclass
class Memory:
    """A rank's memory."""

    base: int
    data: Bytes

    @classmethod
    def filled(cls, base: int, size: int, value: int) -> Memory:
        return cls(base, np.full(size, value, np.uint8))

    def at(self, where: int, length: int) -> Bytes:
        offset = where - self.base
        assert 0 <= offset <= offset + length <= len(self.data), f"{length} bytes at {where:#x} are outside the memory"
        return self.data[offset : offset + length]


def states_of(tokens: int, plane: Plane) -> int:
    """States that `tokens` tokens have begun."""
    return -int(-tokens // plane.tokens_per_state)


def source_memories(
    engine: Engine, blocks: Mapping[str, Blocks], tokens: int
) -> tuple[EngineGeometry, list[Memory], dict[str, Bytes]]:
    """The source's ranks, filled with a request of `tokens` tokens; and the model's tensors by plane name."""
    geometry, sizes = engine.build()
    memories = [Memory.filled(engine.base(rank), size, JUNK) for rank, size in enumerate(sizes)]
    model: dict[str, Bytes] = {}
    for rank, plane in geometry.planes():
        group = geometry.group(plane.group)
        is_state = group.kind is GroupKind.STATE
        total = plane.block_states if is_state else states_of(tokens, plane)
        tensor = model.setdefault(plane.name, content(plane, total))
        mine = blocks[group.name]
        first = 0 if is_state else mine.first_token // group.block_tokens
        for place, block_id in enumerate(mine.ids.tolist()):
            for x in range(plane.block_states):
                state = x if is_state else global_state(plane, first + place, x)
                if state >= total:
                    continue
                for unit in range(plane.units.begin, plane.units.end):
                    where = address(plane, block_id, unit, x)
                    memories[rank.rank].at(where, plane.state_bytes)[:] = tensor[unit, state]
    return geometry, memories, model


def copies(descriptors: Descriptors) -> list[tuple[int, int, int]]:
    """Descriptors as (source, destination, length), from the lists that NIXL gets."""
    (source, length, device), (destination, same_length, own_device) = (rows.T.tolist() for rows in descriptors.lists())
    assert length == same_length
    memory = descriptors.memory
    assert {*device, memory.source[1]} == {memory.source[1]}
    assert {*own_device, memory.destination[1]} == {memory.destination[1]}
    return list(zip(source, destination, length, strict=True))


def copy_of(
    source: int,
    source_stride: int,
    places: npt.NDArray[np.int64],
    destination: int,
    destination_stride: int,
    ids: npt.NDArray[np.int64],
    axes: Sequence[tuple[int, int, int]],
    cell: int,
) -> Copy:
    """A copy from places to blocks; along its axes, (count, source stride, destination stride)."""
    counts, strides, own_strides = (tuple(axis[at] for axis in axes) for at in range(3))
    there = Cells(source, (int(places.max()) + 1, *counts), (source_stride, *strides), cell)
    here = Cells(destination, (int(ids.max()) + 1, *counts), (destination_stride, *own_strides), cell)
    return Copy(there, places, here, ids)


def addresses(cells: Cells, at: int) -> list[int]:
    """The addresses of the cells at an index of the first axis."""
    found = [cells.address + at * cells.strides[0]]
    for count, stride in zip(cells.shape[1:], cells.strides[1:], strict=True):
        found = [address + step * stride for address in found for step in range(count)]
    return found


def execute(expansion: Expansion, sources: list[Memory], destination: Memory) -> None:
    """Move the bytes; no destination byte may be written twice."""
    written = np.zeros(len(destination.data), np.uint8)
    counted = 0
    for source in expansion.sources:
        for descriptors in source.descriptors:
            moves = copies(descriptors)
            assert len(moves) == descriptors.count
            assert descriptors.total_bytes == sum(length for _, _, length in moves)
            counted += len(moves)
            for theirs, mine, length in moves:
                assert length > 0
                destination.at(mine, length)[:] = sources[source.source_rank].at(theirs, length)
                written[mine - destination.base : mine - destination.base + length] += 1
        for read in source.staged:
            counted += read.count
            _execute_staged(read, sources[source.source_rank], destination, written)
    assert counted == expansion.descriptors <= expansion.pieces
    assert written.max(initial=0) <= 1, "a destination byte is written twice"
    assert int(written.sum()) == expansion.total_bytes


def _execute_staged(read: StagedRead, source: Memory, destination: Memory, written: npt.NDArray[np.uint8]) -> None:
    """Batch after batch through one slot of staging memory, as DESIGN §5 describes it: rows in, then a permutation."""
    slot_bytes = max(extent.length for extent in read.lane.extents) + SLOT_ROOM
    moved = descriptors = 0
    for batch in read.batches(slot_bytes):
        slot = Memory.filled(SLOT, slot_bytes, POISON)
        raw = batch.descriptors(SLOT, read.lane.memory)
        descriptors += raw.count
        for theirs, mine, length in copies(raw):
            assert mine + length <= SLOT + batch.staged_bytes <= SLOT + slot_bytes
            slot.at(mine, length)[:] = source.at(theirs, length)
        before = moved
        for copy in batch.copies(SLOT):
            for place, block_id in zip(copy.places.tolist(), copy.ids.tolist(), strict=True):
                pairs = zip(addresses(copy.source, place), addresses(copy.destination, block_id), strict=True)
                for theirs, mine in pairs:
                    size = copy.source.size
                    destination.at(mine, size)[:] = slot.at(theirs, size)
                    written[mine - destination.base : mine - destination.base + size] += 1
                    moved += size
        assert moved - before == batch.total_bytes
    assert moved == read.total_bytes
    assert descriptors >= read.count


@dataclass(frozen=True)
class Wanted:
    """What a request asks of one group: tokens ``[begin, end)``, and the first token that may be written at all."""

    begin: int
    end: int
    floor: int


def has_token(group: Group, blocks: Blocks, token: int) -> bool:
    """Whether a block table has a block with the token."""
    place = token // group.block_tokens - blocks.first_token // group.block_tokens
    if token < blocks.first_token or place >= len(blocks.ids):
        return False
    within = blocks.end_token is None or token < blocks.end_token
    return within and int(blocks.ids[place]) != group.null_block


def wanted(
    group: Group, source: Blocks, mine: Blocks, source_group: Group, tokens: tuple[int, int] | None
) -> Wanted | None:
    """From the words of DESIGN §5, Tokens; None for state groups."""
    if group.kind is GroupKind.STATE:
        return None
    floor = mine.first_token if tokens is None else max(mine.first_token, tokens[0])
    if tokens is not None:
        end = tokens[1]
    elif mine.end_token is not None:
        end = mine.end_token
    elif source.end_token is not None:
        end = source.end_token
    else:
        end = (source.first_token // source_group.block_tokens + len(source.ids)) * source_group.block_tokens
    begin = floor
    if group.kind is GroupKind.WINDOW:
        # The next token attends to itself and the window_tokens - 1 before it; the one before these is moved where
        # both sides hold it.
        begin = max(begin, end - group.window_tokens + 1)
        more = end - group.window_tokens
        if more >= floor and has_token(source_group, source, more) and has_token(group, mine, more):
            begin = more
    return Wanted(begin, end, floor)


def check(
    plan: ReadPlan,
    destination: Memory,
    before: Bytes,
    model: Mapping[str, Bytes],
    source: Mapping[str, Blocks],
    blocks: Mapping[str, Blocks],
    tokens: tuple[int, int] | None,
) -> int:
    """Compare every byte of a destination rank; returns how many states were wanted.

    A granule that holds a wanted state is read whole, whatever its bytes mean; that may reach past the end, and, for a
    window, below its begin, but not below what was asked. All other bytes stay as they were.
    """
    expected = before.copy()
    count = 0
    for plane in plan.rank.planes:
        if plane.name in plan.uncovered:
            continue
        group = plan.destination.group(plane.group)
        mine = blocks[group.name]
        ask = wanted(group, source[group.name], mine, plan.source.group(group.name), tokens)
        first = 0 if ask is None else mine.first_token // group.block_tokens
        per_state = plane.tokens_per_state
        for place, block_id in enumerate(mine.ids.tolist()):
            states = [x if ask is None else global_state(plane, first + place, x) for x in range(plane.block_states)]
            want = [
                ask is None or ((s + 1) * per_state > ask.begin and s * per_state < ask.end and ask.begin < ask.end)
                for s in states
            ]
            for cell in range(0, plane.block_states, plane.token_granule):
                inside = range(cell, cell + plane.token_granule)
                if not any(want[x] for x in inside):
                    continue
                for x in inside:
                    for unit in range(plane.units.begin, plane.units.end):
                        where = address(plane, block_id, unit, x) - destination.base
                        here = slice(where, where + plane.state_bytes)
                        count += want[x]
                        assert want[x] or (ask is not None and states[x] * per_state >= ask.floor)
                        known = states[x] < model[plane.name].shape[1]
                        expected[here] = model[plane.name][unit, states[x]] if known else JUNK
    wrong = np.flatnonzero(expected != destination.data)
    if len(wrong):
        untouched = expected[wrong] == before[wrong]
        raise AssertionError(
            f"{len(wrong)} bytes are wrong, {int(untouched.sum())} of them should not have been touched; "
            f"the first at {destination.base + int(wrong[0]):#x}, of {_owner(plan, destination, int(wrong[0]))}"
        )
    return count


def _owner(plan: ReadPlan, destination: Memory, offset: int) -> str:
    """Where a byte lies, for messages."""
    at = destination.base + offset
    for plane in plan.rank.planes:
        for block_id in range(plane.num_blocks):
            for x in range(plane.block_states):
                for unit in range(plane.units.begin, plane.units.end):
                    begin = address(plane, block_id, unit, x)
                    if begin <= at < begin + plane.state_bytes:
                        return f"{plane.name} block {block_id} unit {unit} state {x}"
    return "no plane"


def move(
    plans: list[ReadPlan],
    source: Engine,
    destination: Engine,
    source_blocks: Mapping[str, Blocks],
    destination_blocks: Mapping[str, Blocks],
    length: int,
    tokens: tuple[int, int] | None = None,
) -> int:
    """Fill, expand, move and check a request of `length` tokens for each plan's rank; returns the states checked."""
    _, memories, model = source_memories(source, source_blocks, length)
    _, sizes = destination.build()
    count = 0
    for plan in plans:
        memory = Memory.filled(destination.base(plan.rank.rank), sizes[plan.rank.rank], POISON)
        before = memory.data.copy()
        mine = {group.name: destination_blocks[group.name] for group in plan.groups}
        expansion = plan.expand(source_blocks, mine, tokens)
        execute(expansion, memories, memory)
        count += check(plan, memory, before, model, source_blocks, destination_blocks, tokens)
    return count
