"""Geometry files: what they say is what the engine has, and what they must not say is refused by name."""

import copy
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import BadGeometry, Incompatible
from kvferry.geometry import EngineGeometry, GroupKind, Interval, MemoryKind, Plane, RankGeometry, TokenShard
from kvferry.geometry import file as geometry_file
from kvferry.planner import plan_read
from tests.geometry.documents import FILES, MAMBA, document, small
from tests.support.repository import EXAMPLES


def cells(plane: Plane) -> np.ndarray[Any, Any]:
    """Address of every (block, unit, state) of a plane."""
    block, unit, state = np.ogrid[: plane.num_blocks, : len(plane.units), : plane.block_states]
    page, inside = state // plane.page_tokens, state % plane.page_tokens
    offset = block * plane.block_stride + page * plane.page_stride
    return np.asarray(plane.base + offset + unit * plane.unit_stride + inside * plane.token_stride)


def covered(rank: RankGeometry) -> np.ndarray[Any, Any]:
    """How many planes hold each byte of a rank's allocation."""
    size = geometry_file.rank_bytes(rank)
    count = np.zeros(size, np.int32)
    for plane in geometry_file.rebase(rank, 0).planes:
        for address in cells(plane).ravel().tolist():
            count[address : address + plane.state_bytes] += 1
    return count


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_load(path: Path) -> None:
    engine = geometry_file.load(path)
    assert engine.engine_id == path.stem
    assert all(rank.planes for rank in engine.ranks)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_can_be_read_by_an_engine_like_themselves(path: Path) -> None:
    engine = geometry_file.load(path)
    for rank in engine.ranks:
        assert plan_read(engine, engine, rank.rank).reads


def test_llama_is_as_large_as_its_file_says() -> None:
    engine = geometry_file.load(EXAMPLES / "llama3-8b-tp4.json")
    assert [rank.labels for rank in engine.ranks] == [{"tp_rank": i, "pp_rank": 0} for i in range(4)]
    assert [group.name for group in engine.groups] == ["full"]
    rank = engine.ranks[3]
    assert len(rank.planes) == 32 * 2
    assert geometry_file.rank_bytes(rank) == 32 * 2 * 1024 * 16 * 2 * 128 * 2
    plane = rank.planes[3]
    assert (plane.name, plane.units, plane.axis_size, plane.dtype) == ("layers.1/value", Interval(6, 8), 8, "bfloat16")
    assert (plane.token_stride, plane.unit_stride, plane.block_stride) == (256, 16 * 256, 2 * 16 * 256)


def test_ranks_move_to_memory_that_exists() -> None:
    rank = geometry_file.parse(small()).ranks[1]
    moved = geometry_file.rebase(rank, 1 << 40)
    assert min(plane.extent[0] for plane in moved.planes) == 1 << 40
    assert max(plane.extent[1] for plane in moved.planes) == (1 << 40) + geometry_file.rank_bytes(rank)
    assert geometry_file.rebase(moved, rank.planes[0].base) == rank
    with pytest.raises(BadGeometry):
        geometry_file.rebase(rank, (1 << 63) - 8)


def test_ranks_without_planes_have_no_bytes() -> None:
    rank = RankGeometry(0, ())
    assert geometry_file.rank_bytes(rank) == 0
    assert geometry_file.rebase(rank, 4096) == rank


LAYOUTS = [
    {"layout": layout, "kv": kv, "tensors": tensors}
    for layout in ("HND", "NHD")
    for kv in ("apart", "packed", "blocks_first")
    for tensors in ("per_layer", "cross_layer")
] + [
    {"order": ["layer", "unit", "block", "token", "component"]},
    {"order": ["unit", "token", "block", "layer", "component"]},
    {"order": ["block", "unit", "layer", "page", "token", "tensor", "component"]},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("paging", [{}, {"block_size": 8, "page_size": 4}], ids=str)
def test_layouts_fill_their_memory_exactly_once(layout: dict[str, Any], paging: dict[str, Any]) -> None:
    for rank in geometry_file.parse(small(**layout, **paging)).ranks:
        assert (covered(rank) == 1).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_padding_belongs_to_no_plane(layout: dict[str, Any]) -> None:
    padded = small(**layout, block_size=8, page_size=4, page_padding=6, block_padding=10)
    for rank in geometry_file.parse(padded).ranks:
        count = covered(rank)
        assert set(count.tolist()) == {0, 1}
        assert count.sum() == sum(plane.bytes_per_block * plane.num_blocks for plane in rank.planes)


def address(engine: EngineGeometry, name: str, block: int, unit: int, token: int) -> int:
    """Offset of a cell in the allocation of rank 0."""
    rank = geometry_file.rebase(engine.ranks[0], 0)
    plane = next(plane for plane in rank.planes if plane.name == name)
    return int(cells(plane)[block, unit, token])


def test_words_for_layouts_mean_the_tensors_that_engines_have() -> None:
    """Offsets by plain indexing of the tensors' shapes: 2 heads on the rank, 4 tokens, 3 elements of 2 bytes."""
    shapes: dict[tuple[str, str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {
        # (layout, kv, tensors): shape, and index of layer 1's value, block 2, head 1, token 3
        ("HND", "apart", "per_layer"): ((2, 2, 3, 2, 4, 3), (1, 1, 2, 1, 3, 0)),
        ("NHD", "apart", "per_layer"): ((2, 2, 3, 4, 2, 3), (1, 1, 2, 3, 1, 0)),
        ("HND", "blocks_first", "per_layer"): ((2, 3, 2, 2, 4, 3), (1, 2, 1, 1, 3, 0)),
        ("NHD", "packed", "per_layer"): ((2, 3, 4, 2, 2, 3), (1, 2, 3, 1, 1, 0)),
        ("HND", "packed", "cross_layer"): ((3, 2, 2, 4, 2, 3), (2, 1, 1, 3, 1, 0)),
        ("NHD", "blocks_first", "cross_layer"): ((3, 2, 2, 4, 2, 3), (2, 1, 1, 3, 1, 0)),
    }
    for (layout, kv, tensors), (shape, index) in shapes.items():
        engine = geometry_file.parse(small(layout=layout, kv=kv, tensors=tensors))
        expected = int(np.ravel_multi_index(index, shape)) * 2
        assert address(engine, "layers.1/value", 2, 1, 3) == expected, (layout, kv, tensors)


@given(heads=st.integers(1, 12), tp_size=st.integers(1, 12))
def test_heads_are_divided_by_the_rule_unless_the_file_says_how(heads: int, tp_size: int) -> None:
    model = {"layers": 1, "kv_heads": heads, "head_dim": 1, "dtype": "int8"}
    engine = geometry_file.parse(small(tp_size=tp_size, model=model))
    for rank, geometry in enumerate(engine.ranks):
        begin, end = rank * heads // tp_size, (rank + 1) * heads // tp_size
        assert {plane.units for plane in geometry.planes} == {Interval(begin, max(end, begin + 1))}


def test_declared_shards_and_stages_are_held() -> None:
    engine = geometry_file.parse(
        document(tp_size=4, pp_size=2, shards=[[0, 3], [3, 4], [4, 7], [7, 8]], stages=[[0, 20], [20, 32]])
    )
    assert [rank.rank for rank in engine.ranks] == list(range(8))
    assert engine.ranks[6].labels == {"tp_rank": 2, "pp_rank": 1}
    assert {plane.units for plane in engine.ranks[6].planes} == {Interval(4, 7)}
    assert [plane.layer for plane in engine.ranks[6].planes[::2]] == [f"layers.{i}" for i in range(20, 32)]


def test_latent_attention_is_whole_on_every_rank() -> None:
    engine = geometry_file.load(EXAMPLES / "deepseek-v3-tp8.json")
    for rank in engine.ranks:
        latent, rope = rank.planes[:2]
        assert (latent.component, latent.state_bytes, latent.units) == ("latent", 1024, Interval(0, 1))
        assert (rope.component, rope.base - latent.base, rope.token_stride) == ("rope", 1024, 1152)


def test_latent_attention_without_rope_is_one_component() -> None:
    model = {"layers": 2, "dtype": "bfloat16", "attention": "mla", "latent_dim": 576}
    engine = geometry_file.parse(small(model=model))
    assert [plane.component for plane in engine.ranks[0].planes] == ["latent", "latent"]


def test_tokens_are_dealt_out_to_context_parallel_ranks() -> None:
    engine = geometry_file.load(EXAMPLES / "llama3-8b-tp8-dcp2.json")
    assert engine.groups[0].block_tokens == 32
    found = [(rank.planes[0].units, rank.planes[0].token_shard, rank.labels["dcp_rank"]) for rank in engine.ranks]
    assert found[:3] == [
        (Interval(0, 2), TokenShard(0, 2, 16), 0),
        (Interval(0, 2), TokenShard(1, 2, 16), 1),
        (Interval(2, 4), TokenShard(0, 2, 16), 0),
    ]
    assert {plane.block_states for rank in engine.ranks for plane in rank.planes} == {16}


@pytest.mark.parametrize("kv", ["apart", "blocks_first", "packed"])
def test_groups_of_a_pool_lie_over_each_other_and_their_blocks_never_meet(kv: str) -> None:
    groups = [
        {"name": "full", "layers": [0], "pool": "all", "null_block": 0},
        {"name": "window", "kind": "window", "window": 8, "layers": [1], "pool": "all", "block_size": 2},
        {
            "name": "state",
            "kind": "state",
            "layers": [0, 1],
            "pool": "all",
            "components": [{"name": "conv_x", "units": 4, "rows": 3}, {"name": "ssm", "units": 2, "content": 5}],
        },
    ]
    engine = geometry_file.parse(small(kv=kv, groups=groups))
    assert [group.pool for group in engine.groups] == ["all"] * 3
    for rank in engine.ranks:
        strides = {plane.block_stride for plane in rank.planes}
        assert len(strides) == 1
        # Full and window attention lie in the first tensor's place: the same bytes, used for either.
        bases = {plane.name: plane.base for plane in rank.planes}
        assert bases["layers.0/key"] == bases["layers.1/key"]
        owner: dict[int, int] = {}
        for plane in rank.planes:
            for block in range(plane.num_blocks):
                for start in cells(plane)[block].ravel().tolist():
                    for byte in range(start, start + plane.state_bytes):
                        assert owner.setdefault(byte, block) == block


def test_pools_whose_blocks_are_scattered_are_refused() -> None:
    groups = [
        {"name": "a", "layers": [0], "pool": "all"},
        {"name": "b", "layers": [1], "pool": "all", "block_size": 16},
    ]
    with pytest.raises(BadGeometry, match=r"pool 'all'.*does not lie within"):
        geometry_file.parse(small(order=["layer", "component", "unit", "block", "token"], groups=groups))
    groups[1] = {"name": "b", "layers": [1], "pool": "all", "num_blocks": 9}
    with pytest.raises(BadGeometry, match="share one space"):
        geometry_file.parse(small(kv="packed", groups=groups))


def test_states_are_sub_projections_with_axes_of_their_own() -> None:
    engine = geometry_file.load(EXAMPLES / "mamba-hybrid-tp2.json")
    assert engine.group("mamba").kind is GroupKind.STATE
    planes = {plane.component: plane for plane in engine.ranks[1].planes if plane.layer == "layers.2"}
    assert {name: str(plane.units) for name, plane in planes.items()} == {
        "conv_x": "[4096, 8192)",
        "conv_b": "[512, 1024)",
        "conv_c": "[512, 1024)",
        "ssm": "[64, 128)",
    }
    # Rows first: each row holds the channels of x, b and c side by side.
    assert (planes["conv_x"].unit_stride, planes["conv_x"].token_stride) == (2, (4096 + 512 + 512) * 2)
    assert planes["conv_b"].base - planes["conv_x"].base == 4096 * 2
    assert planes["ssm"].base - planes["conv_x"].base == 3 * (4096 + 512 + 512) * 2
    assert (planes["ssm"].block_states, planes["ssm"].state_bytes, planes["ssm"].dtype) == (1, 32768, "float32")


@pytest.mark.parametrize("rows", ["rows_first", "channels_first"])
@pytest.mark.parametrize("kv", ["apart", "blocks_first"])
def test_states_fill_their_memory_exactly_once(rows: str, kv: str) -> None:
    components = [
        {"name": "conv_x", "units": 6, "rows": 3},
        {"name": "conv_b", "units": 2, "rows": 3, "replicated": True},
        {"name": "ssm", "units": 4, "content": 5, "dtype": "float32", "shards": [[0, 1], [1, 4]]},
    ]
    group = {"name": "mamba", "kind": "state", "rows": rows, "kv": kv, "components": components}
    engine = geometry_file.parse(small(groups=[group]))
    for rank in engine.ranks:
        assert (covered(rank) == 1).all()
    by_name = {plane.component: plane for plane in engine.ranks[1].planes}
    assert (by_name["conv_b"].units, by_name["ssm"].units) == (Interval(0, 2), Interval(1, 4))
    assert (by_name["conv_x"].token_stride > by_name["conv_x"].unit_stride) == (rows == "rows_first")


def test_states_in_either_row_order_read_from_each_other() -> None:
    rows_first = geometry_file.load(EXAMPLES / "mamba-hybrid-tp2.json")
    for group in (channels_first := copy.deepcopy(MAMBA))["groups"][1:]:
        group["rows"] = "channels_first"
    assert plan_read(rows_first, geometry_file.parse(channels_first), 0).reads


def test_compressed_states_indexers_and_draft_layers_are_read() -> None:
    engine = geometry_file.load(EXAMPLES / "sparse-mla-tp4.json")
    planes = {plane.name: plane for plane in engine.ranks[0].planes}
    assert planes["layers.3/index_scale"].tokens_per_state == Fraction(4)
    assert (planes["layers.3/index_scale"].block_states, planes["layers.3/index_scale"].state_bytes) == (64, 4)
    assert "layers.20/index" not in planes
    assert planes["draft.layers.0/latent"].optional_cover
    assert engine.group("window").window_tokens == 128


def test_draft_layers_lie_on_their_stage() -> None:
    groups = [
        {"name": "full"},
        {"name": "draft", "layers": [0], "layer_name": "draft.{}", "stage": 1},
        {"name": "more", "layers": [2, 3], "layer_name": "mtp.{}"},
    ]
    engine = geometry_file.parse(small(pp_size=2, groups=groups))
    layers = [sorted({plane.layer for plane in rank.planes}) for rank in engine.ranks]
    assert layers[0] == ["layers.0"]
    assert layers[2] == ["draft.0", "layers.1", "mtp.2", "mtp.3"]


def test_formats_decide_what_may_be_cut() -> None:
    opaque = geometry_file.load(EXAMPLES / "opaque-tp2.json").ranks[0].planes[0]
    assert (opaque.format, opaque.token_granule, opaque.units_divide) == ("opaque", 16, False)
    key, value = geometry_file.load(EXAMPLES / "vllm-cpu-tp2.json").ranks[0].planes[:2]
    assert (key.format, key.token_granule, value.format, value.token_granule) == (
        "vllm-cpu-column-major",
        32,
        "plain",
        32,
    )
    assert value.base - key.base == 32 * 64 * 4


def test_pages_that_cannot_be_cut_are_refused_with_the_reason() -> None:
    opaque = document(format="opaque")
    with pytest.raises(Incompatible, match="granule"):
        plan_read(geometry_file.parse(opaque), geometry_file.parse({**opaque, "block_size": 32}), 0)


def test_identity_memory_and_null_block_are_taken_from_the_file() -> None:
    engine = geometry_file.parse(small(identity={"model": "m"}, memory="vram", device=3, null_block=0))
    plane = engine.ranks[0].planes[0]
    assert (engine.identity, plane.memory_kind, plane.device) == ({"model": "m"}, MemoryKind.VRAM, 3)
    assert engine.groups[0].null_block == 0
