"""The last check, which divides addresses back into blocks: whatever two engines look like, it refuses a descriptor of
another block (R7), and lets pass what the planner makes, descriptors that run on from plane to plane included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import Blocks
from kvferry.errors import InvalidField
from kvferry.geometry import EngineGeometry, Group, Interval, MemoryKind, Plane, RankGeometry
from kvferry.planner import Path, PathRule, ReadPlan, plan_read
from kvferry.planner import expansion as expand
from kvferry.planner.descriptors import Descriptors, MemoryPair
from kvferry.planner.expansion import SourceDescriptors
from kvferry.planner.footprint import Footprint, layers_of
from tests.planner.small_worlds import LAYOUTS, PAIRS, Bytes, Side, may_be_right, one_group
from tests.support.drawn_worlds import World, worlds
from tests.support.geometries import Layout, engine, tensors
from tests.support.simulated_memories import copies, move

PROFILE = settings.get_profile("plan")
TRIES = 6
"""Descriptors of a list that are moved, on each side."""

MODEL = tensors(layers=3, axis=2)
RUNNING_ON = {
    "planes apart": Layout("BPUT"),
    "units outermost": Layout("UPBT"),
    "units outermost, components side by side": Layout("UPBT", level=1),
    "blocks first": Layout("BPUT", level=1),
}


@pytest.mark.parametrize("read_into", RUNNING_ON)
@pytest.mark.parametrize("read_from", RUNNING_ON)
@pytest.mark.parametrize("blocks", [range(12), range(1), range(11, 12), range(2, 12)])
def test_descriptors_that_run_on_from_plane_to_plane_are_read(read_from: str, read_into: str, blocks: range) -> None:
    source = engine("p", MODEL, layout=RUNNING_ON[read_from])
    destination = engine("d", MODEL, layout=RUNNING_ON[read_into])
    plan = plan_read(source.geometry(), destination.geometry(), 0)
    length = 16 * len(blocks)
    theirs = {"full": Blocks(list(blocks), end_token=length)}
    assert move([plan], source, destination, theirs, {"full": Blocks(list(blocks))}, length)


def test_the_part_of_a_descriptor_behind_a_plane_is_checked_too() -> None:
    """From the last block of a plane into the first block of the next plane; the request has only the last block."""
    geometry = engine("p", MODEL).geometry(), engine("d", MODEL).geometry()
    plan = plan_read(*geometry, 0)
    expansion = plan.expand({"full": Blocks([11], end_token=16)}, {"full": Blocks([11])}, None)
    (read,) = expansion.sources
    assert read.footprint is not None
    for raw in read.descriptors:
        read.footprint.check(raw)
        single = raw.one_by_one()
        with pytest.raises(InvalidField):
            read.footprint.check(
                Descriptors(raw.memory, single.source, single.destination, single.length + np.uint64(1))
            )


# --- small worlds, byte by byte ---------------------------------------------------------------------------------------

DRAM = MemoryPair(MemoryKind.DRAM, 0, MemoryKind.DRAM, 0)
WRONG = 60
"""Wrong descriptors of a world that are tried."""


def small(name: str) -> Iterator[tuple[Bytes, Bytes, SourceDescriptors]]:
    """A small world read directly, by source rank: the oracles of both sides, and the reads."""
    source, destination, theirs, mine = PAIRS[name]
    plan = plan_read(source, destination, 0, rule=PathRule(Path.DIRECT))
    for read in plan.expand(theirs, mine).sources:
        yield Bytes(source, read.source_rank, theirs), Bytes(destination, 0, mine), read


def footprint_of(read: SourceDescriptors) -> Footprint:
    assert read.footprint is not None
    return read.footprint


def raw_of(pieces: Iterable[tuple[int, int, int]], memory: MemoryPair = DRAM) -> Descriptors:
    return Descriptors(memory, *np.array(list(pieces), np.uint64).reshape(-1, 3).T)


def refuses(read: SourceDescriptors, pieces: Iterable[tuple[int, int, int]]) -> None:
    """Check that each of the pieces is refused on its own."""
    for piece in pieces:
        with pytest.raises(InvalidField, match="of the request's blocks"):
            footprint_of(read).check(raw_of([piece]))


@pytest.mark.parametrize("name", PAIRS)
def test_a_byte_goes_only_to_a_block_of_the_same_tokens(name: str) -> None:
    turns = Random(name)
    for theirs, mine, read in small(name):
        for descriptors in read.descriptors:
            footprint_of(read).check(descriptors)
        source, destination = theirs.own, mine.own
        pairs = {(there, here) for there in source for here in turns.sample(destination, 6)}
        pairs |= {(there, here) for here in destination for there in turns.sample(source, 6)}
        right = [pair for pair in sorted(pairs) if theirs.tokens(pair[0]) & mine.tokens(pair[1])]
        footprint_of(read).check(raw_of((there, here, 1) for there, here in right))
        wrong = sorted(pairs - set(right))
        wrong = turns.sample(wrong, min(len(wrong), WRONG))
        # Bytes of other blocks, and bytes of no block.
        wrong += [(there, turns.choice(destination)) for there in theirs.others]
        wrong += [(turns.choice(source), here) for here in mine.others]
        refuses(read, ((there, here, 1) for there, here in wrong))


@pytest.mark.parametrize("name", PAIRS)
def test_stretches_that_touch_another_block_are_refused(name: str) -> None:
    turns = Random(name)
    for theirs, mine, read in small(name):
        source, destination = theirs.own, mine.own
        found = []
        for _ in range(1000):
            there, here = turns.choice(source), turns.choice(destination)
            ends = turns.choice((source, destination))
            length = turns.choice(ends) - (there if ends is source else here) + 1
            if length > 0 and (theirs.strange(there, length) or mine.strange(here, length)):
                found.append((there, here, length))
        # The only block there is is the request's.
        assert found or name == "one block"
        refuses(read, found[:WRONG])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ids", [[0], [5], [1, 4], [2, 3]], ids=str)
def test_stretches_over_another_block_between_two_of_the_request_are_refused(layout: str, ids: list[int]) -> None:
    """From every byte to every byte, where both engines lay out their memory alike."""
    source, destination = one_group("p", layout), one_group("d", layout)
    plan = plan_read(source, destination, 0, rule=PathRule(Path.DIRECT))
    (read,) = plan.expand({"full": Blocks(ids)}, {"full": Blocks(ids)}).sources
    theirs = Bytes(source, 0, {"full": Blocks(ids)})
    own = theirs.own
    pieces = [(begin, begin, end - begin + 1) for begin in own[::2] for end in own if end > begin]
    touching = [piece for piece in pieces if theirs.strange(piece[0], piece[2])]
    refuses(read, Random(layout).sample(touching, min(len(touching), WRONG)))


def test_a_source_block_given_twice_may_go_to_both_destinations() -> None:
    source, destination = one_group("p", "planes apart"), one_group("d", "packed")
    theirs, mine = {"full": Blocks([3, 1, 3])}, {"full": Blocks([2, 5, 0])}
    (read,) = plan_read(source, destination, 0).expand(theirs, mine).sources
    for descriptors in read.descriptors:
        footprint_of(read).check(descriptors)
    there, here = Bytes(source, 0, theirs), Bytes(destination, 0, mine)
    refuses(read, ((byte, here.own[0], 1) for byte in there.others))
    refuses(read, ((there.own[0], byte, 1) for byte in here.others))
    # From block 1 into block 2, which is not the request's.
    stride = source.ranks[0].planes[0].block_stride
    refuses(read, ((there.own[0], byte, stride + 1) for byte in here.own))


def test_blocks_that_are_neighbours_only_in_memory_are_no_stretch() -> None:
    """Of blocks 3 and 4, on one side or the other, the request's tokens are apart."""
    source, destination = one_group("p", "planes apart"), one_group("d", "planes apart", 10)
    (first, own) = (engine.ranks[0].planes[0] for engine in (source, destination))
    for ids, fine in (([3, 4, 1, 0, 5], True), ([3, 1, 4, 0, 5], False)):
        (read,) = plan_read(source, destination, 0).expand({"full": Blocks(ids)}, {"full": Blocks([1])}).sources
        stretch = [(first.base + 3 * first.block_stride, own.base + own.block_stride, 2 * first.block_stride)]
        if fine:
            footprint_of(read).check(raw_of(stretch))
        else:
            refuses(read, stretch)
        back = plan_read(destination, source, 0).expand({"full": Blocks([1])}, {"full": Blocks(ids)})
        stretch = [(stretch[0][1], stretch[0][0], stretch[0][2])]
        if fine:
            footprint_of(back.sources[0]).check(raw_of(stretch))
        else:
            refuses(back.sources[0], stretch)


def adjacent(engine_id: str, block_tokens: int, num_blocks: int) -> EngineGeometry:
    """Value begins where key ends; a token takes 4 bytes of either."""
    geometry = engine(
        engine_id, tensors(layers=1, axis=2, state_bytes=2), block_tokens=block_tokens, num_blocks=num_blocks
    ).geometry()
    planes = geometry.ranks[0].planes
    if num_blocks == 1:
        # There is no block to step to.
        planes = tuple(replace(plane, block_stride=0) for plane in planes)
    return replace(geometry, ranks=(RankGeometry(0, (planes[0], replace(planes[1], base=planes[0].extent[1]))),))


@pytest.mark.parametrize(
    ("theirs", "mine", "blocks", "fine"),
    [
        ((2, 6, [5, 0]), (2, 6, [5, 0]), 2, True),
        ((2, 6, [5, 0]), (2, 4, [3, 0]), 2, True),
        ((2, 6, [5, 1]), (2, 6, [5, 1]), 2, False),
        ((2, 6, [5, 0]), (2, 6, [0, 5]), 2, False),
        ((2, 6, [5, 0, 1]), (2, 6, [5, 0, 2]), 3, False),
        ((4, 1, [0]), (4, 1, [0]), 2, True),
        ((4, 1, [0]), (4, 1, [0]), 3, False),
        # Each side passes from plane to plane where the other does not.
        ((2, 8, [4, 5, 6, 7]), (4, 3, [2, 0]), 4, True),
        ((2, 8, [4, 5, 6, 7]), (4, 3, [2, 1]), 4, False),
        ((2, 6, [4, 5, 0, 1]), (4, 4, [2, 3]), 4, True),
        ((2, 6, [4, 5, 0, 2]), (4, 4, [2, 3]), 4, False),
        ((2, 6, [5, 0, 1, 2, 3, 4]), (2, 6, [2, 3, 4, 5, 0, 1]), 6, True),
        ((2, 6, [5, 0, 1, 2, 3, 4]), (2, 6, [2, 3, 4, 5, 0, 1]), 7, False),
    ],
    ids=str,
)
def test_descriptors_that_run_on_into_the_next_plane_are_checked_piece_by_piece(
    theirs: tuple[int, int, list[int]], mine: tuple[int, int, list[int]], blocks: int, fine: bool
) -> None:
    source, destination = adjacent("p", *theirs[:2]), adjacent("d", *mine[:2])
    (read,) = plan_read(source, destination, 0).expand({"full": Blocks(theirs[2])}, {"full": Blocks(mine[2])}).sources
    key, own = source.ranks[0].planes[0], destination.ranks[0].planes[0]
    begin = key.base + theirs[2][0] * key.block_stride, own.base + mine[2][0] * own.block_stride
    stretch = (*begin, blocks * key.bytes_per_block)
    if not fine:
        refuses(read, [stretch])
        return
    # Beside one that needs no cut, and cut anywhere.
    footprint_of(read).check(raw_of([stretch, (*begin, 1)]))
    for at in range(1, stretch[2]):
        rest = begin[0] + at, begin[1] + at, stretch[2] - at
        footprint_of(read).check(raw_of([(*begin, at), rest]))


@pytest.mark.parametrize(("ids", "fine"), [([5, 0], True), ([5, 1], False)], ids=str)
def test_a_stretch_may_begin_in_any_of_several_planes_that_interleave(ids: list[int], fine: bool) -> None:
    """From the last block of value on into block 0 of key's next unit."""
    source, destination = PAIRS["woven"][:2]
    (read,) = plan_read(source, destination, 0).expand({"full": Blocks(ids)}, {"full": Blocks(ids)}).sources
    theirs, mine = (engine.ranks[0].planes[1].extent[1] - 4 for engine in (source, destination))
    if fine:
        footprint_of(read).check(raw_of([(theirs, mine, 8)]))
    else:
        refuses(read, [(theirs, mine, 8)])


@pytest.mark.parametrize("memory", [(2, 0, 1, 0), (1, 1, 1, 0), (1, 0, 2, 0), (1, 0, 1, 1)], ids=str)
def test_an_address_in_other_memory_is_refused(memory: tuple[int, int, int, int]) -> None:
    ((theirs, mine, read),) = small("planes apart to packed")
    piece = next((a, b, 1) for a in theirs.own for b in mine.own if theirs.tokens(a) & mine.tokens(b))
    footprint_of(read).check(raw_of([piece]))
    elsewhere = MemoryPair(MemoryKind(memory[0]), memory[1], MemoryKind(memory[2]), memory[3])
    with pytest.raises(InvalidField):
        footprint_of(read).check(raw_of([piece], elsewhere))


@pytest.mark.parametrize("name", PAIRS)
def test_staged_rows_begin_and_end_in_blocks_of_the_request(name: str) -> None:
    turns = Random(name)
    for theirs, _, read in small(name):
        own, others = theirs.own, theirs.others
        pairs = [sorted(turns.sample(own, 2)) for _ in range(60)]
        # Bytes between the ends, and destinations, do not matter.
        footprint_of(read).check_source(raw_of((begin, 7, end - begin + 1) for begin, end in pairs))
        for other in others:
            ends = sorted((other, turns.choice(own)))
            with pytest.raises(InvalidField, match="of the request's blocks"):
                footprint_of(read).check_source(raw_of([(ends[0], 7, ends[1] - ends[0] + 1)]))
        for kind, device in ((2, 0), (1, 1)):
            elsewhere = MemoryPair(MemoryKind(kind), device, MemoryKind.DRAM, 0)
            with pytest.raises(InvalidField):
                footprint_of(read).check_source(raw_of([(own[0], 7, 1)], elsewhere))


@pytest.mark.parametrize(
    ("name", "slabs"),
    [
        ("planes apart to packed", 1),
        ("packed to units outermost, padded", 2),
        ("side by side in a unit to planes apart", 1),
        ("two groups of a pool", 2),
        ("three groups", 3),
        ("two groups on two ranks", 1),
        ("source planes every 0 bytes", 1),
        ("source planes every 7 bytes", 6),
        ("source planes every 40 bytes", 2),
    ],
)
def test_effort_counts_the_lookups_of_descriptors(name: str, slabs: int) -> None:
    """Once per group, however many planes it has, unless they lie over each other."""
    for _, _, read in small(name):
        assert footprint_of(read).check(raw_of([(1, 1, 1)] * 5), 0) == 5 * slabs
        ones = np.ones(5, np.uint64)
        some = Descriptors(DRAM, ones[:3], ones[:3], ones[:3], ones, ones, ones)
        assert footprint_of(read).check(some, 0) == (3 + 5) * slabs


def test_effort_counts_each_descriptor_of_rows_that_have_no_block_of_their_own() -> None:
    """A source whose planes lie over each other must not keep the loop of a reader, and so its leases, from going on:
    the rows run on from the block of one plane into the next block of another."""
    blocks = {"full": Blocks(range(10))}
    over, beside = lapped("p", step=60, block=100), lapped("d", step=60, block=128)
    (read,) = plan_read(over, beside, 0, rule=PathRule(Path.DIRECT)).expand(blocks, blocks).sources
    rows, length = np.array([LAPPED, LAPPED + 1], np.uint64), np.full(2, 118, np.uint64)
    there, here = (np.arange(10, dtype=np.uint64) * np.uint64(block) for block in (100, 128))
    some = Descriptors(DRAM, rows, rows, length, there, here, np.ones(10, np.uint64))
    lookups = 2 * (2 + 10 + 20)
    assert footprint_of(read).check(some, lookups - 1) == lookups
    with pytest.raises(InvalidField, match="the request's blocks"):
        footprint_of(read).check(some, lookups)


LAPPED = 1 << 20


def lapped(engine_id: str, step: int, block: int) -> EngineGeometry:
    """Ten blocks of 60 bytes of two planes that share bytes, if `block` is less than twice the `step` between them."""
    group = Group("full", block_tokens=1, num_blocks=10)
    planes = (
        Plane(
            layer="layers.0",
            component=component,
            group="full",
            format="plain",
            dtype="uint8",
            memory_kind=MemoryKind.DRAM,
            device=0,
            base=base,
            num_blocks=10,
            block_stride=block,
            page_tokens=1,
            page_stride=0,
            block_states=1,
            unit_stride=0,
            token_stride=0,
            state_bytes=60,
            axis_size=1,
            units=Interval(0, 1),
            shared=block < 2 * step,
        )
        for component, base in (("key", LAPPED), ("value", LAPPED + step))
    )
    return EngineGeometry(engine_id, (group,), (RankGeometry(0, tuple(planes)),))


# --- rows and runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(name="in_lists")
def _in_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand, "OWN_LIST", 1)
    monkeypatch.setattr(expand, "OWN_LIST_RUNS", 1)


def lists_of(read: SourceDescriptors) -> list[Descriptors]:
    return [some for some in read.descriptors if not some.plain]


# Rows of woven planes end in the slab of another plane.
@pytest.mark.usefixtures("in_lists")
@pytest.mark.parametrize("name", [name for name in PAIRS if name != "woven"])
def test_rows_and_runs_of_the_planner_are_checked_without_each_descriptor(name: str) -> None:
    for _, _, read in small(name):
        assert lists_of(read)
        for some in lists_of(read):
            assert footprint_of(read)._irregular(some, *some.memory.spaces).count == 0


ROWS, RUNS = ("source", "destination", "length"), ("source_offset", "destination_offset", "repeats")


def disturbed(some: Sequence[Descriptors], turns: Random) -> Iterator[Descriptors]:
    """Some rows of all lists, and some runs of one, mostly with a number or two moved: by bytes, or by blocks."""
    rows = np.concatenate([np.stack([getattr(of, name) for name in ROWS]) for of in some], axis=1)
    for of in some:
        runs = np.stack([getattr(of, name) for name in RUNS])
        steps = [1, 2, *(int(step) for at in (*rows[:2], *runs[:2]) for step in np.diff(np.unique(at)))]
        for _ in range(100):
            columns: list[npt.NDArray[np.uint64]] = []
            for every in (rows, runs):
                count = every.shape[1]
                columns += list(every[:, turns.sample(range(count), turns.randint(1, min(3, count)))].copy())
            for _ in range(turns.randint(0, 2)):
                which = turns.randrange(6)
                at = turns.randrange(len(columns[which]))
                if which == 5:
                    columns[which][at] = turns.randint(1, 3)
                else:
                    moved = int(columns[which][at]) + turns.choice((-1, 1)) * turns.choice(steps)
                    columns[which][at] = max(which == 2, moved)
            yield Descriptors(of.memory, *columns)


@pytest.mark.usefixtures("in_lists")
@pytest.mark.parametrize("name", PAIRS)
def test_rows_and_runs_are_refused_if_one_of_their_descriptors_is(name: str) -> None:
    turns = Random(name)
    answers = []
    for _, _, read in small(name):
        for some in disturbed(lists_of(read), turns):
            single = some.one_by_one()
            refused = any(_refuses(read, single.rows(slice(at, at + 1))) for at in range(single.count))
            assert _refuses(read, some) is refused
            answers.append(refused)
    assert set(answers) == {True, False}


def strided(engine_id: str, strides: Mapping[str, tuple[int, int]]) -> EngineGeometry:
    """Ten blocks of two units of two tokens of 8 bytes; by component, the strides of blocks and units."""
    group, base, planes = Group("full", block_tokens=2, num_blocks=10), 1 << 20, []
    for component, (block, unit) in strides.items():
        planes.append(
            Plane(
                layer="layers.0",
                component=component,
                group="full",
                format="plain",
                dtype="uint8",
                memory_kind=MemoryKind.DRAM,
                device=0,
                base=base,
                num_blocks=10,
                block_stride=block,
                page_tokens=2,
                page_stride=0,
                block_states=2,
                unit_stride=unit,
                token_stride=8,
                state_bytes=8,
                axis_size=2,
                units=Interval(0, 2),
            )
        )
        base += 1 << 16
    return EngineGeometry(engine_id, (group,), (RankGeometry(0, tuple(planes)),))


@pytest.mark.parametrize(
    ("strides", "ids", "rows", "runs"),
    [
        # In the planes of value, the second run is block 6, and the third is block 2 of the other unit.
        (((144, 16), (24, 240)), [0, 1, 2], [0, 1 << 16], ([0, 144, 288], [0, 144, 288], [1, 1, 1])),
        # The second run is five blocks at the source, and the destination's are padded.
        (((32, 16), (32, 16)), list(range(10)), [0], ([0, 32, 224], [0, 40, 280], [1, 5, 1])),
    ],
    ids=["blocks of two strides", "blocks with padding"],
)
def test_runs_between_the_lowest_and_the_highest_are_right_only_by_equal_steps(
    strides: tuple[tuple[int, int], tuple[int, int]], ids: list[int], rows: list[int], runs: tuple[list[int], ...]
) -> None:
    source = strided("p", dict(zip(("key", "value"), strides, strict=True)))
    padded = {name: (40 if block == 32 else block, unit) for name, (block, unit) in zip("kv", strides, strict=True)}
    destination = strided("d", dict(zip(("key", "value"), padded.values(), strict=True)))
    blocks = {"full": Blocks(ids)}
    (read,) = plan_read(source, destination, 0, rule=PathRule(Path.DIRECT)).expand(blocks, blocks).sources
    first = np.array([(1 << 20) + row for row in rows], np.uint64)
    length = np.full(len(rows), 32 if len(ids) == 10 else 16, np.uint64)
    columns = [np.array(run, np.uint64) for run in runs]
    some = Descriptors(DRAM, first, first, length, *columns)
    # Without the second run, they are right.
    ends = [column[[0, 2]] for column in columns]
    footprint_of(read).check(Descriptors(DRAM, first, first, length, *ends))
    assert _refuses(read, some.one_by_one())
    assert _refuses(read, some)


def _refuses(read: SourceDescriptors, descriptors: Descriptors) -> bool:
    try:
        footprint_of(read).check(descriptors)
    except InvalidField:
        return True
    return False


# --- random worlds ----------------------------------------------------------------------------------------------------


def moved(descriptors: Descriptors, theirs: Side, mine: Side, turns: Random) -> Iterator[tuple[Descriptors, int]]:
    """The same descriptors with one moved to another block, and which."""
    for at in turns.sample(range(descriptors.count), min(TRIES, descriptors.count)):
        for column, side in (("source", theirs), ("destination", mine)):
            single = descriptors.one_by_one()
            values = getattr(single, column).copy()
            where = int(values[at])
            plane = turns.choice(
                [plane for plane in side.planes if plane.extent[0] <= where < plane.extent[1]] or side.planes
            )
            values[at] = where + turns.randint(-plane.num_blocks, plane.num_blocks) * plane.block_stride
            yield replace(single, **{column: values}), at


def found(plan: ReadPlan, source: EngineGeometry, world: World, turns: Random) -> int:
    """How many wrong descriptors are refused; all are."""
    refused = 0
    groups = {group.name for group in plan.groups}
    mine = Side.of(
        plan.rank.planes,
        plan.groups,
        {name: blocks for name, blocks in world.destination_blocks.items() if name in groups},
    )
    for read in plan.expand(world.source_blocks, mine.blocks, world.tokens).sources:
        rank = next(rank for rank in source.ranks if rank.rank == read.source_rank)
        theirs = Side.of(rank.planes, source.groups, world.source_blocks)
        assert read.footprint is not None
        for descriptors in read.descriptors:
            read.footprint.check(descriptors)
            assert all(may_be_right(theirs, mine, *one) for one in copies(descriptors))
            for bad, at in moved(descriptors, theirs, mine, turns):
                there, here, length = copies(bad)[at]
                if not theirs.known(there, length) or not mine.known(here, length):
                    continue
                if not may_be_right(theirs, mine, there, here, length):
                    with pytest.raises(InvalidField, match="the request's blocks"):
                        read.footprint.check(bad)
                    refused += 1
    return refused


@pytest.mark.timeout(max(120, PROFILE.max_examples // 5))
@settings(PROFILE, max_examples=PROFILE.max_examples // 4)
@given(world=worlds(), lists=st.booleans(), seed=st.integers(0, 99))
def test_a_descriptor_of_another_block_is_found(world: World, lists: bool, seed: int) -> None:
    source, destination = world.source.geometry(), world.destination.geometry()
    with pytest.MonkeyPatch.context() as patch:
        if lists:
            patch.setattr(expand, "OWN_LIST", 1)
        for rank in world.readers:
            plan = plan_read(source, destination, rank, striping=world.striping)
            found(plan, source, world, Random(seed))


def test_blocks_that_a_source_declares_to_occur_a_million_times_take_no_memory() -> None:
    """Units and pages step further than blocks, so that a block of a plane is in 2**20 places."""
    units, pages = 128, 1 << 13
    apart: dict[str, Any] = {
        "block_stride": 8,
        "page_stride": 16,
        "unit_stride": 16 * pages,
        "token_stride": 0,
        "page_tokens": 1,
    }
    first = one_group("p", "planes apart").ranks[0].planes[0]
    plane = replace(first, num_blocks=2, block_states=pages, axis_size=units, units=Interval(0, units), **apart)
    planes = [replace(plane, layer=str(layer), base=(1 + layer) << 40) for layer in range(16)]
    (slabs,) = layers_of(planes)
    assert len(slabs.begin) <= len(planes)
    last = np.array([planes[-1].extent[1] - 1], np.uint64)
    inside, block, _ = slabs.blocks(last, np.ones(1, np.uint64))
    assert (inside.tolist(), block.tolist()) == ([True], [1])
