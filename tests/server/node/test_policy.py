"""The policy on the wire: real certificates of each role, and wrong ones, against the example of docs/security.md."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf import descriptor_pool

from kvferry._wire.channel import TlsConfig, connect
from kvferry._wire.reference import (
    format_reference,
    question_reference,
    router_reference,
)
from kvferry._wire.status import from_notification_error, from_rpc_error
from kvferry.errors import BadReference, InvalidField, KvferryError, NotAllowed, Unreachable
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from kvferry_server.node.loading import BadConfig, configure, read_policy
from kvferry_server.node.server import OFFERED
from kvferry_server.servicers import access
from kvferry_server.servicers.access import TABLE, TRUSTED, UNKNOWN_CALLERS, Access, Grant, Policy, Rule
from kvferry_server.servicers.limits import MAX_NOTIFICATIONS
from tests.support.certificates import Authority, tls_flags
from tests.support.node_in_process import raised, running
from tests.support.node_servers import Kvferryd, serves
from tests.support.raw_parties import Party
from tests.support.repository import ROOT
from tests.support.stubs import KVTransferStub
from tests.support.waiting import until

TIMEOUT = 20.0
HERE = "DNS:localhost,IP:127.0.0.1"
CERTIFICATES = {
    "prefill": "URI:spiffe://fleet.example/prefill/7",
    "decode": "DNS:node-8.example,URI:spiffe://fleet.example/decode/8",
    "router": "DNS:router.fleet.example",
    "dashboard": "DNS:a.dashboards.example",
    "operator": "URI:spiffe://fleet.example/operator/ann",
    "of no rule": "DNS:node-9.example",
    "deeper": "URI:spiffe://fleet.example/prefill/7/x",
    "a URI as DNS name": "DNS:spiffe://fleet.example/operator/ann",
    "an e-mail address": "email:router.fleet.example@x,IP:127.0.0.1",
    "without names": "",
}

ENGINE_CALLS = {"open", "open as if relayed", "register", "publish", "miss", "rank left", "decline", "relayed decline"}
RELAY_CALLS = {"relayed open", "relayed registration", "relayed decline", "rank left"}
LEASE_CALLS = {"renew", "checksums"}
READER_CALLS = {"handshake", "read", "ask", "decline", "relayed decline"} | LEASE_CALLS
OBSERVER_CALLS = {"list", "plan"}
NOTHING = {"nothing"}
MAY: Mapping[str, Mapping[str, set[str]]] = {
    # What each certificate may do to a publishing engine, and to a reading one.
    "prefill": {"prefill-1": ENGINE_CALLS | RELAY_CALLS | NOTHING, "decode-1": NOTHING},
    "decode": {
        "prefill-1": READER_CALLS | {"geometry"} | NOTHING,
        "decode-1": ENGINE_CALLS | LEASE_CALLS | NOTHING,
    },
    "router": {name: READER_CALLS | {"geometry"} | NOTHING for name in ("prefill-1", "decode-1")},
    "dashboard": {name: OBSERVER_CALLS | {"geometry"} for name in ("prefill-1", "decode-1")},
    "operator": {name: OBSERVER_CALLS | {"geometry"} for name in ("prefill-1", "decode-1")},
}


def example() -> str:
    """The policy in docs/security.md."""
    (found,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "security.md").read_text(), re.DOTALL)
    return str(found)


def calls(channel: grpc.Channel, engine_id: str) -> dict[str, Callable[[], object]]:
    """Every call, about an engine. The home has no engine, and answers so to callers with the role."""
    kv, introspection = KVTransferStub(channel), IntrospectionStub(channel)
    engine, reader = (pb.EngineRef(engine_id=name, incarnation=b"i" * 16) for name in (engine_id, "some-reader"))
    reference = format_reference(
        pb.Reference(
            home="h:1", engine_id=engine_id, incarnation=b"i" * 16, publication=1, request_id="r", key=b"k" * 16
        )
    )
    read = pb.ReadBlocksRequest(reference=reference, reader=reader, read_id=b"r" * 16, parties=1)
    question = question_reference("h:1", engine_id)
    whole = format_reference(pb.EngineReference(home="h:1", engine_id=engine_id, incarnation=b"i" * 16, key=b"k" * 16))

    def notify(**kind: Any) -> Callable[[], object]:
        request = pb.NotifyRequest(sender=engine, session_secret=b"s" * 32, notifications=[pb.Notification(**kind)])
        return lambda: kv.Notify(request, timeout=TIMEOUT)

    def watch(role: pb.WatchRole.ValueType = pb.WATCH_ROLE_SCHEDULER, **more: Any) -> Callable[[], object]:
        request = pb.WatchRequest(engine=engine, session_secret=b"s" * 32, role=role, **more)
        return lambda: list(kv.Watch(request, timeout=TIMEOUT))

    def register(**more: Any) -> Callable[[], object]:
        request = pb.RegisterCacheRequest(engine=engine, session_secret=b"s" * 32, **more)
        return lambda: kv.RegisterCache(request, timeout=TIMEOUT)

    def handshake(**more: Any) -> Callable[[], object]:
        request = pb.HandshakeRequest(engine_id=engine_id, reader=reader, **more)
        return lambda: list(kv.Handshake(request, timeout=TIMEOUT))

    return {
        "open": watch(),
        "register": register(),
        "publish": notify(publish=pb.Publish(publication=1)),
        "miss": notify(miss=pb.Miss(question=1, reason=pb.MISS_REASON_BUSY)),
        "rank left": notify(rank_left=pb.RankLeft()),
        "relayed open": watch(pb.WATCH_ROLE_RANK, relayed_by="h:1"),
        "open as if relayed": watch(relayed_by="h:1"),
        "relayed registration": register(relayed_by="h:1"),
        "handshake": handshake(reference=reference),
        "geometry": handshake(),
        "read": lambda: kv.ReadBlocks(read, timeout=TIMEOUT),
        "ask": notify(ask=pb.Ask(reference=question, engine_reference=whole, prompt=pb.Prompt(token_ids=[1]))),
        "decline": notify(decline=pb.Decline(reference=reference)),
        "relayed decline": notify(decline=pb.Decline(reference=reference, relayed_by="h:1")),
        "renew": notify(renew=pb.Renew(lease_id=b"l" * 16)),
        "checksums": lambda: kv.ReadChecksums(
            pb.ReadChecksumsRequest(reader=reader, lease_id=b"l" * 16), timeout=TIMEOUT
        ),
        "nothing": lambda: kv.Notify(pb.NotifyRequest(), timeout=TIMEOUT),
        "list": lambda: introspection.ListEngines(ipb.ListEnginesRequest(), timeout=TIMEOUT),
        "plan": lambda: introspection.PlanRead(ipb.PlanReadRequest(source_engine_id=engine_id), timeout=TIMEOUT),
    }


def refusal(call: Callable[[], object]) -> NotAllowed | None:
    """The policy's refusal of a call; None: the policy allows the call, which may fail otherwise."""
    try:
        call()
    except grpc.RpcError as error:
        found = from_rpc_error(error, "the server")
        # Without this, a caller that TLS rejects would look like an allowed one.
        assert not isinstance(found, Unreachable), found
        return found if isinstance(found, NotAllowed) else None
    return None


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("fleet"), "fleet")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(example())
    return path


@pytest.fixture(scope="module")
def node(fleet: Authority, policy: Path) -> Iterator[Kvferryd]:
    flags = [*tls_flags(fleet.issue("node")), "--policy", str(policy), "--engine-ttl", "0.5", "--drain", "0"]
    with Kvferryd("--listen", "127.0.0.1:0", "--unix", str(fleet.folder / "node.sock"), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def channels(node: Kvferryd, fleet: Authority) -> Iterator[dict[str, grpc.Channel]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(connect(node.advertise, fleet.issue(name.replace(" ", "-"), names)))
            for name, names in CERTIFICATES.items()
        }


@pytest.mark.parametrize("who", CERTIFICATES)
def test_certificate_may_do_only_what_its_roles_allow(channels: dict[str, grpc.Channel], who: str) -> None:
    for engine_id in ("prefill-1", "decode-1"):
        found = {name for name, call in calls(channels[who], engine_id).items() if refusal(call) is None}
        assert found == MAY.get(who, {}).get(engine_id, set()), engine_id


def test_unix_socket_is_trusted_under_any_policy(node: Kvferryd) -> None:
    with connect(node.address) as channel:
        assert [name for name, call in calls(channel, "any").items() if refusal(call) is not None] == []


def test_refusal_names_the_identity_the_role_and_the_engine(channels: dict[str, grpc.Channel]) -> None:
    error = refusal(calls(channels["decode"], "prefill-1")["open"])
    assert error is not None
    assert error.values == {
        "identity": "node-8.example, spiffe://fleet.example/decode/8",
        "role": "engine",
        "engine_id": "prefill-1",
        "method": "/kvferry.v1.KVTransfer/Watch",
    }
    assert "--policy" in error.message
    nameless = refusal(calls(channels["without names"], "prefill-1")["list"])
    assert nameless is not None
    assert (nameless.values["identity"], nameless.values["role"], nameless.values["engine_id"]) == ("", "observer", "")


def test_router_reference_needs_the_role_for_every_possible_engine(
    channels: dict[str, grpc.Channel],
) -> None:
    """Otherwise it would be a way around the policy: only the home knows which of these engines lives."""

    def asked(who: str, engine_id: str, rank: int) -> NotAllowed | None:
        reference = router_reference("h:1", engine_id, data_parallel_rank=rank)
        reader = pb.EngineRef(engine_id="some-reader", incarnation=b"i" * 16)
        read = pb.ReadBlocksRequest(reference=reference, reader=reader, read_id=b"r" * 16, parties=1)
        kv = KVTransferStub(channels[who])
        return refusal(lambda: kv.ReadBlocks(read, timeout=TIMEOUT))

    assert asked("decode", "prefill-1", 0) is None
    assert asked("decode", "prefill-1", 3) is None
    refused = asked("decode", "decode-1", 3)
    assert refused is not None
    assert refused.values["engine_id"] == "decode-1_dp3"
    assert asked("prefill", "prefill-1", 0) is not None


def test_engine_is_asked_by_its_name_only_with_a_certificate(node: Kvferryd, channels: dict[str, grpc.Channel]) -> None:
    reader = pb.EngineRef(engine_id="some-reader", incarnation=b"i" * 16)

    def answer(channel: grpc.Channel, name: str) -> str:
        ask = pb.Ask(reference=question_reference("h:1", name), prompt=pb.Prompt(token_ids=[1]))
        request = pb.NotifyRequest(sender=reader, notifications=[pb.Notification(ask=ask)])
        (result,) = KVTransferStub(channel).Notify(request, timeout=TIMEOUT).results
        return type(from_notification_error(result.error)).__name__ if result.HasField("error") else "done"

    with connect(node.address) as local:
        party = Party(local, "prefill-asked")
        party.live()
        try:
            assert answer(channels["decode"], party.name) == "done"
            assert answer(local, party.name) == "NotAllowed"
        finally:
            party.close()


def test_refusal_does_not_reveal_which_engines_exist(node: Kvferryd, channels: dict[str, grpc.Channel]) -> None:
    with connect(node.address) as local:
        party = Party(local, "prefill-lives")
        party.live()
        try:
            for name in ("open", "register", "handshake", "geometry", "read", "ask", "publish", "decline", "plan"):
                lives, absent = (
                    refusal(calls(channels["of no rule"], engine_id)[name]) for engine_id in (party.name, "x")
                )
                assert lives is not None, name
                assert absent is not None, name
                assert lives.message.replace(party.name, "x") == absent.message
        finally:
            party.close()


def test_client_rejected_by_tls_gets_no_information(node: Kvferryd, fleet: Authority, tmp_path: Path) -> None:
    right = CERTIFICATES["operator"]
    other = Authority.make(tmp_path, "other").issue("operator", right)
    for wrong in (
        fleet.issue("expired", right, days=-1),
        TlsConfig(ca=fleet.certificate, cert=other.cert, key=other.key),
        TlsConfig(ca=fleet.certificate),
    ):
        with connect(node.advertise, wrong) as channel, pytest.raises(grpc.RpcError) as caught:
            calls(channel, "prefill-1")["list"]()
        assert isinstance(from_rpc_error(caught.value, node.advertise, wrong), Unreachable)
    # Health is for every caller that TLS accepts, also without a role.
    assert serves(node.advertise, fleet.issue("of-no-rule", CERTIFICATES["of no rule"]))


def paths() -> set[str]:
    pool = descriptor_pool.Default()
    return {f"/{service}/{method.name}" for service in OFFERED for method in pool.FindServiceByName(service).methods}


def test_offered_methods_are_all_in_the_table() -> None:
    assert paths() - set(TABLE) == set()


async def test_method_missing_in_the_table_is_refused_to_every_caller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = "/kvferry.v1.Introspection/ListEngines"
    monkeypatch.setattr(access, "TABLE", {method: entry for method, entry in TABLE.items() if method != path})
    async with running(tmp_path) as node:
        error = await raised(node.introspection.ListEngines(ipb.ListEnginesRequest(), timeout=TIMEOUT))
    assert isinstance(error, NotAllowed)
    assert error.values["method"] == path


ADMIN = sorted(path for path in TABLE if path.startswith("/kvferry.v1.Admin/"))


@pytest.mark.parametrize("method", ADMIN)
def test_administration_is_for_the_unix_socket_and_identities_that_the_policy_names(method: str, policy: Path) -> None:
    def allowed(checks: Access) -> bool:
        try:
            check(checks, method, None)
        except NotAllowed:
            return False
        return True

    def caller(found: Policy, *identities: str) -> Access:
        return Access(lambda: found, lambda _: identities)

    operator, written = "spiffe://fleet.example/operator/ann", read_policy(policy)
    assert allowed(TRUSTED)
    assert not allowed(UNKNOWN_CALLERS)
    assert not allowed(caller(Policy(), operator))
    assert allowed(caller(written, operator))
    assert not allowed(caller(written, "spiffe://fleet.example/prefill/7", "a.dashboards.example"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "rule: Field required"),
        ("rule = [", "in TOML"),
        ("[[rule]]\nengine = ['*']", "rule.1.identities: Field required"),
        ("[[rule]]\nidentities = []", "at least 1 item"),
        ("[[rule]]\nidentities = ['a']\nwriter = ['*']", "rule.1.writer: no such field"),
        ("[[rule]]\nidentites = ['a']", "rule.1.identites: no such field"),
        ("[[rules]]\nidentities = ['a']", "rules: no such field"),
        ("[[rule]]\nidentities = ['a']\n[[rule]]\nidentities = 'b'", "rule.2.identities"),
        ("[[rule]]\nidentities = ['a']\nreader = ['']", "rule.1.reader.1: String should have at least 1 character"),
        ("[[rule]]\nidentities = ['URI:spiffe://a/b']", "write the name alone"),
        ("[[rule]]\nidentities = ['spiffe://a/**b']", "as a whole part of the name"),
        ("[[rule]]\nidentities = ['a']\nadmin = 'yes'", "rule.1.admin"),
        ("\xff", "in TOML"),
        ("rule = " + "[" * 100_000, "in TOML"),
        ("[[rule]]\nidentities = ['caf\xc3\xa9.example']", "xn--"),
    ],
)
def test_policy_file_with_unknown_content_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidField) as caught:
        read_policy(path)
    assert caught.value.values["field"] == "policy"
    assert says in caught.value.message


def check(access: Access, method: str, request: Any) -> None:
    """Check a call as the guard does: before the request is read, then the request."""
    access.admit(method, cast("Any", None))(request)


def who_has(**roles: Any) -> Access:
    """The access of a caller that has these roles by the policy."""
    policy = Policy(Grant(), (Rule(("a.example",), Grant(**roles)),))
    return Access(lambda: policy, lambda _: ("a.example",))


def test_router_reference_needs_roles_for_its_possible_engines() -> None:
    """A source that refuses a request declines for its readers, whatever its own name; a reader needs the role for
    each engine that it might be given."""

    def may(method: str, request: object, **roles: Any) -> bool:
        try:
            check(who_has(**roles), f"/kvferry.v1.KVTransfer/{method}", request)
        except NotAllowed:
            return False
        return True

    reference = router_reference("h:1", "p")
    decline = pb.NotifyRequest(notifications=[pb.Notification(decline=pb.Decline(reference=reference))])
    read = pb.ReadBlocksRequest(reference=reference)
    for name in ("p", "p_dp0"):
        assert may("Notify", decline, engine=(name,))
        assert may("Notify", decline, reader=(name,))
        assert not may("ReadBlocks", read, reader=(name,))
    assert may("ReadBlocks", read, reader=("p", "p_dp0"))
    for nothing in ({"engine": ("p_dp1",)}, {"reader": ("q",)}, {"relay": ("p",)}, {"observer": ("*",)}):
        assert not may("Notify", decline, **nothing)


def test_relay_opens_no_engine() -> None:
    """A scheduler's Watch opens an engine. Marked as relayed, it still takes the role of the engine."""
    relay, method = who_has(relay=("p-*",)), "/kvferry.v1.KVTransfer/Watch"
    request = pb.WatchRequest(engine=pb.EngineRef(engine_id="p-1"), role=pb.WATCH_ROLE_RANK, relayed_by="h:1")
    check(relay, method, request)
    request.role = pb.WATCH_ROLE_SCHEDULER
    with pytest.raises(NotAllowed, match="role engine"):
        check(relay, method, request)


def test_refusal_is_short_for_any_request() -> None:
    """Refusals are logged."""
    request = pb.WatchRequest(engine=pb.EngineRef(engine_id="x" * 3_000_000))
    with pytest.raises(NotAllowed) as caught:
        check(who_has(engine=("p-*",)), "/kvferry.v1.KVTransfer/Watch", request)
    assert len(caught.value.message) + sum(map(len, caught.value.values.values())) < 1500


def test_batch_that_is_too_large_is_not_checked_item_by_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a million references in one message would hold up every other caller for more than a second."""
    parsed = list[str]()

    def parse(text: str) -> pb.Reference:
        parsed.append(text)
        raise BadReference("none")

    monkeypatch.setattr(access, "parse_reference", parse)
    for count, looked_at in ((MAX_NOTIFICATIONS, MAX_NOTIFICATIONS), (MAX_NOTIFICATIONS + 1, 0)):
        parsed.clear()
        declines = [pb.Notification(decline=pb.Decline(reference=f"r{number}")) for number in range(count)]
        request = pb.NotifyRequest(notifications=declines)
        check(who_has(reader=("p-*",)), "/kvferry.v1.KVTransfer/Notify", request)
        assert len(parsed) == looked_at
        with pytest.raises(NotAllowed):
            check(who_has(observer=("*",)), "/kvferry.v1.KVTransfer/Notify", request)


def test_batch_is_not_checked_pattern_by_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand names against a thousand patterns would hold up every other caller for two seconds."""
    matched = list[str]()

    def match(name: str, pattern: str) -> bool:
        matched.append(name)
        return fnmatchcase(name, pattern)

    monkeypatch.setattr(access, "fnmatchcase", match)
    names = [f"p-999-{number}" for number in range(MAX_NOTIFICATIONS)]
    declines = [pb.Notification(decline=pb.Decline(reference=router_reference("h:1", name))) for name in names]
    caller = who_has(reader=tuple(f"p-{number}-*" for number in range(1000)))
    check(caller, "/kvferry.v1.KVTransfer/Notify", pb.NotifyRequest(notifications=declines))
    assert len(matched) <= len(names)


def test_policy_in_an_inaccessible_folder_is_refused(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "gone", "No such file"), (tmp_path / ("x" * 300), "too long")):
        with pytest.raises(InvalidField, match=says) as caught:
            read_policy(path)
        assert caught.value.values["field"] == "policy"


def test_policy_is_read_again_at_sighup_and_a_broken_file_changes_nothing(fleet: Authority, tmp_path: Path) -> None:
    path, stranger = tmp_path / "policy.toml", fleet.issue("later", "DNS:later.example")
    path.write_text(example())
    flags = [*tls_flags(fleet.issue("node")), "--policy", str(path)]
    with Kvferryd("--listen", "127.0.0.1:0", "--unix", "", *flags) as server, connect(server.advertise, stranger) as to:
        listing = calls(to, "x")["list"]
        assert refusal(listing) is not None
        path.write_text("[[rule]]\nidentities = ['*.example']\nobserver = true\n")
        assert refusal(listing) is not None
        server.signal(signal.SIGHUP)
        until(lambda: "the policy was read again" in server.log, TIMEOUT)
        assert refusal(listing) is None
        path.write_text("[[rule]]\nidentities = ['*.exam")
        server.signal(signal.SIGHUP)
        until(lambda: "the policy stays as it was" in server.log, TIMEOUT)
        assert refusal(listing) is None
        assert "other settings need a restart" in server.log


def test_policy_needs_certificates(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"tls_ca is None.*because policy is given"):
        configure(policy=tmp_path / "policy.toml")


def test_policy_errors_are_known_to_clients() -> None:
    assert issubclass(NotAllowed, KvferryError)
    assert (NotAllowed.code, NotAllowed.reason) == ("PERMISSION_DENIED", "NOT_ALLOWED")
