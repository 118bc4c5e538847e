"""The last check, which divides addresses back into blocks: whatever two engines look like, it refuses a descriptor of
another block (R7). That it lets pass what the planner makes is seen by every test that expands a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import Blocks
from kvferry.errors import Incompatible, InvalidField
from kvferry.geometry import EngineGeometry, Group, Interval, RankGeometry
from kvferry.planner import Path, PathRule, ReadPlan, plan_read
from kvferry.planner import expansion as expand
from kvferry.planner import lane as lanes
from kvferry.planner.descriptors import Descriptors
from kvferry.planner.expansion import StagedRead, staged_read
from kvferry.planner.lane import Lane
from kvferry.planner.token_line import Segment
from tests.planner.small_worlds import PAIRS, Bytes, Side, may_be_right, one_group
from tests.support.checked_lists import CheckedList, checked_lists
from tests.support.drawn_worlds import World, worlds
from tests.support.geometries import Layout, engine, tensors
from tests.support.simulated_memories import copies, move

PROFILE = settings.get_profile("plan")
TRIES = 6
"""Rows and runs of a list that are moved, on each side."""

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


# --- small worlds, byte by byte ---------------------------------------------------------------------------------------


def small(name: str) -> Iterator[tuple[Bytes, Bytes, list[CheckedList]]]:
    """A small world read directly, by source rank: the oracles of both sides, and the checked lists."""
    source, destination, theirs, mine = PAIRS[name]
    plan = plan_read(source, destination, 0, rule=PathRule(Path.DIRECT))
    for rank in plan.source_ranks:
        of_rank = replace(plan, lanes=tuple(lane for lane in plan.lanes if lane.source_rank == rank))
        of_rank = of_rank.choose_paths(plan.rule)
        lists = checked_lists(lambda of_rank=of_rank: of_rank.expand(theirs, mine))  # type: ignore[misc]
        yield Bytes(source, rank, theirs), Bytes(destination, 0, mine), lists


def strange(theirs: Bytes, mine: Bytes, made: Descriptors) -> bool:
    """Whether a byte of a descriptor is in no block of the request, or its ends are in blocks of different tokens."""
    for there, here, length in copies(made):
        if theirs.strange(there, length) or mine.strange(here, length):
            return True
        for at in (0, length - 1):
            tokens, own = theirs.tokens(there + at), mine.tokens(here + at)
            if tokens and own and not tokens & own:
                return True
    return False


ROWS, RUNS = ("source", "destination", "length"), ("source_offset", "destination_offset", "repeats")


def disturbed(made: Descriptors, turns: Random) -> Iterator[Descriptors]:
    """Some rows and some runs of a list, with a number or two moved: by bytes, or by blocks."""
    rows, runs = (np.stack([getattr(made, name) for name in names]) for names in (ROWS, RUNS))
    steps = [1, 2, *(int(step) for at in (*rows[:2], *runs[:2]) for step in np.diff(np.unique(at)))]
    for _ in range(100):
        columns = []
        for every in (rows, runs):
            count = every.shape[1]
            columns += list(every[:, turns.sample(range(count), turns.randint(1, min(3, count)))].copy())
        for _ in range(turns.randint(1, 2)):
            which = turns.randrange(6)
            at = turns.randrange(len(columns[which]))
            if which == 5:
                columns[which][at] = turns.randint(1, 3)
            else:
                changed = int(columns[which][at]) + turns.choice((-1, 1)) * turns.choice(steps)
                columns[which][at] = max(which == 2, changed) % 2**64
        yield Descriptors(made.memory, *columns)


@pytest.mark.parametrize("name", PAIRS)
def test_rows_and_runs_of_another_block_are_refused(name: str) -> None:
    turns = Random(name)
    answers = set()
    for theirs, mine, lists in small(name):
        assert lists
        for checked in lists:
            assert not checked.refuses(checked.made)
            for made in disturbed(checked.made, turns):
                refused = checked.refuses(made)
                assert refused or not strange(theirs, mine, made)
                answers.add(refused)
    assert True in answers


def test_a_source_block_given_twice_may_go_to_both_destinations() -> None:
    source, destination = one_group("p", "planes apart"), one_group("d", "packed")
    theirs, mine = {"full": Blocks([3, 1, 3])}, {"full": Blocks([2, 5, 0])}
    plan = plan_read(source, destination, 0)
    for checked in checked_lists(lambda: plan.expand(theirs, mine)):
        made = checked.made
        other = replace(
            made, source_offset=np.full_like(made.source_offset, 2 * source.ranks[0].planes[0].block_stride)
        )
        assert checked.refuses(other)
        own = replace(
            made, destination_offset=np.full_like(made.source_offset, destination.ranks[0].planes[0].block_stride)
        )
        assert checked.refuses(own)


def run_of(checked: CheckedList, first: int, count: int, moved: int = 0) -> Descriptors:
    """A list with one run of blocks instead of its own, and its rows moved by some bytes."""
    made, one = checked.made, np.ones(1, np.uint64)
    by = np.uint64(moved)
    return replace(
        made,
        source=made.source + by,
        destination=made.destination + by,
        source_offset=one * np.uint64(first * checked.theirs.stride),
        destination_offset=one * np.uint64(first * checked.mine.stride),
        repeats=one * np.uint64(count),
        blocks=None,
    )


def whole_blocks(theirs: list[int], mine: list[int]) -> CheckedList:
    """A list whose rows are whole blocks."""
    source, destination = (engine(name, MODEL, block_tokens=4).geometry() for name in ("p", "d"))
    plan = plan_read(source, destination, 0, rule=PathRule(Path.DIRECT))
    return checked_lists(lambda: plan.expand({"full": Blocks(theirs)}, {"full": Blocks(mine)}))[0]


def test_blocks_that_are_neighbours_only_in_memory_are_no_run() -> None:
    """Between blocks 3 and 6, on one side or the other, the request's tokens are apart."""
    whole, apart = [3, 4, 5, 6, 9, 1], [3, 5, 4, 6, 9, 1]
    for theirs, mine in ((whole, apart), (apart, whole)):
        checked = whole_blocks(theirs, mine)
        assert not checked.refuses(run_of(checked, 3, 1))
        assert checked.refuses(run_of(checked, 3, 4))


def test_a_run_of_blocks_begins_with_a_block() -> None:
    checked = whole_blocks([3, 4, 5, 8], [3, 4, 5, 9])
    assert not checked.refuses(run_of(checked, 3, 3))
    assert checked.refuses(run_of(checked, 3, 3, moved=2))
    assert checked.refuses(run_of(checked, 3, 4))


@pytest.mark.parametrize("other", [0, 1, 4, 11])
def test_another_block_than_the_only_one_is_refused(other: int) -> None:
    checked = whole_blocks([3], [3])
    assert not checked.refuses(run_of(checked, 3, 1))
    assert checked.refuses(run_of(checked, other, 1))


# --- staged rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["planes apart to packed", "three groups", "other block sizes"])
def test_staged_rows_of_another_block_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination, theirs, mine = PAIRS[name]
    plan = plan_read(source, destination, 0, rule=PathRule(Path.STAGED))
    assert plan.staged
    plan.expand(theirs, mine)
    segments = lanes.segments

    def moved(side: str, lane: Lane, wanted: object) -> list[Segment]:
        found = segments(lane, wanted)  # type: ignore[arg-type]
        if lane not in plan.staged:
            return found
        return [replace(found[0], **{side: getattr(found[0], side) + 3}), *found[1:]]

    for side in ("source", "destination"):
        with monkeypatch.context() as patch:
            patch.setattr(expand, "segments", lambda lane, wanted, side=side: moved(side, lane, wanted))
            with pytest.raises(InvalidField, match="of the request's blocks"):
                plan.expand(theirs, mine)


@pytest.mark.parametrize("changed", ["blocks", "pieces"])
def test_staged_blocks_that_are_not_the_requests_are_refused(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only what is asked of staging is checked, but what comes of it: the blocks that will be read."""
    source, destination, theirs, mine = PAIRS["planes apart to packed"]
    plan = plan_read(source, destination, 0, rule=PathRule(Path.STAGED))

    def wrong(lane: Lane, found: list[Segment]) -> StagedRead | None:
        read = staged_read(lane, found)
        assert read is not None
        if changed == "blocks":
            return replace(read, blocks=read.blocks + 1)
        first = read.pieces[0]
        return replace(read, pieces=(replace(first, source=np.roll(first.source, 1)), *read.pieces[1:]))

    plan.expand(theirs, mine)
    monkeypatch.setattr(expand, "staged_read", wrong)
    with pytest.raises(InvalidField, match="of the request's blocks"):
        plan.expand(theirs, mine)


def test_blocks_that_a_source_declares_in_millions_of_places_are_refused_at_once() -> None:
    """Units and pages step further than blocks, so that a block of a plane is in 2**20 places."""
    pages = 1 << 17

    def declared(name: str, tokens: int, **strides: int) -> EngineGeometry:
        group = Group("full", block_tokens=tokens, num_blocks=2)
        of: dict[str, Any] = {"block_states": tokens, "axis_size": 8, "units": Interval(0, 8), "page_tokens": 1}
        of |= {"num_blocks": 2, "state_bytes": 8, "token_stride": 0, **strides}
        first = replace(one_group(name, "planes apart").ranks[0].planes[0], **of)
        planes = tuple(first.moved(str(layer), (1 + layer) << 36) for layer in range(4))
        return EngineGeometry(name, (group,), (RankGeometry(0, planes),))

    source = declared("p", pages, block_stride=8, page_stride=16, unit_stride=16 * pages)
    destination = declared("d", 16, block_stride=1024, page_stride=64, unit_stride=8)
    with pytest.raises(Incompatible, match="places"):
        plan_read(source, destination, 0)


# --- random worlds ----------------------------------------------------------------------------------------------------


def moved(made: Descriptors, theirs: Side, mine: Side, turns: Random) -> Iterator[Descriptors]:
    """The same list with one row, or one run, moved by blocks on one side."""
    for side, planes in (("source", theirs.planes), ("destination", mine.planes)):
        for name in (side, f"{side}_offset"):
            for _ in range(TRIES):
                values = getattr(made, name).copy()
                plane = turns.choice(planes)
                at = turns.randrange(len(values))
                by = turns.randint(-plane.num_blocks, plane.num_blocks) * plane.block_stride
                values[at] = max(0, int(values[at]) + by)
                yield replace(made, **{name: values})


def check_moved(plan: ReadPlan, source: EngineGeometry, world: World, turns: Random) -> None:
    """Move rows and runs of all lists: all that are of other blocks then are refused."""
    groups = {group.name for group in plan.groups}
    own = {name: blocks for name, blocks in world.destination_blocks.items() if name in groups}
    mine = Side.of(plan.rank.planes, plan.groups, own)
    for lane in plan.lanes:
        part = replace(plan, lanes=(lane,)).choose_paths(plan.rule)
        theirs = Side.of(source.ranks[lane.source_rank].planes, source.groups, world.source_blocks)
        wanted = {lane.group.name: own[lane.group.name]}
        for checked in checked_lists(lambda: part.expand(world.source_blocks, wanted, world.tokens)):  # noqa: B023
            assert all(may_be_right(theirs, mine, *one) for one in copies(checked.made))
            for made in moved(checked.made, theirs, mine, turns):
                known = [one for one in copies(made) if theirs.known(one[0], one[2]) and mine.known(one[1], one[2])]
                if not all(may_be_right(theirs, mine, *one) for one in known):
                    assert checked.refuses(made)


@pytest.mark.timeout(max(120, PROFILE.max_examples // 5))
@settings(PROFILE, max_examples=PROFILE.max_examples // 4)
@given(world=worlds(), seed=st.integers(0, 99))
def test_a_row_or_run_of_another_block_is_found(world: World, seed: int) -> None:
    source, destination = world.source.geometry(), world.destination.geometry()
    for rank in world.readers:
        plan = plan_read(source, destination, rank, striping=world.striping, rule=PathRule(Path.DIRECT))
        check_moved(plan, source, world, Random(seed))
