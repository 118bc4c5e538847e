"""Layers with K and V of each head, as vLLM's own code writes them."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm._aiter_ops import rocm_aiter_ops
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, nvfp4_kv_cache_full_dim, nvfp4_split_data_scale
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import (
    b12x,
    flash_attn,
    flex_attention,
    rocm_aiter_fa,
    rocm_aiter_unified_attn,
    rocm_attn,
    triton_attn,
    triton_attn_diffkv,
)
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from kvferry import plan_read
from kvferry.errors import BadGeometry, Incompatible
from kvferry.planner import Path
from tests.integrations.vllm.layouts.worlds import LAYERS, LAYOUTS, TOKENS, Model, Rank, Shape, World, check_read
from tests.support.vllm_versions import aiter

HEADS, KEY, VALUE = 6, 16, 32
FEW = 17
"""Tokens of a request where one pair of layouts is as good as another: the interpreter is slow."""


@cache
def request(layer: str, width: int) -> torch.Tensor:
    """K or V of a layer, ``[tokens, heads, width]``."""
    random = torch.Generator().manual_seed(LAYERS.index(layer) * 1000 + width)
    return torch.randn(TOKENS, HEADS, width, generator=random).to(torch.bfloat16)


def packed_spec(cache_dtype: str, key: int, value: int) -> Callable[[int, int], Any]:
    """Specs as vLLM's `Attention.get_kv_cache_spec` makes them."""
    mode = get_kv_quant_mode(cache_dtype)
    dtype = STR_DTYPE_TO_TORCH_DTYPE.get(cache_dtype, torch.bfloat16)

    def spec(block: int, heads: int) -> Any:
        return FullAttentionSpec(
            block_size=block, num_kv_heads=heads, head_size=key, head_size_v=value, dtype=dtype, kv_quant_mode=mode
        )

    return spec


def backend(
    attention: Any, impl_of: Any, cache_dtype: str = "auto", key: int = KEY, value: int = KEY, tokens: int = TOKENS
) -> Model:
    """A backend of vLLM, whose implementation writes K and V into the cache."""
    mode = get_kv_quant_mode(cache_dtype)
    made = packed_spec(cache_dtype, key, value)

    def module(heads: int) -> Any:
        # Without its constructor, which asks the device for what attention needs, not for what writing does.
        impl = object.__new__(impl_of)
        impl.attn_type, impl.num_kv_heads, impl.head_size = AttentionType.DECODER, heads, key
        impl.kv_cache_dtype, impl.fp8_dtype, impl.kv_torch_dtype = cache_dtype, torch.float8_e4m3fn, torch.bfloat16
        impl._kv_quant_mode, impl._is_per_token_head_quant = mode, mode.is_per_token_head
        scale = torch.tensor(0.25)
        return SimpleNamespace(impl=impl, kv_cache_dtype=cache_dtype, _k_scale=scale, _v_scale=scale)

    def write(rank: Rank, layer: str, slots: torch.Tensor) -> None:
        held, of = rank.heads, rank.modules[layer]
        k, v = (part[: len(slots), held].contiguous() for part in (request(layer, key), request(layer, value)))
        of.impl.do_kv_cache_update(of, k, v, rank.caches[layer], slots)

    def spec(block: int, heads: int) -> Any:
        return attention.customize_spec(made(block, heads))

    name, layers = f"{attention.__module__}.{attention.__qualname__}", LAYERS if tokens == TOKENS else LAYERS[:1]
    return Model(name, HEADS, spec, write, module, tokens=tokens, layers=layers)


def triton(cache_dtype: str = "auto", key: int = KEY, value: int = KEY, tokens: int = TOKENS) -> Model:
    """vLLM's Triton backend; with K and V of different sizes its variant for these."""
    pair: tuple[Any, Any] = triton_attn.TritonAttentionBackend, triton_attn.TritonAttentionImpl
    if key != value:
        pair = triton_attn_diffkv.TritonAttentionDiffKVBackend, triton_attn_diffkv.TritonAttentionDiffKVImpl
    return backend(*pair, cache_dtype, key, value, tokens)


def rocm_tiles() -> Model:
    """vLLM's ROCm backend, where it writes by Triton: with pages that are not one after the other."""
    return backend(rocm_attn.RocmAttentionBackend, rocm_attn.RocmAttentionImpl, tokens=FEW)


def rocm_slots(cache_dtype: str = "auto") -> Model:
    """vLLM's segmented ROCm backend, which it has from 0.32 on."""
    module = pytest.importorskip("vllm.v1.attention.backends.rocm_segmented_attn", exc_type=ImportError)
    found = module.RocmSegmentedAttentionBackend, module.RocmSegmentedAttentionImpl
    return backend(*found, cache_dtype, tokens=FEW)


@cache
def on_rocm(module: Any) -> Any:
    """A module of vLLM as it is on ROCm, where it defines more kernels."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_on_rocm", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch, aiter():
        patch.setattr(type(current_platform), "is_rocm", lambda platform: True)
        spec.loader.exec_module(found)
    return found


def aiter_tiles() -> Model:
    """vLLM's AITER backend with shuffled pages."""
    found = on_rocm(rocm_aiter_fa)
    made = backend(found.AiterFlashAttentionBackend, found.AiterFlashAttentionImpl, tokens=FEW)

    def shuffled(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: True)
                return function(*arguments)

        return call

    name = f"{rocm_aiter_fa.__name__}.AiterFlashAttentionBackend"
    return replace(made, backend=name, spec=shuffled(made.spec), write=shuffled(made.write))


SOURCES = [
    Shape(2, 16, "LBHNC"),
    Shape(3, 32, "LBNHC"),
    Shape(1, 48, "LHBNC"),
    Shape(2, 32, "BLHNC"),
    Shape(3, 16, "BLNHC"),
    Shape(1, 16, "BHLNC"),
    Shape(2, 48, "LBHNC", kernel_block=16),
]
DESTINATIONS = [
    Shape(3, 16, "LBNHC"),
    Shape(2, 48, "BLHNC"),
    Shape(1, 32, "LBHNC", padding=64),
    Shape(3, 48, "LHBNC"),
    Shape(2, 16, "BHLNC"),
    Shape(2, 32, "BLNHC"),
    Shape(1, 48, "LBNHC", kernel_block=16),
]


@cache
def world(name: str, make: Callable[..., Model], arguments: tuple[Any, ...], shape: Shape) -> World:
    """An engine, written once for all of its reads."""
    return World(name, make(*arguments), shape)


def test_layouts_are_read_into_every_other_layout() -> None:
    assert {shape.layout for shape in SOURCES} == {shape.layout for shape in DESTINATIONS} == set(LAYOUTS)


@pytest.mark.parametrize("destination", DESTINATIONS, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_packed_keys_and_values_move(source: Shape, destination: Shape) -> None:
    pair = world("p", triton, (), source), world("d", triton, (), destination)
    check_read(*pair)
    # The other ways, one for each pair.
    index = SOURCES.index(source) + DESTINATIONS.index(destination)
    check_read(
        *pair, *[(destination.block, Path.DIRECT), (0, Path.STAGED), (destination.block, Path.STAGED)][index % 3]
    )


PAIRS = (
    (Shape(2), Shape(3, 32, "BLNHC")),
    (Shape(3, 32, "LBNHC"), Shape(2, 16, "LHBNC")),
)


def check_pairs(make: Callable[..., Model], arguments: tuple[Any, ...] = ()) -> None:
    """Some pairs of engines; that layouts do not matter is shown by `test_packed_keys_and_values_move`."""
    for source, destination in PAIRS:
        check_read(world("p", make, arguments, source), world("d", make, arguments, destination))


def test_fp8_with_one_scale_for_a_tensor_moves() -> None:
    check_pairs(triton, ("fp8", KEY, KEY, FEW))
    check_pairs(rocm_slots, ("fp8",))


def test_keys_and_values_of_different_sizes_move() -> None:
    check_pairs(triton, ("auto", KEY, VALUE, FEW))


@pytest.mark.parametrize("cache_dtype", ["int8_per_token_head", "fp8_per_token_head"])
def test_cells_with_a_scale_for_each_token_and_head_move(cache_dtype: str) -> None:
    check_pairs(triton, (cache_dtype, KEY, KEY, FEW))


def test_cells_of_four_bits_move() -> None:
    arguments = ("int4_per_token_head", KEY, KEY, 3)
    check_read(world("p", triton, arguments, PAIRS[0][0]), world("d", triton, arguments, PAIRS[0][1]))


def test_layer_without_writes_of_vllm_keeps_the_scales_of_a_read() -> None:
    """vLLM sets all scales of a layer to 1 before it first writes to it: on an engine that decodes, after the read."""
    made = triton("int8_per_token_head", tokens=FEW)
    source, destination = World("p", made, Shape()), World("d", made, Shape())
    (rank,) = destination.ranks
    assert destination.touched[0].any()
    # As after a start: vLLM's layers have not seen their caches yet, and the connector declares them.
    rank.modules.update({layer: made.module(HEADS) for layer in made.layers})
    rank.planes(destination.group)
    check_read(source, destination)
    before = rank.buffer.clone()
    unused = next(block for block in range(1, destination.group.num_blocks) if block not in destination.ids)
    for layer in made.layers:
        made.write(rank, layer, torch.tensor([unused * 16]))
    changed = torch.nonzero(rank.buffer != before).flatten()
    inside = torch.zeros_like(rank.buffer, dtype=torch.bool)
    for cache_ in rank.caches.values():
        begin = cache_[unused].data_ptr() - rank.buffer.data_ptr()
        inside[begin : begin + rank.spec.page_size_bytes] = True
    assert len(changed)
    assert inside[changed].all()


def test_slots_of_keys_and_of_values_move() -> None:
    check_pairs(rocm_slots)


def test_slots_and_packed_content_are_read_into_each_other() -> None:
    """Both are in natural order: only strides differ."""
    packed = ("auto", KEY, KEY, FEW)
    check_read(world("p", rocm_slots, (), PAIRS[0][0]), world("d", triton, packed, PAIRS[0][1]))
    check_read(world("p", triton, packed, PAIRS[1][0]), world("d", rocm_slots, (), PAIRS[1][1]))


@pytest.mark.parametrize("make", [rocm_tiles, aiter_tiles])
def test_tiles_move_by_head_and_whole_pages(make: Callable[..., Model]) -> None:
    for source, destination in (
        (Shape(2, 16, "LBHNC"), Shape(3, 16, "LBHNC")),
        (Shape(3, 16, "LBHNC"), Shape(1, 48, "LBHNC", kernel_block=16)),
    ):
        check_read(world("p", make, (), source), world("d", make, (), destination), whole=True)


@pytest.mark.parametrize("make", [rocm_tiles, aiter_tiles])
def test_tiles_of_different_pages_are_refused(make: Callable[..., Model]) -> None:
    source, destination = world("p", make, (), Shape(2, 48)), world("d", make, (), Shape(1, 16))
    with pytest.raises(Incompatible, match="cannot be cut to fit"):
        plan_read(source.geometry, destination.geometry, 0)


PORTS = {
    "flash": (flash_attn.FlashAttentionBackend, flash_attn.FlashAttentionImpl, triton),
    "flex": (flex_attention.FlexAttentionBackend, flex_attention.FlexAttentionImpl, triton),
    "aiter": (rocm_aiter_fa.AiterFlashAttentionBackend, rocm_aiter_fa.AiterFlashAttentionImpl, triton),
    "aiter unified": (
        rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend,
        rocm_aiter_unified_attn.RocmAiterUnifiedAttentionImpl,
        triton,
    ),
    "b12x": (b12x.B12xPagedAttentionBackend, b12x.B12xPagedAttentionImpl, rocm_slots),
}


@pytest.mark.parametrize("name", PORTS)
def test_other_backends_write_the_bytes_of_a_proven_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own code finds K and V in the cache, and gives them to vLLM's Triton port of their kernel."""
    attention, impl_of, proven = PORTS[name]
    for module in (flash_attn, rocm_aiter_unified_attn.ops, torch.ops._C_cache_ops):
        monkeypatch.setattr(module, "reshape_and_cache_flash", triton_reshape_and_cache_flash, raising=False)
    for layout in LAYOUTS:
        made = (replace(model, tokens=5, layers=LAYERS[:1]) for model in (backend(attention, impl_of), proven()))
        mine, theirs = (World("d", model, Shape(1, 16, layout)) for model in made)
        assert torch.equal(mine.written[0], theirs.written[0])
        assert torch.equal(mine.touched[0], theirs.touched[0])
        moved, expected = (world.geometry.ranks[0].planes for world in (mine, theirs))
        assert [replace(plane, base=0) for plane in moved] == [replace(plane, base=0) for plane in expected]


def nvfp4() -> Model:
    """NVFP4 pages, written through vLLM's own view of a side of a page."""
    mode = get_kv_quant_mode("nvfp4")
    width = nvfp4_kv_cache_full_dim(32)

    def spec(block: int, heads: int) -> Any:
        return FullAttentionSpec(
            block_size=block,
            num_kv_heads=heads,
            head_size=32,
            dtype=torch.uint8,
            kv_quant_mode=mode,
            num_head_slots=2 * heads,
            state_content_bytes=width,
        )

    def write(rank: Rank, layer: str, slots: torch.Tensor) -> None:
        values = request(layer, 2 * width).view(torch.uint8)[: len(slots), rank.heads]
        page, cache_ = rank.caches[layer].shape[2], rank.caches[layer]
        heads = cache_.shape[1] // 2
        for side in range(2):
            data, scale = nvfp4_split_data_scale(cache_[:, side * heads : (side + 1) * heads])
            content = values[..., side * width : (side + 1) * width]
            size = data.shape[-1]
            data[slots // page, :, slots % page] = content[..., :size]
            scale.view(torch.uint8)[slots // page, :, slots % page] = content[..., size:]

    return Model("vllm.v1.attention.backends.flashinfer.FlashInferBackend", HEADS, spec, write)


def test_nvfp4_pages_move() -> None:
    for source, destination in itertools.product(
        (Shape(2, 32), Shape(3, 32, "BLHNC")), (Shape(1, 32, "BLHNC"), Shape(3, 32), Shape(2, 32, padding=64))
    ):
        check_read(world("p", nvfp4, (), source), world("d", nvfp4, (), destination), whole=True)


def test_nvfp4_with_tokens_before_heads_is_refused() -> None:
    with pytest.raises(BadGeometry, match="not one piece"):
        World("p", nvfp4(), Shape(1, 32, "LBNHC"))
