"""Replicas share the load: contiguous stripes, bounded load and bounded fan-in, each block read once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.geometry import Blocks, Group, GroupKind, Interval, TokenShard
from kvferry.planner import ReadPlan, plan_read
from tests.support.examples import examples
from tests.support.geometries import Engine, Held, Rank, Tensor, engine
from tests.support.simulated_memories import copies

MLA = [Tensor("layers.0", "latent", axis=1, state_bytes=8)]
BLOCK = 4


def plans(replicas: int, readers: int, *, striping: bool = True) -> list[ReadPlan]:
    source = engine("p", MLA, replicas, block_tokens=BLOCK, num_blocks=64, replicated=["latent"]).geometry()
    destination = engine("d", MLA, readers, block_tokens=BLOCK, num_blocks=64, replicated=["latent"]).geometry()
    return [plan_read(source, destination, rank, striping=striping) for rank in range(readers)]


def blocks_read(plan: ReadPlan, count: int) -> dict[int, list[int]]:
    """The blocks of the request that are read from each source rank."""
    ids = {"full": Blocks(range(count))}
    found: dict[int, list[int]] = {}
    for source in plan.expand(ids, ids).sources:
        plane = plan.reads[0].destination
        for descriptors in source.descriptors:
            for _, begin, length in copies(descriptors):
                first = (begin - plane.base) // plane.block_stride
                found.setdefault(source.source_rank, []).extend(range(first, first + length // plane.block_stride))
    return found


@settings(settings.get_profile("plan"), max_examples=examples(100))
@given(replicas=st.integers(1, 12), readers=st.integers(1, 12), count=st.integers(1, 40))
def test_stripes_are_contiguous_and_limit_load_and_fan_in(replicas: int, readers: int, count: int) -> None:
    load = dict.fromkeys(range(replicas), 0)
    for plan in plans(replicas, readers):
        read = blocks_read(plan, count)
        assert sorted(block for blocks in read.values() for block in blocks) == list(range(count))
        assert len(read) <= -(-replicas // readers) + 1
        for source, blocks in read.items():
            assert blocks == list(range(blocks[0], blocks[0] + len(blocks)))
            load[source] += len(blocks)
    assert max(load.values()) <= -(-readers * count // replicas)


@pytest.mark.parametrize(("replicas", "readers"), [(4, 1), (3, 2), (2, 4), (5, 5)])
def test_readers_without_striping_read_from_one_replica_each(replicas: int, readers: int) -> None:
    used = [plan.source_ranks for plan in plans(replicas, readers, striping=False)]
    assert all(len(ranks) == 1 for ranks in used)
    # As even as whole reads can be.
    counts = [sum(ranks == (replica,) for ranks in used) for replica in range(replicas)]
    assert max(counts) <= -(-readers // replicas)


def test_readers_pair_up_with_as_many_replicas() -> None:
    assert [plan.source_ranks for plan in plans(4, 4)] == [(0,), (1,), (2,), (3,)]
    assert all(read.stripe.whole for plan in plans(4, 4) for read in plan.reads)


def test_stripes_are_whole_in_both_block_sizes() -> None:
    source = engine("p", MLA, 3, block_tokens=4, num_blocks=64, replicated=["latent"]).geometry()
    plan = plan_read(source, engine("d", MLA, block_tokens=6, num_blocks=64).geometry(), 0)
    expansion = plan.expand({"full": Blocks(range(18))}, {"full": Blocks(range(12))})
    assert [part.total_bytes for part in expansion.sources] == [24 * 8] * 3


def test_readers_of_different_tokens_share_the_replicas() -> None:
    # Eight holders of everything, eight readers of an eighth each: each reads from one, not a sliver from all.
    source = engine("p", MLA, 8, block_tokens=8, replicated=["latent"]).geometry()
    ranks = tuple(Rank((Held(MLA[0], Interval(0, 1), TokenShard(index, 8, 1)),)) for index in range(8))
    destination = Engine("d", (Group("full", block_tokens=64, num_blocks=4),), ranks).geometry()
    assert [plan_read(source, destination, rank).source_ranks for rank in range(8)] == [(rank,) for rank in range(8)]


def test_token_shards_like_the_readers_own_are_preferred() -> None:
    # The source has both a whole copy and the same shards as the destination: shards need no recutting.
    whole = Rank((Held(MLA[0], Interval(0, 1)),))
    shards = tuple(Rank((Held(MLA[0], Interval(0, 1), TokenShard(index, 2, 1)),)) for index in range(2))
    source = Engine("p", (Group("full", block_tokens=8, num_blocks=4),), (whole, *shards)).geometry()
    destination = Engine("d", source.groups, shards).geometry()
    assert [plan_read(source, destination, rank).source_ranks for rank in range(2)] == [(1,), (2,)]


@pytest.mark.parametrize(("replicas", "readers"), [(1, 1), (4, 1), (4, 2), (3, 5)])
def test_a_state_is_read_once_whatever_its_replicas(replicas: int, readers: int) -> None:
    model = [Tensor("layers.0", "ssm", axis=2, state_rows=3)]

    def made(name: str, size: int) -> Engine:
        ranks = tuple(Rank((Held(model[0], Interval(0, 2)),)) for _ in range(size))
        return Engine(name, (Group("full", GroupKind.STATE, num_blocks=4),), ranks)

    source, destination = made("p", replicas).geometry(), made("d", readers).geometry()
    one = {"full": Blocks([1], state_token=9)}
    for rank in range(readers):
        expansion = plan_read(source, destination, rank).expand(one, one)
        assert expansion.total_bytes == 2 * 3 * 4
        assert len(expansion.sources) == 1
