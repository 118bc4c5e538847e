"""Counts the calls that go to a server: a proxy between two UNIX sockets that looks at the frames of HTTP/2. It knows
nothing of how either side is written."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER = 9
HEADERS = 1
"""Type of the frame with which a client begins each call, and sends only then."""


class CallCounter:
    """Calls begun so far, over all connections.

    Attributes:
        address: of the proxy, as gRPC writes it.
        calls: how many.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.calls = 0
        self._lock = threading.Lock()

    def count(self, calls: int) -> None:
        """Add so many."""
        with self._lock:
            self.calls += calls


class Frames:
    """Finds the frames in what a client sends, in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""
        self._greeted = False
        self._skip = 0

    def feed(self, piece: bytes) -> int:
        """Take the next bytes; how many calls begin in them."""
        self._rest += piece
        if not self._greeted:
            if len(self._rest) < len(PREFACE):
                return 0
            if not self._rest.startswith(PREFACE):
                raise ValueError("this is not HTTP/2")
            self._rest, self._greeted = self._rest[len(PREFACE) :], True
        calls = 0
        while True:
            skipped = min(self._skip, len(self._rest))
            self._rest, self._skip = self._rest[skipped:], self._skip - skipped
            if self._skip or len(self._rest) < FRAME_HEADER:
                return calls
            calls += self._rest[3] == HEADERS
            self._skip = FRAME_HEADER + int.from_bytes(self._rest[:3], "big")


@contextmanager
def counted(address: str) -> Iterator[CallCounter]:
    """A proxy to the server at a UNIX socket, until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        path = f"{folder}/proxy.sock"
        counter = CallCounter(f"unix:{path}")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            threading.Thread(
                target=_accept, args=(listener, address.removeprefix("unix:"), counter), daemon=True
            ).start()
            try:
                yield counter
            finally:
                # Closing alone does not wake the thread that accepts.
                listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, path: str, counter: CallCounter) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_connection, args=(client, path, counter), daemon=True).start()


def _connection(client: socket.socket, path: str, counter: CallCounter) -> None:
    """Forward both ways until both sides have ended."""
    with client, socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        back = threading.Thread(target=_forward, args=(server, client, None), daemon=True)
        back.start()
        _forward(client, server, counter)
        back.join()


def _forward(source: socket.socket, destination: socket.socket, counter: CallCounter | None) -> None:
    frames = Frames()
    with suppress(OSError):
        while piece := source.recv(1 << 16):
            if counter is not None:
                counter.count(frames.feed(piece))
            destination.sendall(piece)
    for end in (source, destination):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
