"""However a source publishes a request in steps: all parts together read what one read of the whole does, each byte
once, and each part reaches as far as what is published and the granules allow."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import BadBlock, BlocksShort, InvalidField
from kvferry.geometry import Blocks, Group, GroupKind, Plane
from kvferry.geometry.blocks import Unfinished, joined, runs_of
from kvferry.planner import Path, PathRule, ReadPlan, plan_read
from kvferry.planner import plan as plans
from kvferry.planner.expansion import OWN_LIST, Expansion, expand
from kvferry.planner.plan import RequestParts
from kvferry.planner.request_blocks import GroupRequest, needed
from tests.support.drawn_worlds import World, worlds
from tests.support.geometries import Engine, Tensor, engine, tensors, tp_ranks
from tests.support.simulated_memories import POISON, Memory, check, execute, global_state, source_memories

PLAN = settings.get_profile("plan")
PROFILE = settings(PLAN, max_examples=max(20, PLAN.max_examples // 4))


@st.composite
def splits(draw: st.DrawFn, world: World) -> list[dict[str, Blocks]]:
    """The request's blocks as their source publishes them: full blocks of groups that are not rewritten, in steps of
    any size; all else with the last."""
    count = draw(st.integers(1, 5))
    steps: list[dict[str, Blocks]] = [{} for _ in range(count)]
    for group in world.source.groups:
        whole = world.source_blocks[group.name]
        if group.kind is not GroupKind.TOKENS:
            steps[-1][group.name] = whole
            continue
        full = world.length // group.block_tokens
        cuts = [0, *sorted(draw(st.lists(st.integers(0, full), min_size=count - 1, max_size=count - 1))), -1]
        for index, (first, end) in enumerate(pairwise(cuts)):
            until = world.length if end < 0 else end * group.block_tokens
            if first != end:
                ids = whole.ids[first : end if end >= 0 else None]
                steps[index][group.name] = Blocks(ids, first * group.block_tokens, until, whole.state_token)
    return steps


def granules(plane: Plane, group: Group, until: int) -> list[tuple[int, int]]:
    """The first and the last token of each granule of a plane, from the definition: one state after the other."""
    found = []
    for block in range(until // group.block_tokens + 1):
        for cell in range(0, plane.block_states, plane.token_granule):
            states = [global_state(plane, block, x) for x in range(cell, cell + plane.token_granule)]
            first, last = min(states) * plane.tokens_per_state, (max(states) + 1) * plane.tokens_per_state
            found.append((int(first), -int(-last // 1) - 1))
    return found


def furthest(plan: ReadPlan, group: str, until: int) -> int:
    """The last token up to `until` that tears no granule of either side, found by trying each."""
    sides = {
        (plane, side.group(group))
        for read in plan.reads
        if read.destination.group == group
        for plane, side in ((read.source, plan.source), (read.destination, plan.destination))
    }
    spans = [span for plane, of in sides for span in granules(plane, of, until)]
    return max(token for token in range(until + 1) if not any(first < token <= last for first, last in spans))


@pytest.mark.timeout(max(120, PROFILE.max_examples // 5))
@settings(PROFILE)
@given(world=worlds(), data=st.data(), path=st.sampled_from((None, Path.STAGED)))
def test_parts_together_read_the_bytes_of_one_read(world: World, data: st.DataObject, path: Path | None) -> None:
    asked = world.tokens or (0, world.length)
    steps = data.draw(splits(world))
    source, destination = world.source.geometry(), world.destination.geometry()
    _, memories, model = source_memories(world.source, world.source_blocks, world.length)
    _, sizes = world.destination.build()
    for rank in world.readers:
        plan = plan_read(source, destination, rank, striping=world.striping, rule=PathRule(path=path))
        memory = Memory.filled(world.destination.base(rank), sizes[rank], POISON)
        before = memory.data.copy()
        mine = {group.name: world.destination_blocks[group.name] for group in plan.groups}
        parts = RequestParts(plan, mine, asked)
        total = 0
        for index, step in enumerate(steps):
            last = index == len(steps) - 1
            expansion = parts.next(step, last=last)
            execute(expansion, memories, memory)
            total += expansion.total_bytes
            if not last:
                expected = replace(memory, data=before.copy())
                execute(expanded(plan, early(plan, parts.granted, mine, asked)), memories, expected)
                assert (memory.data == expected.data).all(), index
        check(plan, memory, before, model, world.source_blocks, world.destination_blocks, asked)
        assert total == plan.expand(world.source_blocks, mine, asked).total_bytes


@pytest.mark.timeout(max(120, PROFILE.max_examples // 5))
@settings(PROFILE)
@given(world=worlds(), data=st.data(), path=st.sampled_from((None, Path.STAGED)), lists=st.booleans())
def test_layers_that_finish_one_after_the_other_are_each_read_once(
    world: World, data: st.DataObject, path: Path | None, lists: bool
) -> None:
    with patch("kvferry.planner.expansion.OWN_LIST", 1 if lists else OWN_LIST):
        read_layers(world, data, path)


def read_layers(world: World, data: st.DataObject, path: Path | None) -> None:
    asked = world.tokens or (0, world.length)
    steps = data.draw(splits(world))
    source, destination = world.source.geometry(), world.destination.geometry()
    _, memories, model = source_memories(world.source, world.source_blocks, world.length)
    _, sizes = world.destination.build()
    names = sorted({plane.layer for rank in source.ranks for plane in rank.planes})
    # Of each step, the layers that have finished when its source tells of it the first time, the second time ...
    finishing = [
        data.draw(st.lists(st.frozensets(st.sampled_from(names)), max_size=3)) if index < len(steps) - 1 else []
        for index in range(len(steps))
    ]
    # A reader that was busy gets several steps at once, and the latest layers only.
    heard = data.draw(st.lists(st.booleans(), min_size=sum(map(len, finishing)) + len(steps)))
    for rank in world.readers:
        plan = plan_read(source, destination, rank, striping=world.striping, rule=PathRule(path=path))
        memory = Memory.filled(world.destination.base(rank), sizes[rank], POISON)
        before = memory.data.copy()
        mine = {group.name: world.destination_blocks[group.name] for group in plan.groups}
        parts, listening = RequestParts(plan, mine, asked), iter(heard)
        total, untold = 0, list[dict[str, Blocks]]()
        for index, (step, layers) in enumerate(zip(steps, finishing, strict=True)):
            finished: frozenset[str] = frozenset()
            for more in layers:
                finished |= more
                if next(listening):
                    expansion = parts.next(joined(untold), Unfinished(runs_of(step), tuple(finished)), last=False)
                    execute(expansion, memories, memory)
                    total, untold = total + expansion.total_bytes, []
                    reached = replace(memory, data=before.copy())
                    execute(expanded(plan, early(plan, parts.granted, mine, asked)), memories, reached)
                    granted = joined((parts.granted, step))
                    some = of_layers(plan, finished)
                    execute(expanded(some, early(plan, granted, mine, asked)), memories, reached)
                    assert (memory.data == reached.data).all(), (index, finished)
            untold.append(step)
            last = index == len(steps) - 1
            if last or next(listening):
                expansion = parts.next(joined(untold), last=last)
                execute(expansion, memories, memory)
                total, untold = total + expansion.total_bytes, []
        check(plan, memory, before, model, world.source_blocks, world.destination_blocks, asked)
        assert total == plan.expand(world.source_blocks, mine, asked).total_bytes


def of_layers(plan: ReadPlan, layers: frozenset[str]) -> ReadPlan:
    return plan.only(lambda plane: plane.layer in layers)


def expanded(plan: ReadPlan, wanted: dict[str, GroupRequest]) -> Expansion:
    return expand(plan.lanes, plan.staged, wanted)


def early(
    plan: ReadPlan, granted: dict[str, Blocks], mine: dict[str, Blocks], asked: tuple[int, int]
) -> dict[str, GroupRequest]:
    """The tokens that may have been read of a request whose last step has not come."""
    found: dict[str, GroupRequest] = {}
    theirs = {group.name: group for group in plan.source.groups}
    for group in plan.groups:
        if group.kind is GroupKind.TOKENS and group.name in granted:
            end = furthest(plan, group.name, min(granted[group.name].end_token or 0, asked[1]))
            if end > asked[0]:
                found |= needed((group,), theirs, granted, mine, (asked[0], end))
    return found


def planned(theirs: int = 4, mine: int = 4, granule: int = 1) -> ReadPlan:
    """A plan between blocks of so many tokens."""
    model = tensors(layers=1, axis=2, state_bytes=2, granule=granule)
    made = [
        engine(name, model, block_tokens=size, num_blocks=16).geometry() for name, size in (("p", theirs), ("d", mine))
    ]
    return plan_read(made[0], made[1], 0)


def bytes_of(parts: RequestParts, steps: Sequence[tuple[list[int], int, int]]) -> list[int]:
    """The bytes that each step brings; the final element is the last step's."""
    found = []
    for index, (ids, first, end) in enumerate(steps):
        step = {"full": Blocks(ids, first, end)}
        found.append(parts.next(step, last=index == len(steps) - 1).total_bytes)
    return found


def test_a_part_ends_inside_a_block_of_the_destination_where_granules_allow() -> None:
    steps = [([1], 0, 4), ([2], 4, 8), ([3], 8, 10)]
    token = planned().expand({"full": Blocks([1])}, {"full": Blocks([1])}, (0, 1)).total_bytes
    assert bytes_of(RequestParts(planned(4, 6), {"full": Blocks([5, 6])}, (0, 10)), steps) == [
        4 * token,
        4 * token,
        2 * token,
    ]
    # Formats that cannot be cut inside a page move as whole pages.
    assert bytes_of(RequestParts(planned(4, 8, granule=4), {"full": Blocks([5, 6])}, (0, 10)), steps) == [
        4 * token,
        4 * token,
        4 * token,
    ]


def test_the_layers_of_each_chunk_are_read_as_they_finish() -> None:
    model = tensors(layers=3, axis=2, state_bytes=2)
    made = [engine(name, model, block_tokens=4, num_blocks=16).geometry() for name in ("p", "d")]
    plan = plan_read(made[0], made[1], 0)
    layer = plan.expand({"full": Blocks([1])}, {"full": Blocks([1])}, (0, 4)).total_bytes // 3
    parts = RequestParts(plan, {"full": Blocks([5, 6])}, (0, 8))
    for first, ids in ((0, [1]), (4, [2])):
        chunk = {"full": Blocks(ids, first, first + 4)}
        for layers, size in (
            ({"layers.1"}, layer),
            ({"layers.1"}, 0),
            # The source has layers that this rank does not read.
            ({"layers.1", "layers.0", "draft.0"}, layer),
        ):
            expansion = parts.next({}, Unfinished(runs_of(chunk), tuple(layers)), last=False)
            assert expansion.total_bytes == size
        assert parts.next(chunk, last=first == 4).total_bytes == layer


def test_layers_that_are_ahead_by_different_tokens_are_each_read_once() -> None:
    """Whatever a source says: a home passes on no other blocks before those of which layers were named are complete."""
    model = tensors(layers=3, axis=2, state_bytes=2)
    made = [engine(name, model, block_tokens=4, num_blocks=16).geometry() for name in ("p", "d")]
    plan = plan_read(made[0], made[1], 0)
    theirs, mine = {"full": Blocks([1, 2, 3], 0, 12)}, {"full": Blocks([5, 6, 7])}
    parts = RequestParts(plan, mine, (0, 12))
    block = plan.expand(theirs, mine, (0, 12)).total_bytes // 9
    found = [
        parts.next({}, Unfinished(runs_of({"full": Blocks(ids, 0, 4 * len(ids))}), layers), last=False).total_bytes
        for ids, layers in (
            ([1], ("layers.0",)),
            ([1, 2], ("layers.1",)),
            ([1, 2, 3], ("layers.0",)),
            ([1, 2], ("layers.0", "layers.1", "layers.2")),
        )
    ]
    assert found == [block, 2 * block, 2 * block, 2 * block]
    assert parts.next(theirs, last=True).total_bytes == 2 * block


def test_a_source_that_never_names_the_same_layers_twice_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "READS_KEPT", 20)
    model = tensors(layers=6, axis=2, state_bytes=2)
    made = [engine(name, model, block_tokens=4, num_blocks=16).geometry() for name in ("p", "d")]
    plan = plan_read(made[0], made[1], 0)
    every = [plan.of_layers(some) for count in range(1, 6) for some in combinations(sorted(plan.layers), count)]
    parts = [(len(part.reads), weakref.ref(part)) for part in every]
    del every
    gc.collect()
    assert 0 < sum(reads for reads, part in parts if part() is not None) <= 20


def test_tokens_asked_may_end_before_those_published() -> None:
    token = planned().expand({"full": Blocks([1])}, {"full": Blocks([1])}, (0, 1)).total_bytes
    steps = [([1, 2], 0, 8), ([3], 8, 12)]
    assert bytes_of(RequestParts(planned(), {"full": Blocks([5, 6])}, (0, 7)), steps) == [7 * token, 0]
    # The granule that holds its end is read once.
    assert bytes_of(RequestParts(planned(granule=4), {"full": Blocks([5, 6])}, (0, 7)), steps) == [4 * token, 4 * token]


def test_tokens_that_are_there_already_are_not_read() -> None:
    parts = RequestParts(planned(), {"full": Blocks([5, 6], 8)}, (8, 16))
    steps = [([1], 0, 4), ([2], 4, 8), ([3], 8, 12), ([4], 12, 16)]
    assert [size > 0 for size in bytes_of(parts, steps)] == [False, False, True, True]


def test_blocks_without_an_end_token_are_read_with_the_last_step() -> None:
    parts = RequestParts(planned(), {"full": Blocks([5, 6])}, (0, 8))
    whole = planned().expand({"full": Blocks([1, 2])}, {"full": Blocks([5, 6])}, (0, 8)).total_bytes
    assert parts.next({"full": Blocks([1, 2])}, last=False).total_bytes == 0
    assert parts.next({}, last=True).total_bytes == whole


@pytest.mark.parametrize(("ids", "error"), [([5, 6, 5], BadBlock), ([5, 6, 16], BadBlock), ([5, 6], BlocksShort)])
def test_destination_blocks_are_checked_before_the_first_part_is_read(ids: list[int], error: type[Exception]) -> None:
    parts = RequestParts(planned(), {"full": Blocks(ids)}, (0, 12))
    with pytest.raises(error):
        parts.next({"full": Blocks([1], 0, 4)}, last=False)


@pytest.mark.parametrize(
    ("step", "last", "error"),
    [
        (Blocks([2], 8, 12), False, BlocksShort),
        (Blocks([16], 4, 8), False, BadBlock),
        (Blocks([2], 4, 12), False, BlocksShort),
        (Blocks([2], 4, 8), True, BlocksShort),
    ],
)
def test_steps_are_checked_before_they_are_read(step: Blocks, last: bool, error: type[Exception]) -> None:
    parts = RequestParts(planned(), {"full": Blocks([5, 6, 7])}, (0, 12))
    parts.next({"full": Blocks([1], 0, 4)}, last=False)
    with pytest.raises(error):
        parts.next({"full": step}, last=last)


def test_parts_before_the_last_step_need_the_asked_tokens() -> None:
    parts = RequestParts(planned(), {"full": Blocks([5, 6])}, None)
    with pytest.raises(InvalidField, match="tokens"):
        parts.next({"full": Blocks([1], 0, 4)}, last=False)


def test_windows_and_states_are_read_with_the_last_step_even_if_published_before() -> None:
    groups = (
        Group("full", block_tokens=4, num_blocks=16),
        Group("window", GroupKind.WINDOW, block_tokens=4, num_blocks=16, window_tokens=4),
        Group("state", GroupKind.STATE, num_blocks=4),
    )
    model = [
        *tensors(layers=1, axis=1, state_bytes=2),
        *tensors(layers=1, prefix="window", group="window", axis=1, state_bytes=2),
        Tensor("mamba", "ssm", "state", axis=1, state_bytes=2, state_rows=2),
    ]
    made = [Engine(name, groups, tp_ranks(model, 1), {}).geometry() for name in ("p", "d")]
    plan = plan_read(made[0], made[1], 0)
    mine = {"full": Blocks([5, 6]), "window": Blocks([7, 8]), "state": Blocks([1], state_token=8)}
    parts = RequestParts(plan, mine, (0, 8))
    early = {"full": Blocks([1], 0, 4), "window": Blocks([1, 2], 0, 8), "state": Blocks([3], state_token=8)}
    alone = planned().expand({"full": Blocks([1])}, {"full": Blocks([5])}, (0, 4)).total_bytes
    assert parts.next(early, last=False).total_bytes == alone // 2
    whole = plan.expand({**early, "full": Blocks([1, 2], 0, 8)}, mine, (0, 8)).total_bytes
    assert parts.next({"full": Blocks([2], 4, 8)}, last=True).total_bytes == whole - alone // 2
