"""TensorRT-LLM's pools."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry._arguments import integer
from kvferry.errors import BadGeometry
from kvferry.geometry.formats.parts import with_axes
from kvferry.geometry.model import Group
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import Holding, Tensor, planes_of_tensor


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
