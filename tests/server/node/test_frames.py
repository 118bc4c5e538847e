"""R9: any bytes end in a status or in that connection closed, and the server serves the next caller."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry._wire.channel import MAX_MESSAGE_BYTES, connect, parse_address
from kvferry._wire.status import from_rpc_error
from kvferry.errors import MessageTooLarge, NotImplementedHere
from tests.support.node_servers import Kvferryd, serves

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvferryd]:
    path = tmp_path_factory.mktemp("frames") / "node.sock"
    with Kvferryd("--unix", str(path), "--listen", "127.0.0.1:0") as running:
        yield running


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


ATTACKS = {
    "nothing": b"",
    "http/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    "preface only": PREFACE,
    "cut preface": PREFACE[:9],
    "frame that claims 16 MiB": PREFACE + frame(4, 0, 0, b"", length=(1 << 24) - 1),
    "data before headers": PREFACE + frame(4, 0, 0, b"") + frame(0, 0, 1, b"x" * 100),
    "broken header block": PREFACE + frame(4, 0, 0, b"") + frame(1, 4, 1, b"\xff" * 64),
    "endless continuation": PREFACE + frame(4, 0, 0, b"") + frame(1, 0, 1, b"") + frame(9, 0, 1, b"\x00" * 16000) * 8,
    "ping flood": PREFACE + frame(4, 0, 0, b"") + frame(6, 0, 0, b"12345678") * 500,
    "resets": PREFACE + frame(4, 0, 0, b"") + frame(3, 0, 1, b"\0\0\0\0") * 500,
    "random": random.Random(7).randbytes(65536),
    "random after the preface": PREFACE + random.Random(8).randbytes(65536),
}


@pytest.mark.parametrize(
    ("kind", "attack"),
    [*(("tcp", attack) for attack in ATTACKS), ("unix", "http/1"), ("unix", "random"), ("unix", "broken header block")],
)
def test_garbage_bytes_end_only_their_own_connection(server: Kvferryd, kind: str, attack: str) -> None:
    address = parse_address(server.addresses[0 if kind == "unix" else 1])
    with connect(str(address)) as bystander:
        grpc.channel_ready_future(bystander).result(10)
        with socket.socket(socket.AF_UNIX if address.is_unix else socket.AF_INET) as caller:
            caller.settimeout(10)
            caller.connect(address.path if address.is_unix else (address.host, address.port))
            # A server may close while we still send.
            with suppress(OSError):
                caller.sendall(ATTACKS[attack])
                caller.shutdown(socket.SHUT_WR)
                while caller.recv(65536):
                    pass
        assert serves(str(address))
        with pytest.raises(grpc.RpcError) as caught:
            raw(bystander, "/kvferry.v1.Nothing/There", b"")
        assert isinstance(from_rpc_error(caught.value, str(address)), NotImplementedHere)
    assert server.running


def raw(channel: grpc.Channel, method: str, request: bytes) -> Any:
    call: Any = channel.unary_unary(method)
    return call(request, timeout=10)


def test_message_over_the_limit_is_refused_and_the_connection_lives(server: Kvferryd) -> None:
    with connect(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            raw(channel, "/kvferry.v1.KVTransfer/Handshake", b"\0" * (MAX_MESSAGE_BYTES + 1))
        error = from_rpc_error(caught.value, server.address)
        assert isinstance(error, MessageTooLarge)
        assert not error.retryable
    assert serves(server.address)


def test_silent_connections_in_numbers_keep_no_others_out(server: Kvferryd) -> None:
    address = parse_address(server.addresses[1])
    idle = [socket.create_connection((address.host, address.port)) for _ in range(200)]
    try:
        assert serves(str(address))
    finally:
        for connection in idle:
            connection.close()


def test_tcp_goes_on_when_the_socket_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with Kvferryd("--unix", str(path), "--listen", "127.0.0.1:0") as server:
        path.unlink()
        assert serves(server.addresses[1])
        server.signal()
        assert server.wait() == 0
    assert list(tmp_path.iterdir()) == []
