"""SGLang's and TensorRT-LLM's pools."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry._arguments import integer
from kvferry.errors import BadGeometry
from kvferry.geometry.formats.parts import Layers, latent_parts, with_axes
from kvferry.geometry.model import Group
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import Holding, Tensor, named_tensors, planes_of_tensor, view_of


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
        view = with_axes(layer, tensor, 3)
        parts = latent_parts(layer, view.shape[-1], latent_dim)
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
    view = with_axes("pool", pool, 4)
    size, cells = view.shape[3], integer("heads", heads) * group.block_tokens
    if heads < 1 or cells < 1 or size % cells:
        raise BadGeometry(
            "pool", f"blocks of {size} elements do not divide by {heads} heads of {group.block_tokens} tokens"
        )
    view = view.split(3, size // heads).split(4, size // cells)
    return planes_of_tensor(
        view, ("block", "layer", "kv", "head", "token", "content"), group, layers, components, holding
    )
