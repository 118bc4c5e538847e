"""Pairs of geometries that the pairwise cover does not have: uneven shards, more than two stages, compressed and scaled
caches, undeclared pages, states of other projections, other transports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GQA = {"layers": 4, "kv_heads": 8, "head_dim": 16, "dtype": "bfloat16", "attention": "gqa"}
MLA = {"layers": 3, "dtype": "bfloat16", "attention": "mla", "latent_dim": 64, "rope_dim": 16}
BASE = {"engine_id": "x", "tp_size": 1, "block_size": 16, "num_blocks": 64, "layout": "HND", "model": GQA}
WINDOWED = [
    {"name": "full", "layers": [0, 2], "pool": "kv", "null_block": 0},
    {"name": "window", "kind": "window", "window": 40, "layers": [1, 3], "pool": "kv", "null_block": 0},
]
STATE = [
    {"name": "full", "layers": [1, 3]},
    {
        "name": "mamba",
        "kind": "state",
        "num_blocks": 8,
        "rows": "rows_first",
        "layers": [0, 2],
        "components": [
            {"name": "conv_x", "units": 64, "rows": 3},
            {"name": "conv_b", "units": 16, "rows": 3},
            {"name": "ssm", "units": 8, "content": 128, "dtype": "float32"},
        ],
    },
]
DELTA = [
    {
        "name": "delta",
        "kind": "state",
        "num_blocks": 8,
        "layers": [0, 2],
        "components": [
            {"name": "conv_q", "units": 16, "rows": 3},
            {"name": "conv_k", "units": 16, "rows": 3},
            {"name": "conv_v", "units": 32, "rows": 3},
            {"name": "ssm", "units": 4, "content": 64, "dtype": "float32"},
        ],
    },
]
DRAFT: list[dict[str, Any]] = [
    {"name": "full"},
    {"name": "draft", "layers": [0, 1], "layer_name": "draft.layers.{}", "block_size": 32},
]
SCALES = [
    {"name": "key", "dtype": "float8_e4m3fn"},
    {"name": "key_scale", "content": 1, "dtype": "float32"},
    {"name": "value", "dtype": "float8_e4m3fn"},
    {"name": "value_scale", "content": 1, "dtype": "float32"},
]
SPARSE = [
    {
        "name": "full",
        "kv": "blocks_first",
        "tokens_per_state": 4,
        "components": [
            {"name": "latent"},
            {"name": "rope"},
            {"name": "index", "content": 32, "dtype": "float8_e4m3fn", "layers": [[0, 2]]},
            {"name": "index_scale", "content": 1, "dtype": "float32", "layers": [[0, 2]]},
        ],
    }
]


@dataclass(frozen=True)
class Case:
    """A pair of geometries, what is read, and over what."""

    source: dict[str, Any]
    destination: dict[str, Any]
    tokens: int = 75
    held: int = 0
    ucx_tls: str = ""
    path: str = "auto"


CASES = {
    "tp3-to-tp2": Case(
        {"tp_size": 3, "model": {**GQA, "kv_heads": 6}}, {"tp_size": 2, "model": {**GQA, "kv_heads": 6}}
    ),
    "tp5-to-tp7": Case(
        {"tp_size": 5, "model": {**GQA, "kv_heads": 35}}, {"tp_size": 7, "model": {**GQA, "kv_heads": 35}}
    ),
    "uneven-to-tp2": Case({"tp_size": 3, "shards": [[0, 3], [3, 4], [4, 8]]}, {"tp_size": 2}, ucx_tls="tcp"),
    "replicas-to-tp1": Case(
        {"tp_size": 4, "model": {**GQA, "kv_heads": 2}}, {"tp_size": 1, "model": {**GQA, "kv_heads": 2}}
    ),
    "tp1-to-replicas": Case({"model": {**GQA, "kv_heads": 2}}, {"tp_size": 4, "model": {**GQA, "kv_heads": 2}}),
    "replicas-to-replicas": Case(
        {"tp_size": 6, "model": {**GQA, "kv_heads": 2}}, {"tp_size": 4, "model": {**GQA, "kv_heads": 2}}, ucx_tls="tcp"
    ),
    "hnd-to-nhd": Case({"tp_size": 2}, {"tp_size": 1, "layout": "NHD"}),
    "nhd-to-hnd-packed": Case({"tp_size": 2, "layout": "NHD"}, {"tp_size": 4, "kv": "packed"}, held=37),
    "apart-to-blocks-first": Case({"tp_size": 2, "kv": "apart"}, {"tp_size": 2, "kv": "blocks_first"}, ucx_tls="tcp"),
    "blocks-16-to-64": Case({"tp_size": 2}, {"tp_size": 4, "block_size": 64, "num_blocks": 16}, held=21),
    "blocks-64-to-16": Case({"tp_size": 4, "block_size": 64, "num_blocks": 16}, {"tp_size": 2}, held=21),
    "blocks-48-to-32": Case(
        {"tp_size": 1, "block_size": 48, "layout": "NHD"}, {"tp_size": 2, "block_size": 32}, tokens=200, ucx_tls="tcp"
    ),
    "pipeline": Case({"tp_size": 2, "pp_size": 2}, {"tp_size": 1, "pp_size": 4}),
    "pipeline-uneven": Case({"pp_size": 2, "stages": [[0, 3], [3, 4]]}, {"tp_size": 4, "pp_size": 2}, ucx_tls="tcp"),
    "window-in-a-pool": Case({"tp_size": 2, "groups": WINDOWED}, {"tp_size": 4, "groups": WINDOWED}, tokens=150),
    "window-other-blocks": Case(
        {"tp_size": 4, "groups": WINDOWED}, {"tp_size": 1, "block_size": 32, "groups": WINDOWED}, tokens=150
    ),
    "state-beside-attention": Case({"tp_size": 2, "groups": STATE}, {"tp_size": 4, "groups": STATE}),
    "state-from-more-ranks": Case({"tp_size": 4, "groups": STATE}, {"tp_size": 1, "groups": STATE}, ucx_tls="tcp"),
    "mla-striped-over-replicas": Case({"tp_size": 4, "model": MLA}, {"tp_size": 1, "model": MLA}, tokens=300),
    "mla-every-reader-once": Case({"tp_size": 2, "model": MLA}, {"tp_size": 4, "model": MLA}, tokens=100, held=16),
    "compressed-with-indexer": Case(
        {"tp_size": 2, "model": MLA, "groups": SPARSE},
        {"tp_size": 1, "model": MLA, "groups": SPARSE, "block_size": 32},
        tokens=120,
    ),
    "dcp-to-whole": Case(
        {"tp_size": 4, "model": MLA, "block_size": 64, "token_shard": {"count": 4, "interleave": 1}},
        {"tp_size": 2, "model": MLA, "block_size": 16},
        tokens=130,
    ),
    "whole-to-dcp": Case(
        {"tp_size": 2, "model": MLA, "block_size": 16},
        {"tp_size": 4, "model": MLA, "block_size": 64, "token_shard": {"count": 4, "interleave": 4}},
        tokens=130,
        ucx_tls="tcp",
    ),
    "dcp-to-dcp-gqa": Case(
        {"tp_size": 4, "block_size": 32, "token_shard": {"count": 2, "interleave": 2}},
        {"tp_size": 8, "block_size": 64, "token_shard": {"count": 4, "interleave": 1}},
        tokens=130,
    ),
    "padded-to-cross-layer": Case(
        {"tp_size": 2, "kv": "packed", "block_padding": 96}, {"tensors": "cross_layer", "layout": "NHD"}
    ),
    "pages-in-another-ratio": Case(
        {"tp_size": 2, "block_size": 48, "page_size": 16, "page_padding": 32},
        {"block_size": 64, "page_size": 32, "block_padding": 64},
        tokens=150,
        held=21,
    ),
    "opaque-pages": Case({"tp_size": 2, "format": "opaque"}, {"tp_size": 2, "format": "opaque", "num_blocks": 32}),
    "scales-beside-values": Case(
        {"tp_size": 2, "components": SCALES}, {"tp_size": 4, "components": SCALES, "kv": "packed", "layout": "NHD"}
    ),
    "draft-layers-on-the-last-stage": Case(
        {"pp_size": 2, "groups": DRAFT}, {"tp_size": 2, "groups": [{**DRAFT[0], "block_size": 32}, DRAFT[1]]}
    ),
    "states-of-q-k-v-in-the-other-order": Case(
        {"tp_size": 2, "groups": [{**DELTA[0], "rows": "channels_first", "kv": "apart"}]},
        {"tp_size": 4, "groups": [{**DELTA[0], "rows": "rows_first", "block_padding": 128}]},
    ),
}
