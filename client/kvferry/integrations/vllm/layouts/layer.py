"""One layer of a vLLM engine, as the functions of this package take it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from kvferry.errors import InvalidField
from kvferry.geometry.model import Group
from kvferry.geometry.tensors import Holding

# What a class that `subclass_attention_backend` of vLLM returns has of its own.
_OF_A_DERIVED_CLASS = {"get_builder_cls", "__module__", "__doc__", "__abstractmethods__", "_abc_impl"}


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of one rank.

    Attributes:
        name: vLLM's full name of the layer, the same on every rank and in both engines.
        cache: the tensor that vLLM handed over for it: its strides say where bytes lie.
        spec: vLLM's KV-cache spec of this layer: it says, with the backend, what the bytes mean.
        group: the group that the layer belongs to.
        heads: the KV heads, and the tokens, that the rank holds of the model; see `shards.holding`.
        vllm_config: the engine's configuration.
        backend: module and class of the layer's attention backend (`backend_of`).
    """

    name: str
    cache: torch.Tensor
    spec: Any
    group: Group
    heads: Holding
    vllm_config: Any
    backend: str = ""

    @property
    def module(self) -> Any:
        """vLLM's module of the layer; None if it has none."""
        return self.vllm_config.compilation_config.static_forward_context.get(self.name)

    @property
    def by_head(self) -> Holding:
        """What the tensor holds if each head is a unit."""
        return replace(self.heads, tokens_per_state=Fraction(self.spec.tokens_per_state))

    @property
    def for_all_heads(self) -> Holding:
        """What the tensor holds if it is the same on every rank."""
        return replace(self.by_head, units=None, axis_size=None)


def backend_of(vllm_config: Any, layer: str) -> str:
    """Return module and class of a layer's attention backend, e.g. ``vllm.v1…flash_attn.FlashAttentionBackend``.

    vLLM derives classes from its backends that differ in how they build metadata, not in what they write; for these the
    class that they are derived from is returned.

    Raises:
        InvalidField: vLLM knows no backend of this layer.
    """
    module = vllm_config.compilation_config.static_forward_context.get(layer)
    if not hasattr(module, "get_attn_backend"):
        raise InvalidField(f"layer {layer}", type(module).__name__, "a layer of vLLM with an attention backend")
    backend: type = module.get_attn_backend()
    while set(vars(backend)) <= _OF_A_DERIVED_CLASS:
        backend = backend.__bases__[0]
    return f"{backend.__module__}.{backend.__qualname__}"
