"""TLS: who gets in and who does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvferry._wire.channel import TlsConfig, connect
from kvferry.errors import InvalidField
from tests.support.certificates import Authority, tls_flags
from tests.support.node_servers import Kvferryd, serves


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("theirs"), "theirs")


@pytest.fixture(scope="module")
def mutual(ours: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvferryd]:
    """Asks clients for a certificate; its UNIX socket does not."""
    path = tmp_path_factory.mktemp("mutual") / "node.sock"
    # Off loopback, which TLS allows.
    flags = ["--listen", "0.0.0.0:0", "--advertise", "127.0.0.1", "--unix", str(path), *tls_flags(ours.issue("node"))]
    with Kvferryd(*flags) as server:
        yield server


def rejected(address: str, tls: TlsConfig | None) -> bool:
    with pytest.raises(grpc.RpcError) as caught:
        serves(address, tls)
    return caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_client_of_our_authority_gets_in(mutual: Kvferryd, ours: Authority) -> None:
    assert serves(mutual.advertise, ours.issue("client"))


def test_the_unix_socket_needs_no_certificate(mutual: Kvferryd, ours: Authority) -> None:
    assert serves(mutual.address, None)
    # A client has one configuration for all addresses.
    assert serves(mutual.address, ours.issue("client"))


def test_everybody_else_is_rejected_and_the_server_goes_on(
    mutual: Kvferryd, ours: Authority, theirs: Authority
) -> None:
    stranger = theirs.issue("client")
    assert rejected(mutual.advertise, None)
    assert rejected(mutual.advertise, TlsConfig(ca=ours.certificate))
    assert rejected(mutual.advertise, TlsConfig(ca=ours.certificate, cert=stranger.cert, key=stranger.key))
    assert serves(mutual.advertise, ours.issue("client"))


def test_a_server_of_another_authority_is_not_talked_to(mutual: Kvferryd, ours: Authority, theirs: Authority) -> None:
    own = ours.issue("client")
    assert rejected(mutual.advertise, TlsConfig(ca=theirs.certificate, cert=own.cert, key=own.key))


def test_a_name_that_the_certificate_does_not_have_is_not_talked_to(mutual: Kvferryd, ours: Authority) -> None:
    port = mutual.advertise.rpartition(":")[2]
    assert serves(f"localhost:{port}", ours.issue("client"))
    assert rejected(f"127.0.0.2:{port}", ours.issue("client"))


def test_without_an_authority_clients_need_no_certificate(ours: Authority) -> None:
    files = ours.issue("node")
    flags = tls_flags(TlsConfig(cert=files.cert, key=files.key))
    with Kvferryd("--listen", "127.0.0.1:0", "--unix", "", *flags) as server:
        assert serves(server.address, TlsConfig(ca=ours.certificate))
        assert rejected(server.address, None)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="tls_key"):
        TlsConfig(cert=tmp_path / "cert.pem")
    empty = tmp_path / "ca.pem"
    empty.write_text("not a certificate")
    with pytest.raises(InvalidField, match=r"tls_ca.*PEM"):
        connect("127.0.0.1:1", TlsConfig(ca=empty))
    with pytest.raises(InvalidField, match=r"tls_ca.*No such file"):
        connect("127.0.0.1:1", TlsConfig(ca=tmp_path / "nowhere.pem"))
