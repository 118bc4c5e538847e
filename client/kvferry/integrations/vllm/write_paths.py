"""Finds vLLM's own functions that write a layer's cache, on the layer's module.

Source: vllm-project/vllm 0.32.0, ``unified_kv_cache_update`` in vllm/model_executor/layers/attention/attention.py,
``MLAAttention.update_kv_cache`` in mla_attention.py beside it, ``sparse_attn_indexer`` in
vllm/model_executor/layers/sparse_attn_indexer.py, ``MambaBase.bind_kv_cache`` in
vllm/model_executor/layers/mamba/abstract.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec

from kvferry.geometry.plane import Plane
from kvferry.integrations.vllm.layouts import Layer
from kvferry.testing.layout import Tokens, WriteTokens

_INDEXER_GROUP = 128
"""Values of an indexer's key that share a scale: ``Indexer.quant_block_size`` in deepseek_v2.py."""


class WritePath(NamedTuple):
    """vLLM's way to write the cache of a layer.

    Attributes:
        name: the backend, or the class of the layer, for people.
        reason: why there is no function that could be called on its own; empty: there is one.
        write, token: see `check_layout`; `token` has zeros.
        states: the views by which vLLM's kernels write a recurrent state: the kernels take whole tensors, and there is
            no write function.
    """

    name: str
    reason: str = ""
    write: WriteTokens | None = None
    token: Tokens | None = None
    states: tuple[torch.Tensor, ...] = ()


def write_path(layer: Layer, planes: Sequence[Plane]) -> WritePath:
    """Return vLLM's way to write the cache of a layer with these planes."""
    module = layer.module
    name = type(module).__name__
    if module is None:
        return WritePath("no module", "vLLM has no layer of that name")
    cache = module.kv_cache
    if isinstance(module, MambaBase):
        return WritePath(name, states=cache) if isinstance(cache, tuple) else WritePath(name, "its state is not bound")
    if not isinstance(cache, torch.Tensor) or cache.numel() == 0:
        return WritePath(name, "its cache is not bound")
    # By name: importing the model's module would import all of its kernels.
    if "DeepseekV32IndexerCache" in [found.__name__ for found in type(module).__mro__]:
        return _fitting(_indexer(module), layer, planes, cache.shape[1])
    shared = getattr(module, "kv_sharing_target_layer_name", None)
    if shared is not None:
        return WritePath(name, f"it reads what {shared} writes")
    update = getattr(getattr(module, "impl", None), "do_kv_cache_update", None)
    if update is None:
        return WritePath(name, "its backend writes the cache inside attention")
    for kind, dimensions, path in ((Attention, 4, _attention), (MLAAttention, 3, _latent)):
        if isinstance(module, kind):
            if cache.dim() != dimensions:
                return WritePath(module.attn_backend.get_name(), f"its cache has the shape {tuple(cache.shape)}")
            return _fitting(path(module, update), layer, planes, cache.shape[dimensions - 2])
    return WritePath(name, "the arguments of its write function are not known")


def _fitting(path: WritePath, layer: Layer, planes: Sequence[Plane], page_tokens: int) -> WritePath:
    """Add the layer's own tensors of a token to a path, if its slots are the tokens of vLLM's blocks."""
    if path.reason:
        return path
    if not isinstance(layer.spec, AttentionSpec) or any(plane.tokens_per_state != 1 for plane in planes):
        return WritePath(path.name, "a state is not one token")
    held = layer.module.kv_cache.shape[0] * page_tokens
    tokens = layer.spec.block_size
    if tokens % page_tokens or held < layer.group.num_blocks * tokens:
        return WritePath(path.name, f"kernel blocks of {page_tokens} tokens do not make blocks of {tokens}")
    dtype, device = layer.vllm_config.model_config.dtype, layer.cache.device
    return path._replace(token={name: zeros.to(device, dtype) for name, zeros in (path.token or {}).items()})


def _attention(module: Any, update: Any) -> WritePath:
    def write(inputs: Tokens, slots: torch.Tensor) -> None:
        update(module, inputs["key"], inputs["value"], module.kv_cache, slots)

    widths = {"key": module.head_size, "value": module.head_size_v}
    token = {name: torch.zeros(module.num_kv_heads, width) for name, width in widths.items()}
    return WritePath(module.attn_backend.get_name(), write=write, token=token)


def _latent(module: Any, update: Any) -> WritePath:
    def write(inputs: Tokens, slots: torch.Tensor) -> None:
        latent, rope = inputs["latent"][:, 0], inputs["rope"]
        update(latent, rope, module.kv_cache, slots, module.kv_cache_dtype, module._k_scale)

    backend = module.attn_backend.get_name()
    if getattr(module, "hisparse_cache", None) is not None:
        return WritePath(backend, "HiSparse keeps its cache elsewhere")
    widths = {"latent": module.kv_lora_rank, "rope": module.qk_rope_head_dim}
    return WritePath(backend, write=write, token={name: torch.zeros(1, width) for name, width in widths.items()})


def _indexer(module: Any) -> WritePath:
    """Return the path of CUDA's operation, which has never been run: there was no GPU."""
    name = type(module).__name__
    shuffled = getattr(module, "uses_shuffled_layout", False)
    if shuffled or not current_platform.is_cuda() or module.kv_cache.dtype is not torch.uint8:
        return WritePath(name, "its write operation is known on CUDA, for a cache of bytes, only")
    # A key of whole groups, and a float32 for each group.
    groups, rest = divmod(module.kv_cache.shape[-1], _INDEXER_GROUP + 4)
    if rest:
        return WritePath(name, f"{module.kv_cache.shape[-1]} bytes of a token are no keys with scales")

    def write(inputs: Tokens, slots: torch.Tensor) -> None:
        from vllm import _custom_ops as ops

        ops.indexer_k_quant_and_cache(inputs["index"][:, 0], module.kv_cache, slots, _INDEXER_GROUP, "ue8m0")

    return WritePath(name, write=write, token={"index": torch.zeros(1, groups * _INDEXER_GROUP)})
