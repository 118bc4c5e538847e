"""Sums over random pairs of geometries, against a brute force by the formula of a plane.

Sources and destinations are those of the planner's tests: any shards, layouts, block sizes, windows and states. The
bytes are moved by the planner's descriptors, and summed where they lie.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry._integrity.summed_blocks import held_blocks, source_blocks
from kvferry._memory.access import HostAccess, MemoryAccess
from kvferry.geometry import Blocks, EngineGeometry, Group, GroupKind, Plane
from kvferry.geometry.tensors import planes_of
from kvferry.planner import ReadPlan, plan_read
from kvferry.planner.request_blocks import needed
from tests.integrity.definition import sum_of
from tests.support.drawn_worlds import World, worlds
from tests.support.examples import examples
from tests.support.simulated_memories import POISON, Memory, address, execute, global_state, source_memories, wanted

PUBLICATION = 7
Place = tuple[int, str, int, int]
"""Source rank, plane, place of the source's block, unit."""


def at_home(geometry: EngineGeometry, memories: dict[int, Memory]) -> EngineGeometry:
    """The geometry with the addresses that the memories really have."""

    def moved(plane: Plane, memory: Memory) -> Plane:
        return replace(plane, base=plane.base - memory.base + memory.data.ctypes.data)

    ranks = tuple(
        replace(rank, planes=tuple(moved(plane, memories[rank.rank]) for plane in rank.planes))
        if rank.rank in memories
        else rank
        for rank in geometry.ranks
    )
    return replace(geometry, ranks=ranks)


def places(group: Group, blocks: Blocks) -> range:
    first = 0 if group.kind is GroupKind.STATE else blocks.first_token // group.block_tokens
    return range(first, first + len(blocks.ids))


def summed_states(plane: Plane, group: Group, blocks: Blocks, place: int) -> list[int]:
    """The held states of a block that are published; empty if its tokens begin or end inside a granule."""
    if group.kind is GroupKind.STATE:
        return list(range(plane.block_states))
    end = blocks.end_token
    if end is None:
        end = (blocks.first_token // group.block_tokens + len(blocks.ids)) * group.block_tokens
    found = []
    for cell in range(0, plane.block_states, plane.token_granule):
        inside = range(cell, cell + plane.token_granule)
        begins = [global_state(plane, place, x) * plane.tokens_per_state for x in inside]
        spans = [(begin, begin + plane.tokens_per_state) for begin in begins]
        touched = any(b < end and e > blocks.first_token for b, e in spans) and blocks.first_token < end
        if touched and not all(b >= blocks.first_token and e <= end for b, e in spans):
            return []
        found += list(inside) if touched else []
    return found


def brute_sums(geometry: EngineGeometry, memories: list[Memory], blocks: dict[str, Blocks]) -> dict[Place, int]:
    found = {}
    for rank, plane in geometry.planes():
        group, mine = geometry.group(plane.group), blocks[plane.group]
        for place, block_id in zip(places(group, mine), mine.ids.tolist(), strict=True):
            states = summed_states(plane, group, mine, place)
            for unit in range(plane.units.begin, plane.units.end):
                cells = [memories[rank.rank].at(address(plane, block_id, unit, x), plane.state_bytes) for x in states]
                if cells:
                    found[rank.rank, plane.name, place, unit] = sum_of(b"".join(cell.tobytes() for cell in cells))
    return found


def source_sums(
    geometry: EngineGeometry, blocks: dict[str, Blocks], share: float = 1.0, memory: MemoryAccess | None = None
) -> dict[Place, int]:
    found = {}
    for rank, plane in geometry.planes():
        for alike in source_blocks(plane, geometry.group(plane.group), blocks[plane.group], PUBLICATION, share):
            sums = (memory or HostAccess()).sums(plane, plane.units, alike)
            for place, row in zip(alike.places.tolist(), sums.tolist(), strict=True):
                for unit, value in zip(range(plane.units.begin, plane.units.end), row, strict=True):
                    assert (rank.rank, plane.name, place, unit) not in found
                    found[rank.rank, plane.name, place, unit] = value
    return found


def reader_sums(plan: ReadPlan, world: World) -> tuple[dict[Place, int], int]:
    """What a reader would compare, and how many others it has read from."""
    source_groups = {group.name: group for group in plan.source.groups}
    mine = {group.name: world.destination_blocks[group.name] for group in plan.groups}
    moved = needed(plan.groups, source_groups, world.source_blocks, mine, world.tokens)
    found, others = {}, 0
    for lane in plan.lanes:
        name = lane.group.name
        if name not in moved:
            continue
        granted = world.source_blocks[name]
        for held, count in held_blocks(lane, moved[name], source_groups[name], granted, PUBLICATION, 1.0):
            others += count * sum(len(read.units) for read in lane.reads)
            for alike in held:
                for read in lane.reads:
                    sums = HostAccess().sums(read.destination, read.units, alike)
                    for place, row in zip(alike.places.tolist(), sums.tolist(), strict=True):
                        for unit, value in zip(range(read.units.begin, read.units.end), row, strict=True):
                            assert (lane.source_rank, read.source.name, place, unit) not in found
                            found[lane.source_rank, read.source.name, place, unit] = value
    return found, others


def moved_states(plan: ReadPlan, world: World, plane: Plane) -> dict[int, tuple[int, int]]:
    """States of a destination plane that were read, and where: (block id, x). From the words of DESIGN §5."""
    group = plan.destination.group(plane.group)
    mine = world.destination_blocks[group.name]
    ask = wanted(group, world.source_blocks[group.name], mine, plan.source.group(group.name), world.tokens)
    found = {}
    for place, block_id in zip(places(group, mine), mine.ids.tolist(), strict=True):
        states = [x if ask is None else global_state(plane, place, x) for x in range(plane.block_states)]
        per_state = plane.tokens_per_state
        want = [
            ask is None or ((s + 1) * per_state > ask.begin and s * per_state < ask.end and ask.begin < ask.end)
            for s in states
        ]
        for cell in range(0, plane.block_states, plane.token_granule):
            inside = range(cell, cell + plane.token_granule)
            if any(want[x] for x in inside):
                found.update({states[x]: (block_id, x) for x in inside})
    return found


def brute_counts(plan: ReadPlan, world: World) -> tuple[Counter[tuple[str, str, int, int]], int]:
    """(plane, token shard, place, unit) of source blocks that are held whole, and the number of others read from."""
    whole: Counter[tuple[str, str, int, int]] = Counter()
    others = 0
    for plane in plan.rank.planes:
        moved = moved_states(plan, world, plane) if plane.name not in plan.uncovered else {}
        sources = {read.source.token_shard: read.source for read in plan.reads if read.destination == plane}
        for shard, source in sources.items():
            group, blocks = plan.source.group(plane.group), world.source_blocks[plane.group]
            for place in places(group, blocks):
                held = [
                    x if group.kind is GroupKind.STATE else global_state(source, place, x)
                    for x in range(source.block_states)
                ]
                if not any(state in moved for state in held):
                    continue
                states = summed_states(source, group, blocks, place)
                complete = bool(states) and all(held[x] in moved for x in states)
                for unit in range(plane.units.begin, plane.units.end):
                    if complete:
                        whole[plane.name, str(shard), place, unit] += 1
                    else:
                        others += 1
    return whole, others


@settings(max_examples=examples(60))
@given(worlds(), st.data())
def test_reader_computes_the_sums_of_the_source(world: World, data: st.DataObject) -> None:
    geometry, memories, _ = source_memories(world.source, world.source_blocks, world.length)
    placed = at_home(geometry, dict(enumerate(memories)))
    truth = source_sums(placed, world.source_blocks)
    assert truth == brute_sums(geometry, memories, world.source_blocks)

    destination, sizes = world.destination.build()
    for reader in world.readers:
        memory = Memory.filled(world.destination.base(reader), sizes[reader], POISON)
        plan = plan_read(geometry, destination, reader, striping=world.striping)
        mine = {group.name: world.destination_blocks[group.name] for group in plan.groups}
        execute(plan.expand(world.source_blocks, mine, world.tokens), memories, memory)

        plan = plan_read(placed, at_home(destination, {reader: memory}), reader, striping=world.striping)
        found, others = reader_sums(plan, world)
        assert {place: truth[place] for place in found} == found

        shards = {(rank.rank, plane.name): str(plane.token_shard) for rank, plane in geometry.planes()}
        kinds = Counter((name, shards[rank, name], place, unit) for rank, name, place, unit in found)
        assert (kinds, others) == brute_counts(plan, world)

        # One wrong byte: found at its place, if that was compared at all.
        candidates = [(plane, moved_states(plan, world, plane)) for plane in plan.rank.planes]
        candidates = [(plane, moved) for plane, moved in candidates if moved and plane.name not in plan.uncovered]
        if not candidates:
            continue
        plane, moved = data.draw(st.sampled_from(candidates))
        state = data.draw(st.sampled_from(sorted(moved)))
        unit = data.draw(st.integers(plane.units.begin, plane.units.end - 1))
        at = data.draw(st.integers(0, plane.state_bytes - 1))
        where = address(plane, moved[state][0], unit, moved[state][1]) + at - plane.base
        offset = plane.base + where - memory.data.ctypes.data
        memory.data[offset] ^= data.draw(st.integers(1, 255))
        after, _ = reader_sums(plan, world)
        assert after.keys() == found.keys()
        wrong = {place for place in found if after[place] != found[place]}
        source_planes = {read.source_rank: read.source for read in plan.reads if read.destination == plane}
        owners = {
            (rank, plane.name, place, unit)
            for rank, source in source_planes.items()
            for place in places(plan.source.group(plane.group), world.source_blocks[plane.group])
            if state in states_of_block(plan, source, world, place)
        }
        assert wrong == owners & found.keys()


def states_of_block(plan: ReadPlan, source: Plane, world: World, place: int) -> list[int]:
    group, blocks = plan.source.group(source.group), world.source_blocks[source.group]
    states = summed_states(source, group, blocks, place)
    return states if group.kind is GroupKind.STATE else [global_state(source, place, x) for x in states]


@settings(max_examples=examples(30))
@given(worlds(), st.sampled_from([0.1, 0.5]))
def test_sampled_sums_are_some_of_all(world: World, share: float) -> None:
    geometry, memories, _ = source_memories(world.source, world.source_blocks, world.length)
    placed = at_home(geometry, dict(enumerate(memories)))
    every, some = source_sums(placed, world.source_blocks), source_sums(placed, world.source_blocks, share)
    assert some.items() <= every.items()
    # Blocks are chosen as a whole: by all ranks, for all planes and units.
    chosen = {place[2] for place in some}
    assert {place for place in every if place[2] in chosen} == some.keys()


def test_sums_cover_blocks_beyond_one_batch_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry._integrity.summed_blocks.STATES_AT_ONCE", 1)
    monkeypatch.setattr("kvferry._memory.access.BYTES_AT_ONCE", 1)
    test_reader_computes_the_sums_of_the_source()


def test_check_of_this_test_notices_unequal_bytes_at_one_place() -> None:
    assert sum_of(np.zeros(8, np.uint8).tobytes()) != sum_of(np.ones(8, np.uint8).tobytes())


def test_an_empty_publication_has_no_sums() -> None:
    group = Group("full", block_tokens=4, num_blocks=2)
    (plane,) = planes_of({"0": np.zeros((2, 4, 8), np.uint8)}, ("block", "token", "content"), group, ("key",))
    assert source_blocks(plane, group, Blocks([], first_token=5, end_token=5), 1, 1.0) == ()
