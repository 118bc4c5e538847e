"""What the admin listener shows of its node server, beside the home."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry_server.admin.call_counts import CallCounts
from kvferry_server.admin.loop_lag import LoopLag
from kvferry_server.domain.budgets import Budget
from kvferry_server.home.home import Home
from kvferry_server.servicers.worker import Worker


@dataclass(frozen=True, slots=True)
class ListenerLoad:
    """What one gRPC listener carries, and how much it may.

    Attributes:
        name: ``unix`` or ``tcp``.
        calls, streams: in progress.
        max_calls, max_streams: at most.
        connections: open ones.
        max_connections: at most.
    """

    name: str
    calls: int
    max_calls: int
    streams: int
    max_streams: int
    connections: int
    max_connections: int


class NodeState(Protocol):
    """A node server, for the admin listener. Times are seconds since 1970.

    Attributes:
        home: its home.
        worker: its thread for geometries.
        calls: what is counted of its calls.
        lag: how late its event loop is.
        started_at: when it started.
        memory_limit: bytes of memory that the process may have.
        addresses: what it listens on.
        failed_handshakes: TLS handshakes that failed, by reason; None: nobody counts them.
        settings: its settings that may be shown: durations, in seconds, and limits.
    """

    home: Home
    worker: Worker
    calls: CallCounts
    lag: LoopLag
    started_at: float
    memory_limit: int
    addresses: Sequence[str]
    failed_handshakes: Mapping[str, int] | None
    settings: Mapping[str, object]

    def why_not_ready(self) -> str:
        """Return why it takes no new work; empty if it does."""

    def why_not_healthy(self) -> str:
        """Return why only a restart helps; empty if it works."""

    def loads(self) -> Sequence[ListenerLoad]:
        """Return what its listeners carry. Takes a while if there are many connections; any thread may call it."""

    def relayed_homes(self) -> int:
        """Return how many homes it is connected to as a relay."""

    def answers(self) -> Sequence[Budget]:
        """Return the budgets of answers that wait to be taken, one per listener."""

    def requests(self) -> Sequence[Budget]:
        """Return the budgets of requests that are worked on, one per listener."""

    def certificate_expiry(self) -> float | None:
        """Return when its certificate ends, in seconds since 1970; None: it has none."""

    def handshakes(self) -> int | None:
        """Return how many TLS handshakes have begun; None: it has no TLS."""

    def authorities_expiry(self) -> float | None:
        """Return when the first of the authorities ends that clients are checked against, in seconds since 1970; None:
        there are none."""
