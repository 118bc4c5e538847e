"""Floods of requests that are small on the wire and large once decoded, at a kvferryd that may have as much memory as
the Kubernetes manifest gives it: real certificates, a real cgroup."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry._wire.channel import TlsConfig, connect
from kvferry._wire.status import from_rpc_error
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.certificates import Authority, tls_flags
from tests.support.memory_groups import in_group, memory_group, peak_bytes
from tests.support.node_in_process import proto, publish_notification, read_request, register_request, snapshot
from tests.support.node_servers import Kvferryd
from tests.support.parties import SECRETS, D, P
from tests.support.repository import ROOT
from tests.support.stubs import KVTransferStub

pytestmark = pytest.mark.slow

TIMEOUT = 60.0
AT_ONCE = 4
SIZE = 3_700_000

KV, INTROSPECTION, ADMIN = "/kvferry.v1.KVTransfer/", "/kvferry.v1.Introspection/", "/kvferry.v1.Admin/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
HEALTH = "/grpc.health.v1.Health/"
FOR_EVERYBODY = (REFLECTION, f"{HEALTH}Check", f"{HEALTH}Watch")


def field(number: int, content: bytes) -> bytes:
    """An encoded field of bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes((*encoded, number))


EMPTY = b""


def repeated(number: int) -> bytes:
    """A repeated field with as many empty messages as fit."""
    return field(number, EMPTY) * (SIZE // len(field(number, EMPTY)))


FLOODS: dict[str, tuple[str, bytes]] = {
    "planes registered": (f"{KV}RegisterCache", field(7, repeated(3))),
    "planes of a reader": (f"{KV}Handshake", field(6, repeated(3))),
    "ranks to plan": (f"{INTROSPECTION}PlanRead", field(2, repeated(5))),
    "notifications": (f"{KV}Notify", repeated(3)),
    "kinds of one notification": (f"{KV}Notify", field(3, (field(1, EMPTY) + field(2, EMPTY)) * 250_000)),
    "groups published": (f"{KV}Notify", field(3, field(1, field(4, EMPTY) * 500_000))),
    "marks published": (f"{KV}Notify", field(3, field(1, field(12, EMPTY) * 500_000))),
    "inputs of a prompt": (f"{KV}Notify", field(3, field(13, field(3, field(3, EMPTY) * 500_000)))),
    "queries": (f"{KV}ReadChecksums", repeated(3)),
    "places": (f"{KV}ReadChecksums", field(3, field(5, b"\1" * SIZE))),
    "names of planes": (f"{KV}ReadChecksums", field(3, field(2, b"x") * (SIZE // 3))),
    "a read": (f"{KV}ReadBlocks", field(15, EMPTY) * (SIZE // 2)),
    "a watch": (f"{KV}Watch", field(15, EMPTY) * (SIZE // 2)),
    "a listing": (f"{INTROSPECTION}ListEngines", field(15, EMPTY) * (SIZE // 2)),
    "an operator's call": (f"{ADMIN}EndLease", field(15, EMPTY) * (SIZE // 2)),
    "reflection": (REFLECTION, (field(5, EMPTY) + field(3, EMPTY)) * (SIZE // 4)),
    "health": (f"{HEALTH}Check", field(15, EMPTY) * (SIZE // 2)),
}
"""A method and a request, by the kind of their many elements."""


def manifest_bytes() -> int:
    """The memory that the manifest lets kvferryd have."""
    found = re.search(r"limits:.*?memory: (\d+)Gi", (ROOT / "deploy/kubernetes/daemonset.yaml").read_text(), re.DOTALL)
    assert found is not None
    return int(found[1]) << 30


@contextmanager
def flooded(folder: Path, policy: str) -> Iterator[tuple[Kvferryd, TlsConfig, Any]]:
    """A kvferryd in a cgroup, the certificate of a stranger of the fleet, and a stub on the UNIX socket."""
    authority, socket = Authority.make(folder, "fleet"), folder / "node.sock"
    flags = ["--listen", "127.0.0.1:0", "--unix", str(socket), *tls_flags(authority.issue("node")), "--drain", "0"]
    if policy:
        (folder / "policy.toml").write_text(policy)
        flags += ["--policy", str(folder / "policy.toml")]
    with ExitStack() as stack:
        group = stack.enter_context(memory_group(manifest_bytes()))
        server = stack.enter_context(Kvferryd(*flags, "--ttl", "60", "--max-ttl", "60", program=in_group(group)))
        channel = stack.enter_context(connect(f"unix:{socket}", None))
        yield server, authority.issue("stranger", "DNS:stranger.fleet"), KVTransferStub(channel)


def call_at_once(address: str, tls: TlsConfig | None, method: str, request: bytes) -> list[grpc.RpcError]:
    """Make a call `AT_ONCE` times together, each on a connection of its own; their errors."""
    with ExitStack() as stack:
        # One channel would share one connection.
        channels = [stack.enter_context(connect(address, tls)) for _ in range(AT_ONCE)]
        made: list[Any] = [channel.stream_stream(method) for channel in channels]
        answers = [call(iter([request]), timeout=TIMEOUT) for call in made]
        return [error for answer in answers if (error := ended(answer)) is not None]


def ended(answers: Any) -> grpc.RpcError | None:
    """The error that a call ends with."""
    try:
        for _ in answers:
            pass
    except grpc.RpcError as error:
        return error
    return None


class Renewals(threading.Thread):
    """A reader of this host, which renews its lease all the time."""

    def __init__(self, stub: Any) -> None:
        super().__init__(daemon=True)
        self._stub = stub
        self._over = threading.Event()
        self.refused: list[object] = []
        self.count = 0
        self._watch = stub.Watch(
            pb.WatchRequest(engine=proto(P), session_secret=SECRETS[P], role=pb.WATCH_ROLE_SCHEDULER)
        )
        while next(self._watch).WhichOneof("event") != "synced":
            pass
        stub.RegisterCache(register_request(), timeout=TIMEOUT)
        source = pb.NotifyRequest(sender=proto(P), session_secret=SECRETS[P], notifications=snapshot())
        source.notifications.append(publish_notification(1))
        stub.Notify(source, timeout=TIMEOUT)
        lease_id = stub.ReadBlocks(read_request(), timeout=TIMEOUT).accepted.lease_id
        self._request = pb.NotifyRequest(
            sender=proto(D), notifications=[pb.Notification(renew=pb.Renew(lease_id=lease_id))]
        )

    def run(self) -> None:
        while not self._over.wait(0.01):
            try:
                [result] = self._stub.Notify(self._request, timeout=TIMEOUT).results
            except grpc.RpcError as error:
                self.refused.append(error)
                return
            if not result.HasField("renewed") or not result.renewed.remaining.seconds:
                self.refused.append(result)
            self.count += 1

    def __enter__(self) -> Renewals:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(TIMEOUT)
        self._watch.cancel()


@pytest.mark.parametrize(
    "policy", ["", '[[rule]]\nidentities = ["nobody.fleet"]\nreader = ["*"]\n'], ids=["open", "policy"]
)
def test_home_survives_floods_of_every_method_within_its_memory(tmp_path: Path, policy: str) -> None:
    with flooded(tmp_path, policy) as (server, stranger, local), Renewals(local) as renewals:
        at_first = server.resident()
        for name, (method, request) in FLOODS.items():
            before = renewals.count
            errors = call_at_once(server.advertise, stranger, method, request)
            assert len(errors) == AT_ONCE, name
            reasons = {from_rpc_error(error, "kvferryd").reason for error in errors}
            allowed = {"NOT_ALLOWED"} if policy and method not in FOR_EVERYBODY else {"INVALID_FIELD", "LIMIT"}
            allowed |= {"NOT_ALLOWED"} if method.startswith(ADMIN) else set()
            print(f"{name}: {reasons}, {peak_bytes(server.pid) >> 20} MiB, {renewals.count - before} renewals")
            assert reasons <= allowed, name
            assert not renewals.refused, name
        assert renewals.count
        assert peak_bytes(server.pid) < manifest_bytes() // 2
        # Freed memory is given back to the system.
        deadline = time.monotonic() + TIMEOUT
        while server.resident() > 1.5 * at_first and time.monotonic() < deadline:
            time.sleep(0.1)
        assert server.resident() <= 1.5 * at_first


@pytest.mark.parametrize("method", [REFLECTION, f"{KV}Watch"])
def test_requests_that_wait_to_be_read_take_little_memory(tmp_path: Path, method: str) -> None:
    """All are from one host, and refused for their size alone."""
    with flooded(tmp_path, "") as (server, stranger, _), ExitStack() as stack:
        channels = [stack.enter_context(connect(server.advertise, stranger)) for _ in range(8)]
        calls: list[Any] = [channel.stream_stream(method) for channel in channels for _ in range(32)]
        answers = [call(iter([bytes(4_000_000)]), timeout=TIMEOUT) for call in calls]
        assert None not in [ended(answer) for answer in answers]
        assert peak_bytes(server.pid) < manifest_bytes() // 2
