"""Budgets: a fixed capacity, mostly one of `limits`, that many holders share, so that none can take everything.

A holder above its floor may take more only if it then holds at most what stays free. One holder alone gets half of the
capacity; three that take all they can get a quarter each, and the last quarter stays free for everyone else.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass

from kvferry.errors import LimitReached
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.limits import CALLER_FLOOR_BYTES

LOCAL = "callers on this host"  # Holder name for callers that cannot be told apart


class Budget:
    """A capacity that many holders share. Each holder gets `floor` as long as anything is free, whatever the others
    hold; by default a 256th."""

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
        """Whether a holder with `size` more would hold no more than the floor."""
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


class MemoryBudget:
    """Bytes that a home holds, counted per engine and per host that engines come from. Every engine gets `floor` bytes,
    even beyond `capacity`.

    Sizes are estimates of what objects take in memory. Hosts of callers on a UNIX socket are unknown: such engines are
    counted per engine only.
    """

    def __init__(self, capacity: int, floor: int, retry_after: float) -> None:
        self._by_engine = Budget(capacity, floor)
        self._by_host = Budget(capacity, 0)
        self._host_of: dict[EngineRef, str] = {}
        self._retry_after = retry_after

    @property
    def used(self) -> int:
        return self._by_engine.used

    def held(self, engine: EngineRef) -> int:
        return self._by_engine.held(engine)

    def comes_from(self, engine: EngineRef, host: str) -> None:
        """Count an engine's bytes against this host from now on; empty: against none."""
        before, held = self._host_of.pop(engine, ""), self._by_engine.held(engine)
        if before:
            self._by_host.give(before, held)
        if host:
            self._host_of[engine] = host
            self._by_host.take(host, held)

    def check(self, engine: EngineRef, size: int) -> None:
        """Raise `LimitReached` if an engine may not take `size` bytes more."""
        if not self._by_engine.in_floor(engine, size):
            self._check(engine, self._host_of.get(engine), size)

    def take(self, engine: EngineRef, size: int) -> None:
        """Add `size` bytes to what an engine holds; a negative size subtracts. Not checked: see `check`."""
        self._by_engine.take(engine, size)
        host = self._host_of.get(engine)
        if host is not None:
            self._by_host.take(host, size)

    def give(self, engine: EngineRef, size: int) -> None:
        self.take(engine, -size)

    def hold(self, caller: Hashable, host: str, size: int) -> ExitStack:
        """Hold the bytes of an answer until the context ends, when the caller has taken it; or of its question.

        The bytes count against the caller, not against the engine that the call is about: a caller that takes no
        answers costs that engine and its other readers nothing. Calls from an unknown host (empty) share what one host
        gets. Raises `LimitReached` if this caller, or its host, holds too much.
        """
        caller, host = _Caller(caller), host or LOCAL
        if self._by_engine.held(caller) + size > CALLER_FLOOR_BYTES:
            self._check(caller, host, size)
        taken = ExitStack()
        for budget, holder in ((self._by_engine, caller), (self._by_host, host)):
            budget.take(holder, size)
            taken.callback(budget.give, holder, size)
        return taken

    def _check(self, holder: Hashable, host: str | None, size: int) -> None:
        if self._by_engine.fits(holder, size) and (host is None or self._by_host.fits(host, size)):
            return
        raise LimitReached(
            f"memory: {self._by_engine.used} of this server's {self._by_engine.capacity} bytes are in use, "
            f"{self._by_engine.held(holder)} of them by {holder}, which may not have {size} more",
            retry_after=self._retry_after,
            limit="memory",
            value=self._by_engine.capacity,
        )


@dataclass(frozen=True, slots=True)
class _Caller:
    """A caller as a holder of the budget. Never equal to an engine, even if the caller uses an engine's name."""

    name: Hashable

    def __str__(self) -> str:
        return f"caller {self.name}"
