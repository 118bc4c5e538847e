"""What the admin listener shows of a node server: its state, also as plain values, and counts of its gRPC calls."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import kvferry
from kvferry._wire.channel import Address
from kvferry._wire.tls_files import TlsFiles
from kvferry.stats import Distribution, counter, histogram, shown
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.journal import EventLog
from kvferry_server.domain.limits import Budget
from kvferry_server.home.home import Home
from kvferry_server.servicers.relay import Relays

Row: TypeAlias = "dict[str, Any]"

CONNECTIONS_POLL = 2.0  # Least seconds between two counts of the open connections
CONNECTIONS_SHARE = 0.002
"""Fraction of a core that counting them may take: thousands of idle connections must not keep it busy (R12)."""
LAG_POLL = 0.5  # Seconds between two measurements of how late the event loop runs its timers
OVERDUE = 5.0  # Seconds by which the home's timers may be late before the node server counts as ill
BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # Of buckets of durations, in seconds

OK = "OK"
INTERNAL = "INTERNAL"  # The reason of a call that failed because of a bug
LEFT = "CANCELLED"  # The result of a call whose client has left
ABORTED = "ABORTED"  # Of a call that its handler aborted without a reason, as those of health and reflection do


@dataclass(slots=True, eq=False)
class CallCounts:
    """Counts of calls, and where their refusals are written. The number of labels is bounded: methods come from the
    contract, reasons from `ErrorReason`."""

    events: EventLog | None = None
    results: Counter[tuple[str, str]] = counter(
        "kvferry_calls",
        "Calls that ended: OK, the reason of the error, CANCELLED if the client left, or ABORTED for an error without "
        "a reason. Other results than OK and INTERNAL begin with the first such call.",
        method=(),
        result=(),
    )
    taken: dict[str, Distribution] = histogram(
        "kvferry_call_seconds", "How long calls take that do not wait for news.", BOUNDS, method=()
    )


@dataclass(frozen=True, slots=True)
class ShownListener:
    """A gRPC listener of a node server. `budgets`: ``calls`` and ``streams``, in bytes the ``answers`` that clients
    have not taken yet, and the ``requests`` in work."""

    address: Address
    budgets: Mapping[str, Budget]
    max_connections: int

    @property
    def name(self) -> str:
        return "unix" if self.address.is_unix else "tcp"


@dataclass(slots=True, eq=False)
class NodeState:
    """A node server, for the admin listener. Belongs to the server's event loop.

    Without TLS, `certificates` is None. `failed_handshakes` returns numbers by reason; None: they are not counted.
    `settings` are those that may be shown: durations, in seconds, and limits. `memory_limit` is in bytes, `started_at`
    in seconds since 1970. `listeners` grows while the server starts. `count_connections` counts the open connections to
    an address, which takes a while if there are many, on any thread; `connections` are the last counts, by listener.
    """

    home: Home
    relays: Relays
    certificates: TlsFiles | None
    failed_handshakes: Callable[[], Mapping[str, int]] | None
    settings: Mapping[str, object]
    addresses: Sequence[str]
    memory_limit: int
    calls: CallCounts
    count_connections: Callable[[Address], int]
    lag: Distribution = histogram("kvferry_loop_lag_seconds", "How late timers of the event loop are.", bounds=BOUNDS)
    listeners: list[ShownListener] = field(default_factory=list)
    connections: dict[str, int] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)

    @property
    def engines(self) -> Collection[Engine]:
        return self.home.engines.all_engines()

    @property
    def alive(self) -> Collection[Engine]:
        return [engine for engine in self.engines if not engine.dead]

    def oldest_pin_age(self) -> float | None:
        """Return the seconds since the oldest publication that is not released was published; None: there is none."""
        oldest = next(iter(self.home.journal.pinned), None)
        return None if oldest is None else self.home.clock.now() - oldest.first_at

    def why_not_ready(self) -> str:
        """Return why the node server takes no new work; empty if it does."""
        if self.home.draining:
            return "draining"
        return "starting" if len(self.listeners) < len(self.addresses) else ""

    def why_not_healthy(self) -> str:
        """Return why only a restart helps; empty if the server works. An answer shows that the event loop runs."""
        late = self.home.clock.now() - self.home.next_deadline()
        return f"the home's timers are {late:.0f} s late" if late > OVERDUE else ""

    async def measure_lag(self) -> None:
        """Measure how late the running event loop runs its timers: every call waits at least as long."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_POLL
            await asyncio.sleep(LAG_POLL)
            self.lag.add(max(0.0, loop.time() - due))

    async def measure_connections(self) -> None:
        """Count the open connections again and again."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            for listener in tuple(self.listeners):
                self.connections[listener.name] = await asyncio.to_thread(self.count_connections, listener.address)
            await asyncio.sleep(max(CONNECTIONS_POLL, (loop.time() - began) / CONNECTIONS_SHARE))


def overview(node: NodeState) -> Row:
    """Return the state of the whole node server, without lists that grow with its load."""
    home, journal = node.home, node.home.journal
    with home.turn():
        states = [engine.state for engine in node.engines]
        pinned = node.oldest_pin_age()
        certificates = node.certificates
        expiry, authorities = (certificates.expiry, certificates.authorities_expiry) if certificates else (None, None)
        return {
            "version": kvferry.__version__,
            "epoch": home.epoch.hex(),
            "ready": not node.why_not_ready(),
            "why_not_ready": node.why_not_ready(),
            "healthy": not node.why_not_healthy(),
            "why_not_healthy": node.why_not_healthy(),
            "draining": home.draining,
            "uptime_s": round(time.time() - node.started_at, 3),
            "addresses": list(node.addresses),
            "advertise": home.advertise,
            "certificate_ends_in_s": None if expiry is None else round(expiry - time.time()),
            "authority_ends_in_s": None if authorities is None else round(authorities - time.time()),
            "engines": {state: states.count(state) for state in sorted(set(states))},
            "publications": _by_name(journal.stages),
            "pinned": len(journal.pinned),
            "oldest_pin_s": None if pinned is None else round(pinned, 3),
            "leases": _by_name(journal.live_leases),
            "leases_ended": _by_name(journal.ended),
            "released": _by_name(journal.outcomes),
            "memory_bytes": home.memory.used,
            "limits": asdict(home.limits),
            "settings": dict(node.settings),
        }


def _by_name(counts: Mapping[Any, int]) -> dict[str, int]:
    return {shown(key): count for key, count in counts.items() if count}


def last_reads(node: NodeState) -> list[Row]:
    """Return the last reads that ended, oldest first; times are seconds before now."""
    with node.home.turn() as now:
        ago = {"began_s_ago": "granted_at", "ended_s_ago": "ended_at"}
        return [
            {**read, **{name: round(now - read[at], 6) for name, at in ago.items()}}
            for read in node.home.journal.last_reads
        ]
