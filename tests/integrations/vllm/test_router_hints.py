"""Hints of other projects' routers, as these projects write them: what is taken of each, and that nothing else does
harm. `test_hinted_prefixes.py` reads by them."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvferry import Blocks, Listing
from kvferry.errors import InvalidField, NotAllowed
from kvferry.integrations.vllm.requests import MOST_ACTIONS, PREFIX_SOURCE, hinted_engine
from kvferry.integrations.vllm.scheduler import ConnectorScheduler
from kvferry.testing import Fabric
from tests.integrations.vllm.played_reader import bound, counted, hinted, matched
from tests.integrations.vllm.played_setup import TOKENS, prefill
from tests.integrations.vllm.router_requests import DYNAMO_TIER, HINTED, dynamo_hint, llm_d_hint
from tests.support.vllm_versions import MINOR

of_vllm = pytest.mark.skipif(MINOR < 31, reason="requests of this vLLM have no hints")


def request(params: object, hints: object = None) -> Any:
    return SimpleNamespace(kv_transfer_params=params, kv_hints=hints)


def changed(part: str, **changes: Any) -> dict[str, Any]:
    """Dynamo's envelope with other values in it, in its action or in the payload of that."""
    envelope: dict[str, Any] = json.loads(json.dumps(dynamo_hint()))
    [action] = envelope["actions"]
    {"envelope": envelope, "action": action, "payload": action["payload"]}[part].update(changes)
    return envelope


# What is taken.


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"kv_hint": dynamo_hint()}, HINTED),
        ({"kv_hint": dynamo_hint("[2001:db8::1]:7777")}, "[2001:db8::1]:7777"),
        ({"kv_hint": changed("payload", mode="copy")}, HINTED),
        ({"kv_hint": changed("payload", block_hashes="not looked at")}, HINTED),
        ({"remote_kv_source": llm_d_hint()}, HINTED),
        ({"remote_kv_source": llm_d_hint("2001:db8::1")}, "[2001:db8::1]:7777"),
        ({"do_remote_decode": True, "remote_kv_source": llm_d_hint()}, HINTED),
        ({"remote_kv_source": llm_d_hint("b", 1), "kv_hint": dynamo_hint("a:1")}, "a:1"),
        ({"remote_kv_source": None, "kv_hint": None}, ""),
        ({"do_remote_decode": True, "remote_host": "10.0.0.7"}, ""),
        (None, ""),
        ([dynamo_hint()], ""),
    ],
    ids=[
        *("dynamo", "dynamo-ipv6", "copy", "hashes", "llm-d", "llm-d-ipv6", "llm-d-prefill"),
        *("both", "nulls", "other-fields", "none", "no-object"),
    ],
)
def test_hint_names_an_engine_by_its_address(params: object, expected: str) -> None:
    assert hinted_engine(request(params)) == expected


def test_first_fetch_of_an_envelope_counts() -> None:
    fetch, other = (dynamo_hint(at)["actions"][0] for at in ("a:1", "b:2"))
    pin = {**fetch, "action_type": "kv.pin"}
    assert hinted_engine(request({"kv_hint": {**dynamo_hint(), "actions": [pin, fetch, other]}})) == "a:1"
    late = [pin] * MOST_ACTIONS
    with pytest.raises(InvalidField, match=r"kv_hint\.actions"):
        hinted_engine(request({"kv_hint": {**dynamo_hint(), "actions": [*late, fetch]}}))


@of_vllm
def test_vllms_own_hint_is_taken_as_it_reaches_the_engine() -> None:
    """By way of its serialisation, and before those in the parameters."""
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    envelope = dynamo_hint()
    hints = KvHintsEnvelope(**{**envelope, "actions": [KvHintAction(**each) for each in envelope["actions"]]})
    sampling = SamplingParams(extra_args={"kv_transfer_params": {"kv_hint": dynamo_hint("b:2")}})
    sent = EngineCoreRequest("r", [1, 2], None, sampling, None, 0.0, None, None, None, kv_hints=hints)
    received = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(sent))
    of_engine = Request.from_engine_core_request(received, None)
    assert hinted_engine(of_engine) == HINTED


# Dynamo's own code, of ai-dynamo 1.6.1, which `scripts/setup_vllm.sh` puts beside vLLM.

DYNAMO = Path(sys.prefix) / "ai-dynamo"


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its module of hints. What that imports of its runtime, which is not here, are names for annotations."""
    monkeypatch.syspath_prepend(DYNAMO)
    runtime = ModuleType("dynamo.llm")
    vars(runtime).update(ModelRuntimeConfig=object, WorkerType=object)
    monkeypatch.setitem(sys.modules, "dynamo.llm", runtime)
    return pytest.importorskip("dynamo.vllm.kv_hints", reason="ai-dynamo is not installed")


def functions_of(file: Path, *names: str) -> dict[str, Any]:
    """Functions of a module that cannot be imported here."""
    wanted = [each for each in ast.parse(file.read_text()).body if getattr(each, "name", "") in names]
    found: dict[str, Any] = {"importlib": importlib, "Any": Any, "Mapping": Mapping}
    exec("from __future__ import annotations\nimport functools\n" + "\n".join(map(ast.unparse, wanted)), found)
    return found


def advertised(dynamo: Any, host: str) -> str:
    """What a worker of Dynamo's advertises if its configuration says so."""
    tier = {**DYNAMO_TIER, "control_advertise_host": host}
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"secondary_tiers": [tier]}
    )
    sources = dynamo.resolve_kv_transfer_hint_sources(
        SimpleNamespace(kv_transfer_config=transfer), SimpleNamespace(value="agg")
    )
    return str(sources[0].source_control_endpoint)


def test_hint_that_dynamo_attaches_is_taken(dynamo: Any) -> None:
    for host, expected in (("10.0.0.7", HINTED), ("2001:db8::1", "[2001:db8::1]:7777")):
        endpoint = advertised(dynamo, host)
        sampling = SamplingParams(extra_args={"kv_transfer_params": {"do_remote_decode": True}})
        dynamo._apply_kv_hint(sampling, dynamo_hint(endpoint.removeprefix("tcp://")))
        params = sampling.extra_args["kv_transfer_params"]
        assert params["do_remote_decode"]
        assert hinted_engine(request(json.loads(json.dumps(params)))) == expected


@of_vllm
def test_hint_that_dynamo_builds_for_vllm_is_taken(dynamo: Any) -> None:
    build = functions_of(DYNAMO / "dynamo/vllm/handlers.py", "_vllm_kv_hints_types", "_build_vllm_kv_hints")
    hints = build["_build_vllm_kv_hints"]({"kv_hint": dynamo_hint()})
    assert type(hints).__module__ == "vllm.v1.kv_hints.protocol"
    assert hinted_engine(request(None, hints)) == HINTED


# What is not.

LONG = "x" * 300
OF_ANOTHER_KIND = {
    "no-envelope": ({"kv_hint": "tcp://10.0.0.7:7777"}, "kv_hint.protocol_version"),
    "no-version": ({"kv_hint": {"source": "prefill"}}, "kv_hint.protocol_version"),
    "later": ({"kv_hint": changed("envelope", protocol_version="0.2")}, "kv_hint.protocol_version"),
    "number": ({"kv_hint": changed("envelope", protocol_version=0.1)}, "kv_hint.protocol_version"),
    "no-list": ({"kv_hint": changed("envelope", actions={"0": {}})}, "kv_hint.actions"),
    "no-actions": ({"kv_hint": changed("envelope", actions=[])}, "kv_hint.actions"),
    "other-action": ({"kv_hint": changed("action", action_type="kv.pin")}, "kv_hint.actions"),
    "no-objects": ({"kv_hint": changed("envelope", actions=["kv.fetch", None, 7])}, "kv_hint.actions"),
    "later-fetch": ({"kv_hint": changed("action", action_version="2.0")}, "kv.fetch.action_version"),
    "no-payload": ({"kv_hint": changed("action", payload=[1])}, "kv.fetch.source_control_endpoint"),
    "move": ({"kv_hint": changed("payload", mode="move")}, "kv.fetch.mode"),
    "no-source": ({"kv_hint": changed("payload", source_control_endpoint=None)}, "kv.fetch.source_control_endpoint"),
    "ipc": ({"kv_hint": changed("payload", source_control_endpoint="ipc:///x")}, "kv.fetch.source_control_endpoint"),
    "empty": ({"kv_hint": changed("payload", source_control_endpoint="tcp://")}, "kv.fetch.source_control_endpoint"),
    "long": ({"kv_hint": dynamo_hint(LONG)}, "kv.fetch.source_control_endpoint"),
    "peer-text": ({"remote_kv_source": "10.0.0.7:7777"}, "remote_kv_source.remote_host"),
    "peer-host": ({"remote_kv_source": {**llm_d_hint(), "remote_host": ["10.0.0.7"]}}, "remote_kv_source.remote_host"),
    "peer-long": ({"remote_kv_source": llm_d_hint(LONG)}, "remote_kv_source.remote_host"),
    "peer-no-port": ({"remote_kv_source": {"remote_host": "a"}}, "remote_kv_source.remote_port"),
    "peer-bool": ({"remote_kv_source": llm_d_hint(port=True)}, "remote_kv_source.remote_port"),
    "peer-port": ({"remote_kv_source": llm_d_hint(port=65536)}, "remote_kv_source.remote_port"),
    "peer-port-text": ({"remote_kv_source": {**llm_d_hint(), "remote_port": "7777"}}, "remote_kv_source.remote_port"),
}


@pytest.mark.parametrize(("params", "field"), OF_ANOTHER_KIND.values(), ids=OF_ANOTHER_KIND)
def test_hint_of_another_kind_is_refused_by_its_field(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        hinted_engine(request(params))
    assert refused.value.values["field"] == field
    # It is logged, whatever clients write.
    assert len(str(refused.value)) < 250


# What becomes of a request.


HOME = "10.0.0.1:7423"


def directory(folder: Path, home: str, *engine_ids: str) -> str:
    """The URL of a directory with engines of one home."""
    file = folder / "directory.json"
    file.write_text(json.dumps({"engines": {engine_id: {"home": home} for engine_id in engine_ids}}))
    return f"file:{file}"


@pytest.fixture
def listed(tmp_path: Path) -> str:
    return directory(tmp_path, HOME, HINTED)


def asked_by(scheduler: ConnectorScheduler, monkeypatch: pytest.MonkeyPatch, *hints: dict[str, Any]) -> list[object]:
    """Whom a scheduler asks for requests with these parameters; those that ask nobody are computed."""
    bound(scheduler)
    asked: list[object] = []
    monkeypatch.setattr(scheduler._port, "ask", lambda _, engine, *__, **___: asked.append(engine))
    for number, params in enumerate(hints):
        given = hinted("", tokens=5 + number, request_id=f"r{number}")
        given.kv_transfer_params = params
        scheduler.on_new_request(given)
        if scheduler._loads.get(given.request_id) is None:
            assert scheduler.matched_tokens(given, 0) == (0, False)
            scheduler.allocated(given.request_id, ([1, 2],), 0)
    return asked


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The connector's; its home has lines of its own."""
    ours = (record for record in caplog.records if record.name.startswith("kvferry.integrations."))
    return [record.getMessage() for record in ours if record.levelname == "WARNING"]


def test_engine_of_that_name_is_asked_at_the_home_that_the_directory_has(
    decode: Callable[..., ConnectorScheduler], listed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = decode(directory=listed)
    both = {"kv_hint": dynamo_hint(), PREFIX_SOURCE: "kvf1e.AAAA"}
    asked = asked_by(scheduler, monkeypatch, {"kv_hint": dynamo_hint()}, {"remote_kv_source": llm_d_hint()}, both)
    assert asked == [Listing(HINTED, HOME), Listing(HINTED, HOME), "kvf1e.AAAA"]
    assert counted(scheduler) == {"prefixes_asked": 3}


def test_engines_of_a_data_parallel_server_are_asked_by_rank(
    decode: Callable[..., ConnectorScheduler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hints name the port of vLLM's tier, which is as many above the server's own as the rank."""
    listed = directory(tmp_path, HOME, "10.0.0.7:7777_dp0", "10.0.0.7:7777_dp1", "10.0.0.8:7777_dp1")
    hints = [{"remote_kv_source": llm_d_hint(port=port)} for port in (7777, 7778, 7779)]
    asked = asked_by(decode(directory=listed), monkeypatch, *hints)
    assert asked == [Listing("10.0.0.7:7777_dp0", HOME), Listing("10.0.0.7:7777_dp1", HOME)]
    own = decode(directory=listed, engine_id="10.0.0.7:7777_dp1")
    assert asked_by(own, monkeypatch, hints[1]) == []
    assert counted(own) == {}


def test_hint_that_cannot_be_followed_is_computed_counted_and_logged_once(
    decode: Callable[..., ConnectorScheduler],
    listed: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = decode(directory=listed)
    unknown = [{"remote_kv_source": llm_d_hint("10.0.0.8")}, {"kv_hint": dynamo_hint("10.0.0.9:7777")}]
    later = [{"kv_hint": changed("envelope", protocol_version=version)} for version in ("0.2", "1.0")]
    assert asked_by(scheduler, monkeypatch, *unknown, *later, {"remote_kv_source": 7}) == []
    assert counted(scheduler) == {"hints_ignored": 5}
    of_unknown, of_version, of_source = warnings(caplog)
    assert "engine '10.0.0.8:7777' is not listed" in of_unknown
    assert "kv_hint.protocol_version is '0.2', expected '0.1'" in of_version
    assert "remote_kv_source.remote_host" in of_source


def test_hint_that_names_the_engine_itself_asks_nobody(
    decode: Callable[..., ConnectorScheduler], listed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = decode(directory=listed, engine_id=HINTED)
    assert asked_by(scheduler, monkeypatch, {"kv_hint": dynamo_hint()}, {"remote_kv_source": llm_d_hint()}) == []
    assert counted(scheduler) == {}


def test_without_a_directory_no_hint_is_followed(
    decode: Callable[..., ConnectorScheduler], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = decode()
    assert asked_by(scheduler, monkeypatch, {"kv_hint": dynamo_hint()}, {"remote_kv_source": llm_d_hint()}) == []
    assert counted(scheduler) == {"hints_ignored": 2}
    [line] = warnings(caplog)
    assert "this engine has no directory" in line


def test_engine_of_a_hint_is_asked_by_the_prompt_and_what_it_has_is_read(
    fabric: Fabric, decode: Callable[..., ConnectorScheduler], tmp_path: Path
) -> None:
    with fabric.client() as client:
        source = prefill(client, HINTED)
        scheduler = decode(directory=directory(tmp_path, fabric.address, HINTED))
        bound(scheduler)
        given = hinted("")
        given.kv_transfer_params = {"kv_hint": dynamo_hint()}
        scheduler.on_new_request(given)
        [question] = source.questions(timeout=5)
        assert question.prompt.token_ids.tolist() == given.prompt_token_ids
        blocks = {"0": Blocks([3, 4], 0, 2 * TOKENS)}
        source.publish("cached", blocks, reference=question.reference, prompt=question.prompt)
        assert matched(scheduler, given) == (2 * TOKENS, True)


def test_home_that_refuses_is_logged_once(
    decode: Callable[..., ConnectorScheduler],
    listed: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By an engine's name alone, nobody may ask who shows no certificate."""
    scheduler = decode(directory=listed)

    def refuse(*_: Any, **__: Any) -> None:
        raise NotAllowed("a caller without a certificate has to name the engine by its engine_reference")

    bound(scheduler)
    monkeypatch.setattr(scheduler._port, "ask", lambda *_, **__: None)
    monkeypatch.setattr(scheduler._port, "granted", refuse)
    for number in range(2):
        given = hinted("", tokens=9 + number, request_id=f"r{number}")
        given.kv_transfer_params = {"remote_kv_source": llm_d_hint()}
        scheduler.on_new_request(given)
        assert scheduler.matched_tokens(given, 0) == (0, False)
    assert counted(scheduler) == {"prefixes_asked": 2, "prefixes_missed": 2}
    [line] = warnings(caplog)
    assert line.startswith("request 'r0' is computed, and so are all like it: ")
    assert "certificate" in line
