"""However a source publishes a request in steps: all parts together read what one read of the whole does, each byte
once, and each part reaches as far as what is published and the granules allow."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.geometry import Blocks, Group, GroupKind, Plane
from kvferry.planner import Path, PathRule, ReadPlan, plan_read
from kvferry.planner.request_blocks import GroupRequest, needed
from kvferry.planner.request_parts import RequestParts
from tests.support.drawn_worlds import World, worlds
from tests.support.geometries import tensors
from tests.support.simulated_memories import POISON, Memory, check, execute, global_state, source_memories

PLAN = settings.get_profile("plan")
PROFILE = settings(PLAN, max_examples=max(20, PLAN.max_examples // 4))

MODEL = tensors(layers=2, axis=4, state_bytes=2)


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
        (plane, engine.group(group))
        for read in plan.reads
        if read.destination.group == group
        for plane, engine in ((read.source, plan.source), (read.destination, plan.destination))
    }
    spans = [span for plane, of in sides for span in granules(plane, of, until)]
    return max(token for token in range(until + 1) if not any(first < token <= last for first, last in spans))


@pytest.mark.timeout(max(120, PROFILE.max_examples // 5))
@settings(PROFILE)
@given(world=worlds(), data=st.data(), path=st.sampled_from((None, Path.STAGED)))
def test_all_parts_together_read_the_bytes_of_one_read(world: World, data: st.DataObject, path: Path | None) -> None:
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
                execute(plan.expand_needed(early(plan, parts.granted, mine, asked)), memories, expected)
                assert (memory.data == expected.data).all(), index
        check(plan, memory, before, model, world.source_blocks, world.destination_blocks, asked)
        assert total == plan.expand(world.source_blocks, mine, asked).total_bytes


def early(
    plan: ReadPlan, granted: dict[str, Blocks], mine: dict[str, Blocks], asked: tuple[int, int]
) -> dict[str, GroupRequest]:
    """What may have been read of a request whose last step has not come."""
    found: dict[str, GroupRequest] = {}
    theirs = {group.name: group for group in plan.source.groups}
    for group in plan.groups:
        if group.kind is GroupKind.TOKENS and group.name in granted:
            end = furthest(plan, group.name, min(granted[group.name].end_token or 0, asked[1]))
            if end > asked[0]:
                found |= needed((group,), theirs, granted, mine, (asked[0], end))
    return found
