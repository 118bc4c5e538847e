"""Pauses between the attempts of an operation that fails."""

from __future__ import annotations

from random import SystemRandom

BACKOFF_FIRST = 0.02
BACKOFF_LAST = 1.0

_RANDOM = SystemRandom()
"""Not the random numbers of the process, which an application may have seeded; nor others with a state, which the
processes that it forks would share."""


class Backoff:
    """Doubles the pause between attempts, from a first to a longest one. Not thread-safe.

    Args:
        first, last: seconds of the first and of the longest pause.
        jitter: 0.0 to 1.0: the random share of each pause, so that many clients do not retry at the same time. With 0.5
            a pause of 1 s becomes 0.5 s to 1 s.
    """

    __slots__ = ("_first", "_jitter", "_last", "pause")

    def __init__(self, first: float = BACKOFF_FIRST, last: float = BACKOFF_LAST, *, jitter: float = 0.0) -> None:
        self._first = first
        self._last = last
        self._jitter = jitter
        self.pause = first
        """Seconds of the next pause, before jitter."""

    def next(self, at_least: float | None = None) -> float:
        """Return the seconds to wait before the next attempt, `at_least` those that the peer asked for
        (`KvferryError.retry_after`), and double the pause after it."""
        pause = self.pause
        self.pause = min(2 * pause, self._last)
        if self._jitter:
            pause *= _RANDOM.uniform(1.0 - self._jitter, 1.0)
        return max(at_least or 0.0, pause)

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self.pause = self._first
