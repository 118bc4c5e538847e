"""All tensor parallel sizes that engines could build: each head of each reader once, from a rank that holds it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvferry.geometry import Blocks
from kvferry.planner import ReadPlan, diff, plan_read
from tests.support.geometries import HND, NHD, engine, shard, tensors
from tests.support.simulated_memories import move

HEADS = (1, 2, 3, 4, 6, 8, 10, 12)
SIZES = range(1, 13)


@pytest.mark.parametrize(
    "heads", [pytest.param(heads, marks=() if heads in (1, 8) else pytest.mark.slow) for heads in HEADS]
)
def test_plans_of_every_pair_of_sizes_are_right(heads: int) -> None:
    model = tensors(layers=1, components=["key"], axis=heads)
    engines = {
        size: engine("x", model, size, block_tokens=2, num_blocks=6, layout=NHD if size % 2 else HND) for size in SIZES
    }
    geometries = {size: made.geometry() for size, made in engines.items()}
    blocks = Blocks([4, 1, 3, 0], 0, 7), Blocks([2, 3, 5, 0], 0, 7)
    for source_size in SIZES:
        for size in SIZES:
            source, destination = geometries[source_size], geometries[size]
            assert diff(source, destination) == ()
            plans = [plan_read(source, destination, rank) for rank in range(size)]
            for plan in plans:
                _check_shares(plan, heads, source_size, size)
                expansion = plan.expand({"full": blocks[0]}, {"full": blocks[1]})
                assert expansion.total_bytes == 7 * 4 * len(shard(plan.rank.rank, size, heads))
            # Moved for one rank of each pair: the bytes, too.
            some = plans[(source_size + size) % size]
            assert move([some], engines[source_size], engines[size], {"full": blocks[0]}, {"full": blocks[1]}, 7)


def _check_shares(plan: ReadPlan, heads: int, source_size: int, size: int) -> None:
    """By counting: of every head of the reader, the stripes are disjoint, cover all blocks, and are held."""
    mine = shard(plan.rank.rank, size, heads)
    for head in range(mine.begin, mine.end):
        stripes = []
        for read in plan.reads:
            if read.units.begin <= head < read.units.end:
                held = shard(read.source_rank, source_size, heads)
                assert held.begin <= head < held.end
                stripes.append((read.stripe.begin / read.stripe.of, read.stripe.end / read.stripe.of))
        stripes.sort()
        assert stripes[0][0] == 0
        assert stripes[-1][1] == 1
        assert all(before[1] == after[0] for before, after in pairwise(stripes))
