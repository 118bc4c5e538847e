"""Back-off and circuit breaker for one peer: who fails again and again is asked seldom, and everybody else fails fast.

Pure but for its lock; the clock is the caller's.
"""

from __future__ import annotations

import threading


class Breaker:
    """Closed while the peer answers. After `threshold` failures in a row it opens: one attempt goes through per pause,
    and each that fails doubles the pause. Any success closes it. Thread-safe.

    Args:
        threshold: failures in a row that open it.
        first, last: seconds of the first and of the longest pause.
    """

    def __init__(self, threshold: int, first: float, last: float) -> None:
        self._threshold = threshold
        self._first = first
        self._last = last
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = first
        self._next = 0.0
        self._probing = False
        """The attempt of this pause is under way; others that fail now began before it opened."""
        self._failing_since: float | None = None
        self._told = False
        """`overdue` has said so since the last success."""

    def ask(self, now: float) -> float:
        """Whether an attempt may be made: 0.0 if so, else the seconds until one may.

        Where several ask at once while it is open, one of them gets 0.0.
        """
        with self._lock:
            if self._failures < self._threshold:
                return 0.0
            if now < self._next:
                return self._next - now
            self._next = now + self._pause
            self._probing = True
            return 0.0

    def succeeded(self) -> bool:
        """The peer answered, whatever it said. True if `overdue` had said that it did not."""
        with self._lock:
            self._failures = 0
            self._probing = False
            self._pause = self._first
            self._failing_since = None
            told, self._told = self._told, False
            return told

    def failed(self, now: float) -> None:
        """The peer did not answer."""
        with self._lock:
            self._failures += 1
            if self._failing_since is None:
                self._failing_since = now
            if self._failures == self._threshold:
                self._next = now + self._pause
            elif self._probing:
                self._probing = False
                self._pause = min(2 * self._pause, self._last)
                self._next = now + self._pause

    def failing_for(self, now: float) -> float:
        """Seconds since the first failure after the last success; 0.0 while it answers."""
        with self._lock:
            return 0.0 if self._failing_since is None else now - self._failing_since

    def overdue(self, now: float, seconds: float) -> bool:
        """Whether it has failed for `seconds`; True once, and again only after it has answered in between."""
        with self._lock:
            if self._told or self._failing_since is None or now < self._failing_since + seconds:
                return False
            self._told = True
            return True
