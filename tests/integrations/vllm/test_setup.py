"""What an operator writes into ``kv_connector_extra_config``: wrong values are refused when vLLM starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvferry.errors import InvalidField
from kvferry.integrations.identity import cache_identity
from kvferry.integrations.vllm.setup import Setup


@pytest.mark.parametrize(
    ("field", "value"),
    [
        # As a sequence of patterns, this string has "*" in it: every home would be allowed.
        ("allowed_homes", "10.0.*"),
        ("allowed_homes", [10]),
        ("read_timeout", "soon"),
        ("read_timeout", 0),
        ("read_timeout", None),
        ("role", "reader"),
    ],
)
def test_wrong_settings_are_refused_by_name(field: str, value: Any) -> None:
    transfer = KVTransferConfig(
        kv_connector="KvferryConnector",
        kv_connector_module_path="kvferry.integrations.vllm",
        kv_role="kv_consumer",
        kv_connector_extra_config={"address": "127.0.0.1:1", field: value},
    )
    caches = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    with pytest.raises(InvalidField) as refused:
        Setup.of(VllmConfig(kv_transfer_config=transfer), caches)
    assert refused.value.values["field"].partition(".")[0] == field


def test_identity_is_equal_while_sides_are_upgraded_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers writes its own version into every configuration."""

    def identity(**settings: Any) -> dict[str, str]:
        model = SimpleNamespace(revision=None, dtype="torch.bfloat16", quantization=None)
        return cache_identity("/models/small", model, transformers.Qwen3Config(**settings).to_dict(), "auto")

    before = identity()
    monkeypatch.setattr(transformers.configuration_utils, "__version__", "99.0")
    assert identity() == before
    assert identity(rope_parameters={"rope_type": "default", "rope_theta": 5.0}) != before
