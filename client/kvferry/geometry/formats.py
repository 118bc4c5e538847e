"""Planes of the engines people use, from the tensors they have.

Each function names the public source of its byte order: repository, file, function, version. Where the bytes of a
unit and token are in natural order the format is ``plain``, whatever the layout around them, so that engines of
different layouts, block sizes and even makes can read from each other. Where a kernel permutes inside a page the
format has a name of its own and a page moves whole.

Layer names are compared verbatim: both engines of a read must use the same. `by_layer_number` makes vLLM's and others'
names equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from kvferry._arguments import integer, mapping, text
from kvferry.errors import BadGeometry
from kvferry.geometry.model import Group, Interval, Plane
from kvferry.geometry.tensors import (
    OPAQUE,
    PLAIN,
    Holding,
    Part,
    Tensor,
    TensorView,
    named_tensors,
    planes_of,
    planes_of_tensor,
    view_of,
)

__all__ = [
    "OPAQUE",
    "PLAIN",
    "by_layer_number",
    "sglang_mha",
    "sglang_mla",
    "trtllm_pool",
    "vllm_attention",
    "vllm_cpu",
    "vllm_flash_attention",
    "vllm_flashinfer",
    "vllm_indexer",
    "vllm_mla",
    "vllm_mla_fp8_ds",
    "vllm_state",
]

Layers = Mapping[str, Tensor]


def by_layer_number(tensors: Layers) -> dict[str, Tensor]:
    """The same tensors under names that engines share: ``model.layers.7.self_attn.attn`` becomes ``layers.7``.

    Raises:
        BadGeometry: a name without exactly one number, or two tensors of the same number (a draft model's, say, which
            need names of their own).
    """
    found: dict[str, Tensor] = {}
    for layer, tensor in mapping("tensors", tensors, "a mapping from layer names to tensors").items():
        name = text("a layer of tensors", layer)
        numbers = [part for part in re.split(r"[./]", name) if part.isdigit()]
        if len(numbers) != 1:
            raise BadGeometry(f"layer {name}", f"its name has {len(numbers)} numbers, not one")
        shared = f"layers.{int(numbers[0])}"
        if shared in found:
            raise BadGeometry(f"layer {name}", f"another tensor is {shared} too")
        found[shared] = cast(Tensor, tensor)
    return found


def vllm_attention(kv_caches: Layers, group: Group, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's attention layers on GPUs, K and V packed side by side in the content of each head and token.

    Args:
        kv_caches: by layer, ``[blocks, heads, tokens, 2 · head_dim]`` of any strides: vLLM's layouts LBHNC, LBNHC,
            LHBNC, BLHNC, BLNHC and BHLNC differ in them alone. Kernel blocks smaller than the group's blocks become
            pages.
        group, holding: see `kvferry.geometry.tensors.planes_of`.

    Source: vllm-project/vllm 0.32.0, ``create_kv_cache_views`` in vllm/v1/kv_cache_interface.py (logical ``[B, H, N,
    C]``, strides by `KVCacheLayout`, vllm/v1/kv_cache_layout.py); ``kv_cache.transpose(1, 2).split(head_size, dim=-1)``
    in vllm/v1/attention/backends/flash_attn.py, ``split(hs, dim=-1)`` in flashinfer.py and triton_attn.py. Not for
    NVFP4, which mixes scales into its pages, nor for the CPU's kernel (`vllm_cpu`).
    """
    found: list[Plane] = []
    for layer, tensor in named_tensors(kv_caches).items():
        view = _with_axes(layer, tensor, 4)
        halves = _halves(layer, view, view.shape[3])
        axes = ("block", "head", "token", "content")
        found += planes_of_tensor(view, axes, group, layer, halves, holding)
    return tuple(found)


def vllm_flash_attention(kv_caches: Layers, group: Group, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's FlashAttention before packed content: K and V apart in one tensor, NHD or HND by strides.

    Args:
        kv_caches: by layer, ``[2, blocks, tokens, heads, head_dim]``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.

    Source: vllm-project/vllm 0084b783 (2025), ``FlashAttentionBackend.get_kv_cache_shape`` and
    ``get_kv_cache_stride_order`` in vllm/v1/attention/backends/flash_attn.py.
    """
    return planes_of(kv_caches, ("kv", "block", "token", "head", "content"), group, ("key", "value"), holding)


def vllm_flashinfer(kv_caches: Layers, group: Group, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's FlashInfer before packed content: K, then V, inside each block; NHD or HND by strides.

    Args:
        kv_caches: by layer, ``[blocks, 2, tokens, heads, head_dim]``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.

    Source: vllm-project/vllm 00a817ad (2025), ``FlashInferBackend.get_kv_cache_shape`` and
    ``get_kv_cache_stride_order`` in vllm/v1/attention/backends/flashinfer.py.
    """
    return planes_of(kv_caches, ("block", "kv", "token", "head", "content"), group, ("key", "value"), holding)


def vllm_mla(kv_caches: Layers, group: Group, latent_dim: int, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's latent attention: latent and rope side by side for each token, the same on every rank.

    Args:
        kv_caches: by layer, ``[blocks, tokens, latent_dim + rope_dim]`` or, since 0.32, ``[blocks, 1, tokens, …]``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        latent_dim: kv_lora_rank of the model.

    Source: vllm-project/vllm, ``concat_and_cache_mla_kernel`` in csrc/cache_kernels.cu (kv_cache is ``[num_blocks,
    block_size, kv_lora_rank + pe_dim]``); ``create_kv_cache_views`` in vllm/v1/kv_cache_interface.py, 0.32.0.
    """
    found: list[Plane] = []
    for layer, tensor in named_tensors(kv_caches).items():
        view = view_of(tensor)
        axes = ("block", "token", "content") if len(view.shape) == 3 else ("block", "head", "token", "content")
        found += planes_of_tensor(view, axes, group, layer, _latent(layer, view.shape[-1], latent_dim), holding)
    return tuple(found)


def vllm_mla_fp8_ds(kv_caches: Layers, group: Group, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's ``fp8_ds_mla`` cache: quantised latent, its scales and rope, mixed into 656 bytes of each token.

    One component ``kv`` of a format of its own, since parts of it mean nothing alone; divisible by token.

    Args:
        kv_caches: by layer, ``uint8 [blocks, tokens, 656]`` or ``[blocks, 1, tokens, 656]``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.

    Source: vllm-project/vllm, ``concat_and_cache_ds_mla_kernel`` in csrc/cache_kernels.cu: 512 bytes of fp8, 4 float32
    scales, 64 bfloat16.
    """
    found: list[Plane] = []
    named = replace(holding or Holding(), format="vllm-fp8-ds-mla")
    for layer, tensor in named_tensors(kv_caches).items():
        view = view_of(tensor)
        axes = ("block", "token", "content") if len(view.shape) == 3 else ("block", "head", "token", "content")
        found += planes_of_tensor(view, axes, group, layer, ("kv",), named)
    return tuple(found)


def vllm_indexer(kv_caches: Layers, group: Group, index_dim: int, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's sparse-attention indexer cache on CUDA: in each page the keys of all tokens, then their scales.

    Two components, ``index`` and ``index_scale``, each in natural order and divisible by token.

    Args:
        kv_caches: by layer, ``uint8 [blocks, tokens, index_dim + scale bytes]`` or ``[blocks, 1, tokens, …]``. The
            shape is only a size: inside a page the bytes are ``[tokens · index_dim | tokens · scale bytes]``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        index_dim: bytes of a token's key.

    Source: vllm-project/vllm, ``indexer_k_quant_and_cache_kernel`` in csrc/cache_kernels.cu: per block the fp8 values
    of all tokens, followed by one float32 scale for each token and 128 values. Not for ROCm's shuffled layout.
    """
    found: list[Plane] = []
    index_dim = integer("index_dim", index_dim)
    for layer, tensor in named_tensors(kv_caches).items():
        view = view_of(tensor)
        tokens, width = view.shape[-2:]
        scale = width - index_dim
        if view.itemsize != 1 or len(view.shape) not in (3, 4) or not 0 < index_dim < width:
            raise BadGeometry(f"layer {layer}", f"keys of {index_dim} bytes and scales in {view.described}")
        page = view.merge_tail(1, (tokens * width,))
        for component, begin, size in (("index", 0, index_dim), ("index_scale", tokens * index_dim, scale)):
            part = replace(
                page,
                address=page.address + begin,
                shape=(page.shape[0], tokens, size),
                strides=(page.strides[0], size, 1),
            )
            found += planes_of_tensor(part, ("block", "token", "content"), group, layer, (component,), holding)
    return tuple(found)


_CPU_NATURAL_VALUES = ("vec", "vec16")


def vllm_cpu(kv_caches: Layers, group: Group, isa: str, holding: Holding | None = None) -> tuple[Plane, ...]:
    """vLLM's CPU attention: for each block and head a page of K, then a page of V, permuted inside by the kernel.

    Divisible by head, not by token: K is column-major, ``[head_dim, tokens]``, with ``vec`` and ``vec16`` (their V is
    in natural order), tiled with ``amx``, and the others have orders of their own. Engines read from each other at
    equal block size and instruction set only.

    Args:
        kv_caches: by layer, ``[blocks, heads, tokens, 2 · head_dim]``, contiguous.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        isa: what ``_get_attn_isa`` in vllm/v1/attention/backends/cpu_attn.py answers on this machine: ``vec``,
            ``amx`` …

    Source: vllm-project/vllm 0.32.0, ``CPUAttentionBackendImpl.forward`` in vllm/v1/attention/backends/cpu_attn.py (the
    view ``[blocks, heads, 2 · tokens, head_dim]``, cut in two), ``AttentionImpl<ISA::VEC>::reshape_and_cache`` in
    csrc/cpu/cpu_attn_vec.hpp, ``AttentionImpl<ISA::AMX>::reshape_and_cache`` in csrc/cpu/cpu_attn_amx.hpp.
    """
    if not re.fullmatch(r"[a-z0-9_]{2,16}", text("isa", isa)):
        raise BadGeometry("tensor", f"isa is {isa!r}, not the name of an instruction set like 'vec' or 'amx'")
    own = f"vllm-cpu-{isa}"
    parts = [Part("key", kv=0, format=own, token_granule=0), Part("value", kv=1, format=own, token_granule=0)]
    if isa in _CPU_NATURAL_VALUES:
        # The kernels differ in their tiles only, so their pages are the same.
        parts = [Part("key", kv=0, format="vllm-cpu-column-major", token_granule=0), Part("value", kv=1)]
    found: list[Plane] = []
    for layer, tensor in named_tensors(kv_caches).items():
        view = _with_axes(layer, tensor, 4)
        _, _, tokens, width = view.shape
        _halves(layer, view, width)
        pages = view.merge_tail(2, (2, tokens, width // 2))
        axes = ("block", "head", "kv", "token", "content")
        found += planes_of_tensor(pages, axes, group, layer, parts, holding)
    return tuple(found)


def vllm_state(
    states: Mapping[str, Sequence[Tensor]],
    group: Group,
    conv: Sequence[Part],
    *,
    dim_first: bool = False,
    heads: Interval | None = None,
    num_heads: int | None = None,
) -> tuple[Plane, ...]:
    """vLLM's Mamba-2 state: the convolution's last inputs, and the temporal state by heads.

    Args:
        states: by layer, (conv, ssm): conv ``[blocks, rows, channels]``, or ``[blocks, channels, rows]`` with
            `dim_first`; ssm ``[blocks, heads, head_dim, state_size]``.
        group: of kind STATE.
        conv: the sub-projections by their channels, e.g. ``Part("conv_x", channels=…, units=…, axis_size=…)``, conv_b
            and conv_c: each has an axis, a shard and replicas of its own.
        dim_first: vLLM's ``is_conv_state_dim_first()``; its default is rows first.
        heads: heads held, of `num_heads`.

    Source: vllm-project/vllm 0.32.0, ``MambaStateShapeCalculator.mamba2_state_shape``, ``_orient_conv_shape`` and
    ``get_conv_state_layout`` in vllm/model_executor/layers/mamba/mamba_utils.py.
    """
    conv_axes = ("block", "channel", "row") if dim_first else ("block", "row", "channel")
    found: list[Plane] = []
    for layer, (conv_state, ssm_state) in states.items():
        found += planes_of_tensor(conv_state, conv_axes, group, layer, conv)
        by_head = Holding(units=heads, axis_size=num_heads)
        found += planes_of_tensor(ssm_state, ("block", "head", "content", "content"), group, layer, ("ssm",), by_head)
    return tuple(found)


def sglang_mha(k_buffer: Layers, v_buffer: Layers, group: Group, holding: Holding | None = None) -> tuple[Plane, ...]:
    """SGLang's attention pool: K and V apart, a row for each token slot; with its HND switch a page for each row.

    A block is a page of the group's block_tokens slots; block 0 holds SGLang's padding slots, so it is the null block.

    Args:
        k_buffer, v_buffer: by layer, ``[slots, heads, head_dim]``, or ``[pages, heads, tokens, head_dim]`` with
            ``SGLANG_USE_HND_KVCACHE``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.

    Source: sgl-project/sglang 0.5.23, ``MHATokenToKVPool._kv_buffer_shapes`` and ``_create_buffers_normal`` in
    python/sglang/srt/mem_cache/memory_pool.py. Not for its ``vectorized_5d`` layout.
    """
    found: list[Plane] = []
    keys, values = named_tensors(k_buffer), named_tensors(v_buffer)
    for layer, key in keys.items():
        if layer not in values:
            raise BadGeometry(f"layer {layer}", "it has a K buffer and no V buffer")
        for component, tensor in (("key", key), ("value", values[layer])):
            view = view_of(tensor)
            axes = ("slot", "head", "content") if len(view.shape) == 3 else ("block", "head", "token", "content")
            found += planes_of_tensor(view, axes, group, layer, (component,), holding)
    return tuple(found)


def sglang_mla(kv_buffer: Layers, group: Group, latent_dim: int, holding: Holding | None = None) -> tuple[Plane, ...]:
    """SGLang's latent pool: latent and rope side by side, a row for each token slot.

    Args:
        kv_buffer: by layer, ``[slots, 1, latent_dim + rope_dim]``.
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        latent_dim: kv_lora_rank of the model.

    Source: sgl-project/sglang 0.5.23, ``MLATokenToKVPool._create_buffers`` in
    python/sglang/srt/mem_cache/memory_pool.py.
    """
    found: list[Plane] = []
    for layer, tensor in named_tensors(kv_buffer).items():
        view = _with_axes(layer, tensor, 3)
        parts = _latent(layer, view.shape[-1], latent_dim)
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
        group, holding: see `kvferry.geometry.tensors.planes_of`.
        heads: KV heads on this rank.
        components: ``("latent",)`` and the like for a pool of one factor.

    Source: NVIDIA/TensorRT-LLM, ``WindowBlockManager::allocatePools`` in
    cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp (``{mNumPrimaryBlocks, pool.numLayers, mKVFactor, blockSize}``)
    and ``KVBlockArray::getKVLocalIdx`` in cpp/tensorrt_llm/kernels/kvCacheUtils.h (``[numHeads, tokensPerBlock,
    hiddenSizePerHead]``), 0ccf9032 (2025). Not for FP4 pools, nor for recurrent states, whose layers come first.
    """
    view = _with_axes("pool", pool, 4)
    size, cells = view.shape[3], integer("heads", heads) * group.block_tokens
    if heads < 1 or cells < 1 or size % cells:
        raise BadGeometry(
            "pool", f"blocks of {size} elements do not divide by {heads} heads of {group.block_tokens} tokens"
        )
    view = view.split(3, size // heads).split(4, size // cells)
    return planes_of_tensor(
        view, ("block", "layer", "kv", "head", "token", "content"), group, layers, components, holding
    )


def _with_axes(layer: str, tensor: Tensor, count: int) -> TensorView:
    view = view_of(tensor)
    if len(view.shape) != count:
        raise BadGeometry(f"layer {layer}", f"{count} axes are expected of {view.described}")
    return view


def _halves(layer: str, view: TensorView, width: int) -> dict[str, int]:
    if width % 2:
        raise BadGeometry(f"layer {layer}", f"K and V cannot be equal parts of the content of {view.described}")
    return {"key": width // 2, "value": width // 2}


def _latent(layer: str, width: int, latent_dim: int) -> dict[str, int]:
    if not 0 < integer("latent_dim", latent_dim) <= width:
        raise BadGeometry(f"layer {layer}", f"a latent of {latent_dim} elements in a content of {width}")
    rope_dim = width - latent_dim
    return {"latent": latent_dim, "rope": rope_dim} if rope_dim else {"latent": latent_dim}
