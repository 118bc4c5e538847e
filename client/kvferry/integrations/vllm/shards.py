"""The layers of a rank of a vLLM engine, and what it holds of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.errors import InvalidField
from kvferry.geometry.model import Group
from kvferry.geometry.plane import Interval, TokenShard
from kvferry.geometry.tensors import Holding
from kvferry.integrations.vllm.setup import BlockTable, layer_spec, token_shards

DRAFT_PREFIX = "draft_model."
"""vLLM's prefix of the layers of a draft model of its own."""

# The own attributes of a class that vLLM's `subclass_attention_backend` returns.
_OF_A_DERIVED_CLASS = {"get_builder_cls", "__module__", "__doc__", "__abstractmethods__", "_abc_impl"}


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank among the ranks of its engine, in tensor, prefill context and pipeline parallelism. Every
    data-parallel rank is an engine of its own."""

    tp: int = 0
    pcp: int = 0
    pp: int = 0
    tp_size: int = 1
    pcp_size: int = 1

    @classmethod
    def of_process(cls) -> RankPlace:
        tp, pcp, pp = get_tp_group(), get_pcp_group(), get_pp_group()
        return cls(tp.rank_in_group, pcp.rank_in_group, pp.rank_in_group, tp.world_size, pcp.world_size)

    @property
    def rank(self) -> int:
        """The rank's index in the engine: pipeline stages, in them prefill context ranks, in them tensor ranks
        (``initialize_model_parallel`` in vllm/distributed/parallel_state.py; 0.32.0)."""
        return (self.pp * self.pcp_size + self.pcp) * self.tp_size + self.tp

    def token_rank(self, shards: int) -> int:
        """Return the index of the rank's token shard: decode context ranks are neighbours in prefill context, then in
        tensor parallelism (same source)."""
        return (self.tp * self.pcp_size + self.pcp) % shards


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of one rank."""

    name: str  # vLLM's full name of the layer, the same on every rank and in both engines
    cache: torch.Tensor  # its strides say where bytes lie
    spec: Any  # vLLM's KV-cache spec, which gives the bytes their meaning, together with the backend
    group: Group
    heads: Holding  # the KV heads and tokens that the rank holds; see `holding`
    vllm_config: Any
    backend: str = ""  # module and class of the layer's attention backend (`backend_of`)

    @property
    def module(self) -> Any:
        """vLLM's module of the layer, or None."""
        return self.vllm_config.compilation_config.static_forward_context.get(self.name)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor by the layer's name, as `kvferry.geometry.formats` takes tensors."""
        return {self.name: self.cache}

    @property
    def for_all_heads(self) -> Holding:
        """The tensor's holding if it is the same on every rank."""
        return replace(self.heads, units=None, axis_size=None)


def layers_of(
    vllm_config: Any,
    kv_cache_config: Any,
    tables: Sequence[BlockTable],
    kv_caches: Mapping[str, torch.Tensor],
    place: RankPlace,
) -> list[Layer]:
    """Return the layers of a rank, ordered by group. Layers that share the cache of another are in no group; layers of
    other pipeline stages have no tensor here."""
    found: list[Layer] = []
    for table in tables:
        listed = kv_cache_config.kv_cache_groups[table.index]
        for name in listed.layer_names:
            if name in kv_caches:
                spec = layer_spec(listed, name)
                held = holding(spec, name, vllm_config, place)
                # The spec of a state is complete without a backend.
                backend = "" if isinstance(spec, MambaSpec) else backend_of(vllm_config, name)
                found.append(Layer(name, kv_caches[name], spec, table.group, held, vllm_config, backend))
    return found


def backend_of(vllm_config: Any, layer: str) -> str:
    """Return module and class of a layer's attention backend, e.g. ``vllm.v1…flash_attn.FlashAttentionBackend``; the
    base class of those that vLLM derives to build other metadata, and which write the same bytes. Raises
    `InvalidField`: vLLM knows no backend of this layer."""
    module = vllm_config.compilation_config.static_forward_context.get(layer)
    if not hasattr(module, "get_attn_backend"):
        raise InvalidField(f"layer {layer}", type(module).__name__, "a layer of vLLM with an attention backend")
    backend: type = module.get_attn_backend()
    while set(vars(backend)) <= _OF_A_DERIVED_CLASS:
        backend = backend.__bases__[0]
    return f"{backend.__module__}.{backend.__qualname__}"


def holding(spec: Any, name: str, vllm_config: Any, place: RankPlace) -> Holding:
    """Return a rank's part of a layer with vLLM's spec and name: its heads, or all heads if ranks are equal, and its
    tokens; of a state, its heads, or its channels if the state has no heads. Raises `InvalidField`: the spec does not
    say how many heads the layer has on all ranks."""
    if isinstance(spec, MambaSpec):
        return _of_state(spec, place)
    shards = token_shards(spec, vllm_config)
    interleave = int(vllm_config.parallel_config.cp_kv_cache_interleave_size) if shards > 1 else 1
    tokens = TokenShard(place.token_rank(shards), shards, interleave)
    per_state = Fraction(spec.tokens_per_state)
    # One latent for all heads is the same on every tensor rank.
    if any(known.__name__ in ("MLAAttentionSpec", "SlidingWindowMLASpec") for known in type(spec).__mro__):
        return Holding(token_shard=tokens, tokens_per_state=per_state)
    units, axis = _heads(spec, name, vllm_config, place)
    return Holding(units=units, axis_size=axis, token_shard=tokens, tokens_per_state=per_state)


def _of_state(spec: Any, place: RankPlace) -> Holding:
    size = int(spec.shapes[-1][0])
    if len(spec.shapes) == 1 and len(spec.shapes[0]) == 2:
        # A convolution alone: rows and channels, in an order that the platform chooses.
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        size = int(spec.shapes[0][0 if is_conv_state_dim_first() else 1])
    if getattr(spec, "tp_replicated", False):
        return Holding(units=Interval(0, size), axis_size=size)
    return Holding(units=Interval(place.tp * size, (place.tp + 1) * size), axis_size=place.tp_size * size)


def _heads(spec: Any, name: str, vllm_config: Any, place: RankPlace) -> tuple[Interval, int]:
    """Return the KV heads of a rank, and the number of KV heads of the model. With fewer heads than ranks, several
    ranks hold the same head.

    Source: vllm-project/vllm 0.32.0, ``ModelConfig.get_num_kv_heads`` in vllm/config/model.py, and
    ``QKVParallelLinear`` in vllm/model_executor/layers/linear.py: ``tp_rank // num_kv_head_replicas``.
    """
    held = int(spec.num_kv_heads)
    if held > 1 or place.tp_size == 1:
        return Interval(place.tp * held, (place.tp + 1) * held), place.tp_size * held
    # One head on each rank, of as many as there are ranks, or less.
    ranks = place.tp_size
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    totals = {"target": int(vllm_config.model_config.get_total_num_kv_heads())}
    if draft is not None:
        totals["draft"] = int(draft.get_total_num_kv_heads())
    if name.startswith(DRAFT_PREFIX):
        totals.pop("target")
    possible = {total for total in totals.values() if total <= ranks and ranks % total == 0}
    if len(possible) != 1:
        expected = f"one number of KV heads that leaves one for each of {ranks} ranks"
        raise InvalidField(f"KV heads of {name}", totals, expected)
    axis = possible.pop()
    head = place.tp * axis // ranks
    return Interval(head, head + 1), axis
