"""The part of the model that a rank of a vLLM engine holds."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.errors import InvalidField
from kvferry.geometry.plane import Interval, TokenShard
from kvferry.geometry.tensors import Holding
from kvferry.integrations.vllm.groups import token_shards

DRAFT_PREFIX = "draft_model."
"""vLLM's prefix of the layers of a draft model of its own."""


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
        """The rank's index in the engine: pipeline stages, in them prefill context ranks, in them tensor ranks.

        Source: vllm-project/vllm 0.32.0, ``initialize_model_parallel`` in vllm/distributed/parallel_state.py.
        """
        return (self.pp * self.pcp_size + self.pcp) * self.tp_size + self.tp

    def token_rank(self, shards: int) -> int:
        """Return the index of the rank's token shard: decode context ranks are neighbours in prefill context, then in
        tensor parallelism (same source)."""
        return (self.tp * self.pcp_size + self.pcp) % shards


def holding(spec: Any, name: str, vllm_config: Any, place: RankPlace) -> Holding:
    """Return a rank's part of a layer with vLLM's spec and name: its heads, or all heads if ranks are equal, and its
    tokens; of a state, its heads, or its channels if the state has no heads.

    Raises `InvalidField`: the spec does not say how many heads the layer has on all ranks.
    """
    if isinstance(spec, MambaSpec):
        return _of_state(spec, place)
    shards = token_shards(spec, vllm_config)
    interleave = int(vllm_config.parallel_config.cp_kv_cache_interleave_size) if shards > 1 else 1
    tokens = TokenShard(place.token_rank(shards), shards, interleave)
    per_state = Fraction(spec.tokens_per_state)
    if _is_latent(spec):
        return Holding(token_shard=tokens, tokens_per_state=per_state)
    units, axis = _heads(spec, name, vllm_config, place)
    return Holding(units=units, axis_size=axis, token_shard=tokens, tokens_per_state=per_state)


def _is_latent(spec: Any) -> bool:
    """Whether a layer has one latent for all heads, which is the same on every tensor rank."""
    return any(known.__name__ in ("MLAAttentionSpec", "SlidingWindowMLASpec") for known in type(spec).__mro__)


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
    axis = _total_of_single_heads(name, vllm_config, place.tp_size)
    head = place.tp * axis // place.tp_size
    return Interval(head, head + 1), axis


def _total_of_single_heads(name: str, vllm_config: Any, ranks: int) -> int:
    """Return the number of KV heads of a layer with one head on each rank: the number of ranks, or less."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    totals = {"target": int(vllm_config.model_config.get_total_num_kv_heads())}
    if draft is not None:
        totals["draft"] = int(draft.get_total_num_kv_heads())
    if name.startswith(DRAFT_PREFIX):
        totals.pop("target")
    possible = {total for total in totals.values() if total <= ranks and ranks % total == 0}
    if len(possible) != 1:
        expected = f"one number of KV heads that leaves one for each of {ranks} ranks"
        raise InvalidField(f"KV heads of {name}", totals, expected)
    return possible.pop()
