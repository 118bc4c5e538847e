"""A plan in words: golden texts, the stable JSON, the proto and the picture.

After a wanted change: ``KVFERRY_UPDATE_GOLDEN=1 pytest tests/planner/test_explain.py``, and read the difference.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from kvferry.geometry import Group, GroupKind, Interval, TokenShard
from kvferry.planner import Path as ReadPath
from kvferry.planner import PathRule, ReadPlan, explain, plan_read, to_json, to_svg, to_text
from kvferry_server.servicers import encode
from tests.support.geometries import CROSS_LAYER, Engine, Held, Rank, Tensor, engine, tensors, tp_ranks

GOLDEN = Path(__file__).parent / "golden"


def plans(source: Engine, destination: Engine) -> list[ReadPlan]:
    theirs, mine = source.geometry(), destination.geometry()
    return [plan_read(theirs, mine, rank.rank) for rank in mine.ranks]


def heads() -> list[ReadPlan]:
    """Tensor parallel 3 to 2, blocks of 48 to 32."""
    model = tensors(layers=4, axis=8, state_bytes=256)
    return plans(engine("prefill", model, 3, block_tokens=48), engine("decode", model, 2, block_tokens=32))


def replicas() -> list[ReadPlan]:
    """MLA on four ranks to a decode engine that shards tokens, one layer of which the source lacks."""
    model = [
        Tensor(f"layers.{i}", name, axis=1, state_bytes=size)
        for i in range(4)
        for name, size in (("latent", 1024), ("rope", 128))
    ]
    draft = Tensor("draft.0", "latent", axis=1, state_bytes=1024, optional=True)
    source = engine("prefill", model, 4, replicated=["latent", "rope"])
    ranks = tuple(
        Rank(
            tuple(Held(tensor, Interval(0, 1), TokenShard(index, 2, 1)) for tensor in [*model, draft]),
            {"tp_rank": index, "pp_rank": 0, "dcp_rank": index},
        )
        for index in range(2)
    )
    return plans(source, Engine("decode", (Group("full", block_tokens=32, num_blocks=8),), ranks))


def hybrid() -> list[ReadPlan]:
    """Pipeline stages, a cross-layer tensor, a window, and states."""
    groups = (
        Group("full", block_tokens=16, num_blocks=8),
        Group("window", GroupKind.WINDOW, 16, 8, window_tokens=64),
        Group("state", GroupKind.STATE, num_blocks=8),
    )
    model = [
        *tensors(layers=6, axis=4, state_bytes=64),
        Tensor("layers.1", "ssm", "state", axis=8, state_bytes=512, state_rows=1),
        Tensor("layers.1", "conv_x", "state", axis=16, state_bytes=2, state_rows=3),
    ]
    model = [replace(t, group="window") if t.layer in ("layers.3", "layers.5") else t for t in model]
    model = [t for t in model if t.group == "state" or t.layer != "layers.1"]

    def made(name: str, size: int, stages: list[range]) -> Engine:
        ranks = []
        for stage, layers in enumerate(stages):
            held = [tensor for tensor in model if int(tensor.layer.removeprefix("layers.")) in layers]
            ranks += [replace(r, labels={"tp_rank": i, "pp_rank": stage}) for i, r in enumerate(tp_ranks(held, size))]
        return Engine(name, groups, tuple(ranks), {"": CROSS_LAYER})

    return plans(made("prefill", 2, [range(4), range(4, 6)]), made("decode", 2, [range(6)]))


PAIRS = {"heads": heads, "replicas": replicas, "hybrid": hybrid}


def golden(name: str, found: str) -> None:
    path = GOLDEN / name
    if "KVFERRY_UPDATE_GOLDEN" in os.environ:
        path.write_text(found)
    assert found == path.read_text()


@pytest.mark.parametrize("pair", sorted(PAIRS))
def test_text_equals_the_golden_file(pair: str) -> None:
    golden(f"{pair}.txt", to_text(PAIRS[pair]()) + "\n")


@pytest.mark.parametrize("pair", sorted(PAIRS))
def test_json_equals_the_golden_file(pair: str) -> None:
    golden(f"{pair}.json", json.dumps(to_json(PAIRS[pair]()), indent=2) + "\n")


@pytest.mark.parametrize("pair", sorted(PAIRS))
def test_picture_equals_the_golden_file(pair: str) -> None:
    svg = to_svg(PAIRS[pair]())
    ElementTree.fromstring(svg)
    golden(f"{pair}.svg", svg)


def test_the_picture_survives_names_that_are_markup() -> None:
    made = PAIRS["heads"]()
    (plan, *_) = made
    evil = replace(plan, source=replace(plan.source, engine_id="<script>alert(1)</script>&"))
    svg = to_svg([evil])
    ElementTree.fromstring(svg)
    assert "<script>" not in svg


RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
RANK = {"tp_rank": {"type": "integer"}, "pp_rank": {"type": "integer"}}
READ = {
    "type": "object",
    "required": [
        "source",
        "layers",
        "units",
        "components",
        "tokens",
        "bytes_per_token",
        "descriptors_per_block",
        "path",
    ],
    "properties": {
        "source": {"type": "object", "required": [*RANK], "properties": RANK},
        "layers": {"type": "array", "items": RANGE},
        "units": RANGE,
        "components": {"type": "array", "items": {"type": "string"}},
        "tokens": {"type": "object", "required": ["index", "count", "interleave"]},
        "stripe": {"type": "object", "required": ["begin", "end", "of"]},
        "bytes_per_token": {"type": "number"},
        "descriptors_per_block": {"type": "integer"},
        "path": {"enum": ["direct", "staged"]},
    },
}
SHAPE = {
    "type": "object",
    "required": ["ranks", "totals"],
    "properties": {
        "ranks": {
            "type": "array",
            "items": {
                "type": "object",
                "required": [*RANK, "reads"],
                "properties": {**RANK, "reads": {"type": "array", "items": READ}},
            },
        },
        "totals": {"type": "object"},
    },
}


@pytest.mark.parametrize("pair", sorted(PAIRS))
def test_json_has_the_promised_shape(pair: str) -> None:
    jsonschema.validate(to_json(PAIRS[pair]()), SHAPE)


@pytest.mark.parametrize("pair", sorted(PAIRS))
def test_bytes_per_token_add_up(pair: str) -> None:
    # Stripes and shards of reads together are the rank's bytes of a token.
    for plan in PAIRS[pair]():
        expected = sum(
            Fraction(len(plane.units) * plane.state_bytes, plane.token_shard.count) / plane.tokens_per_state
            for plane in plan.rank.planes
            if plan.destination.group(plane.group).kind is not GroupKind.STATE and plane.name not in plan.uncovered
        )
        assert sum(line.bytes_per_token for line in explain(plan)) == pytest.approx(float(expected))
        states = sum(
            plane.bytes_per_block
            for plane in plan.rank.planes
            if plan.destination.group(plane.group).kind is GroupKind.STATE
        )
        assert sum(line.bytes_per_request for line in explain(plan)) == states


def test_bytes_per_token_are_exact_where_only_a_part_of_the_blocks_is_looked_at() -> None:
    """Blocks without a small common multiple, dealt out to two ranks of the source, which each serve half of them."""
    (tensor,) = tensors(layers=1, axis=1)[:1]
    ranks = tuple(Rank((Held(tensor, Interval(0, 1), TokenShard(index, 2, 3)),)) for index in range(2))
    source = Engine("p", (Group("full", block_tokens=2 * 1011, num_blocks=4),), ranks)
    (plan,) = plans(source, engine("d", [tensor], block_tokens=1013, num_blocks=4))
    half = tensor.state_bytes / 2
    assert [line.bytes_per_token for line in explain(plan)] == [half, half]


@pytest.mark.parametrize("pair", sorted(PAIRS))
def test_proto_equals_the_explained_lines(pair: str) -> None:
    for plan in PAIRS[pair]():
        lines, message = explain(plan), encode.plan(plan)
        assert (message.rank, list(message.uncovered)) == (plan.rank.rank, list(plan.uncovered))
        assert len(message.reads) == len(lines)
        for line, read in zip(lines, message.reads, strict=True):
            assert (read.source_rank, read.group) == (line.source.rank, line.group)
            assert (tuple(read.layers), tuple(read.components)) == (line.layers, line.components)
            assert (read.unit_begin, read.unit_end) == (line.units.begin, line.units.end)
            assert read.HasField("token_shard") == (line.tokens.count > 1)
            assert read.stripe_of == (0 if line.stripe.whole else line.stripe.of)
            assert (read.bytes_per_token, read.bytes_per_request) == (line.bytes_per_token, line.bytes_per_request)
            assert (read.path, read.path_reason) == (line.path, line.reason)


def test_block_sizes_without_a_small_common_multiple_are_explained_by_one_block() -> None:
    model = tensors(layers=1, axis=2)
    (plan,) = plans(
        engine("p", model, 1, block_tokens=1009, num_blocks=2), engine("d", model, 1, block_tokens=1013, num_blocks=2)
    )
    (line,) = explain(plan)
    # Staged: a row for each plane of the two source blocks that the first block of the destination needs.
    assert (line.path, line.descriptors_per_block) == ("staged", 2 * 2)
    (line,) = explain(plan.choose_paths(PathRule(ReadPath.DIRECT)))
    assert (line.path, line.descriptors_per_block) == ("direct", 2 * 2 * 2)


def test_output_for_no_plans_is_empty() -> None:
    assert to_text([]) == "no rank to plan for"
    assert to_json([])["ranks"] == []
    ElementTree.fromstring(to_svg([]))
