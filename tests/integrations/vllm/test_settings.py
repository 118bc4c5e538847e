"""What an operator writes into ``kv_connector_extra_config``: all that a client can do, and each key checked."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import AuxOutputConfig, KVTransferConfig, VllmConfig

from kvferry.errors import InvalidField
from kvferry.integrations.vllm.connector import KvferryConnector
from kvferry.integrations.vllm.settings import OF_NIXL_CONNECTOR, ConnectorSettings, check_supported
from tests.support.certificates import Authority
from tests.support.repository import ROOT

ADDRESS = {"address": "127.0.0.1:1"}


def test_options_of_a_client_can_all_be_set(tmp_path: Path) -> None:
    tls = Authority.make(tmp_path, "authority").issue("engine")
    settings = ConnectorSettings.of(
        {
            **ADDRESS,
            "allowed_homes": ["10.0.*"],
            "read_timeout": 30,
            "start_timeout": 5.5,
            "tls": {"ca": str(tls.ca), "cert": str(tls.cert), "key": str(tls.key)},
            "nixl": {"reading_agents": 2, "chunk_bytes": 1 << 20, "ucx_tls": "tcp"},
            "staging": {"path": "staged", "slots": 3, "costs": {"descriptor": 1e-6}},
            "integrity": {"mode": "sampled", "rate": 0.5},
            "prompt_check": "require",
            "optimistic": False,
        }
    )
    assert settings.tls == tls
    assert (settings.nixl.reading_agents, settings.nixl.ucx_tls) == (2, "tcp")
    assert settings.staging.costs is not None
    assert (settings.staging.path, settings.staging.costs.descriptor) == ("staged", 1e-6)
    assert (settings.integrity.share, settings.prompt_check, settings.optimistic) == (0.5, "require", False)
    assert (settings.allowed_homes, settings.read_timeout) == (("10.0.*",), 30.0)
    settings.client().close()


@pytest.mark.parametrize(
    ("extra", "field", "said"),
    [
        ({"adress": "a:1"}, "adress", "'address'"),
        ({"nixl": {"ucx_tsl": "tcp"}}, "nixl.ucx_tsl", "'ucx_tls'"),
        ({"staging": {"costs": {"bite": 1}}}, "staging.costs.bite", "'byte'"),
        ({"zzz": 1}, "zzz", "allowed_homes"),
        # JSON has no such keys, but vLLM's Python interface takes them.
        ({5: 1}, "5", "allowed_homes"),
        ({"tls": {5: "x"}}, "tls.5", "ca, cert, key"),
        # Of vLLM's NixlConnector: what kvferry has instead.
        ({"kv_lease_duration": 30}, "kv_lease_duration", "--ttl"),
        ({"nixl": {"reading_agents": 0}}, "nixl.reading_agents", "at least 1"),
        ({"nixl": {"reading_agents": "two"}}, "nixl.reading_agents", "a valid integer"),
        ({"nixl": "UCX"}, "nixl", "an object"),
        ({"staging": {"path": "fast"}}, "staging.path", "'auto', 'direct' or 'staged'"),
        ({"staging": {"costs": {"byte": "cheap"}}}, "staging.costs.byte", "a valid number"),
        ({"integrity": {"mode": True}}, "integrity.mode", "'off', 'sampled' or 'full'"),
        ({"prompt_check": "on"}, "prompt_check", "'require', 'compare' or 'off'"),
        ({"tls": {"cert": "/c.pem"}}, "tls.tls_key", "a file"),
        ({"tls": {"ca": 1}}, "tls.ca", "a valid string"),
        ({"role": "kv_both"}, "role", "'prefill', 'decode' or 'both'"),
        ({"role": 1}, "role", "'prefill', 'decode' or 'both'"),
        ({"start_timeout": 0}, "start_timeout", "greater than 0"),
        ({"read_timeout": float("inf")}, "read_timeout", "less than"),
        ({"read_timeout": "soon"}, "read_timeout", "a valid number"),
        ({"prefix_share": 1.5}, "prefix_share", "less than"),
        ({"prefix_share": True}, "prefix_share", "a valid number"),
        ({"prefix_wait": 0}, "prefix_wait", "greater than"),
        ({"traces": "no"}, "traces", "a valid boolean"),
        ({"home_in_references": "no"}, "home_in_references", "a valid boolean"),
        ({"allowed_homes": "10.0.*"}, "allowed_homes", "a valid array"),
        ({"directory": 5}, "directory", ""),
        ({"prompt_check": "never"}, "prompt_check", "'require', 'compare' or 'off'"),
        ({"address": "http://host:1"}, "address", ""),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(extra: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InvalidField) as refused:
        ConnectorSettings.of({**ADDRESS, **extra}).client()
    assert refused.value.values["field"] == field
    assert said in refused.value.values["expected"]


@pytest.mark.parametrize("field", ["ca", "cert", "key"])
def test_a_key_in_place_of_its_files_name_is_refused_and_not_shown(field: str) -> None:
    files = {"ca": "/ca.pem", "cert": "/c.pem", "key": "/k.pem"}
    text = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"
    with pytest.raises(InvalidField, match="not what is in it") as refused:
        ConnectorSettings.of({**ADDRESS, "tls": {**files, field: text}})
    assert "c2VjcmV0" not in f"{refused.value} {refused.value.values}"


def test_the_address_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFERRY_ADDRESS", raising=False)
    with pytest.raises(InvalidField, match="KVFERRY_ADDRESS"):
        ConnectorSettings.of({})
    monkeypatch.setenv("KVFERRY_ADDRESS", "unix:/run/kvferry/node.sock")
    assert ConnectorSettings.of({}).address == "unix:/run/kvferry/node.sock"
    # One engine's own setting comes first.
    assert ConnectorSettings.of(ADDRESS).address == ADDRESS["address"]


@pytest.mark.parametrize(
    ("kv_role", "role", "expected"),
    [
        ("kv_producer", None, "prefill"),
        ("kv_consumer", None, "decode"),
        ("kv_both", None, "both"),
        # Where vLLM has no kv_both any more.
        ("kv_consumer", "both", "both"),
        ("kv_consumer", "prefill", "prefill"),
        ("kv_both", "prefill", "prefill"),
        ("kv_both", "decode", "decode"),
        ("kv_producer", "prefill", "prefill"),
    ],
)
def test_the_role_is_that_of_vllm_unless_it_is_set(kv_role: str, role: str | None, expected: str) -> None:
    assert ConnectorSettings.of({**ADDRESS, "role": role}).role_of(kv_role) == expected


@pytest.mark.parametrize("role", ["decode", "both"])
def test_an_engine_that_vllm_takes_for_a_producer_alone_may_not_read(role: str) -> None:
    """vLLM keeps freed blocks back for consumers alone: a step under way would overwrite what was read into them."""
    with pytest.raises(InvalidField, match="kv_producer") as refused:
        ConnectorSettings.of({**ADDRESS, "role": role}).role_of("kv_producer")
    assert refused.value.values["field"] == "role"


def model(**fields: Any) -> SimpleNamespace:
    """The part of vLLM's ModelConfig that is asked for, which needs no model's files."""
    given = {"runner_type": "generate", "is_encoder_decoder": False, "enable_sleep_mode": False, "model": "m", **fields}
    return SimpleNamespace(**given)


@pytest.mark.parametrize(
    ("fields", "device", "buffer", "field", "said"),
    [
        ({"runner_type": "pooling"}, "cpu", "cpu", "runner", "embeddings"),
        ({"is_encoder_decoder": True}, "cpu", "cpu", "model", "cross-attention"),
        ({"enable_sleep_mode": True}, "cuda", "cuda", "enable_sleep_mode", "unmaps"),
        ({}, "cuda", "cpu", "kv_buffer_device", "no copy is made"),
    ],
)
def test_unsupported_settings_are_refused_with_the_reason(
    fields: dict[str, Any], device: str, buffer: str, field: str, said: str
) -> None:
    transfer = KVTransferConfig(kv_connector="KvferryConnector", kv_role="kv_both", kv_buffer_device=buffer)
    config = SimpleNamespace(
        kv_transfer_config=transfer, model_config=model(**fields), aux_output_config=AuxOutputConfig()
    )
    with pytest.raises(InvalidField) as refused:
        check_supported(config, device)
    assert refused.value.values["field"] == field
    assert said in refused.value.values["expected"]
    assert not KvferryConnector.supports_sleep_mode(transfer)
    fine = KVTransferConfig(kv_connector="KvferryConnector", kv_role="kv_both", kv_buffer_device=device)
    config.kv_transfer_config, config.model_config = fine, model()
    check_supported(config, device)


def test_a_version_of_vllm_that_is_too_old_is_refused_by_name() -> None:
    with pytest.raises(InvalidField, match=r"version of vLLM is .* 0\.31\.0 or newer"):
        check_supported(SimpleNamespace(), "cpu")


def test_routed_experts_are_refused_by_name() -> None:
    """vLLM refuses them for the connectors whose names it knows: decode has not computed the prompt."""
    transfer = KVTransferConfig(kv_connector="KvferryConnector", kv_role="kv_both", kv_connector_extra_config=ADDRESS)
    config = VllmConfig(kv_transfer_config=transfer)
    config.aux_output_config.enable_return_routed_experts = True
    with pytest.raises(InvalidField, match="not published") as refused:
        check_supported(config, transfer.kv_buffer_device)
    assert refused.value.values["field"] == "enable_return_routed_experts"


def table(heading: str) -> dict[str, str]:
    """The rows of the first table behind a heading of docs/vllm.md, by the name in their first column."""
    behind = (ROOT / "docs" / "vllm.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([\w.]+)`[^|]*\|(.*)\|$", behind, re.MULTILINE))


def test_the_guide_lists_every_setting_with_its_default() -> None:
    listed = table("Settings")
    settings = ConnectorSettings.of(ADDRESS)
    expected = {each.name: getattr(settings, each.name) for each in dataclasses.fields(ConnectorSettings)}
    # It has none.
    expected["address"] = None
    assert set(listed) == set(expected)
    for name, value in expected.items():
        said = listed[name].split("|")[0].strip()
        if isinstance(value, bool):
            # Settings are JSON.
            value = json.dumps(value)
        # The fields of an object are described with its class.
        assert said == ("–" if value in (None, "", ()) or dataclasses.is_dataclass(value) else f"`{value}`"), name


@pytest.mark.parametrize("key", OF_NIXL_CONNECTOR)
def test_a_key_of_nixl_connector_is_refused_with_its_replacement(key: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(OF_NIXL_CONNECTOR[key])):
        ConnectorSettings.of({**ADDRESS, key: 1})
