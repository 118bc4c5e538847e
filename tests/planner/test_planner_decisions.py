"""Decisions of the planner that mutation testing found untested (`make mutate`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.errors import InvalidField
from kvferry.geometry import Blocks, Group, GroupKind, Interval, TokenShard
from kvferry.planner import Path, PathRule, expansion, plan_read
from kvferry.planner.coverage import Coverer, Indexed
from tests.support.geometries import Engine, Held, Rank, Tensor, engine, tensors

GQA = tensors(layers=2, axis=4)


def test_ranks_that_cannot_be_covered_are_refused() -> None:
    """Not only the first rank: the result for one plane is remembered for planes alike."""
    source = engine("p", GQA, 1).geometry()
    planes = tuple(replace(plane, format="another") for plane in source.ranks[0].planes)
    source = replace(source, ranks=(replace(source.ranks[0], planes=planes),))
    destination = engine("d", GQA, 2).geometry()
    coverer = Coverer(Indexed(source), destination)
    for rank in destination.ranks:
        assert {mismatch.where for mismatch in coverer.cover(rank).mismatches} == {plane.name for plane in rank.planes}


def sharded(engine_id: str, granule: int, count: int, interleave: int) -> Engine:
    """One head, its tokens dealt out to `count` ranks."""
    tensor = Tensor("l", "key", axis=1, granule=granule)
    group = Group("full", GroupKind.TOKENS, 48 * count, 8)
    held = [Rank((Held(tensor, Interval(0, 1), TokenShard(index, count, interleave)),)) for index in range(count)]
    return Engine(engine_id, (group,), tuple(held))


@pytest.mark.parametrize(("source", "destination", "fits"), [(16, 48, True), (16, 8, False), (8, 16, False)])
def test_token_shards_cut_through_no_granule_on_either_side(source: int, destination: int, fits: bool) -> None:
    read_from = sharded("p", 16, 3, source).geometry()
    read_into = sharded("d", 16, 2, destination).geometry()
    found = Coverer(Indexed(read_from), read_into).cover(read_into.ranks[0]).mismatches
    assert ("token_shard" in {mismatch.field for mismatch in found}) is not fits


def test_a_read_of_too_many_descriptors_is_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    source = engine("p", GQA, 1, num_blocks=64).geometry()
    plan = plan_read(source, engine("d", GQA, 2, num_blocks=64).geometry(), 0, rule=PathRule(Path.DIRECT))
    scattered = Blocks(list(range(0, 64, 2)))
    made = plan.expand({"full": scattered}, {"full": scattered}).descriptors
    monkeypatch.setattr(expansion, "MAX_DESCRIPTORS", made)
    assert plan.expand({"full": scattered}, {"full": scattered}).descriptors == made
    monkeypatch.setattr(expansion, "MAX_DESCRIPTORS", made - 1)
    with pytest.raises(InvalidField, match="descriptors of one read"):
        plan.expand({"full": scattered}, {"full": scattered})
