"""The last check, which divides addresses back into blocks: whatever two engines look like, it refuses a descriptor of
another block (R7), and lets pass what the planner makes, descriptors that run on from plane to plane included."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import Blocks
from kvferry.errors import InvalidField
from kvferry.geometry import EngineGeometry, Group, GroupKind, MemoryKind, RankGeometry
from kvferry.planner import Path, PathRule, ReadPlan, plan_read
from kvferry.planner import expansion as expand
from kvferry.planner.descriptors import Descriptors, DescriptorTable, MemoryPair, PreparedDescriptors, RawDescriptors
from kvferry.planner.expansion import SourceDescriptors
from kvferry.planner.footprint import BY_ID_LIMIT, Footprint
from tests.planner.small_worlds import LAYOUTS, PAIRS, STATE, Bytes, Side, may_be_right, one_group
from tests.support.drawn_worlds import World, worlds
from tests.support.geometries import HND, Engine, Layout, engine, tensors, tp_ranks
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
        assert isinstance(raw, RawDescriptors)
        read.footprint.check(raw)
        longer = RawDescriptors(raw.memory, raw.source, raw.destination, raw.length + np.uint64(1))
        with pytest.raises(InvalidField):
            read.footprint.check(longer)


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


def raw_of(pieces: Iterable[tuple[int, int, int]], memory: MemoryPair = DRAM) -> RawDescriptors:
    return RawDescriptors(memory, *np.array(list(pieces), np.uint64).reshape(-1, 3).T)


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
        assert footprint_of(read).effort(raw_of([(1, 1, 1)] * 5)) == 5 * slabs


# --- indices of prepared tables ---------------------------------------------------------------------------------------


@pytest.fixture(name="prepared")
def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand, "PREPARED_MIN_COUNT", 1)


def tokens(side: Bytes, table: DescriptorTable, column: str) -> list[set[tuple[str, int]]]:
    """The request's tokens to which each index of one side belongs."""
    rows = getattr(table, column).tolist()
    return [
        side.tokens(address + at * stride) & side.tokens(address + at * stride + length - 1)
        for address, length, _, stride, count in rows
        for at in range(count)
    ]


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("name", [name for name in PAIRS if "every" not in name])
def test_an_index_goes_only_to_a_block_of_the_same_tokens(name: str) -> None:
    turns = Random(name)
    for theirs, mine, read in small(name):
        for descriptors in read.descriptors:
            if not isinstance(descriptors, PreparedDescriptors):
                continue
            table = descriptors.table
            source, destination = tokens(theirs, table, "source"), tokens(mine, table, "destination")
            pairs = [(there, here) for there in range(len(source)) for here in range(len(destination))]
            right, wrong = (
                [pair for pair in pairs if bool(source[pair[0]] & destination[pair[1]]) is fine]
                for fine in (True, False)
            )
            footprint_of(read).check(indices(descriptors, turns.sample(right, len(right))))
            for pair in turns.sample(wrong, min(len(wrong), WRONG)):
                for some in ([pair], [right[0], pair, right[-1]]):
                    with pytest.raises(InvalidField, match=f"index {pair[0]} to index {pair[1]}',"):
                        footprint_of(read).check(indices(descriptors, some))


def indices(of: PreparedDescriptors, pairs: Iterable[tuple[int, int]]) -> PreparedDescriptors:
    source, destination = np.array(list(pairs), np.int32).T
    return replace(of, source=source, destination=destination)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("column", ["source", "destination"])
@pytest.mark.parametrize(
    ("change", "fine"),
    [((0, 0, 0), True), ((24, 0, 0), False), ((0, 24, 0), False), ((0, 0, 1), False), ((-24, 0, 0), False)],
    ids=str,
)
def test_a_row_has_to_step_from_block_to_block(column: str, change: tuple[int, int, int], fine: bool) -> None:
    """Address, length and stride; blocks are 24 bytes."""
    source, destination = (engine(name, MODEL[:1], block_tokens=3, num_blocks=6, layout=HND) for name in "pd")
    ids = {"full": Blocks([1, 2, 0, 5])}, {"full": Blocks([4, 0, 1, 3])}
    (read,) = plan_read(source.geometry(), destination.geometry(), 0).expand(*ids).sources
    (prepared,) = read.descriptors
    assert isinstance(prepared, PreparedDescriptors)
    rows = getattr(prepared.table, column).copy()
    assert rows[0, [1, 3]].tolist() == [24, 24]
    rows[:, [0, 1, 3]] += np.array(change).astype(np.uint64)
    moved = replace(prepared, table=replace(prepared.table, **{column: rows}))
    if fine:
        footprint_of(read).check(moved)
        return
    with pytest.raises(InvalidField, match="index 1 to index 4',"):
        footprint_of(read).check(moved)


@pytest.mark.usefixtures("prepared")
def test_a_row_of_one_block_needs_no_steps() -> None:
    ((_, _, read),) = small("one block")
    (prepared,) = read.descriptors
    assert isinstance(prepared, PreparedDescriptors)
    rows = prepared.table.source.copy()
    rows[:, 3] += 1
    footprint_of(read).check(replace(prepared, table=replace(prepared.table, source=rows)))


@pytest.mark.usefixtures("prepared")
def test_an_index_of_a_source_block_given_twice_may_go_to_both_destinations() -> None:
    source, destination = one_group("p", "planes apart"), one_group("d", "packed")
    (read,) = plan_read(source, destination, 0).expand({"full": Blocks([3, 1, 3])}, {"full": Blocks([2, 5, 0])}).sources
    (prepared,) = read.descriptors
    assert isinstance(prepared, PreparedDescriptors)
    footprint_of(read).check(prepared)
    footprint_of(read).check(indices(prepared, [(3, 2), (3, 0), (1, 5)]))
    for pair in ((0, 2), (2, 2), (3, 1), (5, 4)):
        with pytest.raises(InvalidField, match="of the request's blocks"):
            footprint_of(read).check(indices(prepared, [(3, 2), pair]))


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("block", [5, BY_ID_LIMIT - 1, BY_ID_LIMIT, BY_ID_LIMIT + 3, 2 * BY_ID_LIMIT - 1])
def test_block_ids_too_high_for_a_table_are_searched_for(block: int) -> None:
    group = Group("state", GroupKind.STATE, num_blocks=2 * BY_ID_LIMIT)
    source, destination = (Engine(name, (group,), tp_ranks(STATE, 1), {"": HND}).geometry() for name in "pd")
    theirs, mine = {"state": Blocks([block])}, {"state": Blocks([7])}
    (read,) = plan_read(source, destination, 0).expand(theirs, mine).sources
    (prepared,) = read.descriptors
    assert isinstance(prepared, PreparedDescriptors)
    footprint_of(read).check(prepared)
    for other in (0, 4, 6, block - 1, min(block + 1, 2 * BY_ID_LIMIT - 2), 2 * BY_ID_LIMIT - 2):
        with pytest.raises(InvalidField, match="of the request's blocks"):
            footprint_of(read).check(indices(prepared, [(other, 7)]))
    with pytest.raises(InvalidField, match="of the request's blocks"):
        footprint_of(read).check(indices(prepared, [(block, 8)]))


def lattices(descriptors: PreparedDescriptors, turns: Random) -> Iterator[PreparedDescriptors]:
    """Two rows of two indices, that step alike on both sides: from plane to plane, from block to block, or both. Some
    have one index moved."""
    table = descriptors.table
    sides = [
        (column, rows[:, 4].astype(np.int64))
        for column, rows in ((descriptors.source, table.source), (descriptors.destination, table.destination))
    ]
    steps = list(itertools.product((-1, 1, 2), (0, 1)))
    for at in turns.sample(range(descriptors.count), min(descriptors.count, 8)):
        for down, right in itertools.product(steps, steps):
            found = []
            for column, counts in sides:
                step, other = (planes * int(counts[0]) + blocks for planes, blocks in (down, right))
                lattice = int(column[at]) + np.array([0, other, step, step + other])
                if turns.random() < 0.2:
                    lattice[turns.randrange(4)] += turns.choice((-1, 1))
                found.append(np.clip(lattice, 0, int(counts.sum()) - 1).astype(np.int32))
            yield replace(descriptors, source=found[0], destination=found[1], grids=((2, 2),))


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("name", [name for name in PAIRS if "every" not in name])
def test_grids_are_a_hint_and_change_no_answer(name: str) -> None:
    turns = Random(name)
    answers = []
    for _, _, read in small(name):
        for descriptors in read.descriptors:
            if not isinstance(descriptors, PreparedDescriptors):
                continue
            assert sum(rows * blocks for rows, blocks in descriptors.grids) == descriptors.count
            for lattice in (descriptors, *lattices(descriptors, turns)):
                wrong_hint = replace(lattice, grids=((1, 1), *lattice.grids))
                refused = [_refuses(read, some) for some in (lattice, replace(lattice, grids=()), wrong_hint)]
                assert refused in ([True] * 3, [False] * 3)
                answers.append(refused[0])
    # With one block there is no wrong destination.
    assert set(answers) == ({False} if name == "one block" else {True, False})


@pytest.mark.usefixtures("prepared")
def test_edges_of_a_grid_are_enough_only_for_one_row_of_the_table_and_one_block() -> None:
    source, destination = (engine(name, MODEL, block_tokens=3, num_blocks=6, layout=HND).geometry() for name in "pd")
    (read,) = plan_read(source, destination, 0).expand({"full": Blocks([1, 2])}, {"full": Blocks([3, 4])}).sources
    (prepared,) = read.descriptors
    assert isinstance(prepared, PreparedDescriptors)
    grid = replace(indices(prepared, [(1, 3), (2, 4), (7, 9), (8, 10)]), grids=((2, 2),))
    footprint_of(read).check(grid)
    # The second row begins with block 2, and goes on to block 3.
    with pytest.raises(InvalidField, match="index 9 to index 11',"):
        footprint_of(read).check(replace(indices(prepared, [(1, 3), (2, 4), (8, 10), (9, 11)]), grids=((2, 2),)))
    # The first row goes from row 0 of the table to row 1, and the second from 1 to 2, which is no plane's.
    rows = prepared.table.source.copy()
    rows[2, 0] += 1
    elsewhere = replace(prepared, table=replace(prepared.table, source=rows))
    with pytest.raises(InvalidField, match="index 13 to index 15',"):
        footprint_of(read).check(replace(indices(elsewhere, [(1, 3), (7, 9), (7, 9), (13, 15)]), grids=((2, 2),)))


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
            values = getattr(descriptors, column).copy()
            if isinstance(descriptors, RawDescriptors):
                where = int(values[at])
                plane = turns.choice(
                    [plane for plane in side.planes if plane.extent[0] <= where < plane.extent[1]] or side.planes
                )
                values[at] = where + turns.randint(-plane.num_blocks, plane.num_blocks) * plane.block_stride
            else:
                assert isinstance(descriptors, PreparedDescriptors)
                values[at] = turns.randrange(int(getattr(descriptors.table, column)[:, 4].sum()))
            yield replace(descriptors, **{column: values}), at


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


@pytest.mark.property
@pytest.mark.timeout(max(120, PROFILE.max_examples // 5))
@settings(PROFILE, max_examples=PROFILE.max_examples // 4)
@given(world=worlds(), prepared=st.booleans(), seed=st.integers(0, 99))
def test_a_descriptor_of_another_block_is_found(world: World, prepared: bool, seed: int) -> None:
    source, destination = world.source.geometry(), world.destination.geometry()
    with pytest.MonkeyPatch.context() as patch:
        if prepared:
            patch.setattr(expand, "PREPARED_MIN_COUNT", 1)
        for rank in world.readers:
            plan = plan_read(source, destination, rank, striping=world.striping)
            found(plan, source, world, Random(seed))
