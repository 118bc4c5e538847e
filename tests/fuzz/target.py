"""The server under attack, its engines, and checks that it is unharmed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
from google.protobuf.message import Message

from kvferry._wire.status import from_rpc_error
from tests.fuzz.methods import Method
from tests.support.node_servers import NodeServerProcess
from tests.support.raw_parties import TIMEOUT, Party

CPU_PER_MESSAGE = 2.0
CPU_PER_LARGE_MESSAGE = 10.0
"""Most seconds of the server's CPU for an ordinary message and for one of 4 MiB. Measured: a few milliseconds, and 1 to
2 s for tens of thousands of planes."""
IDLE_WITHIN = 10.0
"""Seconds from the last message until the server must be idle."""
IDLE_LOOK = 0.05
"""Seconds of a sample, of which an idle server uses at most a fifth: the kernel counts in hundredths."""
GROWTH = 256 << 20
"""Most bytes by which the server may grow during a test."""

# Codes that no peer may get: UNKNOWN is a handler that failed outside of our guard, INTERNAL one that failed inside.
FAILURES = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL})


class Target:
    """A node server in its own process, a victim engine in whose name messages are sent, and a bystander engine."""

    def __init__(self, folder: Path) -> None:
        self._server = NodeServerProcess(folder, tcp=True, engine_ttl=2, retire=2, drain=0)
        self.log = folder / "log"

    def __enter__(self) -> Target:
        self._server.start()
        self.address = self._server.address
        self.channel = grpc.insecure_channel(self.address, (("grpc.max_receive_message_length", -1),))
        self.victim, self.bystander = Party(self.channel, "victim"), Party(self.channel, "bystander")
        self._process = psutil.Process(self._server.pid)
        self.bystander.live()
        self.victim.live()
        return self

    def __exit__(self, *_: object) -> None:
        for party in (self.victim, self.bystander):
            party.close()
        self.channel.close()
        self._server.stop()

    def cpu(self) -> float:
        """Return the seconds of CPU that the server has used."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Check that after the context the server is idle, has not grown, and serves other engines."""
        before = self._process.memory_info().rss
        self.bystander.works()
        yield
        self.idle()
        grown = self._process.memory_info().rss - before
        assert grown < GROWTH, f"the server has grown by {grown >> 20} MiB"
        self.bystander.works()
        self.victim.live()

    def idle(self) -> None:
        """Wait until the server uses almost no CPU; raises `AssertionError` if it never stops."""
        deadline = time.monotonic() + IDLE_WITHIN
        used = self.cpu()
        while time.monotonic() < deadline:
            # A sample, not a wait: the server must use little of this time.
            time.sleep(IDLE_LOOK)
            before, used = used, self.cpu()
            if used - before <= IDLE_LOOK / 5:
                return
        raise AssertionError(f"the server is still busy {IDLE_WITHIN} s after the last message")

    def send(self, method: Method, raw: bytes | Sequence[bytes], cpu: float = CPU_PER_MESSAGE) -> grpc.StatusCode:
        """Send bytes as a request (as several to a method that takes a stream), and check the answer."""
        requests = [raw] if isinstance(raw, bytes) else list(raw)
        before = self.cpu()
        try:
            self._call(method, requests)
            code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            code = self._checked(method, requests, error)
        used = self.cpu() - before
        assert used < cpu, f"{method} took {used:.1f} s of CPU for {_shown(requests)}"
        return code

    def _call(self, method: Method, requests: Sequence[bytes]) -> None:
        # Without (de)serialisers a channel takes and gives bytes, but its types do not allow that.
        channel: Any = self.channel
        if method.client_streams:
            for _ in channel.stream_stream(method.path)(iter(requests), timeout=TIMEOUT):
                pass
            return
        (request,) = requests
        if not method.server_streams:
            channel.unary_unary(method.path)(request, timeout=TIMEOUT)
            return
        # A stream that was granted lasts as long as its lease or its process: its first message is the answer.
        stream = channel.unary_stream(method.path)(request, timeout=TIMEOUT)
        with suppress(StopIteration):
            next(stream)
        stream.cancel()

    def _checked(self, method: Method, requests: Sequence[bytes], error: grpc.RpcError) -> grpc.StatusCode:
        call: Any = error
        code: grpc.StatusCode = call.code()
        typed = from_rpc_error(error, self.address)
        said = f"{method} answered {code.name}, {call.details()!r}, to {_shown(requests)}"
        assert code not in FAILURES, said
        # Both of these mean a server that does not answer, unless the error is typed.
        if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
            assert typed.reason not in ("", "UNREACHABLE"), said
        if method.path.startswith("/kvferry."):
            assert typed.reason, said
        return code


def _shown(requests: Sequence[bytes]) -> str:
    first = requests[0] if requests else b""
    return f"{len(requests)} request(s), the first of {len(first)} bytes: {first[:400].hex()}"


def encoded(message: Message) -> bytes:
    return message.SerializeToString()
