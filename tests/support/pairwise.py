"""Pairs of geometries in which every two things that can differ do so together at least once.

A row chooses one level of each factor; `rows` is a small set of rows in which every feasible pair of levels of two
factors occurs. What cannot be is declared (`INFEASIBLE`), with the reason, and tested to be all that is missing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, str]
"""The level of each factor."""

FACTORS: dict[str, tuple[str, ...]] = {
    "tp": ("equal", "more readers", "fewer readers", "indivisible"),
    "replicas": ("none", "source", "destination", "both"),
    "layout": ("HND-HND", "HND-NHD", "NHD-HND", "NHD-NHD"),
    "kv": ("apart-apart", "apart-packed", "packed-blocks_first", "blocks_first-apart"),
    "blocks": ("16-16", "16-64", "64-16", "48-32"),
    "kind": ("full", "window", "mla", "state"),
    "pp": ("none", "source", "destination", "both"),
    "dcp": ("none", "source", "destination", "both"),
    "prefix": ("none", "inside a block"),
    "tail": ("whole blocks", "ragged"),
    "path": ("direct", "staged"),
}

INFEASIBLE: dict[tuple[str, str, str, str], str] = {
    ("tp", "equal", "replicas", "source"): "as many ranks on both sides replicate a head on both or on neither",
    ("tp", "equal", "replicas", "destination"): "the same",
    ("tp", "more readers", "replicas", "source"): "more readers than sources replicate what the sources do",
    ("tp", "fewer readers", "replicas", "destination"): "fewer readers than sources replicate nothing else",
    ("layout", "HND-NHD", "kind", "mla"): "there is one latent: what has no heads has no order of heads and tokens",
    ("layout", "NHD-HND", "kind", "mla"): "the same",
    ("layout", "NHD-NHD", "kind", "mla"): "the same",
    ("kind", "state", "dcp", "source"): "a state has no tokens to shard",
    ("kind", "state", "dcp", "destination"): "the same",
    ("kind", "state", "dcp", "both"): "the same",
}

SIZES = {
    ("equal", "none"): (2, 2, 4),
    ("equal", "both"): (2, 2, 1),
    ("more readers", "none"): (2, 4, 4),
    ("more readers", "destination"): (2, 4, 2),
    ("more readers", "both"): (2, 4, 1),
    ("fewer readers", "none"): (4, 2, 4),
    ("fewer readers", "source"): (4, 2, 2),
    ("fewer readers", "both"): (4, 2, 1),
    ("indivisible", "none"): (3, 2, 5),
    ("indivisible", "source"): (3, 2, 2),
    ("indivisible", "destination"): (2, 3, 2),
    ("indivisible", "both"): (3, 2, 1),
}
"""Ranks that share the heads out on both sides, and pairs of heads, by relation and replicas. In pairs, so that a rank
never has one head only: HND and NHD would be the same bytes."""

LATENT_SIZES = {
    ("equal", "none"): (1, 1),
    ("equal", "both"): (2, 2),
    ("more readers", "destination"): (1, 3),
    ("more readers", "both"): (2, 4),
    ("fewer readers", "source"): (3, 1),
    ("fewer readers", "both"): (4, 2),
    ("indivisible", "both"): (3, 2),
}
"""The same for MLA, where every rank holds all of it."""

COUNT = 2
"""Token shards of a rank that shards tokens."""


def feasible(row: Row) -> bool:
    """Whether there are such engines."""
    latent = row["kind"] == "mla"
    sizes = LATENT_SIZES if latent else SIZES
    return (
        (row["tp"], row["replicas"]) in sizes
        and (row["kind"] != "state" or row["dcp"] == "none")
        and (row["layout"] == "HND-HND" or not latent)
    )


def rows(seed: int = 1) -> list[dict[str, str]]:
    """A pairwise cover; always the same for a seed."""
    choose = random.Random(seed)
    missing = {pair for pair in _all_pairs() if pair not in INFEASIBLE}
    found = []
    while missing:
        candidates = (_candidate(choose, *choose.choice(sorted(missing))) for _ in range(60))
        best = max((row for row in candidates if row is not None), key=lambda row: len(missing & pairs(row)))
        missing -= pairs(best)
        found.append(best)
    return found


def pairs(row: Row) -> set[tuple[str, str, str, str]]:
    """The pairs of levels in a row."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(FACTORS, 2)}


def _all_pairs() -> list[tuple[str, str, str, str]]:
    return [
        (a, x, b, y)
        for a, b in itertools.combinations(FACTORS, 2)
        for x, y in itertools.product(FACTORS[a], FACTORS[b])
    ]


def _candidate(choose: random.Random, a: str, x: str, b: str, y: str) -> dict[str, str] | None:
    """A feasible row with this pair in it."""
    for _ in range(200):
        row = {factor: choose.choice(levels) for factor, levels in FACTORS.items()}
        row[a], row[b] = x, y
        if feasible(row):
            return row
    return None


def documents(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two engines of a row, as geometry files say them."""
    found = []
    latent = row["kind"] == "mla"
    key = row["tp"], row["replicas"]
    sizes = LATENT_SIZES[key] if latent else SIZES[key][:2]
    for side, name in enumerate(("source", "destination")):
        sharded = row["dcp"] in (name, "both")
        staged = row["pp"] in (name, "both")
        layout, kv, block = (row[factor].split("-")[side] for factor in ("layout", "kv", "blocks"))
        engine: dict[str, Any] = {
            "engine_id": name,
            "tp_size": sizes[side] * (COUNT if sharded else 1),
            "layout": layout,
            "kv": kv,
            "block_size": int(block),
            "num_blocks": 2048 // int(block),
            "model": (
                {"layers": 4, "dtype": "bfloat16", "attention": "mla", "latent_dim": 64, "rope_dim": 16}
                if latent
                else {"layers": 4, "kv_heads": 2 * SIZES[key][2], "head_dim": 16, "dtype": "bfloat16"}
            ),
        }
        if not latent:
            # Ranks that shard tokens hold the same heads.
            shards = _pairs_of_heads(sizes[side], SIZES[key][2])
            engine["shards"] = [shard for shard in shards for _ in range(COUNT if sharded else 1)]
        if sharded:
            engine["token_shard"] = {"count": COUNT, "interleave": 1 if side else 4}
        if staged:
            # Not where the other side splits, if it does.
            engine |= {"pp_size": 2, "stages": [[0, 3], [3, 4]] if side else [[0, 2], [2, 4]]}
        engine |= _groups(row["kind"])
        if "groups" in engine and "token_shard" in engine:
            shard = engine.pop("token_shard")
            engine["groups"] = [{**group, "token_shard": shard} for group in engine["groups"]]
        found.append(engine)
    return found[0], found[1]


def _pairs_of_heads(ranks: int, count: int) -> list[list[int]]:
    """Heads by rank: pairs r·n // ranks to (r + 1)·n // ranks, one pair where that is none."""
    found = []
    for rank in range(ranks):
        begin, end = rank * count // ranks, (rank + 1) * count // ranks
        found.append([2 * begin, 2 * max(end, begin + 1)])
    return found


def _groups(kind: str) -> dict[str, Any]:
    if kind == "window":
        return {
            "groups": [
                {"name": "full", "layers": [0, 2], "pool": "kv", "null_block": 0},
                {"name": "window", "kind": "window", "window": 40, "layers": [1, 3], "pool": "kv", "null_block": 0},
            ]
        }
    if kind == "state":
        components = [
            {"name": "conv_x", "units": 48, "rows": 3},
            {"name": "conv_b", "units": 12, "rows": 3},
            {"name": "ssm", "units": 12, "content": 64, "dtype": "float32"},
        ]
        state = {"name": "mamba", "kind": "state", "num_blocks": 8, "layers": [0, 2], "components": components}
        return {"groups": [{"name": "full", "layers": [1, 3]}, {**state, "rows": "rows_first"}]}
    return {}


def tokens(row: Row) -> tuple[int, int]:
    """Tokens of the request, and how many of them the destination holds already."""
    length = 192 if row["tail"] == "whole blocks" else 187
    return length, 21 if row["prefix"] == "inside a block" else 0
