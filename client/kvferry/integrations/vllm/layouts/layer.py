"""One layer of a vLLM engine, as the functions of this package take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.geometry.model import Group
from kvferry.geometry.tensors import Holding, Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of one rank.

    Attributes:
        name: vLLM's full name of the layer, the same on every rank and in both engines.
        cache: the tensor that vLLM handed over for it: its strides say where bytes lie.
        spec: vLLM's KV-cache spec of this layer: it says what the bytes mean.
        group: the group that the layer belongs to.
        heads: the KV heads, and the tokens, that the rank holds of the model; see `shards.holding`.
        vllm_config: the engine's configuration.
    """

    name: str
    cache: Tensor
    spec: Any
    group: Group
    heads: Holding
    vllm_config: Any
