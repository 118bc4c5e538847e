"""An engine whose ranks together lack units or tokens of a plane is refused: against sets of (unit, token)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest

from kvferry.errors import BadGeometry
from kvferry.geometry import EngineGeometry, Group, Interval, Plane, RankGeometry, TokenShard
from kvferry.planner.coverage import Indexed, check_complete
from tests.support.large_caches import plane

HEADS = 6
GROUP = Group("full", block_tokens=16, num_blocks=64)
TOKENS = range(16)
ALL_TOKENS = TokenShard()


def held(layer: str, units: Interval, tokens: TokenShard = ALL_TOKENS) -> Plane:
    made = plane(1 << 40, tokens=16 // tokens.count)
    size = len(units)
    return replace(
        made,
        layer=layer,
        num_blocks=64,
        block_stride=made.block_stride * HEADS,
        unit_stride=made.block_stride if size > 1 else 0,
        axis_size=HEADS,
        units=units,
        token_shard=tokens,
    )


def engine(ranks: list[list[Plane]], *, partial: bool = False) -> EngineGeometry:
    return EngineGeometry(
        "d", (GROUP,), tuple(RankGeometry(rank, tuple(of)) for rank, of in enumerate(ranks)), partial=partial
    )


def refused(made: EngineGeometry) -> BadGeometry | None:
    try:
        check_complete(Indexed(made))
    except BadGeometry as error:
        return error
    return None


def is_whole(planes: list[Plane]) -> bool:
    """Whether, for every head, ranks that split the tokens in the same way hold all tokens."""
    for head in range(HEADS):
        splits: dict[tuple[int, int], set[int]] = {}
        for one in planes:
            if one.units.begin <= head < one.units.end:
                shard = one.token_shard
                splits.setdefault((shard.count, shard.interleave), set()).update(
                    token for token in TOKENS if token // shard.interleave % shard.count == shard.index
                )
        if not any(tokens == set(TOKENS) for tokens in splits.values()):
            return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_is_refused_exactly_if_its_ranks_lack_a_head_or_a_token(seed: int) -> None:
    turns, seen = Random(seed), set()
    for _ in range(600):
        planes = []
        for _ in range(turns.randint(1, 7)):
            begin = turns.choice((0, 0, 2, 3, turns.randrange(HEADS)))
            end = turns.choice((HEADS, HEADS, turns.randint(begin + 1, HEADS)))
            count, interleave = turns.choice(((1, 1), (2, 1), (2, 4), (4, 1)))
            planes.append(held("layer", Interval(begin, end), TokenShard(turns.randrange(count), count, interleave)))
        whole = is_whole(planes)
        assert (refused(engine([[one] for one in planes])) is None) == whole, planes
        assert refused(engine([[one] for one in planes], partial=True)) is None
        seen.add(whole)
    assert seen == {True, False}


def test_the_message_names_plane_heads_and_ranks() -> None:
    twice = [[held(f"layers.{layer}", Interval(0, 3)) for layer in range(3)] for _ in range(2)]
    error = refused(engine(twice))
    assert error is not None
    assert error.values["where"] == "engine 'd', plane layers.0/key (and 2 more planes)"
    assert "units [3, 6) of 6 are held by no rank" in error.values["problem"]
    assert "[0, 3) all tokens by ranks 0 1" in error.values["problem"]


def test_the_message_names_only_heads_that_no_rank_holds() -> None:
    error = refused(engine([[held("layer", Interval(1, 3))], [held("layer", Interval(4, 6))]]))
    assert error is not None
    assert "units [0, 1), [3, 4) of 6 are held by no rank" in error.values["problem"]


def test_a_plane_that_is_whole_does_not_excuse_another() -> None:
    half, whole = held("a", Interval(0, 3)), held("b", Interval(0, HEADS))
    for planes in itertools.permutations((half, whole)):
        error = refused(engine([list(planes)]))
        assert error is not None
        assert error.values["where"] == "engine 'd', plane a/key"


@pytest.mark.parametrize(
    "ranks",
    [
        [[held("0", Interval(0, 3)), held("1", Interval(0, 6))], [held("0", Interval(3, 6))]],
        # Pipeline stages: each layer is on one of them.
        [[held("0", Interval(0, 6))], [held("1", Interval(0, 6))]],
        # Replicas.
        [[held("0", Interval(0, 3))], [held("0", Interval(3, 6))], [held("0", Interval(0, 3))]],
        # Tokens are divided within each half of the heads.
        [[held("0", Interval(3 * (rank // 2), 3 * (rank // 2) + 3), TokenShard(rank % 2, 2))] for rank in range(4)],
        # Some heads are held whole, the others by shards of tokens.
        [[held("0", Interval(0, 4))], *([held("0", Interval(4, 6), TokenShard(index, 2))] for index in range(2))],
        [[]],
    ],
)
def test_whole_engines_pass(ranks: list[list[Plane]]) -> None:
    assert refused(engine(ranks)) is None


@pytest.mark.parametrize("shards", [1, 2])
def test_an_engine_of_any_size_is_decided(shards: int) -> None:
    """Also an engine whose heads lie on as many ranks, and whose tokens no rank holds whole."""
    many = 2000
    one = replace(held("layer", Interval(0, 1), TokenShard(0, 2)), axis_size=many)
    ranks = [
        [replace(one, units=Interval(unit, unit + 1), token_shard=TokenShard(shard, 2))]
        for unit in range(many)
        for shard in range(shards)
    ]
    error = refused(engine(ranks))
    if shards == 2:
        assert error is None
        error = refused(engine([of for of in ranks if of[0].units.begin != 700]))
        assert error is not None
        assert "units [700, 701) of 2000 are held" in error.values["problem"]
    else:
        assert error is not None
        assert "units [0, 2000) of 2000 are held" in error.values["problem"]
