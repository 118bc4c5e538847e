"""The limits of a home, and the budgets by which many holders share one. Beyond a limit a call fails with LIMIT and a
retry delay, so that no queue grows without bound.

A budget is a fixed capacity that many holders share, so that none can take everything. A holder above its floor may
take more only if it then holds at most what stays free. One holder alone gets half of the capacity; three that take all
they can get a quarter each, and the last quarter stays free for everyone else.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass

from kvferry.errors import LimitReached
from kvferry_server.domain.values import EngineRef


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts, unless a field says bytes. Far above what working engines need: they bound what a faulty one can take."""

    engines: int = 1024  # Engines at a home, including dead ones that may still come back
    ranks: int = 4096  # Ranks of one engine; also the parties of one read
    memory: int = 1 << 30
    """Bytes that the home keeps for all engines: registrations, publications, leases, reports, checksums and events.
    An engine, and all engines of one host together, get at most as much as stays free."""
    engine_memory: int = 1 << 20  # Bytes that every engine gets, whatever the others hold, also beyond `memory`
    retired: int = 16_384  # Retired incarnations that are refused
    publications: int = 65_536  # Publications of one engine that readers wait for, or whose release is not acknowledged
    checksum_bytes: int = 1 << 28  # Bytes of checksums for the unreleased publications of one engine
    reads: int = 1024  # Reads of one publication, including ended ones
    raised_reads: int = 64
    """Expected reads of a publication that a reader can state. The source may state up to `reads`."""
    leases: int = 262_144
    """Leases at a home, with ended ones whose outcome is kept. Those on one engine get at most as many as stay free."""
    router_keys: int = 65_536
    """Reads that wait under routers' keys at a home; and as many declines under keys whose publications have not
    arrived. A caller gets at most as many as stay free."""
    watch_queue: int = 1024  # Events that a Watch may fall behind before its answer is `lagged`


# Leases, and publications, that one pass of the timers ends: 100,000 may be due, and the event loop waits for a pass.
MAX_ENDED_AT_ONCE = 256
MAX_PAST_ROUTER_KEYS = 4096  # Router keys of one engine kept after their publications; the oldest are forgotten first
MAX_QUESTIONS = 64  # Questions to one engine that it has not answered; one that ended so counts for `ENDED_KEPT`
# Publication numbers below an engine's high-water mark that may still arrive. They take 100 KB, not counted elsewhere.
MAX_SKIPPED = 1024
MAX_PAYLOAD = 64 * 1024  # Bytes of a publication's payload
MAX_REGION_CHECKS = 1 << 22  # Planes times regions of one rank: bounds the work on one registration
MAX_CHECKSUM_PAGES = 256  # Checksum pages of one plane of a publication: each new page is compared with all of them
CHECKSUM_BATCH = 1 << 14  # Block positions that a new checksum page is compared with in one step
MAX_NAMED_RANKS = 64  # Missing ranks that an answer or error lists; the rest are counted
MAX_NAMED_NODES = 16  # Node servers of missing ranks that an error lists
MAX_NOTED_READERS = 1024  # Digests of geometries found compatible with an engine's; beyond, all are compared again
RANK_PAGE_BYTES = 1 << 20  # Bytes of ranks in one Handshake message; small, so that sending a message takes little time
MAX_RANK_BYTES = 7 << 19  # Encoded bytes of one rank and its agent: with `MAX_HEADER_BYTES` they fit one message
MAX_HEADER_BYTES = 1 << 18  # Encoded bytes of an engine without its ranks
CALLER_FLOOR_BYTES = 64 << 10  # Bytes of unsent answers and questions that every caller gets. Most are far smaller.


def check_limit(limit: str, count: int, most: int, retry_after: float) -> None:
    """Raise `LimitReached`, naming `limit`, if there is no room for one more. `retry_after` is in seconds."""
    if count >= most:
        raise LimitReached(
            f"{limit}: the server holds {count} of at most {most}", retry_after=retry_after, limit=limit, value=most
        )


LOCAL = "callers on this host"  # Holder name for callers that cannot be told apart


class Budget:
    """A capacity that many holders share. Each gets `floor`, by default a 256th, as long as anything is free."""

    def __init__(self, capacity: int, floor: int | None = None) -> None:
        self.capacity = capacity
        self.floor = max(1, capacity // 256) if floor is None else floor
        self.used = 0  # By all holders together
        self._held: dict[Hashable, int] = {}

    def held(self, holder: Hashable) -> int:
        return self._held.get(holder, 0)

    def fits(self, holder: Hashable, size: int = 1) -> bool:
        free = self.capacity - self.used - size
        return free >= 0 and (self.in_floor(holder, size) or self.held(holder) + size <= free)

    def in_floor(self, holder: Hashable, size: int = 1) -> bool:
        """Whether a holder with `size` more holds no more than the floor."""
        return self.held(holder) + size <= self.floor

    def take(self, holder: Hashable, size: int = 1) -> None:
        """Add `size` to what a holder holds; a negative size subtracts. Not checked: see `fits`."""
        self.used += size
        held = self._held.get(holder, 0) + size
        if held:
            self._held[holder] = held
        else:
            self._held.pop(holder, None)

    def give(self, holder: Hashable, size: int = 1) -> None:
        self.take(holder, -size)


def check_budget(limit: str, budget: Budget, holder: Hashable, retry_after: float, size: int = 1) -> None:
    """Raise `LimitReached` if a holder may not take `size` more. `limit` names the limit in the error; an empty holder,
    or None, stands for callers that cannot be told apart; `retry_after` is in seconds."""
    if not budget.fits(holder, size):
        raise LimitReached(
            f"{limit}: {budget.used} of {budget.capacity} are in use, {budget.held(holder)} of them by "
            f"{LOCAL if holder in ('', None) else holder}, which may not have {size} more",
            retry_after=retry_after,
            limit=limit,
            value=budget.capacity,
        )


class MemoryBudget(Budget):
    """Bytes that a home holds, counted per engine and per host that engines come from. Every engine gets `floor` bytes,
    even beyond `capacity`, where there is room for `engines`, half of it for one host: engines that are gone still hold
    what their leases need. Hosts of callers on a UNIX socket are unknown: such engines are counted per engine only.
    Sizes are estimates of what objects take in memory."""

    def __init__(self, capacity: int, floor: int, engines: int, retry_after: float) -> None:
        super().__init__(capacity, floor)
        self._most = capacity + floor * engines
        self._by_host = Budget(capacity, 0)
        self._host_of: dict[Hashable, str] = {}
        self._retry_after = retry_after

    def comes_from(self, engine: EngineRef, host: str) -> None:
        """Count an engine's bytes against this host from now on, until it holds none."""
        before, held = self._host_of.pop(engine, ""), self.held(engine)
        if before:
            self._by_host.give(before, held)
        self._host_of[engine] = host
        self._by_host.take(host, held)

    def check(self, engine: EngineRef, size: int) -> None:
        """Raise `LimitReached` if an engine may not take `size` bytes more."""
        host = self._host_of.get(engine)
        room = self.used + size <= self._most and self._by_host.held(host) + size <= self._most // 2
        if not (room and self.in_floor(engine, size)):
            self._check(engine, host, size)

    def take(self, holder: Hashable, size: int = 1) -> None:
        super().take(holder, size)
        host = self._host_of.get(holder)
        if host is not None:
            self._by_host.take(host, size)
            if not self.held(holder):
                del self._host_of[holder]

    def hold(self, caller: Hashable, host: str, size: int) -> ExitStack:
        """Hold the bytes of an answer until the context ends, when the caller has taken it; or of its question. The
        bytes count against the caller, not against the engine that the call is about: a caller that takes no answers
        costs that engine and its other readers nothing. Calls from an unknown host (empty) share what one host gets.
        Raises `LimitReached` if this caller, or its host, holds too much."""
        # Never equal to an engine, even if the caller uses an engine's name.
        caller, host = f"caller {caller}", host or LOCAL
        if self.held(caller) + size > CALLER_FLOOR_BYTES:
            self._check(caller, host, size)
        taken = ExitStack()
        for budget, holder in ((self, caller), (self._by_host, host)):
            budget.take(holder, size)
            taken.callback(budget.give, holder, size)
        return taken

    def _check(self, holder: Hashable, host: str | None, size: int) -> None:
        if self.fits(holder, size) and (host is None or self._by_host.fits(host, size)):
            return
        raise LimitReached(
            f"memory: {self.used} of this server's {self.capacity} bytes are in use, "
            f"{self.held(holder)} of them by {holder}, which may not have {size} more",
            retry_after=self._retry_after,
            limit="memory",
            value=self.capacity,
        )
