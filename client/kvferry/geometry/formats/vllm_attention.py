"""vLLM's attention on GPUs."""

from __future__ import annotations

from dataclasses import replace

from kvferry._arguments import integer
from kvferry.errors import BadGeometry
from kvferry.geometry.formats.parts import Layers, halves, head_width, with_axes
from kvferry.geometry.model import Group
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import Holding, Part, named_tensors, planes_of_tensor, view_of


def vllm_attention(
    kv_caches: Layers, group: Group, holding: Holding | None = None, key_dim: int | None = None
) -> tuple[Plane, ...]:
    """vLLM's attention layers on GPUs, K and V packed side by side in the content of each head and token.

    Args:
        kv_caches: by layer, ``[blocks, heads, tokens, key_dim + value_dim]`` of any strides: vLLM's layouts LBHNC,
            LBNHC, LHBNC, BLHNC, BLNHC and BHLNC differ in them alone. Kernel blocks smaller than the group's blocks
            become pages.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        key_dim: elements of K; None: as many as of V.

    Source: vllm-project/vllm 0.32.0, ``create_kv_cache_views`` in vllm/v1/kv_cache_interface.py (logical ``[B, H, N,
    C]``, strides by `KVCacheLayout`, vllm/v1/kv_cache_layout.py); ``kv_cache.transpose(1, 2).split(head_size, dim=-1)``
    in vllm/v1/attention/backends/flash_attn.py, ``split(hs, dim=-1)`` in flashinfer.py and triton_attn.py; for V of
    another size ``triton_reshape_and_cache_flash_diffkv`` in vllm/v1/attention/ops/triton_reshape_and_cache_flash.py.
    Not for NVFP4 (`vllm_nvfp4`), nor for the CPU's kernel (`vllm_cpu`).
    """
    found: list[Plane] = []
    for layer, tensor in named_tensors(kv_caches).items():
        view = with_axes(layer, tensor, 4)
        width = view.shape[3]
        if key_dim is not None and not 0 < integer("key_dim", key_dim) < width:
            raise BadGeometry(f"layer {layer}", f"keys of {key_dim} elements in the content of {view.described}")
        parts = halves(layer, view, width) if key_dim is None else {"key": key_dim, "value": width - key_dim}
        axes = ("block", "head", "token", "content")
        found += planes_of_tensor(view, axes, group, layer, parts, holding)
    return tuple(found)


def vllm_two_slots(kv_caches: Layers, group: Group, heads: int, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's attention layers with K and V as two slots of all heads, each in natural order.

    Args:
        kv_caches: by layer, ``[blocks, 2, tokens, heads · head_dim]`` of any strides.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        heads: KV heads on this rank.

    Source: vllm-project/vllm 0.32.0, ``B12xPagedAttentionImpl._kv_cache_views`` in vllm/v1/attention/backends/b12x.py
    and ``RocmSegmentedAttentionImpl._split_kv_cache`` in rocm_segmented_attn.py. Not for `vllm_tiles`.
    """
    found: list[Plane] = []
    for layer, tensor in named_tensors(kv_caches).items():
        view = with_axes(layer, tensor, 4)
        view = view.split(3, head_width(layer, view, heads))
        found += planes_of_tensor(view, ("block", "kv", "token", "head", "content"), group, layer, None, holding)
    return tuple(found)


def vllm_tiles(
    kv_caches: Layers, group: Group, heads: int, format: str, holding: Holding | None = None
) -> tuple[Plane, ...]:
    """vLLM's attention layers with K and V as two slots, in which each head has a tile permuted by the kernel.

    A tile is all tokens of a page: divisible by head, not by token, and only between pages of equal size.

    Args:
        kv_caches: by layer, ``[blocks, 2, tokens, heads · head_dim]``; a page of each slot is one piece.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        heads: KV heads on this rank.
        format: name of the order in the tile.

    Source: vllm-project/vllm 0.32.0, ``PagedAttention.split_kv_cache`` in vllm/v1/attention/ops/paged_attn.py (K
    ``[heads, head_dim / x, tokens, x]``, V ``[heads, head_dim, tokens]``, x elements being 16 bytes) and
    ``reshape_and_cache_shuffle_kernel`` in vllm/v1/attention/backends/rocm_aiter_fa.py (V ``[heads, tokens / x,
    head_dim, x]``).
    """
    found: list[Plane] = []
    parts = [Part(name, kv=kv, format=format, token_granule=0) for kv, name in enumerate(("key", "value"))]
    for layer, tensor in named_tensors(kv_caches).items():
        view = with_axes(layer, tensor, 4)
        width, tokens = head_width(layer, view, heads), view.shape[2]
        tiles = view.merge_tail(2, (heads, tokens, width))
        found += planes_of_tensor(tiles, ("block", "kv", "head", "token", "content"), group, layer, parts, holding)
    return tuple(found)


def vllm_cells(kv_caches: Layers, group: Group, format: str, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's layers in which a cell of each head and token mixes values and scales: one component ``kv``.

    Args:
        kv_caches: by layer, ``[blocks, heads, tokens, bytes]`` or, of one head, ``[blocks, tokens, bytes]``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        format: name of what is in a cell.

    Source: vllm-project/vllm 0.32.0, ``TritonAttentionImpl._ensure_scale_caches`` in
    vllm/v1/attention/backends/triton_attn.py (``[K | its float32 scale | V | its float32 scale]``),
    ``triton_turboquant_store`` in vllm/v1/attention/ops/triton_turboquant_store.py.
    """
    found: list[Plane] = []
    named = replace(holding or Holding(), format=format)
    for layer, tensor in named_tensors(kv_caches).items():
        view = view_of(tensor)
        axes = ("block", "token", "content") if len(view.shape) == 3 else ("block", "head", "token", "content")
        found += planes_of_tensor(view, axes, group, layer, ("kv",), named)
    return tuple(found)


def vllm_nvfp4(
    kv_caches: Layers, group: Group, heads: int, scales: str, holding: Holding | None = None
) -> tuple[Plane, ...]:
    """vLLM's NVFP4 attention: in each page K, its block scales, V, its block scales; four components.

    Values are in natural order. The order of scales inside a head's page is the kernel's, so they move by whole pages.

    Args:
        kv_caches: by layer, ``uint8 [blocks, 2 · heads, tokens, 9 / 16 · head_dim]``, heads before tokens in memory.
            The shape is only a size: a side of a page is ``[heads · tokens · head_dim / 2 | heads · tokens · head_dim
            / 16]``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        heads: KV heads on this rank.
        scales: format of the scales.

    Source: vllm-project/vllm 0.32.0, ``_nvfp4_kv_views`` in vllm/v1/attention/backends/flashinfer.py and
    ``nvfp4_split_data_scale`` in vllm/utils/torch_utils.py.
    """
    found: list[Plane] = []
    for layer, tensor in named_tensors(kv_caches).items():
        view = with_axes(layer, tensor, 4)
        _, slots, tokens, width = view.shape
        scale = width // 9
        if view.itemsize != 1 or slots != 2 * heads or width % 9:
            raise BadGeometry(f"layer {layer}", f"no K and V of {heads} heads as values and scales in {view.described}")
        page = view.merge_tail(1, (slots * tokens * width,))
        side = heads * tokens * width
        for component, begin in (("key", 0), ("value", side)):
            for name, size, offset in (
                (component, width - scale, 0),
                (f"{component}_scale", scale, side - heads * tokens * scale),
            ):
                cells = replace(
                    page,
                    address=page.address + begin + offset,
                    shape=(page.shape[0], heads, tokens, size),
                    strides=(page.strides[0], tokens * size, size, 1),
                )
                part = Part(name) if size != scale else Part(name, format=scales, token_granule=0)
                found += planes_of_tensor(cells, ("block", "head", "token", "content"), group, layer, (part,), holding)
    return tuple(found)
