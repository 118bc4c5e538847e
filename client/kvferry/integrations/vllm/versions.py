"""What vLLM 0.30 and 0.31 do not have of what the connector asks vLLM 0.32 for, and what holds in its place."""

from __future__ import annotations

from typing import Any

from vllm.version import __version__

# A build of vLLM's sources calls itself 0.1.dev1 where git's tags are not at hand, and "dev" without git.
UNPROVEN_STATES = frozenset({"GDN_ATTN"}) if __version__.startswith("0.30.") else frozenset()
"""States that are refused. With vLLM 0.30, decode says other tokens than one engine after reads of one or two tokens of
a gated delta net, and one engine says others if it computes a prompt of 3 tokens in two chunks. Why is not known."""

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:
    # vLLM 0.31 and older do not ask where a hit of the cache comes from.
    HIT_SOURCE = None
else:
    HIT_SOURCE = CacheHitSource.P2P


def lookahead_tokens(vllm_config: Any) -> int:
    """Return how many tokens ahead the drafter reads in prefill. vLLM 0.30 has no drafters of several modules."""
    return int(getattr(vllm_config, "num_prefill_lookahead_tokens", 1))


def is_divided_by_tokens(spec: Any) -> bool:
    """Return whether decode context parallelism divides the tokens of a layer. In vLLM 0.30 it divides all."""
    return bool(getattr(spec, "dcp_sharded", True))


def returns_routed_experts(vllm_config: Any) -> bool:
    """Return whether answers say which experts computed each token. Older versions of vLLM have this at the model."""
    where = getattr(vllm_config, "aux_output_config", None) or vllm_config.model_config
    return bool(getattr(where, "enable_return_routed_experts", False))
