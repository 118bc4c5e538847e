"""The pairwise cover is one, and its rows are what they say."""

from __future__ import annotations

import itertools

import pytest

from kvferry.geometry import EngineGeometry, GroupKind, Plane
from kvferry.geometry.file import parse
from tests.support import pairwise
from tests.support.pairwise import FACTORS, INFEASIBLE, Row

ROWS = pairwise.rows()


def test_possible_pairs_of_levels_are_all_covered() -> None:
    levels = {(a, x, b, y) for (a, xs), (b, ys) in itertools.combinations(FACTORS.items(), 2) for x in xs for y in ys}
    covered = set().union(*(pairwise.pairs(row) for row in ROWS))
    assert levels - covered == set(INFEASIBLE)
    assert all(INFEASIBLE.values())


def test_rows_have_only_declared_levels() -> None:
    for row in ROWS:
        assert list(row) == list(FACTORS)
        assert all(level in FACTORS[factor] for factor, level in row.items())
        assert pairwise.feasible(row)


def test_the_cover_is_always_the_same_and_small() -> None:
    assert pairwise.rows() == ROWS
    # No cover is smaller than the two largest factors' pairs.
    assert 16 <= len(ROWS) <= 48


def sides(source: bool, destination: bool) -> str:
    """A level of those factors that say on which side something is."""
    return {(False, False): "none", (True, False): "source", (False, True): "destination", (True, True): "both"}[
        source, destination
    ]


def attention(engine: EngineGeometry) -> list[list[Plane]]:
    """The two components of the first attention layer, of every rank that holds it."""
    names = {group.name for group in engine.groups if group.kind is not GroupKind.STATE}
    layer = min(plane.layer for _, plane in engine.planes() if plane.group in names)
    return [found for rank in engine.ranks if (found := [plane for plane in rank.planes if plane.layer == layer])]


def placed(engine: EngineGeometry) -> str:
    one, other = attention(engine)[0]
    away = other.base - one.base
    if away == one.state_bytes:
        return "packed"
    return "blocks_first" if away < one.block_stride else "apart"


def replicated(engine: EngineGeometry) -> bool:
    held = [(planes[0].units, planes[0].token_shard) for planes in attention(engine)]
    return len(set(held)) < len(held)


def sharers(engine: EngineGeometry) -> int:
    """Ranks that share the heads out."""
    return sum(planes[0].token_shard.index == 0 for planes in attention(engine))


def relation(source: int, destination: int) -> str:
    if source == destination:
        return "equal"
    if max(source, destination) % min(source, destination):
        return "indivisible"
    return "more readers" if source < destination else "fewer readers"


def kind(engine: EngineGeometry) -> str:
    kinds = {group.kind for group in engine.groups}
    if GroupKind.WINDOW in kinds:
        return "window"
    if GroupKind.STATE in kinds:
        return "state"
    return "mla" if attention(engine)[0][0].component == "latent" else "full"


def tokens_inside(token: int, source: EngineGeometry, destination: EngineGeometry) -> bool:
    """Whether a token is inside a block on both sides."""
    return all(token % engine.groups[0].block_tokens for engine in (source, destination))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row.values()).replace(" ", "_"))
def test_row_is_the_declared_case(row: Row) -> None:
    source, destination = (parse(document) for document in pairwise.documents(row))
    both = source, destination
    (theirs, *_), (mine, *_) = attention(source)[0], attention(destination)[0]
    length, held = pairwise.tokens(row)
    found = {
        "tp": relation(sharers(source), sharers(destination)),
        "replicas": sides(*(replicated(engine) for engine in both)),
        "layout": "-".join("NHD" if plane.unit_stride < plane.token_stride else "HND" for plane in (theirs, mine)),
        "kv": "-".join(placed(engine) for engine in both),
        "blocks": "-".join(str(engine.groups[0].block_tokens) for engine in both),
        "kind": kind(source),
        "pp": sides(*(any(rank.labels["pp_rank"] for rank in engine.ranks) for engine in both)),
        "dcp": sides(theirs.token_shard.count > 1, mine.token_shard.count > 1),
        "prefix": "inside a block" if held and tokens_inside(held, *both) else "none",
        "tail": "ragged" if tokens_inside(length, *both) else "whole blocks",
        "path": row["path"],
    }
    if row["kind"] == "mla":
        found["layout"] = row["layout"]
    assert found == row
    assert kind(destination) == row["kind"]
