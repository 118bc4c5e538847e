"""Replacements for features of vLLM 0.32 that vLLM 0.30 and 0.31 lack."""

from __future__ import annotations

from typing import Any

from vllm.version import __version__

# A build of vLLM's sources has the version 0.1.dev1 without git's tags, and "dev" without git.
UNPROVEN_STATES = frozenset({"GDN_ATTN"}) if __version__.startswith("0.30.") else frozenset()
"""Refused states. With vLLM 0.30, decode generates other tokens than one engine after reads of one or two tokens of a
gated delta net, and so does one engine that computes a prompt of 3 tokens in two chunks. The cause is unknown."""

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ModuleNotFoundError:
    # vLLM 0.31 and older do not record the source of a cache hit.
    HIT_SOURCE = None
else:
    HIT_SOURCE = CacheHitSource.P2P


def lookahead_tokens(vllm_config: Any) -> int:
    """Return the number of tokens that the drafter reads ahead in prefill. vLLM 0.30 has no drafters of several
    modules."""
    return int(getattr(vllm_config, "num_prefill_lookahead_tokens", 1))


def is_divided_by_tokens(spec: Any) -> bool:
    """Return whether decode context parallelism divides the tokens of a layer; of all layers in vLLM 0.30."""
    return bool(getattr(spec, "dcp_sharded", True))


def returns_routed_experts(vllm_config: Any) -> bool:
    """Return whether answers name the experts of each token. Older versions of vLLM have this setting at the model."""
    where = getattr(vllm_config, "aux_output_config", None) or vllm_config.model_config
    return bool(getattr(where, "enable_return_routed_experts", False))
