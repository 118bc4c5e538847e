"""Incarnations that ended for good, and are refused for a time, so that a delayed message cannot evict the living
(PROTOCOL, Identities)."""

from __future__ import annotations

from kvferry_server.domain.budgets import Budget, check_budget
from kvferry_server.domain.identity import EngineRef


class Retired:
    """The retired incarnations of a home.

    Args:
        lasts: seconds for which each is refused.
        most: of those that their engines have retired themselves; a host gets at most as many as stay free. Otherwise
            whoever opens and retires incarnations without an end would fill the memory.
    """

    def __init__(self, lasts: float, most: int) -> None:
        self._lasts = lasts
        self._by_host = Budget(most)
        self._until: dict[EngineRef, tuple[float, str | None]] = {}
        """Until when each is refused, rising, and the host that it counts for."""

    def add(self, ref: EngineRef, now: float, host: str | None = None) -> None:
        """Refuse an incarnation from now on. It counts for a host, unless that is None.

        Raises:
            LimitReached: the host has retired too many.
        """
        if host is not None:
            check_budget("retired", self._by_host, host, self._lasts)
            self._by_host.take(host)
        self._until[ref] = now + self._lasts, host

    def has(self, ref: EngineRef, now: float) -> bool:
        """Whether an incarnation is refused."""
        while self._until:
            first, (until, host) = next(iter(self._until.items()))
            if until > now:
                break
            del self._until[first]
            if host is not None:
                self._by_host.give(host)
        return ref in self._until
