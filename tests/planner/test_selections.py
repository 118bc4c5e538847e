"""Parts of a request: some layers, some tokens. Together the parts are the whole, and no byte is written twice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.geometry import Blocks, Group, GroupKind, Plane
from kvferry.planner import plan_read
from tests.support.examples import examples
from tests.support.geometries import Engine, Tensor, engine, tensors, tp_ranks
from tests.support.simulated_memories import POISON, Memory, check, execute, source_memories

MODEL = tensors(layers=4, axis=2)
SOURCE = engine("p", MODEL, 2, block_tokens=8)
DESTINATION = engine("d", MODEL, 1, block_tokens=12)
THEIRS, MINE = {"full": Blocks([3, 4, 9, 1, 0], 0, 40)}, {"full": Blocks([5, 2, 3, 8])}


def layer_is(layer: int) -> Callable[[Plane], bool]:
    return lambda plane: plane.layer == f"layers.{layer}"


def test_layers_one_by_one_are_the_whole() -> None:
    plan = plan_read(SOURCE.geometry(), DESTINATION.geometry(), 0)
    _, memories, model = source_memories(SOURCE, THEIRS, 40)
    memory = Memory.filled(DESTINATION.base(0), DESTINATION.build()[1][0], POISON)
    before = memory.data.copy()
    total = 0
    for layer in range(4):
        part = plan.only(layer_is(layer))
        expansion = part.expand(THEIRS, MINE)
        execute(expansion, memories, memory)
        total += expansion.total_bytes
    assert check(plan, memory, before, model, THEIRS, MINE, None)
    assert total == plan.expand(THEIRS, MINE).total_bytes


def test_a_part_touches_no_other_layer() -> None:
    plan = plan_read(SOURCE.geometry(), DESTINATION.geometry(), 0)
    _, memories, _ = source_memories(SOURCE, THEIRS, 40)
    memory = Memory.filled(DESTINATION.base(0), DESTINATION.build()[1][0], POISON)
    execute(plan.only(layer_is(2)).expand(THEIRS, MINE), memories, memory)
    for plane in plan.rank.planes:
        first, last = (address - memory.base for address in plane.extent)
        assert bool((memory.data[first:last] != POISON).any()) == (plane.layer == "layers.2")


def test_a_part_needs_no_blocks_of_groups_it_does_not_read() -> None:
    groups = (Group("full", block_tokens=8, num_blocks=8), Group("state", GroupKind.STATE, num_blocks=8))
    model = [*MODEL, Tensor("ssm.0", "ssm", "state", state_rows=2)]
    geometry = Engine("x", groups, tp_ranks(model, 1)).geometry()
    plan = plan_read(geometry, geometry, 0).only(lambda plane: plane.group == "full")
    assert [group.name for group in plan.groups] == ["full"]
    assert plan.expand({"full": Blocks([1])}, {"full": Blocks([2])}).descriptors


def test_selections_may_be_empty() -> None:
    plan = plan_read(SOURCE.geometry(), DESTINATION.geometry(), 0).only(lambda plane: False)
    assert plan.source_ranks == ()
    assert plan.expand({}, {}).sources == ()


@settings(settings.get_profile("plan"), max_examples=examples(50))
@given(cuts=st.sets(st.integers(1, 39), max_size=4))
def test_token_ranges_one_after_the_other_are_the_whole(cuts: set[int]) -> None:
    plan = plan_read(SOURCE.geometry(), DESTINATION.geometry(), 0)
    _, memories, model = source_memories(SOURCE, THEIRS, 40)
    memory = Memory.filled(DESTINATION.base(0), DESTINATION.build()[1][0], POISON)
    before = memory.data.copy()
    edges = [0, *sorted(cuts), 40]
    for begin, end in pairwise(edges):
        execute(plan.expand(THEIRS, MINE, (begin, end)), memories, memory)
    check(plan, memory, before, model, THEIRS, MINE, (0, 40))
    assert not np.array_equal(before, memory.data)
