"""What the admin listener shows of its node server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry._wire.channel import Address
from kvferry.stats import Distribution, histogram
from kvferry_server.admin.call_counts import CallCounts
from kvferry_server.admin.limits import LAG_POLL, OVERDUE
from kvferry_server.domain.budgets import Budget
from kvferry_server.home.home import Home
from kvferry_server.servicers.relay import Relays
from kvferry_server.servicers.worker import Worker

LATE = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bounds, in seconds, of how late timers are."""


@dataclass(slots=True, eq=False)
class LoopLag:
    """Measures how late the running event loop runs its timers: what every call waits at least."""

    seen: Distribution = histogram("kvferry_loop_lag_seconds", "How late timers of the event loop are.", bounds=LATE)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_POLL
            await asyncio.sleep(LAG_POLL)
            self.seen.add(max(0.0, loop.time() - due))


class ShownCertificates(Protocol):
    """The TLS files of a node server. Times are seconds since 1970.

    Attributes:
        handshakes: how many TLS handshakes have begun.
    """

    handshakes: int

    @property
    def expiry(self) -> float:
        """When its certificate ends."""

    @property
    def authorities_expiry(self) -> float | None:
        """When the first of the authorities ends that clients are checked against; None: there are none."""


@dataclass(frozen=True, slots=True)
class ShownListener:
    """A gRPC listener of a node server.

    Attributes:
        address: where it listens.
        is_serving: whether a gRPC server is there; not while one replaces another.
        calls, streams: the budgets of those in progress.
        answers: the budget of answers that wait to be taken.
        requests: the budget of requests that are worked on.
        connections: counts open connections. Takes a while if there are many; any thread may call it.
        max_connections: how many there may be.
    """

    address: Address
    is_serving: Callable[[], bool]
    calls: Budget
    streams: Budget
    answers: Budget
    requests: Budget
    connections: Callable[[], int]
    max_connections: int

    @property
    def name(self) -> str:
        """``unix`` or ``tcp``."""
        return "unix" if self.address.is_unix else "tcp"


@dataclass(slots=True, eq=False)
class NodeState:
    """A node server, for the admin listener. Belongs to its event loop.

    Attributes:
        home, worker, relays: its parts.
        home_runs: whether the home's timers run.
        certificates: its TLS files; None: it has none.
        failed_handshakes: TLS handshakes that failed, by reason; None: nobody counts them.
        settings: its settings that may be shown: durations, in seconds, and limits.
        addresses: what it listens on.
        memory_limit: bytes of memory that the process may have.
        calls: what is counted of its calls.
        lag: how late its event loop is.
        listeners: its gRPC listeners, as they come.
        started_at: when it started, in seconds since 1970.
    """

    home: Home
    worker: Worker
    relays: Relays
    home_runs: Callable[[], bool]
    certificates: ShownCertificates | None
    failed_handshakes: Mapping[str, int] | None
    settings: Mapping[str, object]
    addresses: Sequence[str]
    memory_limit: int
    calls: CallCounts
    lag: LoopLag = field(default_factory=LoopLag)
    listeners: list[ShownListener] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)

    def why_not_ready(self) -> str:
        """Return why it takes no new work; empty if it does."""
        if self.home.draining:
            return "draining"
        if len(self.listeners) < len(self.addresses):
            return "starting"
        away = [str(listener.address) for listener in self.listeners if not listener.is_serving()]
        return f"gRPC's server is being replaced at {' and '.join(away)}" if away else ""

    def why_not_healthy(self) -> str:
        """Return why only a restart helps; empty if it works. That it is asked at all shows that the loop runs."""
        if not self.home_runs():
            return "the home's timers have stopped: nothing is released any more"
        late = self.home.clock.now() - self.home.next_deadline()
        return f"the home's timers are {late:.0f} s late" if late > OVERDUE else ""

    def open_connections(self) -> Mapping[str, int]:
        """Return how many connections each listener has, by its name. Any thread may call it."""
        return {listener.name: listener.connections() for listener in tuple(self.listeners)}
