"""The doctor's check of a node server: real servers, real certificates, and each way in which a server is
unreachable."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvferry._doctor import peer
from kvferry._doctor.check import Finding, Host
from kvferry._wire.channel import TlsConfig
from tests.doctor.looking import names
from tests.support.certificates import Authority, tls_flags
from tests.support.node_servers import Kvferryd, free_port


@dataclass(frozen=True)
class Stage:
    """A node server with mTLS on TCP, and without TLS on its socket."""

    socket: str
    tcp: str
    right: TlsConfig
    stranger: TlsConfig
    expired: TlsConfig


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("peer")
    ours, others = Authority.make(folder, "ours"), Authority.make(folder, "others")
    files = tls_flags(ours.issue("server"))
    flags = ("--unix", str(folder / "node.sock"), "--listen", "127.0.0.1:0", "--drain", "0")
    with Kvferryd(*flags, *files) as server:
        unix, tcp = server.addresses
        yield Stage(unix, tcp, ours.issue("client"), others.issue("client"), ours.issue("old", days=-1))


def look(address: str, tls: TlsConfig | None = None, timeout: float = 5.0) -> list[Finding]:
    files = {} if tls is None else {"ca": tls.ca, "cert": tls.cert, "key": tls.key}
    return peer.check(Host(peer=address, tls=files, timeout=timeout))


def test_node_server_that_serves(stage: Stage) -> None:
    found = look(stage.tcp, stage.right)
    assert names(found) == {"peer-answers", "peer-version"}
    assert "over TLS (median of 21" in found[0].found
    assert "without TLS" in look(stage.socket)[0].found


@pytest.mark.parametrize("kind", ["none", "stranger", "expired", "no certificate"])
def test_wrong_certificate_is_found_with_its_setting(stage: Stage, kind: str) -> None:
    mixed = TlsConfig(ca=stage.right.ca, cert=stage.stranger.cert, key=stage.stranger.key)
    tls, setting = {
        "none": (None, "tls.ca"),
        "stranger": (mixed, "tls.cert"),
        "expired": (stage.expired, "not expired"),
        "no certificate": (TlsConfig(ca=stage.right.ca), "tls.cert"),
    }[kind]
    found = look(stage.tcp, tls)
    assert names(found) == {"peer-tls"}
    assert setting in found[0].found


def test_authority_that_the_caller_does_not_trust_is_found(stage: Stage) -> None:
    found = look(stage.tcp, stage.stranger)
    assert names(found) == {"peer-tls"}
    assert "does not trust" in found[0].found


def test_peers_of_an_unknown_name_are_found() -> None:
    # RFC 2606 reserves this name.
    assert names(look("no-such-host.invalid:7423", timeout=20.0)) == {"peer-name-unknown"}


@pytest.mark.parametrize("place", ["port", "socket"])
def test_peers_that_do_not_listen_are_found(tmp_path: Path, place: str) -> None:
    address = f"127.0.0.1:{free_port()}" if place == "port" else f"unix:{tmp_path / 'none.sock'}"
    assert names(look(address)) == {"peer-refused"}


def test_peers_whose_packets_are_dropped_are_found() -> None:
    """Like a firewall, a listener with a full queue answers no further connection."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filling in (first, second):
            filling.setblocking(False)
            filling.connect_ex(full.getsockname())
        found = look(f"127.0.0.1:{full.getsockname()[1]}", timeout=0.5)
    assert names(found) == {"peer-silent"}
    assert "no answer within 0.5 s" in found[0].found


@pytest.mark.parametrize("address", ["http://a:1", "nonsense", "unix:relative"])
def test_addresses_that_are_malformed_are_found(address: str) -> None:
    assert names(look(address)) == {"peer-address-wrong"}


@pytest.mark.parametrize("name", ["node..example", "n" * 64])
def test_name_that_no_host_can_have_is_found(name: str) -> None:
    assert names(look(f"{name}:7423")) == {"peer-name-unknown"}


def test_tls_files_that_cannot_be_read_are_found() -> None:
    found = look("127.0.0.1:1", TlsConfig(ca=Path("/none.pem")))
    assert names(found) == {"peer-address-wrong"}
    assert "/none.pem" in found[0].found


@contextmanager
def server_with_health(answer: bytes | grpc.StatusCode) -> Iterator[str]:
    """A gRPC server that has a health service and nothing else."""

    def check(_: bytes, context: grpc.ServicerContext) -> bytes:
        if isinstance(answer, bytes):
            return answer
        context.abort(answer, "no")
        raise AssertionError

    handler = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": _unary(check)})
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def _unary(check: Callable[[bytes, grpc.ServicerContext], bytes]) -> grpc.RpcMethodHandler[bytes, bytes]:
    return grpc.unary_unary_rpc_method_handler(check)


@pytest.mark.parametrize(
    ("answer", "finding"),
    [
        (b"\x08\x02", "peer-not-serving"),
        (grpc.StatusCode.UNAUTHENTICATED, "peer-forbids"),
        (grpc.StatusCode.PERMISSION_DENIED, "peer-forbids"),
        (grpc.StatusCode.UNIMPLEMENTED, "peer-no-answer"),
    ],
)
def test_peers_that_do_not_serve_are_found(answer: bytes | grpc.StatusCode, finding: str) -> None:
    with server_with_health(answer) as address:
        assert names(look(address)) == {finding}


def test_long_answers_of_a_peer_are_cut() -> None:
    with server_with_health(b"x" * 3_000_000) as address:
        (found,) = look(address)
    assert len(found.found) < 1000


def test_older_node_server_has_no_version() -> None:
    with server_with_health(b"\x08\x01") as address:
        assert names(look(address)) == {"peer-answers", "peer-version-differs"}


def test_peer_that_accepts_and_never_answers_is_found() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        assert names(look(f"127.0.0.1:{silent.getsockname()[1]}", timeout=0.5)) == {"peer-no-answer"}
