"""vLLM's own ways to write a layer's cache, found on the layer's module.

Source: vllm-project/vllm 0.32.0, ``unified_kv_cache_update`` in vllm/model_executor/layers/attention/attention.py,
``MLAAttention.update_kv_cache`` in mla_attention.py beside it, ``sparse_attn_indexer`` in
vllm/model_executor/layers/sparse_attn_indexer.py, ``MambaBase.bind_kv_cache`` in
vllm/model_executor/layers/mamba/abstract.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform

Inputs = Mapping[str, torch.Tensor]
"""By name, ``[tokens, heads, width]``."""

_INDEXER_GROUP = 128
"""Values of an indexer's key that share a scale: ``Indexer.quant_block_size`` in deepseek_v2.py."""


@dataclass(frozen=True, slots=True)
class TokenPath:
    """A write path that takes tokens and their slots.

    Attributes:
        name: the backend and the function, for people.
        cache: the tensor that vLLM writes into; the first axis counts kernel blocks.
        page_tokens: tokens of a kernel block.
        shapes: (heads, width) of each input, by its name.
        dtype: element type of the inputs.
        write: writes inputs into slots, ``int64 [tokens]``.
    """

    name: str
    cache: torch.Tensor
    page_tokens: int
    shapes: Mapping[str, tuple[int, int]]
    dtype: torch.dtype
    write: Callable[[Inputs, torch.Tensor], None]

    @property
    def copies(self) -> bool:
        """Whether vLLM stores the elements of its inputs as they are."""
        return self.cache.dtype == self.dtype


@dataclass(frozen=True, slots=True)
class StatePath:
    """The views by which vLLM's kernels write a recurrent state: they take whole tensors, there is no write function.

    Attributes:
        name: the class of the layer, for people.
        states: a tensor for each part of the state; the first axis counts blocks.
    """

    name: str
    states: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class NoPath:
    """There is no write path that could be called on its own.

    Attributes:
        name: the class of the layer, for people.
        reason: why.
    """

    name: str
    reason: str


def write_path(module: Any, dtype: torch.dtype) -> TokenPath | StatePath | NoPath:
    """Return how vLLM writes the cache of a layer.

    Args:
        module: the layer, from vLLM's ``static_forward_context``; None if there is none of that name.
        dtype: the model's element type.
    """
    name = type(module).__name__
    if module is None:
        return NoPath("no module", "vLLM has no layer of that name")
    if isinstance(module, MambaBase):
        if not isinstance(module.kv_cache, tuple):
            return NoPath(name, "its state is not bound")
        return StatePath(name, module.kv_cache)
    if not isinstance(module.kv_cache, torch.Tensor) or module.kv_cache.numel() == 0:
        return NoPath(name, "its cache is not bound")
    # By name: importing the model's module would import all of its kernels.
    if "DeepseekV32IndexerCache" in [found.__name__ for found in type(module).__mro__]:
        return _indexer(module, dtype)
    shared = getattr(module, "kv_sharing_target_layer_name", None)
    if shared is not None:
        return NoPath(name, f"it reads what {shared} writes")
    update = getattr(getattr(module, "impl", None), "do_kv_cache_update", None)
    if update is None:
        return NoPath(name, "its backend writes the cache inside attention")
    if isinstance(module, Attention):
        return _attention(module, update, dtype)
    if isinstance(module, MLAAttention):
        return _latent(module, update, dtype)
    return NoPath(name, "the arguments of its write function are not known")


def _attention(module: Any, update: Any, dtype: torch.dtype) -> TokenPath | NoPath:
    def write(inputs: Inputs, slots: torch.Tensor) -> None:
        update(module, inputs["key"], inputs["value"], module.kv_cache, slots)

    backend = module.attn_backend.get_name()
    if module.kv_cache.dim() != 4:
        return NoPath(backend, f"its cache has the shape {tuple(module.kv_cache.shape)}")
    shapes = {"key": (module.num_kv_heads, module.head_size), "value": (module.num_kv_heads, module.head_size_v)}
    return TokenPath(backend, module.kv_cache, module.kv_cache.shape[2], shapes, dtype, write)


def _latent(module: Any, update: Any, dtype: torch.dtype) -> TokenPath | NoPath:
    def write(inputs: Inputs, slots: torch.Tensor) -> None:
        latent, rope = inputs["latent"][:, 0], inputs["rope"]
        update(latent, rope, module.kv_cache, slots, module.kv_cache_dtype, module._k_scale)

    backend = module.attn_backend.get_name()
    if getattr(module, "hisparse_cache", None) is not None:
        return NoPath(backend, "HiSparse keeps its cache elsewhere")
    if module.kv_cache.dim() != 3:
        return NoPath(backend, f"its cache has the shape {tuple(module.kv_cache.shape)}")
    shapes = {"latent": (1, module.kv_lora_rank), "rope": (1, module.qk_rope_head_dim)}
    return TokenPath(backend, module.kv_cache, module.kv_cache.shape[1], shapes, dtype, write)


def _indexer(module: Any, dtype: torch.dtype) -> TokenPath | NoPath:
    """CUDA's operation. It has not been run by the authors of this file, who had no GPU."""
    name = type(module).__name__
    shuffled = getattr(module, "uses_shuffled_layout", False)
    if shuffled or not current_platform.is_cuda() or module.kv_cache.dtype is not torch.uint8:
        return NoPath(name, "its write operation is known on CUDA, for a cache of bytes, only")
    # A key of whole groups, and a float32 for each.
    groups, rest = divmod(module.kv_cache.shape[-1], _INDEXER_GROUP + 4)
    if rest:
        return NoPath(name, f"{module.kv_cache.shape[-1]} bytes of a token are no keys with scales")

    def write(inputs: Inputs, slots: torch.Tensor) -> None:
        from vllm import _custom_ops as ops

        ops.indexer_k_quant_and_cache(inputs["index"][:, 0], module.kv_cache, slots, _INDEXER_GROUP, "ue8m0")

    shapes = {"index": (1, groups * _INDEXER_GROUP)}
    return TokenPath(name, module.kv_cache, module.kv_cache.shape[1], shapes, dtype, write)
