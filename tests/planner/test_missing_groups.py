"""A request in parts that lacks blocks for a group is refused before its first part, not after all the others moved."""

from __future__ import annotations

import pytest

from kvferry.errors import InvalidField
from kvferry.geometry import Blocks, Group, Interval
from kvferry.planner import plan_read
from kvferry.planner.plan import RequestParts
from tests.support.geometries import Engine, Held, Rank, tensors


def test_a_group_without_blocks_is_found_with_the_first_step() -> None:
    groups = tuple(Group(name, block_tokens=4, num_blocks=16) for name in ("full", "other"))
    model = [
        *tensors(layers=1, axis=1, state_bytes=2),
        *tensors(layers=1, prefix="other", group="other", axis=1, state_bytes=2),
    ]
    rank = Rank(tuple(Held(tensor, Interval(0, 1)) for tensor in model))
    theirs, mine = (Engine(name, groups, (rank,)).geometry() for name in ("p", "d"))
    parts = RequestParts(plan_read(theirs, mine, 0), {"full": Blocks([5, 6])}, (0, 8))
    with pytest.raises(InvalidField, match="'other'"):
        parts.next({"full": Blocks([1], 0, 4)}, last=False)
