"""As much HTTP/2 as it takes to speak it wrongly."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 1, 4, 1
TIMEOUT = 20.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_block(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers in HPACK, as literals that are not indexed."""
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in headers)


def request_headers(path: str, /, **changed: bytes | None) -> bytes:
    """The headers of a gRPC request; a name with underscores in `changed` replaces a value, None leaves it out."""
    headers: dict[str, bytes | None] = {
        ":method": b"POST",
        ":scheme": b"http",
        ":path": path.encode(),
        ":authority": b"x",
        "content-type": b"application/grpc",
        "te": b"trailers",
        "grpc-timeout": b"10S",
    }
    named = {f":{name}" if f":{name}" in headers else name.replace("_", "-"): value for name, value in changed.items()}
    return header_block((name.encode(), value) for name, value in {**headers, **named}.items() if value is not None)


def message(raw: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """A gRPC message with its prefix."""
    return struct.pack(">BI", compressed, len(raw) if length is None else length) + raw


def data(stream: int, payload: bytes, *, end: bool = True) -> Iterator[bytes]:
    """A payload in frames of 16 KiB."""
    parts = [payload[at : at + 16384] for at in range(0, len(payload), 16384)] or [b""]
    for index, part in enumerate(parts):
        yield frame(DATA, END_STREAM if end and index == len(parts) - 1 else 0, stream, part)


def settings(values: Mapping[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", key, value) for key, value in values.items()))


def _string(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes([size]) + text
    size, prefix = size - 127, bytearray([127])
    while size >= 128:
        prefix.append(size % 128 + 128)
        size //= 128
    return bytes(prefix) + bytes([size]) + text


class Connection:
    """A TCP connection to an ``host:port``. A server may close it at any time, which is no error."""

    def __init__(self, address: str, *, preface: bool = True, source: str = "") -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT, (source, 0))
        self._unread = b""
        self.closed = False
        if preface:
            self.send(PREFACE + settings({}))

    def send(self, *parts: bytes) -> None:
        """Send, unless the server has closed."""
        try:
            for part in parts:
                self._socket.sendall(part)
        except ConnectionError:
            self.closed = True

    def ended(self, stream: int) -> bool:
        """Read until the stream has ended, or all streams have; false if neither happens in time."""
        with suppress(TimeoutError):
            while not self.closed:
                kind, flags, of, payload = self._frame()
                if kind == GOAWAY or (of == stream and (kind == RST or (kind == HEADERS and flags & END_STREAM))):
                    return True
                if kind == PING and not flags & ACK:
                    self.send(frame(PING, ACK, 0, payload))
                if kind == SETTINGS and not flags & ACK:
                    self.send(frame(SETTINGS, ACK, 0))
            return True
        return False

    def answered(self, stream: int, by: int = DATA) -> bool:
        """Read until a message of the stream has come, or with `by` another frame; false if it ended instead, or
        nothing came in time."""
        with suppress(TimeoutError):
            while not self.closed:
                kind, flags, of, _ = self._frame()
                if kind == GOAWAY or (of == stream and (kind == RST or (kind == HEADERS and flags & END_STREAM))):
                    return False
                if of == stream and kind == by:
                    return True
        return False

    def _frame(self) -> tuple[int, int, int, bytes]:
        head = self._read(9)
        size, kind, flags, stream = int.from_bytes(head[:3], "big"), head[3], head[4], int.from_bytes(head[5:9], "big")
        return (kind, flags, stream, self._read(size)) if len(head) == 9 else (GOAWAY, 0, 0, b"")

    def _read(self, size: int) -> bytes:
        while len(self._unread) < size:
            try:
                more = self._socket.recv(65536)
            except ConnectionError:
                more = b""
            if not more:
                self.closed = True
                return b"\0" * 3 + bytes([GOAWAY]) + b"\0" * 5 if size == 9 else b""
            self._unread += more
        found, self._unread = self._unread[:size], self._unread[size:]
        return found

    def reset(self) -> None:
        """Leave with a TCP RST."""
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
