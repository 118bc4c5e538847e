"""The connector's entry in Dynamo's table: in a double of it, and in that of `ai-dynamo`, which `scripts/setup_vllm.sh`
puts beside vLLM without what it depends on, so that its workers cannot run. What was run by hand: docs/vllm.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from kvferry import Publication
from kvferry.integrations.vllm.registration import CONNECTOR, register
from kvferry.integrations.vllm.requests import asks_to_publish, publish_reference, published_params, read_reference
from tests.integrations.vllm.router_requests import ROUTERS

PROTOCOLS = "dynamo.vllm.kv_connector_protocols"


class Handed:
    """What Dynamo does with requests of NixlConnector, re-stated."""


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Run in a process of Dynamo's: a double, whose module of protocols has these names, or none."""

    def run(**names: Any) -> ModuleType:
        for name in ("dynamo", "dynamo.vllm"):
            package = ModuleType(name)
            package.__path__ = []
            monkeypatch.setitem(sys.modules, name, package)
        monkeypatch.delitem(sys.modules, PROTOCOLS, raising=False)
        protocols = ModuleType(PROTOCOLS)
        vars(protocols).update(names)
        if names:
            monkeypatch.setitem(sys.modules, PROTOCOLS, protocols)
        return protocols

    return run


def test_connector_is_handed_over_as_nixls(dynamo: Callable[..., ModuleType]) -> None:
    table = {"NixlConnector": Handed, "MooncakeConnector": object}
    dynamo(KV_CONNECTOR_PROTOCOLS=table)
    register()
    register()
    assert table == {"NixlConnector": Handed, "MooncakeConnector": object, CONNECTOR: Handed}


def test_dynamos_own_entry_stays(dynamo: Callable[..., ModuleType]) -> None:
    table = {"NixlConnector": object, CONNECTOR: Handed}
    dynamo(KV_CONNECTOR_PROTOCOLS=table)
    register()
    assert table[CONNECTOR] is Handed


@pytest.mark.parametrize(
    "names",
    [{}, {"another": 1}, {"KV_CONNECTOR_PROTOCOLS": {"MooncakeConnector": object}}, {"KV_CONNECTOR_PROTOCOLS": None}],
    ids=["no-module", "no-table", "no-nixl", "no-dictionary"],
)
def test_another_version_of_dynamo_costs_one_line(
    dynamo: Callable[..., ModuleType], names: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    dynamo(**names)
    register()
    [line] = caplog.records
    assert line.levelname == "WARNING"
    assert f"{CONNECTOR} is not available in this version of Dynamo" in line.getMessage()


def test_without_dynamo_nothing_is_imported_or_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor from another package of this name."""
    monkeypatch.setitem(sys.modules, "dynamo", ModuleType("dynamo"))
    for name in ("dynamo.vllm", PROTOCOLS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    register()
    assert PROTOCOLS not in sys.modules
    assert not caplog.records


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Dynamo's own protocols, with our entry. Their folder is on no other path: the wheel has plug-ins of pytest."""
    monkeypatch.syspath_prepend(Path(sys.prefix) / "ai-dynamo")
    protocols = pytest.importorskip(PROTOCOLS, reason="ai-dynamo is not installed")
    monkeypatch.delitem(protocols.KV_CONNECTOR_PROTOCOLS, CONNECTOR, raising=False)
    register()
    return protocols


def configured(child: dict[str, Any], *others: dict[str, Any]) -> Any:
    """A configuration of vLLM: ours alone, or in MultiConnector."""
    if not others:
        return SimpleNamespace(kv_transfer_config=KVTransferConfig(kv_role="kv_both", **child))
    extra = {"connectors": [child, *others]}
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra, engine_id="p"
    )
    return SimpleNamespace(kv_transfer_config=transfer)


OURS = {"kv_connector": CONNECTOR, "kv_connector_extra_config": {"address": "127.0.0.1:1"}}
STORE = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
CACHE = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize("others", [(), (STORE,), (CACHE,)], ids=["alone", "with-a-store", "with-a-cache"])
def test_dynamos_handlers_hand_our_parameters_over(real: Any, others: tuple[dict[str, Any], ...]) -> None:
    """What its prefill handler asks vLLM for, and what its decode handler gets of the answer, by way of JSON: vLLM's
    ``kv_transfer_params`` are what the connector reads."""
    protocol = real.make_kv_connector_protocol(configured(OURS, *others))
    asked = protocol.prefill_request_kv_transfer_params()
    request = SimpleNamespace(kv_transfer_params=asked)
    assert asks_to_publish(request)
    assert (read_reference(request), publish_reference(request)) == ("", "")
    # `test_routers.py` sends it to a real vLLM.
    [replayed] = (router for router in ROUTERS if router.name == "dynamo")
    assert asked == replayed.asks
    answer = SimpleNamespace(kv_transfer_params=published_params(Publication(1, "r", "kvf1.AAAA")))
    forwarded = json.loads(json.dumps(protocol.decode_request_kv_transfer_params(answer)))
    assert forwarded == answer.kv_transfer_params
    assert read_reference(SimpleNamespace(kv_transfer_params=forwarded)) == "kvf1.AAAA"


def test_dynamo_refuses_a_second_connector_that_hands_over(real: Any) -> None:
    """Before vLLM does."""
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    with pytest.raises(ValueError, match="multiple PD-capable"):
        real.make_kv_connector_protocol(configured(OURS, nixl))
