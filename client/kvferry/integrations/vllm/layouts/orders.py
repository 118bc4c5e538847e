"""The planes of layers by the orders of bytes that backends write: K and V of each head, or one latent for all heads
(MLA), the same on every rank, with its indexer. The table of backends is in `backends`."""

from __future__ import annotations

from vllm.platforms import current_platform

from kvferry.errors import InvalidField
from kvferry.geometry import formats
from kvferry.geometry.plane import Plane
from kvferry.integrations.vllm.layouts.layer import Layer, content_of

_INDEX_BYTES = {132: 128, 68: 64}
"""Bytes of an indexer's key by the bytes of key and scales: 128 fp8 and a float32, or 128 fp4 and 4 exponents."""

_ROCM_TILE = 16
"""Tokens in a tile of the indexer on ROCm."""

_V4_ROW_BYTES = 576

Planes = tuple[Plane, ...]


def packed(layer: Layer) -> Planes:
    """K, then V, in the content of each head and token."""
    return formats.vllm_attention(layer.tensors, layer.group, layer.heads, layer.spec.head_size)


def cells(layer: Layer) -> Planes:
    """Values and scales of each head and token, mixed."""
    # vLLM sets the scales in the cache to 1 at its first write to the layer. On a decode engine, a read may come before
    # that, and its scales would be lost. So vLLM sets the scales now.
    make_scales = getattr(getattr(layer.module, "impl", None), "_ensure_scale_caches", None)
    if make_scales is not None:
        make_scales(layer.cache)
    named = f"vllm-{content_of(layer.spec).replace('_', '-')}"
    return formats.vllm_cells(layer.tensors, layer.group, named, layer.heads)


def two_slots(layer: Layer) -> Planes:
    """K and V as two slots of all heads, in natural order."""
    return formats.vllm_two_slots(layer.tensors, layer.group, layer.spec.num_kv_heads, layer.heads)


def tiles(layer: Layer, named: str) -> Planes:
    """K and V as two slots, permuted as kernels for AMD's GPUs read them: HIP's and AITER's each in its own way."""
    return formats.vllm_tiles(layer.tensors, layer.group, layer.spec.num_kv_heads, named, layer.heads)


def nvfp4_pages(layer: Layer) -> Planes:
    """Values and scales of K, then of V, in each page."""
    # Two kernels write these pages. Their orders of scales inside a head's page were not compared.
    writer = "flashinfer" if getattr(getattr(layer.module, "impl", None), "nvfp4_fa2", False) else "vllm"
    named = f"vllm-nvfp4-scales-{writer}"
    return formats.vllm_nvfp4(layer.tensors, layer.group, layer.spec.num_kv_heads, named, layer.heads)


def cpu_pages(layer: Layer) -> Planes:
    """Pages of vLLM's attention on CPUs, which permutes inside a page."""
    # Imported on this platform only: the module examines the processor.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    # With the arguments of `CPUAttentionMetadataBuilder`: the dtype is the model's, also for a cache of fp8.
    config = layer.vllm_config
    cache_dtype = config.cache_config.cache_dtype
    isa = _get_attn_isa(config.model_config.dtype, layer.cache.shape[2], layer.spec.head_size, cache_dtype)
    return formats.vllm_cpu(layer.tensors, layer.group, isa, layer.heads)


def latent_and_rope(layer: Layer) -> Planes:
    """Latent and rope side by side."""
    latent_dim = layer.vllm_config.model_config.hf_text_config.kv_lora_rank
    return formats.vllm_mla(layer.tensors, layer.group, latent_dim, layer.for_all_heads)


def latent_rows(layer: Layer) -> Planes:
    """One row of numbers for each state."""
    return formats.vllm_mla(layer.tensors, layer.group, layer.spec.head_size, layer.for_all_heads)


def latent_cells(layer: Layer) -> Planes:
    """Latent, scales and rope of each token, mixed."""
    if content_of(layer.spec) == "fp8_ds_mla":
        return formats.vllm_mla_fp8_ds(layer.tensors, layer.group, layer.for_all_heads)
    return formats.vllm_cells(layer.tensors, layer.group, "vllm-nvfp4-ds-mla", layer.for_all_heads)


def v4_pages(layer: Layer) -> Planes:
    """DeepSeek V4: in each page the rows of all states, then their scales."""
    return formats.vllm_mla_pages(layer.tensors, layer.group, _V4_ROW_BYTES, "vllm-fp8-ds-v4", layer.for_all_heads)


def compressor_rows(layer: Layer) -> Planes:
    """DeepSeek V4's compressor: its inputs for each token of its window."""
    return formats.vllm_cells(layer.tensors, layer.group, "vllm-compressor", layer.for_all_heads)


def index_pages(layer: Layer) -> Planes:
    """An indexer: in each page the keys of all tokens, then their scales.

    Raises:
        InvalidField: keys of a width that is not known, or pages that ROCm's tiles do not divide.
    """
    width, tokens = layer.spec.state_content_size_bytes, int(layer.cache.shape[2])
    index_dim = _INDEX_BYTES.get(width)
    if index_dim is None:
        raise InvalidField(f"bytes of a key of {layer.name}", width, " or ".join(map(str, _INDEX_BYTES)))
    named = formats.PLAIN if index_dim == 128 else "vllm-mxfp4"
    granule = 1
    if current_platform.is_rocm() and tokens > 1:
        named, granule = f"vllm-indexer-tiles-{_ROCM_TILE}", _ROCM_TILE
        if tokens % granule or index_dim != 128:
            raise InvalidField(
                f"page of {layer.name}", f"{tokens} tokens, keys of {index_dim} bytes", "whole tiles of fp8"
            )
    return formats.vllm_indexer(
        layer.tensors, layer.group, index_dim, layer.for_all_heads, format=named, token_granule=granule
    )
