"""What the control plane costs: each call of a request against a bare call of the same kind, with messages of the same
sizes, to a server that does nothing. Before each, the client does the same, and the server has answered a small call:
what a process has just done decides how fast its next call is."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from benchmarks.caches import Layout
from benchmarks.call_sizes import sizes_of
from benchmarks.echo_server import Echo, echo_server
from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved
from benchmarks.node_server import ServerProcess, node_server
from benchmarks.parties import TIMEOUT, Party, sent
from kvferry.v1 import kv_transfer_pb2 as pb

LAYOUT = Layout()
BLOCKS = 256
REPEATS = 300
MANY = 64
"""Notifications in a batch."""


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    blocks = effort.size(BLOCKS, 16)
    with (
        node_server() as server,
        echo_server() as (echo, bare),
        grpc.insecure_channel(server.address) as channel,
    ):
        source, destination = Party(channel, "source", LAYOUT), Party(channel, "reader", LAYOUT)
        source.open()
        try:
            calls = _Calls(source, destination, blocks, effort)
            measures = _against_bare(calls, echo, channel, blocks, effort)
            measures += _cpu(calls, server, bare, echo, effort)
        finally:
            source.close()
    return Topic("server_calls", f"Calls of a request of {BLOCKS} scattered blocks, one at a time", tuple(measures))


class _Calls:
    """The calls of requests, each on a publication or lease of its own; what a call needs is made before, untimed."""

    def __init__(self, source: Party, destination: Party, blocks: int, effort: Effort) -> None:
        self.source, self.destination = source, destination
        self.stub: Any = source.stub
        self.batch = effort.size(MANY, 2)
        self._ids = np.random.default_rng(0).permutation(LAYOUT.num_blocks)[:blocks].astype(np.int32)
        self._request: Any = None
        self._lease = b""
        self._leases: list[bytes] = []

    def publish(self) -> Action:
        """Notify(publish)."""

        def prepare() -> None:
            self._request = self.source.publish_request(self._ids)

        return Action(lambda: sent(self.stub, self._request), prepare=prepare)

    def read_blocks(self) -> Action:
        """ReadBlocks, which answers lease and blocks at once."""

        def prepare() -> None:
            sent(self.stub, self.source.publish_request(self._ids))
            self._request = self.destination.read_request(self.source.reference(), secrets.token_bytes(16))

        def run() -> None:
            answer = self.stub.ReadBlocks(self._request, timeout=TIMEOUT)
            if not answer.HasField("complete"):
                raise AssertionError("the publication is not complete")
            self._lease = answer.accepted.lease_id

        return Action(run, prepare=prepare)

    def report(self) -> Action:
        """Notify(read done)."""

        def prepare() -> None:
            self.read_blocks().seconds()
            self._request = self.destination.done_request(self._lease)

        return Action(self._ended_well, prepare=prepare)

    def validate(self) -> Action:
        """Notify(validate)."""

        def prepare() -> None:
            sent(self.stub, self.source.publish_request(self._ids))
            self._request = self.destination.validate_request(self.source)

        return Action(self._ended_well, prepare=prepare)

    def renew(self) -> Action:
        """Notify(renew) of one lease."""

        def prepare() -> None:
            self._hold(1)

        return Action(lambda: self._renewed(1), prepare=prepare)

    def renew_many(self) -> Action:
        """Notify(renew) of a batch of leases."""

        def prepare() -> None:
            self._hold(self.batch)

        return Action(lambda: self._renewed(self.batch), prepare=prepare)

    def request(self) -> None:
        """Publish, validate: the calls of a request whose read takes no lease."""
        self.validate().seconds()

    def leased_request(self) -> None:
        """Publish, ask for the blocks, report: the calls of a request whose read has a lease."""
        self.report().seconds()

    def nothing(self) -> None:
        """Notify without a notification."""
        self.stub.Notify(pb.NotifyRequest(), timeout=TIMEOUT)

    def _ended_well(self) -> None:
        [result] = sent(self.stub, self._request)
        if result.read_ended.verdict != pb.VERDICT_VALID:
            raise AssertionError(f"a good read ended {result}")

    def _hold(self, count: int) -> None:
        while len(self._leases) < count:
            self.read_blocks().seconds()
            self._leases.append(self._lease)
        renewals = [pb.Notification(renew=pb.Renew(lease_id=lease)) for lease in self._leases[:count]]
        self._request = self.destination.as_reader(*renewals)

    def _renewed(self, count: int) -> None:
        results = sent(self.stub, self._request)
        if len(results) != count or not all(result.renewed.remaining.seconds for result in results):
            raise AssertionError("a live lease was not renewed")


def _against_bare(calls: _Calls, echo: Echo, channel: grpc.Channel, blocks: int, effort: Effort) -> list[Measure]:
    repeats = effort.repeats(REPEATS)
    sizes = sizes_of(channel, LAYOUT, blocks)
    pairs = {
        "Notify(publish)": (calls.publish(), echo.unary(*sizes.publish)),
        "Notify(validate)": (calls.validate(), echo.unary(*sizes.validate)),
        "ReadBlocks": (calls.read_blocks(), echo.unary(*sizes.read)),
        "Notify(read done)": (calls.report(), echo.unary(*sizes.report)),
        "Notify(renew)": (calls.renew(), echo.unary(*sizes.renew)),
        f"Notify(renew) of {calls.batch} leases": (
            calls.renew_many(),
            echo.unary(*(size * calls.batch for size in sizes.renew)),
        ),
    }
    actions = {"bare unary echo": Action(echo.unary())}
    for name, (call, bare) in pairs.items():
        actions[name] = Action(call.run, prepare=_both(call.prepare, calls.nothing))
        actions[f"bare, as {name}"] = Action(bare, prepare=_both(call.prepare, echo.unary()))
    times = interleaved(actions, repeats, warm=effort.size(20, 1))
    against = {name: f"bare, as {name}" for name in pairs}
    measures = [Measure(name, "s", found, against.get(name, "")) for name, found in times.items()]
    control = sum(sum(part) for part in (sizes.publish, sizes.validate))
    return [
        *measures,
        Measure.of("bytes of control per request", "B", control),
        Measure.of("bytes of a renewal", "B", sum(sizes.renew)),
    ]


def _both(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _cpu(calls: _Calls, server: ServerProcess, bare: ServerProcess, echo: Echo, effort: Effort) -> list[Measure]:
    """The server process's CPU per request, and per bare call."""
    repeats = effort.repeats(REPEATS)
    used: list[float] = []
    for request in (calls.request, calls.leased_request):
        before = server.cpu_seconds()
        for _ in range(repeats):
            request()
        used.append((server.cpu_seconds() - before) / repeats)
    renewals = calls.renew_many()
    renewals.prepare()
    before = server.cpu_seconds()
    for _ in range(repeats):
        renewals.run()
    renewed = (server.cpu_seconds() - before) / repeats / calls.batch
    call = echo.unary()
    before = bare.cpu_seconds()
    for _ in range(repeats):
        call()
    least = (bare.cpu_seconds() - before) / repeats
    return [
        Measure.of("bare server's CPU per call", "s", least),
        Measure.of("node server's CPU per request of two calls", "s", used[0], "bare server's CPU per call"),
        Measure.of("node server's CPU per request with a lease", "s", used[1], "bare server's CPU per call"),
        Measure.of("node server's CPU per renewal, in batches", "s", renewed, "bare server's CPU per call"),
    ]
