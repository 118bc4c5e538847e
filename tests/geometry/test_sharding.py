"""Statements 17 and 18 of what the others promise: shards are disjoint, cover everything, and never empty."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import BadGeometry
from kvferry.geometry import Interval, TokenShard, shard, shards

sizes = st.integers(1, 200)


@given(count=sizes, size=sizes)
def test_shards_are_disjoint_and_cover_the_axis(count: int, size: int) -> None:
    held = [unit for part in shards(count, size) for unit in range(part.begin, part.end)]
    assert sorted(set(held)) == list(range(size))
    if count <= size:
        assert len(held) == size


@given(count=sizes, size=sizes)
def test_shards_differ_in_size_by_at_most_one(count: int, size: int) -> None:
    lengths = {len(part) for part in shards(count, size)}
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1


@given(replicas=st.integers(1, 16), heads=st.integers(1, 16))
def test_replicas_are_neighbours_as_in_vllm(replicas: int, heads: int) -> None:
    for rank, part in enumerate(shards(heads * replicas, heads)):
        assert part == Interval(rank // replicas, rank // replicas + 1)


def test_heads_that_do_not_divide_evenly_are_spread_over_all_ranks() -> None:
    assert [str(part) for part in shards(4, 10)] == ["[0, 2)", "[2, 5)", "[5, 7)", "[7, 10)"]


@pytest.mark.parametrize(("index", "count", "size"), [(-1, 2, 8), (2, 2, 8), (0, 0, 8), (0, 2, 0)])
def test_parts_that_do_not_exist_are_refused(index: int, count: int, size: int) -> None:
    with pytest.raises(BadGeometry):
        shard(index, count, size)


def test_a_single_token_shard_holds_all_tokens() -> None:
    assert TokenShard(0, 1, 16) == TokenShard()
