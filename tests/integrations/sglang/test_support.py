"""The backend refuses unsupported settings before it serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.errors import InvalidField
from kvferry.integrations.sglang.settings import check_supported


def checked(draft: object = None, states: tuple[str, ...] = (), **changed: Any) -> None:
    parallel = SimpleNamespace(
        pp_size=1,
        dp_size=1,
        attn_cp_size=1,
        attn_dcp_size=1,
        attn_dp_size=1,
        enable_kv_cache_sharding=False,
    )
    disagg = SimpleNamespace(disaggregation_enable_kv_checksum=False, enable_pd_role_switch=False)
    memory = SimpleNamespace(enable_unified_memory=False)
    features = SimpleNamespace(enable_memory_saver=False)
    for name, value in changed.items():
        owner = next(each for each in (parallel, disagg, memory, features) if hasattr(each, name))
        setattr(owner, name, value)
    kv_args = SimpleNamespace(state_types=[SimpleNamespace(value=state) for state in states])
    check_supported(kv_args, parallel, disagg, memory, features, draft)


def test_tensor_parallel_instances_are_served_with_and_without_windows() -> None:
    checked()
    checked(states=("swa",))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"pp_size": 2}, "pp_size"),
        ({"dp_size": 2}, "dp_size"),
        ({"attn_cp_size": 2}, "attn_cp_size"),
        ({"attn_dcp_size": 2}, "attn_dcp_size"),
        ({"enable_kv_cache_sharding": True}, "enable_kv_cache_sharding"),
        ({"enable_unified_memory": True}, "enable_unified_memory"),
        ({"enable_memory_saver": True}, "enable_memory_saver"),
        ({"disaggregation_enable_kv_checksum": True}, "disaggregation_enable_kv_checksum"),
        ({"enable_pd_role_switch": True}, "enable_pd_role_switch"),
        ({"draft": object()}, "draft model"),
        ({"states": ("mamba",)}, "state beside the KV cache"),
    ],
)
def test_unsupported_settings_are_refused_by_name(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        checked(**changed)
    assert refused.value.values["field"] == field
