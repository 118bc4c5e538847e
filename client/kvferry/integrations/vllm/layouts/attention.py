"""Layers with K and V of each head."""

from __future__ import annotations

from kvferry.geometry import formats
from kvferry.geometry.plane import Plane
from kvferry.integrations.vllm.layouts.content import content_of
from kvferry.integrations.vllm.layouts.layer import Layer


def packed(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer with K, then V, in the content of each head and token."""
    return formats.vllm_attention({layer.name: layer.cache}, layer.group, layer.by_head, layer.spec.head_size)


def cells(layer: Layer) -> tuple[Plane, ...]:
    """Return the plane of a layer that mixes values and scales of each head and token."""
    _make_scales(layer)
    named = f"vllm-{content_of(layer.spec).replace('_', '-')}"
    return formats.vllm_cells({layer.name: layer.cache}, layer.group, named, layer.by_head)


def two_slots(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer with K and V as two slots of all heads, in natural order."""
    return formats.vllm_two_slots({layer.name: layer.cache}, layer.group, layer.spec.num_kv_heads, layer.by_head)


def rocm_tiles(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer with K and V as two slots, permuted as HIP kernels read them."""
    return _tiles(layer, "vllm-rocm-tiles")


def aiter_tiles(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer with K and V as two slots, permuted as AITER reads them."""
    return _tiles(layer, "vllm-aiter-tiles")


def _tiles(layer: Layer, named: str) -> tuple[Plane, ...]:
    heads = layer.spec.num_kv_heads
    return formats.vllm_tiles({layer.name: layer.cache}, layer.group, heads, named, layer.by_head)


def nvfp4_pages(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer with values and scales of K, then of V, in each page."""
    # Two kernels write these pages, and how each orders scales inside a head's page was not checked.
    writer = "flashinfer" if getattr(getattr(layer.module, "impl", None), "nvfp4_fa2", False) else "vllm"
    heads = layer.spec.num_kv_heads
    named = f"vllm-nvfp4-scales-{writer}"
    return formats.vllm_nvfp4({layer.name: layer.cache}, layer.group, heads, named, layer.by_head)


def cpu_pages(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer of vLLM's attention on CPUs, which permutes inside a page."""
    # Of this platform only: the module asks the processor what it can do.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    # As `CPUAttentionMetadataBuilder` asks: the dtype is the model's, also where the cache is of fp8.
    config = layer.vllm_config
    cache_dtype = config.cache_config.cache_dtype
    isa = _get_attn_isa(config.model_config.dtype, layer.cache.shape[2], layer.spec.head_size, cache_dtype)
    return formats.vllm_cpu({layer.name: layer.cache}, layer.group, isa, layer.by_head)


def _make_scales(layer: Layer) -> None:
    """Let vLLM set the scales in the cache to 1 now. It does so when it first writes to the layer, which on an engine
    that decodes can be after a read: what was read would be lost."""
    make = getattr(getattr(layer.module, "impl", None), "_ensure_scale_caches", None)
    if make is not None:
        make(layer.cache)
