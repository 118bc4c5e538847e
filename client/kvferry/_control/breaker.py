"""A circuit breaker for one peer: while the peer keeps failing, it admits few attempts, and other calls fail at once.

Pure; the caller passes the time.
"""

from __future__ import annotations

from kvferry._control.backoff import Backoff


class Breaker:
    """Admits calls while the peer answers. Not thread-safe.

    After `threshold` consecutive failures the breaker opens: it then admits one attempt per pause, and each failed
    attempt doubles the pause, from `first` to `last` seconds. Any success closes it.
    """

    def __init__(self, threshold: int, first: float, last: float) -> None:
        self._threshold = threshold
        self._failures = 0
        self._backoff = Backoff(first, last)
        self._next = 0.0
        self._probing = False
        """Whether the attempt of this pause is in progress. Other attempts that fail then began before the pause."""
        self._failing_since: float | None = None
        self._reported = False

    def ask(self, now: float) -> float:
        """Return 0.0 if an attempt may be made now, else the seconds to wait. While the breaker is open, only one of
        several simultaneous callers gets 0.0."""
        if self._failures < self._threshold:
            return 0.0
        if now < self._next:
            return self._next - now
        self._next = now + self._backoff.pause
        self._probing = True
        return 0.0

    def succeeded(self) -> bool:
        """Record that the peer answered, even if with an error; returns whether `overdue` had returned True."""
        self._failures = 0
        self._probing = False
        self._backoff.reset()
        self._failing_since = None
        was_reported, self._reported = self._reported, False
        return was_reported

    def failed(self, now: float) -> None:
        """Record that the peer did not answer."""
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
        """Return the seconds since the first failure after the last success; 0.0 while the peer answers."""
        since = self._failing_since
        return 0.0 if since is None else now - since

    def overdue(self, now: float, seconds: float) -> bool:
        """Return True once if the peer has failed for `seconds`, and again only after a success in between."""
        if self._reported or self._failing_since is None or now < self._failing_since + seconds:
            return False
        self._reported = True
        return True
