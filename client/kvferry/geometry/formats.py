"""Planes of common engines, from those engines' tensors.

Each function names the public source of its byte order: repository, file, function, version. Where the bytes of a
unit and token are in natural order the format is ``plain``, whatever the layout around them, so that engines of
different layouts, block sizes and even makes can read from each other. Where a kernel permutes bytes inside a page the
format has a name of its own and a page moves whole.

Layer names are compared verbatim: both engines of a read must use the same names. All functions take `group` and
`holding` as `kvferry.geometry.tensors.planes_of` does.

vLLM is covered with its attention on GPUs and, permuted inside a page by its kernel, on CPUs, and with its latent
attention and indexers, which are the same on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from kvferry._arguments import integer, text
from kvferry.errors import BadGeometry
from kvferry.geometry.model import Group
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import OPAQUE as OPAQUE
from kvferry.geometry.tensors import PLAIN as PLAIN
from kvferry.geometry.tensors import (
    Holding,
    Part,
    Tensor,
    TensorView,
    named_tensors,
    planes_of,
    planes_of_tensor,
    view_of,
)

Layers = Mapping[str, Tensor]
"""Tensors by layer name."""

CELLS = ("block", "head", "token", "content")
FP8_DS_BYTES = 656
_CPU_NATURAL_VALUES = ("vec", "vec16")


def _views(tensors: Layers, *counts: int) -> dict[str, TensorView]:
    """The memory of each layer's tensor; raises `BadGeometry` unless it has one of these numbers of axes."""
    views = {layer: view_of(tensor) for layer, tensor in named_tensors(tensors).items()}
    for layer, view in views.items():
        if len(view.shape) not in counts:
            expected = " or ".join(map(str, counts))
            raise BadGeometry(f"layer {layer}", f"{expected} axes are expected of {view.described}")
    return views


def _cell_axes(view: TensorView) -> tuple[str, ...]:
    """The axes of a tensor of cells; one of three axes has one head."""
    return CELLS if len(view.shape) == 4 else ("block", "token", "content")


def _halves(layer: str, view: TensorView) -> dict[str, int]:
    """K and V as equal parts of the content; raises `BadGeometry`."""
    width = view.shape[-1]
    if width % 2:
        raise BadGeometry(f"layer {layer}", f"K and V cannot be equal parts of the content of {view.described}")
    return {"key": width // 2, "value": width // 2}


def _latent_parts(layer: str, width: int, latent_dim: int) -> dict[str, int]:
    """The latent and, if elements follow it, the rope; raises `BadGeometry`."""
    if not 0 < integer("latent_dim", latent_dim) <= width:
        raise BadGeometry(f"layer {layer}", f"a latent of {latent_dim} elements in a content of {width}")
    rope_dim = width - latent_dim
    return {"latent": latent_dim, "rope": rope_dim} if rope_dim else {"latent": latent_dim}


def _head_width(layer: str, view: TensorView, heads: int) -> int:
    """Elements of a head in a content that holds all heads of the rank; raises `BadGeometry`."""
    width = view.shape[-1]
    if integer("heads", heads) < 1 or width % heads:
        raise BadGeometry(f"layer {layer}", f"{heads} heads do not divide the content of {view.described}")
    return width // heads


def _inside(page: TensorView, begin: int, shape: tuple[int, ...]) -> TensorView:
    """Contiguous bytes of each page, from byte `begin` on; `page` has the axes (page, byte)."""
    return replace(page, address=page.address + begin, shape=(page.shape[0], prod(shape))).merge_tail(1, shape)


def vllm_attention(
    kv_caches: Layers, group: Group, holding: Holding | None = None, key_dim: int | None = None
) -> tuple[Plane, ...]:
    """vLLM's attention layers on GPUs, K and V packed side by side in the content of each head and token.

    Args:
        kv_caches: by layer, ``[blocks, heads, tokens, key_dim + value_dim]`` of any strides, in which alone vLLM's
            layouts LBHNC, LBNHC, LHBNC, BLHNC, BLNHC and BHLNC differ. Kernel blocks smaller than the group's blocks
            become pages.
        key_dim: elements of K; None: as many as of V.

    Source: vllm-project/vllm 0.32.0, ``create_kv_cache_views`` in vllm/v1/kv_cache_interface.py (logical ``[B, H, N,
    C]``, strides by `KVCacheLayout`, vllm/v1/kv_cache_layout.py); ``kv_cache.transpose(1, 2).split(head_size, dim=-1)``
    in vllm/v1/attention/backends/flash_attn.py, ``split(hs, dim=-1)`` in flashinfer.py and triton_attn.py; for V of
    another size ``triton_reshape_and_cache_flash_diffkv`` in vllm/v1/attention/ops/triton_reshape_and_cache_flash.py.
    Not for NVFP4 (`vllm_nvfp4`), nor for the CPU's kernel (`vllm_cpu`).
    """
    found: list[Plane] = []
    for layer, view in _views(kv_caches, 4).items():
        width = view.shape[3]
        if key_dim is not None and not 0 < integer("key_dim", key_dim) < width:
            raise BadGeometry(f"layer {layer}", f"keys of {key_dim} elements in the content of {view.described}")
        parts = _halves(layer, view) if key_dim is None else {"key": key_dim, "value": width - key_dim}
        found += planes_of_tensor(view, CELLS, group, layer, parts, holding)
    return tuple(found)


def vllm_two_slots(kv_caches: Layers, group: Group, heads: int, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's attention layers with K and V as two slots of all heads, each in natural order.

    Args:
        kv_caches: by layer, ``[blocks, 2, tokens, heads · head_dim]`` of any strides.
        heads: KV heads on this rank.

    Source: vllm-project/vllm 0.32.0, ``B12xPagedAttentionImpl._kv_cache_views`` in vllm/v1/attention/backends/b12x.py
    and ``RocmSegmentedAttentionImpl._split_kv_cache`` in rocm_segmented_attn.py. Not for `vllm_tiles`.
    """
    views = _views(kv_caches, 4)
    split = {layer: view.split(3, _head_width(layer, view, heads)) for layer, view in views.items()}
    return planes_of(split, ("block", "kv", "token", "head", "content"), group, None, holding)


def vllm_tiles(
    kv_caches: Layers, group: Group, heads: int, format: str, holding: Holding | None = None
) -> tuple[Plane, ...]:
    """vLLM's attention layers with K and V as two slots, in which each head has a tile permuted by the kernel.

    A tile is all tokens of a page: divisible by head, not by token, and only between pages of equal size.

    Args:
        kv_caches: by layer, ``[blocks, 2, tokens, heads · head_dim]``; a page of each slot is one piece.
        heads: KV heads on this rank.
        format: name of the order in the tile.

    Source: vllm-project/vllm 0.32.0, ``PagedAttention.split_kv_cache`` in vllm/v1/attention/ops/paged_attn.py (K
    ``[heads, head_dim / x, tokens, x]``, V ``[heads, head_dim, tokens]``, x elements being 16 bytes) and
    ``reshape_and_cache_shuffle_kernel`` in vllm/v1/attention/backends/rocm_aiter_fa.py (V ``[heads, tokens / x,
    head_dim, x]``).
    """
    tiles = {
        layer: view.merge_tail(2, (heads, view.shape[2], _head_width(layer, view, heads)))
        for layer, view in _views(kv_caches, 4).items()
    }
    parts = [Part(name, kv=kv, format=format, token_granule=0) for kv, name in enumerate(("key", "value"))]
    return planes_of(tiles, ("block", "kv", "head", "token", "content"), group, parts, holding)


def vllm_cells(kv_caches: Layers, group: Group, format: str, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's layers in which a cell of each head and token mixes values and scales: one component ``kv``.

    Args:
        kv_caches: by layer, ``[blocks, heads, tokens, bytes]`` or, of one head, ``[blocks, tokens, bytes]``.
        format: names the content of a cell.

    Source: vllm-project/vllm 0.32.0, ``TritonAttentionImpl._ensure_scale_caches`` in
    vllm/v1/attention/backends/triton_attn.py (``[K | its float32 scale | V | its float32 scale]``),
    ``triton_turboquant_store`` in vllm/v1/attention/ops/triton_turboquant_store.py.
    """
    found: list[Plane] = []
    named = replace(holding or Holding(), format=format)
    for layer, view in _views(kv_caches, 3, 4).items():
        found += planes_of_tensor(view, _cell_axes(view), group, layer, ("kv",), named)
    return tuple(found)


def vllm_nvfp4(
    kv_caches: Layers, group: Group, heads: int, scales: str, holding: Holding | None = None
) -> tuple[Plane, ...]:
    """vLLM's NVFP4 attention: in each page K, its block scales, V, its block scales; four components.

    Values are in natural order. The kernel orders the scales inside a head's page, so scales move by whole pages.

    Args:
        kv_caches: by layer, ``uint8 [blocks, 2 · heads, tokens, 9 / 16 · head_dim]``, heads before tokens in memory.
            The shape is only a size: a side of a page is ``[heads · tokens · head_dim / 2 | heads · tokens · head_dim
            / 16]``.
        heads: KV heads on this rank.
        scales: format of the scales.

    Source: vllm-project/vllm 0.32.0, ``_nvfp4_kv_views`` in vllm/v1/attention/backends/flashinfer.py and
    ``nvfp4_split_data_scale`` in vllm/utils/torch_utils.py.
    """
    found: list[Plane] = []
    for layer, view in _views(kv_caches, 4).items():
        _, slots, tokens, width = view.shape
        scale = width // 9
        if view.itemsize != 1 or slots != 2 * heads or width % 9:
            raise BadGeometry(f"layer {layer}", f"no K and V of {heads} heads as values and scales in {view.described}")
        page, begin = view.merge_tail(1, (slots * tokens * width,)), 0
        for side in ("key", "value"):
            of_scales = Part(f"{side}_scale", format=scales, token_granule=0)
            for part, size in ((Part(side), width - scale), (of_scales, scale)):
                cells = _inside(page, begin, (heads, tokens, size))
                found += planes_of_tensor(cells, CELLS, group, layer, (part,), holding)
                begin += heads * tokens * size
    return tuple(found)


def vllm_mla(kv_caches: Layers, group: Group, latent_dim: int, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's latent attention: latent and rope side by side for each token, the same on every rank.

    Args:
        kv_caches: by layer, ``[blocks, tokens, latent_dim + rope_dim]`` or, since 0.32, ``[blocks, 1, tokens, …]``.
        latent_dim: kv_lora_rank of the model.

    Source: vllm-project/vllm, ``concat_and_cache_mla_kernel`` in csrc/cache_kernels.cu (kv_cache is ``[num_blocks,
    block_size, kv_lora_rank + pe_dim]``); ``create_kv_cache_views`` in vllm/v1/kv_cache_interface.py, 0.32.0.
    """
    found: list[Plane] = []
    for layer, view in _views(kv_caches, 3, 4).items():
        parts = _latent_parts(layer, view.shape[-1], latent_dim)
        found += planes_of_tensor(view, _cell_axes(view), group, layer, parts, holding)
    return tuple(found)


def vllm_mla_fp8_ds(kv_caches: Layers, group: Group, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's ``fp8_ds_mla`` cache of DeepSeek V3.2: quantised latent, its scales and rope in 656 bytes of each token.

    One component ``kv`` of a format of its own, since its parts mean nothing alone; divisible by token. DeepSeek V4
    has pages of another order under the same name (`vllm_mla_pages`).

    Args:
        kv_caches: by layer, ``uint8 [blocks, tokens, 656]`` or ``[blocks, 1, tokens, 656]``.

    Raises:
        BadGeometry: rows have another width.

    Source: vllm-project/vllm, ``concat_and_cache_ds_mla_kernel`` in csrc/cache_kernels.cu: 512 bytes of fp8, 4 float32
    scales, 64 bfloat16.
    """
    for layer, view in _views(kv_caches, 3, 4).items():
        if view.shape[-1] * view.itemsize != FP8_DS_BYTES:
            raise BadGeometry(f"layer {layer}", f"rows of {FP8_DS_BYTES} bytes are expected of {view.described}")
    return vllm_cells(kv_caches, group, "vllm-fp8-ds-mla", holding)


def vllm_mla_pages(
    kv_caches: Layers, group: Group, row_bytes: int, format: str, holding: Holding | None = None
) -> tuple[Plane, ...]:
    """vLLM's packed latent cache of DeepSeek V4: in each page the rows of all states, then their scales.

    Two components, ``kv`` (quantised latent and rope of a state) and ``kv_scale``, each divisible by state.

    Args:
        kv_caches: by layer, ``uint8 [blocks, 1, states, row_bytes + scale bytes]``. The shape is only a size: inside a
            page the bytes are ``[states · row_bytes | states · scale bytes]``.
        row_bytes: bytes of a state without its scales: 576 in V4.
        format: names the content of a row and its scales.

    Source: vllm-project/vllm 0.32.0, ``quantize_and_insert_k_kernel`` in
    vllm/models/deepseek_v4/common/ops/cache_utils.py: 448 bytes of fp8 and 64 bfloat16, then 8 bytes of scales for each
    state.
    """
    parts = (Part("kv", format=format), Part("kv_scale", format=format))
    return _rows_then_scales(kv_caches, group, row_bytes, parts, holding)


def vllm_indexer(
    kv_caches: Layers,
    group: Group,
    index_dim: int,
    holding: Holding | None = None,
    *,
    format: str = PLAIN,
    token_granule: int = 1,
) -> tuple[Plane, ...]:
    """vLLM's sparse-attention indexer cache: in each page the keys of all tokens, then their scales.

    Two components, ``index`` and ``index_scale``. Scales are in natural order and divisible by token, and so are
    keys on CUDA; on ROCm keys are in tiles of 16 tokens.

    Args:
        kv_caches: by layer, ``uint8 [blocks, tokens, index_dim + scale bytes]`` or ``[blocks, 1, tokens, …]``. The
            shape is only a size: inside a page the bytes are ``[tokens · index_dim | tokens · scale bytes]``.
        index_dim: bytes of a token's key.
        format, token_granule: those of the keys.

    Source: vllm-project/vllm, ``indexer_k_quant_and_cache_kernel`` in csrc/cache_kernels.cu: per block the fp8 values
    of all tokens, followed by one float32 scale for each token and 128 values; for ROCm
    ``_indexer_k_quant_and_cache_kernel`` in vllm/v1/attention/ops/rocm_aiter_mla_sparse.py, 0.32.0.
    """
    parts = (Part("index", format=format, token_granule=token_granule), Part("index_scale"))
    return _rows_then_scales(kv_caches, group, integer("index_dim", index_dim), parts, holding)


def _rows_then_scales(
    kv_caches: Layers, group: Group, row_bytes: int, parts: tuple[Part, Part], holding: Holding | None
) -> tuple[Plane, ...]:
    found: list[Plane] = []
    for layer, view in _views(kv_caches, 3, 4).items():
        tokens, width = view.shape[-2:]
        if view.itemsize != 1 or not 0 < row_bytes < width:
            raise BadGeometry(f"layer {layer}", f"rows of {row_bytes} bytes and scales in {view.described}")
        page = view.merge_tail(1, (tokens * width,))
        for part, begin, size in ((parts[0], 0, row_bytes), (parts[1], tokens * row_bytes, width - row_bytes)):
            rows = _inside(page, begin, (tokens, size))
            found += planes_of_tensor(rows, ("block", "token", "content"), group, layer, (part,), holding)
    return tuple(found)


def vllm_cpu(kv_caches: Layers, group: Group, isa: str, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's CPU attention: for each block and head a page of K, then a page of V, permuted inside by the kernel.

    Divisible by head, not by token: K is column-major, ``[head_dim, tokens]``, with ``vec`` and ``vec16`` (their V is
    in natural order), tiled with ``amx``; other instruction sets have orders of their own. Engines read from each other
    only at equal block size and instruction set.

    Args:
        kv_caches: by layer, ``[blocks, heads, tokens, 2 · head_dim]``, contiguous.
        isa: the answer of ``_get_attn_isa`` in vllm/v1/attention/backends/cpu_attn.py on this machine: ``vec``,
            ``amx`` …

    Source: vllm-project/vllm 0.32.0, ``CPUAttentionBackendImpl.forward`` in vllm/v1/attention/backends/cpu_attn.py (the
    view ``[blocks, heads, 2 · tokens, head_dim]``, cut in two), ``AttentionImpl<ISA::VEC>::reshape_and_cache`` in
    csrc/cpu/cpu_attn_vec.hpp, ``AttentionImpl<ISA::AMX>::reshape_and_cache`` in csrc/cpu/cpu_attn_amx.hpp.
    """
    if not re.fullmatch(r"[a-z0-9_]{2,16}", text("isa", isa)):
        raise BadGeometry("tensor", f"isa is {isa!r}, not the name of an instruction set like 'vec' or 'amx'")
    key = f"vllm-cpu-{isa}"
    value: str | None = key
    if isa in _CPU_NATURAL_VALUES:
        # The kernels differ in their tiles only, so their pages are the same. V could be cut by token. But K cannot,
        # and planes that are cut alike are read together: the pages of K and V, of every head, as one piece.
        key, value = "vllm-cpu-column-major", None
    parts = [Part("key", kv=0, format=key, token_granule=0), Part("value", kv=1, format=value, token_granule=0)]
    pages = {
        layer: view.merge_tail(2, (2, view.shape[2], _halves(layer, view)["key"]))
        for layer, view in _views(kv_caches, 4).items()
    }
    return planes_of(pages, ("block", "head", "kv", "token", "content"), group, parts, holding)


def sglang_mha(k_buffer: Layers, v_buffer: Layers, group: Group, holding: Holding | None = None) -> tuple[Plane, ...]:
    """SGLang's attention pool: K and V apart, a row for each token slot; with its HND switch a page for each row.

    A block is a page of the group's block_tokens slots; block 0 holds SGLang's padding slots, so it is the null block.

    Args:
        k_buffer, v_buffer: by layer, ``[slots, heads, head_dim]``, or ``[pages, heads, tokens, head_dim]`` with
            ``SGLANG_USE_HND_KVCACHE``.

    Source: sgl-project/sglang 0.5.23, ``MHATokenToKVPool._kv_buffer_shapes`` and ``_create_buffers_normal`` in
    python/sglang/srt/mem_cache/memory_pool.py. Not for its ``vectorized_5d`` layout.
    """
    found: list[Plane] = []
    keys, values = _views(k_buffer, 3, 4), _views(v_buffer, 3, 4)
    for layer, key in keys.items():
        if layer not in values:
            raise BadGeometry(f"layer {layer}", "it has a K buffer and no V buffer")
        for component, view in (("key", key), ("value", values[layer])):
            axes = ("slot", "head", "content") if len(view.shape) == 3 else CELLS
            found += planes_of_tensor(view, axes, group, layer, (component,), holding)
    return tuple(found)


def sglang_mla(kv_buffer: Layers, group: Group, latent_dim: int, holding: Holding | None = None) -> tuple[Plane, ...]:
    """SGLang's latent pool: latent and rope side by side, a row for each token slot.

    Args:
        kv_buffer: by layer, ``[slots, 1, latent_dim + rope_dim]``.
        latent_dim: kv_lora_rank of the model.

    Source: sgl-project/sglang 0.5.23, ``MLATokenToKVPool._create_buffers`` in
    python/sglang/srt/mem_cache/memory_pool.py.
    """
    found: list[Plane] = []
    for layer, view in _views(kv_buffer, 3).items():
        parts = _latent_parts(layer, view.shape[-1], latent_dim)
        found += planes_of_tensor(view, ("slot", "head", "content"), group, layer, parts, holding)
    return tuple(found)


def trtllm_pool(
    pool: Tensor,
    layers: Sequence[str],
    group: Group,
    heads: int,
    holding: Holding | None = None,
    components: Sequence[str] = ("key", "value"),
) -> tuple[Plane, ...]:
    """A pool of TensorRT-LLM's paged cache: blocks of all its layers, each K, then V, as ``[heads, tokens, head_dim]``.

    Args:
        pool: ``[blocks, layers, len(components), heads · tokens · head_dim]``, contiguous.
        layers: names of the pool's layers, in its order.
        heads: KV heads on this rank.
        components: ``("latent",)`` or similar for a pool of one factor.

    Source: NVIDIA/TensorRT-LLM, ``WindowBlockManager::allocatePools`` in
    cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp (``{mNumPrimaryBlocks, pool.numLayers, mKVFactor, blockSize}``)
    and ``KVBlockArray::getKVLocalIdx`` in cpp/tensorrt_llm/kernels/kvCacheUtils.h (``[numHeads, tokensPerBlock,
    hiddenSizePerHead]``), 0ccf9032 (2025). Not for FP4 pools, nor for recurrent states, whose layers come first.
    """
    view = _views({"pool": pool}, 4)["pool"]
    size, cells = view.shape[3], integer("heads", heads) * group.block_tokens
    if heads < 1 or cells < 1 or size % cells:
        problem = f"blocks of {size} elements do not divide by {heads} heads of {group.block_tokens} tokens"
        raise BadGeometry("pool", problem)
    view = view.split(3, size // heads).split(4, size // cells)
    axes = ("block", "layer", "kv", "head", "token", "content")
    return planes_of_tensor(view, axes, group, layers, components, holding)
