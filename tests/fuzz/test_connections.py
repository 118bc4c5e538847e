"""R9 below the messages: peers that speak HTTP/2 and gRPC wrongly, halfway, or far too much. Frames that are no HTTP/2
at all are in tests/server/node/test_frames.py."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvferry._wire.channel import MAX_MESSAGE_BYTES
from tests.fuzz.conftest import EXAMPLES
from tests.fuzz.messages import seed
from tests.fuzz.methods import METHODS, Method
from tests.fuzz.target import Target, encoded
from tests.support import http2
from tests.support.http2 import Connection, data, frame, message, request_headers

CPU_PER_CONNECTION = 5.0
"""Seconds of the server's CPU; the worst attack takes a tenth."""
LIST_ENGINES = "/kvferry.v1.Introspection/ListEngines"
HANDSHAKE = "/kvferry.v1.KVTransfer/Handshake"
WATCH = "/kvferry.v1.KVTransfer/Watch"

ONE_OF_A_KIND = [method for method in METHODS if method.path in (HANDSHAKE, WATCH, LIST_ENGINES)]
"""One method of each kind: light, heavy, and streaming. Below the messages, methods of a kind do not differ."""

every_method = pytest.mark.parametrize("method", METHODS, ids=str)


@contextmanager
def attacked(target: Target) -> Iterator[None]:
    with target.unharmed():
        before = target.cpu()
        yield
        assert target.cpu() - before < CPU_PER_CONNECTION


def headers(stream: int, path: str, /, *, end: bool = False, **changed: bytes | None) -> bytes:
    flags = http2.END_HEADERS | (http2.END_STREAM if end else 0)
    return frame(http2.HEADERS, flags, stream, request_headers(path, **changed))


@every_method
def test_calls_that_are_reset_at_once(target: Target, method: Method) -> None:
    request = message(encoded(seed(method, target.victim)))
    with attacked(target), Connection(target.address) as peer:
        for stream in range(1, 2001, 2):
            peer.send(headers(stream, method.path), *data(stream, request), frame(http2.RST, 0, stream, b"\0\0\0\x08"))
        peer.send(headers(2001, LIST_ENGINES), *data(2001, message(b"")))
        assert peer.ended(2001)


@every_method
def test_calls_that_stop_halfway(target: Target, method: Method) -> None:
    request = message(encoded(seed(method, target.victim)) or b"x")
    with attacked(target):
        for _ in range(20):
            peer = Connection(target.address)
            for stream in range(1, 21, 2):
                peer.send(headers(stream, method.path), *data(stream, request[: stream % len(request)], end=False))
            peer.reset()


@pytest.mark.parametrize("method", ONE_OF_A_KIND, ids=str)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        b"\0\0\0\0",
        message(b"xyz", length=100),
        message(b"xyz", length=2**32 - 1),
        message(b"xyz", length=0),
        message(b"xyz", compressed=1),
        message(b"xyz", compressed=255),
        message(b"") + message(b"") + b"\0",
    ],
    ids=["nothing", "1 byte", "4 bytes", "cut", "4 GiB", "longer", "compressed by nothing", "flags", "two and a bit"],
)
def test_bodies_that_are_no_message(target: Target, method: Method, body: bytes) -> None:
    with attacked(target), Connection(target.address) as peer:
        # A server that waits for the rest of the body waits until the timeout.
        peer.send(headers(1, method.path, grpc_timeout=b"200m"), *data(1, body))
        assert peer.ended(1)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity", "snappy"])
def test_bodies_that_grow_when_unpacked(target: Target, encoding: str) -> None:
    """The compressed zeros that fit a message are 4 GiB unpacked."""
    bomb = gzip.compress(bytes(64 << 20), 9)
    bomb *= MAX_MESSAGE_BYTES // len(bomb)
    with attacked(target), Connection(target.address) as peer:
        peer.send(headers(1, HANDSHAKE, grpc_encoding=encoding.encode()), *data(1, message(bomb, compressed=1)))
        assert peer.ended(1)


STRANGE_HEADERS: dict[str, dict[str, bytes | None]] = {
    "no path": {"path": None},
    "no method": {"method": None},
    "get": {"method": b"GET"},
    "long path": {"path": b"/" + b"x" * 8000},
    "path of bytes": {"path": bytes(range(128))},
    "path that leaves": {"path": b"/../../etc/passwd"},
    "no timeout": {"grpc_timeout": None},
    "endless timeout": {"grpc_timeout": b"99999999H"},
    "negative timeout": {"grpc_timeout": b"-1S"},
    "no time": {"grpc_timeout": b"0n"},
    "timeout of nothing": {"grpc_timeout": b""},
    "html": {"content_type": b"text/html"},
    "no content type": {"content_type": None},
    "no te": {"te": None},
    "long header": {"x_long": b"y" * 100_000},
    "long binary header": {"x_long_bin": b"y" * 100_000},
    "bad binary header": {"x_bin": b"\xff\xfe!!"},
    "trace": {"grpc_trace_bin": b"\0" * 1000},
    "tags": {"grpc_tags_bin": b"\0" * 1000},
    "own status": {"grpc_status": b"0"},
    "upper case": {"X_UPPER": b"x"},
    "connection": {"connection": b"close"},
    "bad length": {"content_length": b"-1"},
}


@pytest.mark.parametrize("case", STRANGE_HEADERS)
def test_strange_headers(target: Target, case: str) -> None:
    with attacked(target), Connection(target.address) as peer:
        strange: dict[str, Any] = STRANGE_HEADERS[case]
        peer.send(headers(1, LIST_ENGINES, **strange)[:16_000_000], *data(1, message(b"")))
        assert peer.ended(1)


SETTINGS = {
    "no window": {4: 0},
    "window too large": {4: 2**32 - 1},
    "no frames": {5: 0},
    "huge tables": {1: 2**32 - 1},
    "no streams": {3: 0},
    "push": {2: 7},
    "unknown": {99: 1, 65535: 2**32 - 1},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_ask_for_much(target: Target, case: str) -> None:
    """Answers that may not be sent wait for the peer, which sends many requests."""
    with attacked(target), Connection(target.address) as peer:
        peer.send(*(http2.settings(SETTINGS[case]) for _ in range(200)))
        for stream in range(1, 2001, 2):
            peer.send(headers(stream, LIST_ENGINES), *data(stream, message(b"")))


@pytest.mark.parametrize("size", [0, 1, 2**31 - 1])
def test_windows_that_overflow(target: Target, size: int) -> None:
    with attacked(target), Connection(target.address) as peer:
        peer.send(headers(1, LIST_ENGINES))
        update = size.to_bytes(4, "big")
        peer.send(*(frame(http2.WINDOW, 0, stream, update) for _ in range(1000) for stream in (0, 1)))


def test_frames_with_random_content(target: Target) -> None:
    turns = random.Random(1)
    with attacked(target):
        for _ in range(4 * EXAMPLES):
            with Connection(target.address) as peer:
                for _ in range(turns.randint(1, 30)):
                    kind, flags = turns.randrange(11), turns.choice([0, 1, 4, 5, 8, 0x20, 255])
                    stream = turns.choice([0, 1, 2, 3, 5, 2**31 - 1])
                    peer.send(frame(kind, flags, stream, turns.randbytes(turns.choice([0, 1, 4, 5, 6, 8, 50]))))
                    if turns.random() < 0.3:
                        peer.send(headers(turns.choice([1, 3, 5]), turns.choice(METHODS).path))


def test_peers_that_stay_and_send_no_more(target: Target) -> None:
    peers = [Connection(target.address, preface=False) for _ in range(100)]
    try:
        for index, peer in enumerate(peers):
            peer.send(http2.PREFACE[: index % 25])
            if index % 2:
                peer.send(http2.PREFACE[index % 25 :], http2.settings({}), headers(1, WATCH))
        with attacked(target):
            pass
    finally:
        for peer in peers:
            peer.close()


def test_connections_that_are_reset(target: Target) -> None:
    with attacked(target):
        for _ in range(300):
            peer = Connection(target.address)
            peer.send(headers(1, LIST_ENGINES), *data(1, message(b"")))
            peer.reset()


@pytest.mark.parametrize("path", [b"/\xff", b"\xc3\x28", b"/kvferry.v1.KVTransfer/\xed\xa0\x80", b"\x80" * 4000])
def test_paths_that_are_no_text(target: Target, path: bytes) -> None:
    """Such paths end grpcio's own asyncio server."""
    with attacked(target), Connection(target.address) as peer:
        for stream in range(1, 201, 2):
            peer.send(headers(stream, LIST_ENGINES, path=path), *data(stream, message(b"")))
        assert peer.ended(199)
