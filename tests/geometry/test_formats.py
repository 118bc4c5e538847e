"""The formats of engines: memory at plane addresses is what the engine's own indexing means."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvferry.errors import BadGeometry, Incompatible
from kvferry.geometry import EngineGeometry, Group, Interval, Plane, RankGeometry, formats
from kvferry.geometry.tensors import Holding
from kvferry.planner import plan_read
from tests.geometry.memory import cell

BLOCKS, TOKENS, HEADS, DIM = 3, 32, 2, 8
GROUP = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)
# Axes of vLLM's KVCacheLayout: the order in memory of [L, B, H, N, C].
VLLM_LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def unique(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, int(np.prod(shape)) + 1).to(dtype).reshape(shape)


def by_name(planes: tuple[Plane, ...]) -> dict[str, Plane]:
    return {plane.name: plane for plane in planes}


def check_rows(plane: Plane, rows: torch.Tensor) -> None:
    """`rows` is ``[blocks, tokens, units, content]``."""
    for block in range(plane.num_blocks):
        for token in range(plane.block_states):
            for unit in range(len(plane.units)):
                expected = rows[block, token, unit].contiguous().numpy().tobytes()
                assert cell(plane, block, unit + plane.units.begin, token) == expected


@pytest.mark.parametrize("layout", VLLM_LAYOUTS)
def test_vllm_packed_content_is_found_in_every_layout(layout: str) -> None:
    order = VLLM_LAYOUTS[layout]
    sizes = (2, BLOCKS, HEADS, TOKENS, 2 * DIM)
    memory = unique(*(sizes[axis] for axis in order))
    logical = memory.permute(*(order.index(axis) for axis in range(5)))
    planes = by_name(formats.vllm_attention({f"l{i}": logical[i] for i in range(2)}, GROUP))
    for layer in range(2):
        rows = logical[layer].transpose(1, 2)
        key, value = rows[..., :DIM], rows[..., DIM:]
        check_rows(planes[f"l{layer}/key"], key)
        check_rows(planes[f"l{layer}/value"], value)


def test_vllm_kernel_blocks_become_pages() -> None:
    cache = unique(BLOCKS * 2, HEADS, TOKENS // 2, 2 * DIM)
    planes = by_name(formats.vllm_attention({"l": cache}, GROUP))
    assert planes["l/key"].pages == 2
    assert cell(planes["l/value"], 1, 1, 20) == cache[3, 1, 4, DIM:].numpy().tobytes()


def test_latent_and_rope_lie_side_by_side() -> None:
    cache = unique(BLOCKS, TOKENS, 24)
    for tensor in (cache, cache[:, None]):
        planes = by_name(formats.vllm_mla({"l": tensor}, GROUP, latent_dim=20))
        check_rows(planes["l/latent"], cache[:, :, None, :20])
        check_rows(planes["l/rope"], cache[:, :, None, 20:])
    slots = by_name(formats.sglang_mla({"l": cache.reshape(-1, 1, 24)}, GROUP, latent_dim=20))
    check_rows(slots["l/rope"], cache[:, :, None, 20:])


def test_mixed_fp8_rows_move_whole() -> None:
    (plane,) = formats.vllm_mla_fp8_ds({"l": torch.zeros(BLOCKS, TOKENS, 656, dtype=torch.uint8)}, GROUP)
    assert (plane.component, plane.state_bytes, plane.token_granule) == ("kv", 656, 1)
    assert plane.format != formats.PLAIN


def test_indexer_pages_hold_all_keys_then_all_scales() -> None:
    cache = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (BLOCKS, TOKENS, 132), np.uint8))
    flat = cache.reshape(BLOCKS, -1)
    planes = by_name(formats.vllm_indexer({"l": cache}, GROUP, index_dim=128))
    assert cell(planes["l/index"], 2, 0, 5) == flat[2, 5 * 128 : 6 * 128].numpy().tobytes()
    begin = TOKENS * 128 + 5 * 4
    assert cell(planes["l/index_scale"], 2, 0, 5) == flat[2, begin : begin + 4].numpy().tobytes()


def test_v4_pages_hold_all_rows_then_all_scales() -> None:
    cache = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (BLOCKS, 1, TOKENS, 24), np.uint8))
    flat = cache.reshape(BLOCKS, -1)
    planes = by_name(formats.vllm_mla_pages({"l": cache}, GROUP, 20, "rows"))
    assert cell(planes["l/kv"], 2, 0, 5) == flat[2, 5 * 20 : 6 * 20].numpy().tobytes()
    begin = TOKENS * 20 + 5 * 4
    assert cell(planes["l/kv_scale"], 2, 0, 5) == flat[2, begin : begin + 4].numpy().tobytes()
    assert {plane.format for plane in planes.values()} == {"rows"}


def test_slots_hold_the_heads_of_each_token_side_by_side() -> None:
    cache = unique(BLOCKS, 2, TOKENS, HEADS * DIM)
    planes = by_name(formats.vllm_two_slots({"l": cache}, GROUP, HEADS))
    rows = cache.reshape(BLOCKS, 2, TOKENS, HEADS, DIM)
    check_rows(planes["l/key"], rows[:, 0])
    check_rows(planes["l/value"], rows[:, 1])


def test_tiles_divide_by_head_only() -> None:
    cache = unique(BLOCKS, 2, TOKENS, HEADS * DIM)
    planes = by_name(formats.vllm_tiles({"l": cache}, GROUP, HEADS, "tiles"))
    key, value = planes["l/key"], planes["l/value"]
    assert (key.token_granule, key.units_divide, key.format) == (TOKENS, True, "tiles")
    tile = b"".join(cell(value, 1, 1, token) for token in range(TOKENS))
    assert tile == cache[1, 1].reshape(HEADS, -1)[1].numpy().tobytes()


def test_nvfp4_pages_hold_values_then_scales_of_each_side() -> None:
    cache = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (BLOCKS, 2 * HEADS, TOKENS, 9), np.uint8))
    flat = cache.reshape(BLOCKS, 2, -1)
    planes = by_name(formats.vllm_nvfp4({"l": cache}, GROUP, HEADS, "scales"))
    begin = (TOKENS + 3) * 8
    assert cell(planes["l/value"], 1, 1, 3) == flat[1, 1, begin : begin + 8].numpy().tobytes()
    scales = HEADS * TOKENS * 8
    assert cell(planes["l/key_scale"], 2, 1, 0) == flat[2, 0, scales + TOKENS : scales + TOKENS + 1].numpy().tobytes()
    assert (planes["l/key_scale"].token_granule, planes["l/key_scale"].format) == (TOKENS, "scales")
    assert (planes["l/key"].token_granule, planes["l/key"].format) == (1, formats.PLAIN)


@pytest.mark.parametrize("key_dim", [0, 2 * DIM])
def test_a_key_that_leaves_no_value_is_refused(key_dim: int) -> None:
    with pytest.raises(BadGeometry, match="keys of"):
        formats.vllm_attention({"l": unique(BLOCKS, HEADS, TOKENS, 2 * DIM)}, GROUP, key_dim=key_dim)


def test_vllm_cpu_pages_divide_by_head() -> None:
    """Written as the kernel writes: per block and head K column-major, then V row-major."""
    key, value = unique(BLOCKS, HEADS, TOKENS, DIM), -unique(BLOCKS, HEADS, TOKENS, DIM)
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM)
    flat = cache.view(BLOCKS, HEADS, 2, TOKENS * DIM)
    flat[:, :, 0] = key.transpose(2, 3).reshape(BLOCKS, HEADS, -1)
    flat[:, :, 1] = value.reshape(BLOCKS, HEADS, -1)
    planes = by_name(formats.vllm_cpu({"l": cache}, GROUP, "vec"))
    check_rows(planes["l/value"], value.transpose(1, 2))
    column_major = planes["l/key"]
    assert (column_major.token_granule, column_major.units_divide) == (TOKENS, True)
    # As K, so that both are read as one piece.
    assert (planes["l/value"].token_granule, planes["l/value"].format) == (TOKENS, formats.PLAIN)
    whole = b"".join(cell(column_major, 1, 1, token) for token in range(TOKENS))
    assert whole == key[1, 1].T.contiguous().numpy().tobytes()


@pytest.mark.parametrize("isa", ["amx", "neon", "rvv"])
def test_vllm_cpu_tiled_values_are_not_cut_either(isa: str) -> None:
    planes = formats.vllm_cpu({"l": torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM)}, GROUP, isa)
    assert {plane.token_granule for plane in planes} == {TOKENS}
    assert {plane.format for plane in planes} == {f"vllm-cpu-{isa}"}


@pytest.mark.parametrize("hnd", [False, True])
def test_sglang_pools_are_slots_or_pages(hnd: bool) -> None:
    key, value = unique(BLOCKS, TOKENS, HEADS, DIM), -unique(BLOCKS, TOKENS, HEADS, DIM)
    pools = [t.transpose(1, 2).contiguous() if hnd else t.reshape(-1, HEADS, DIM) for t in (key, value)]
    planes = by_name(formats.sglang_mha({"l": pools[0]}, {"l": pools[1]}, GROUP))
    check_rows(planes["l/key"], key)
    check_rows(planes["l/value"], value)


def test_trtllm_pool_holds_all_layers_in_a_block() -> None:
    pool = unique(BLOCKS, 2, 2, HEADS * TOKENS * DIM)
    planes = by_name(formats.trtllm_pool(pool, ("a", "b"), GROUP, HEADS))
    cells = pool.reshape(BLOCKS, 2, 2, HEADS, TOKENS, DIM)
    check_rows(planes["b/value"], cells[:, 1, 1].transpose(1, 2))


def test_engines_of_different_makes_and_layouts_read_from_each_other() -> None:
    holding = Holding(units=Interval(0, HEADS), axis_size=HEADS)
    sides = [
        formats.sglang_mha({"l": torch.zeros(96, HEADS, DIM)}, {"l": torch.zeros(96, HEADS, DIM)}, GROUP, holding),
        formats.vllm_attention({"l": torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM)}, GROUP, holding),
        formats.trtllm_pool(torch.zeros(BLOCKS, 1, 2, HEADS * TOKENS * DIM), ("l",), GROUP, HEADS, holding),
    ]
    engines = [EngineGeometry(str(i), (GROUP,), (RankGeometry(0, planes),)) for i, planes in enumerate(sides)]
    for source in engines:
        for destination in engines:
            assert plan_read(source, destination, 0).reads


def test_permuted_formats_are_not_read_as_plain() -> None:
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM)
    plain, permuted = formats.vllm_attention({"l": cache}, GROUP), formats.vllm_cpu({"l": cache}, GROUP, "vec")
    engines = [EngineGeometry(str(i), (GROUP,), (RankGeometry(0, p),)) for i, p in enumerate((plain, permuted))]
    with pytest.raises(Incompatible, match="format"):
        plan_read(engines[0], engines[1], 0)


def test_tensors_of_another_format_are_refused() -> None:
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM)
    odd = torch.zeros(BLOCKS, HEADS, TOKENS, 15)
    refused: tuple[Callable[[], object], ...] = (
        lambda: formats.vllm_attention({"l": cache[0]}, GROUP),
        lambda: formats.vllm_attention({"l": odd}, GROUP),
        lambda: formats.vllm_cpu({"l": cache.transpose(1, 2)}, GROUP, "vec"),
        lambda: formats.vllm_cpu({"l": cache}, GROUP, "X86!"),
        lambda: formats.vllm_mla({"l": cache[:, :1]}, GROUP, latent_dim=17),
        lambda: formats.vllm_indexer({"l": cache[:, :1]}, GROUP, index_dim=8),
        lambda: formats.sglang_mha({"l": cache}, {"m": cache}, GROUP),
        lambda: formats.trtllm_pool(cache, ("a",), GROUP, 3),
    )
    for call in refused:
        with pytest.raises(BadGeometry):
            call()


def test_errors_tell_the_shape_that_the_tensor_has() -> None:
    cache = unique(BLOCKS, TOKENS // 4, DIM)
    few = Group("full", block_tokens=TOKENS // 8, num_blocks=BLOCKS)
    told = re.escape(f"shape {tuple(cache.shape)}, strides (256, 32, 4)")
    with pytest.raises(BadGeometry, match=told):
        formats.vllm_mla({"l": cache}, few, latent_dim=4)
    with pytest.raises(BadGeometry, match=told):
        formats.vllm_cells({"l": cache}, few, "own")
