"""Pauses between the attempts of an operation that fails, a circuit breaker for a peer that keeps failing, and calls
that are repeated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from random import SystemRandom
from typing import TypeVar

from kvferry._logs import Log
from kvferry.errors import KvferryError, Unreachable

logger = Log(__name__)

Answer = TypeVar("Answer")

CALL_TIMEOUT = 5.0
"""Default seconds for a unary call."""

SILENCE = 1.0
"""Seconds of waiting after which a warning is logged."""

BACKOFF_FIRST = 0.02
BACKOFF_LAST = 1.0

_RANDOM = SystemRandom()
"""Not the random numbers of the process, which an application may have seeded; nor others with a state, which the
processes that it forks would share."""


class Backoff:
    """Doubles the pause between attempts, from the `first` to the longest seconds (`last`). Not thread-safe. `jitter`,
    0.0 to 1.0, is the random share of each pause, so that many clients do not retry at the same time: with 0.5 a pause
    of 1 s becomes 0.5 s to 1 s."""

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
        self.pause = self._first


class Breaker:
    """Admits calls while a peer answers. After `threshold` consecutive failures the breaker opens: it then admits one
    attempt per pause, and other calls fail at once; each failed attempt doubles the pause, from `first` to `last`
    seconds. Any success closes it. Not thread-safe."""

    def __init__(self, threshold: int, first: float, last: float) -> None:
        self._threshold = threshold
        self._failures = 0
        self._backoff = Backoff(first, last)
        self._next = 0.0
        self._probing = False
        """Whether the attempt of this pause is in progress. Other attempts that fail then began before the pause."""
        self._failing_since: float | None = None

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

    def succeeded(self) -> None:
        """Record that the peer answered, even if with an error."""
        self._failures = 0
        self._probing = False
        self._backoff.reset()
        self._failing_since = None

    def failed(self, now: float) -> None:
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


async def retrying(
    call: Callable[[float], Awaitable[Answer]], deadline: float, most: float = CALL_TIMEOUT, *, what: str = ""
) -> Answer:
    """Repeat a call, which gets the seconds that it may take, at most `most`, while its error is retryable. After the
    `deadline` on the loop's clock, the last error is raised, or the one before if the last attempt was short of time.

    `what` is the subject of one warning if the wait is longer than `SILENCE`. If it is empty, one warning is logged for
    an error that persists after `SILENCE`; `Control` itself warns of an unreachable node server.
    """
    loop = asyncio.get_running_loop()
    backoff, reason = Backoff(jitter=0.5), "there is no answer yet"
    before: KvferryError | None = None
    silent_until = loop.time() + SILENCE
    warning = loop.call_later(SILENCE, lambda: logger.warning("still waiting for %s: %s", what, reason))
    if not what:
        warning.cancel()
    try:
        while True:
            left = deadline - loop.time()
            try:
                return await call(max(0.001, min(most, left)))
            except KvferryError as error:
                pause = backoff.next(error.retry_after)
                if not error.retryable or loop.time() + pause >= deadline:
                    if before is not None and left < SILENCE and isinstance(error, Unreachable):
                        # The deadline has cut this attempt short; what the node server said before is the reason.
                        raise before from None
                    raise
                before, reason = error.with_traceback(None), error.message
                if not what and not isinstance(error, Unreachable) and loop.time() >= silent_until:
                    logger.warning("still failing after %.0f s: %s", SILENCE, error.message)
                    silent_until = math.inf
            await asyncio.sleep(pause)
    finally:
        # Its traceback refers to this frame.
        before = None
        warning.cancel()
