"""TLS: which clients are accepted, and the errors of rejected clients."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import grpc
import pytest

from kvferry._wire.channel import TlsConfig, connect
from kvferry._wire.status import MESSAGE_BYTES
from kvferry.errors import InvalidField, Unreachable
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.blocking_control import BlockingControl
from tests.support.certificates import Authority, tls_flags
from tests.support.command_line import run_kvferry
from tests.support.node_servers import Kvferryd, free_port, serves


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("theirs"), "theirs")


@pytest.fixture(scope="module")
def mutual(ours: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvferryd]:
    """A server that asks clients for a certificate, but not on its UNIX socket."""
    path = tmp_path_factory.mktemp("mutual") / "node.sock"
    # Off loopback, which TLS allows.
    flags = ["--listen", "0.0.0.0:0", "--advertise", "127.0.0.1", "--unix", str(path), *tls_flags(ours.issue("node"))]
    with Kvferryd(*flags) as server:
        yield server


def rejected(address: str, tls: TlsConfig | None) -> bool:
    with pytest.raises(grpc.RpcError) as caught:
        serves(address, tls)
    return caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_client_of_the_servers_authority_is_accepted(mutual: Kvferryd, ours: Authority) -> None:
    assert serves(mutual.advertise, ours.issue("client"))


def test_unix_socket_needs_no_certificate(mutual: Kvferryd, ours: Authority) -> None:
    assert serves(mutual.address, None)
    # A client has one configuration for all addresses.
    assert serves(mutual.address, ours.issue("client"))


def test_clients_without_a_valid_certificate_are_rejected_and_the_server_goes_on(
    mutual: Kvferryd, ours: Authority, theirs: Authority
) -> None:
    stranger = theirs.issue("client")
    assert rejected(mutual.advertise, None)
    assert rejected(mutual.advertise, TlsConfig(ca=ours.certificate))
    assert rejected(mutual.advertise, TlsConfig(ca=ours.certificate, cert=stranger.cert, key=stranger.key))
    assert serves(mutual.advertise, ours.issue("client"))


def test_client_refuses_a_server_of_another_authority(mutual: Kvferryd, ours: Authority, theirs: Authority) -> None:
    own = ours.issue("client")
    assert rejected(mutual.advertise, TlsConfig(ca=theirs.certificate, cert=own.cert, key=own.key))


def test_client_refuses_a_server_whose_certificate_lacks_the_name(mutual: Kvferryd, ours: Authority) -> None:
    port = mutual.advertise.rpartition(":")[2]
    assert serves(f"localhost:{port}", ours.issue("client"))
    assert rejected(f"127.0.0.2:{port}", ours.issue("client"))


def test_clients_need_no_certificate_without_an_authority(ours: Authority) -> None:
    files = ours.issue("node")
    flags = tls_flags(TlsConfig(cert=files.cert, key=files.key))
    with Kvferryd("--listen", "127.0.0.1:0", "--unix", "", *flags) as server:
        assert serves(server.address, TlsConfig(ca=ours.certificate))
        assert rejected(server.address, None)


def test_unusable_tls_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="tls_key"):
        TlsConfig(cert=tmp_path / "cert.pem")
    empty = tmp_path / "ca.pem"
    empty.write_text("not a certificate")
    with pytest.raises(InvalidField, match=r"tls_ca.*PEM"):
        connect("127.0.0.1:1", TlsConfig(ca=empty))
    with pytest.raises(InvalidField, match=r"tls_ca.*No such file"):
        connect("127.0.0.1:1", TlsConfig(ca=tmp_path / "nowhere.pem"))


@pytest.mark.parametrize("field", ["ca", "cert", "key"])
def test_what_is_in_a_file_is_no_name_of_it_and_is_not_shown(field: str) -> None:
    text = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"
    with pytest.raises(InvalidField, match=f"tls_{field}.*not what is in it") as refused:
        TlsConfig(**{field: Path(text)})
    assert "c2VjcmV0" not in f"{refused.value} {refused.value.values}"


@pytest.fixture(scope="module")
def plain() -> Iterator[Kvferryd]:
    with Kvferryd("--listen", "127.0.0.1:0", "--unix", "") as server:
        yield server


@pytest.fixture(scope="module")
def expired(ours: Authority) -> Iterator[Kvferryd]:
    with Kvferryd("--listen", "127.0.0.1:0", "--unix", "", *tls_flags(ours.issue("old node", days=-1))) as server:
        yield server


@pytest.fixture(scope="module")
def elsewhere(ours: Authority) -> Iterator[Kvferryd]:
    files = ours.issue("other node", names="DNS:node7.example")
    with Kvferryd("--listen", "127.0.0.1:0", "--unix", "", *tls_flags(files)) as server:
        yield server


Make = Callable[[Authority, Authority], "TlsConfig | None"]
"""Makes a caller's files from the server's authority and from another."""


def wrong_authority(ours: Authority, theirs: Authority) -> TlsConfig:
    own = ours.issue("client")
    return TlsConfig(ca=theirs.certificate, cert=own.cert, key=own.key)


def no_authority(ours: Authority, theirs: Authority) -> TlsConfig:
    own = ours.issue("client")
    return TlsConfig(cert=own.cert, key=own.key)


def no_certificate(ours: Authority, theirs: Authority) -> TlsConfig:
    return TlsConfig(ca=ours.certificate)


def their_certificate(ours: Authority, theirs: Authority) -> TlsConfig:
    stranger = theirs.issue("client")
    return TlsConfig(ca=ours.certificate, cert=stranger.cert, key=stranger.key)


def expired_certificate(ours: Authority, theirs: Authority) -> TlsConfig:
    return ours.issue("old client", days=-1)


def right(ours: Authority, theirs: Authority) -> TlsConfig:
    return ours.issue("client")


def no_tls(ours: Authority, theirs: Authority) -> None:
    return None


def ask(address: str, tls: TlsConfig | None) -> None:
    control = BlockingControl(address, tls)
    hello = pb.HandshakeRequest(engine_id="nobody", reader=pb.EngineRef(engine_id="me", incarnation=b"i" * 16))
    try:
        control.handshake(hello, 10.0)
    finally:
        control.close()


@pytest.mark.parametrize(
    ("server", "files", "says"),
    [
        ("mutual", wrong_authority, ["settings differ", "does not trust", "tls.ca (--tls-ca)"]),
        ("mutual", no_authority, ["settings differ", "does not trust", "tls.ca (--tls-ca)", "not given"]),
        (
            "mutual",
            no_certificate,
            ["likely to differ", "no certificate", "tls.cert and tls.key (--tls-cert, --tls-key)"],
        ),
        ("mutual", their_certificate, ["likely to differ", "--tls-cert, --tls-key", "signed", "--tls-ca of kvferryd"]),
        ("mutual", expired_certificate, ["likely to differ", "--tls-cert, --tls-key", "expired", "-enddate"]),
        ("expired", right, ["certificate has expired", "put new files in place"]),
        ("elsewhere", right, ["settings differ", "other names", "--advertise", "subjectAltName"]),
        ("plain", right, ["settings differ", "does not speak TLS", "leave out the caller's tls", "--tls-ca"]),
        ("mutual", no_tls, ["likely to differ", "without TLS", "tls.ca (--tls-ca)", "tls.cert and tls.key"]),
    ],
)
def test_rejected_client_gets_an_error_that_names_the_setting(
    server: str, files: Make, says: list[str], ours: Authority, theirs: Authority, request: pytest.FixtureRequest
) -> None:
    found: Kvferryd = request.getfixturevalue(server)
    tls = files(ours, theirs)
    with pytest.raises(Unreachable) as caught:
        ask(found.advertise, tls)
    printed = run_kvferry("engines", "--server", found.advertise, *(tls_flags(tls) if tls else ()))
    assert printed.returncode == 1
    for told in (caught.value.message, printed.stderr):
        assert [part for part in (found.advertise, *says) if part not in told] == []
        assert "Socket closed" not in told
        assert "Is kvferryd running there?" not in told
    # A relaying node server passes the message on, and cuts it.
    assert len(caught.value.message.encode()) <= MESSAGE_BYTES


def test_peer_that_closes_connections_at_once_gets_an_error_with_possible_causes(ours: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=close_all, args=(listener,), daemon=True).start()
        for tls in (None, ours.issue("client")):
            with pytest.raises(Unreachable, match=r"likely to differ.*--max-connections") as caught:
                ask(f"127.0.0.1:{listener.getsockname()[1]}", tls)
            assert "Socket closed" not in caught.value.message
        listener.shutdown(socket.SHUT_RDWR)


def close_all(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            listener.accept()[0].close()


def test_missing_server_is_not_reported_as_a_tls_failure(ours: Authority) -> None:
    for tls in (None, ours.issue("client")):
        with pytest.raises(Unreachable, match="Is kvferryd running there") as caught:
            ask(f"127.0.0.1:{free_port()}", tls)
        assert "TLS" not in caught.value.message
