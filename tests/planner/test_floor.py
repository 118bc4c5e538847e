"""Nothing is written below the first wanted token, for any token shards of both sides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.errors import InvalidField
from kvferry.geometry import Blocks, EngineGeometry, Group, GroupKind, RankGeometry, TokenShard
from kvferry.planner import Path, PathRule, plan_read
from tests.support.large_caches import BLOCKS, plane
from tests.support.simulated_memories import copies

GROUP = Group("full", block_tokens=16, num_blocks=BLOCKS)
GRANULE = 4


def ranks(shards: int, base: int) -> tuple[RankGeometry, ...]:
    """Ranks that hold every so many-th granule of tokens."""
    whole = plane(base, tokens=16 // shards)
    return tuple(
        RankGeometry(rank, (replace(whole, token_granule=GRANULE, token_shard=TokenShard(rank, shards, GRANULE)),))
        for rank in range(shards)
    )


@pytest.mark.parametrize(("theirs", "mine"), [(1, 1), (2, 2), (2, 1), (1, 2), (4, 2), (2, 4)])
def test_a_first_token_inside_a_granule_is_refused(theirs: int, mine: int) -> None:
    source = EngineGeometry("p", (GROUP,), ranks(theirs, 1 << 36))
    destination = EngineGeometry("d", (GROUP,), ranks(mine, 1 << 40))
    plan = plan_read(source, destination, 0, rule=PathRule(Path.DIRECT, slot_bytes=1 << 20))
    blocks = {"full": Blocks(list(range(8)))}
    # The granule of token 32 is that of rank 0 on all sides.
    with pytest.raises(InvalidField, match=r"first token is '?34'?, expected a multiple of [48] tokens"):
        plan.expand(blocks, blocks, (34, 128))
    expansion = plan.expand(blocks, blocks, (32, 128))
    first = plan.rank.planes[0]
    floor = min(mine for read in expansion.sources for part in read.descriptors for _, mine, _ in copies(part))
    assert floor >= first.base + 2 * first.block_stride


def test_the_token_before_a_window_is_left_where_its_granule_begins_too_early() -> None:
    """This token is not required, so a granule that may not be written is no reason to refuse the read."""
    made = [
        EngineGeometry(name, (Group("full", GroupKind.WINDOW, 16, BLOCKS, window_tokens=13),), ranks(1, base))
        for name, base in (("p", 1 << 36), ("d", 1 << 40))
    ]
    plan = plan_read(made[0], made[1], 0, rule=PathRule(Path.DIRECT, slot_bytes=1 << 20))
    blocks = {"full": Blocks([0, 1])}
    granule = plan.expand(blocks, blocks, (8, 9)).total_bytes
    # Tokens 8 to 19 are required, and 7 is not.
    assert plan.expand(blocks, blocks, (4, 20)).total_bytes == 4 * granule
    assert plan.expand(blocks, blocks, (6, 20)).total_bytes == 3 * granule
    with pytest.raises(InvalidField, match=r"first token is '?9'?"):
        plan.expand(blocks, blocks, (9, 20))
