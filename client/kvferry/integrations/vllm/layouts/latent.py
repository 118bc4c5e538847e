"""Layers of multi-head latent attention (MLA) and their indexers: one latent for all heads, the same on every rank."""

from __future__ import annotations

from vllm.platforms import current_platform

from kvferry.errors import InvalidField
from kvferry.geometry import formats
from kvferry.geometry.plane import Plane
from kvferry.integrations.vllm.layouts.content import content_of
from kvferry.integrations.vllm.layouts.layer import Layer

_INDEX_BYTES = {132: 128, 68: 64}
"""Bytes of an indexer's key by those of key and scales: 128 fp8 and a float32, or 128 fp4 and 4 exponents."""

_ROCM_TILE = 16
"""Tokens in a tile of the indexer on ROCm."""

_V4_ROW_BYTES = 576


def latent_and_rope(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer with latent and rope side by side."""
    latent_dim = layer.vllm_config.model_config.hf_text_config.kv_lora_rank
    return formats.vllm_mla({layer.name: layer.cache}, layer.group, latent_dim, layer.for_all_heads)


def latent_rows(layer: Layer) -> tuple[Plane, ...]:
    """Return the plane of a layer with one row of numbers for each state."""
    rows = {layer.name: layer.cache}
    return formats.vllm_mla(rows, layer.group, layer.spec.head_size, layer.for_all_heads)


def latent_cells(layer: Layer) -> tuple[Plane, ...]:
    """Return the plane of a layer that mixes latent, scales and rope of each token."""
    rows = {layer.name: layer.cache}
    if content_of(layer.spec) == "fp8_ds_mla":
        return formats.vllm_mla_fp8_ds(rows, layer.group, layer.for_all_heads)
    return formats.vllm_cells(rows, layer.group, "vllm-nvfp4-ds-mla", layer.for_all_heads)


def v4_pages(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of a layer of DeepSeek V4: in each page the rows of all states, then their scales."""
    rows = {layer.name: layer.cache}
    return formats.vllm_mla_pages(rows, layer.group, _V4_ROW_BYTES, "vllm-fp8-ds-v4", layer.for_all_heads)


def compressor_rows(layer: Layer) -> tuple[Plane, ...]:
    """Return the plane of DeepSeek V4's compressor: for each token of its window what it will sum up."""
    rows = {layer.name: layer.cache}
    return formats.vllm_cells(rows, layer.group, "vllm-compressor", layer.for_all_heads)


def index_pages(layer: Layer) -> tuple[Plane, ...]:
    """Return the planes of an indexer: in each page the keys of all tokens, then their scales.

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
        {layer.name: layer.cache}, layer.group, index_dim, layer.for_all_heads, format=named, token_granule=granule
    )
