"""A circuit breaker for one peer: while the peer keeps failing, few attempts are made and the other calls fail at once.

Pure but for its lock; the clock is the caller's.
"""

from __future__ import annotations

import threading

from kvferry._control.backoff import Backoff


class Breaker:
    """Lets calls through while the peer answers. Thread-safe.

    After `threshold` failures in a row it opens: it lets one attempt through per pause, and each of those that fails
    doubles the pause. Any success closes it.

    Args:
        threshold: failures in a row that open it.
        first, last: seconds of the first and of the longest pause.
    """

    def __init__(self, threshold: int, first: float, last: float) -> None:
        self._threshold = threshold
        self._lock = threading.Lock()
        self._failures = 0
        self._backoff = Backoff(first, last)
        self._next = 0.0
        self._probing = False
        """The attempt of this pause is under way. Failures of other attempts are of attempts that began earlier."""
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
            self._next = now + self._backoff.pause
            self._probing = True
            return 0.0

    def succeeded(self) -> bool:
        """The peer answered, even if with an error. True if `overdue` had said that it did not."""
        with self._lock:
            self._failures = 0
            self._probing = False
            self._backoff.reset()
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
                self._next = now + self._backoff.pause
            elif self._probing:
                self._probing = False
                self._backoff.next()
                self._next = now + self._backoff.pause

    def failing_for(self, now: float) -> float:
        """Seconds since the first failure after the last success; 0.0 while the peer answers."""
        with self._lock:
            return 0.0 if self._failing_since is None else now - self._failing_since

    def overdue(self, now: float, seconds: float) -> bool:
        """Whether it has failed for `seconds`; True once, and again only after it has answered in between."""
        with self._lock:
            if self._told or self._failing_since is None or now < self._failing_since + seconds:
                return False
            self._told = True
            return True
