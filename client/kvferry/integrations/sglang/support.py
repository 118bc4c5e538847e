"""Refuses unsupported settings before an engine serves; and the identity of a cache's contents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.errors import InvalidField
from kvferry.integrations.identity import cache_identity

STATES = ("swa",)
"""Supported states that SGLang keeps beside the KV cache and hands over, by `StateType`'s values."""


def check_supported(kv_args: Any, parallel: Any, disagg: Any, memory: Any, draft_pool: Any) -> None:
    """Raise `InvalidField`, which names SGLang's setting, for unsupported settings. `kv_args` are SGLang's arguments of
    the manager; `draft_pool` is None without a draft model."""
    for name, found in (
        ("pp_size", parallel.pp_size),
        ("dp_size", parallel.dp_size),
        ("attn_cp_size", parallel.attn_cp_size),
        ("attn_dcp_size", parallel.attn_dcp_size),
        ("attn_dp_size", parallel.attn_dp_size),
    ):
        if found > 1:
            raise InvalidField(name, found, "1: other ways to divide an engine than tensor parallelism are not built")
    for name, given in (
        ("enable_kv_cache_sharding", parallel.enable_kv_cache_sharding),
        ("enable_unified_memory", memory.enable_unified_memory),
        ("disaggregation_enable_kv_checksum", disagg.disaggregation_enable_kv_checksum),
        ("enable_pd_role_switch", disagg.enable_pd_role_switch),
    ):
        if given:
            raise InvalidField(name, given, "False")
    if draft_pool is not None:
        raise InvalidField("draft model", type(draft_pool).__name__, "none: its cache is not handed over")
    states = [state.value for state in kv_args.state_types if state.value not in STATES]
    if states:
        raise InvalidField("state beside the KV cache", states, f"one of {STATES}")


def identity(model: Any, config: Mapping[str, object], kv_cache_dtype: str) -> dict[str, str]:
    """Return the identity of the cache's contents; see `cache_identity`.

    Args:
        model: SGLang's configuration of the model.
        config: the model's own configuration, as transformers reads it: SGLang adds to its copy.
        kv_cache_dtype: SGLang's ``--kv-cache-dtype``.
    """
    return cache_identity(
        model.model_path,
        model.revision,
        config,
        dtype=model.dtype,
        cache_dtype=kv_cache_dtype,
        quantization=model.quantization,
    )
