"""A thread for work that an engine's step must not wait for, and for work that has time."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

from kvferry._clock import now
from kvferry._threads import start_thread

logger = logging.getLogger(__name__)

LOOK_AGAIN = 1.0
"""Seconds after which a tick that failed is made again."""


class WorkQueue:
    """Does work in the order it came, one after the other, and other work when its time has come.

    Threading: `do` and `do_later` may be called from any thread and return at once. Without work the thread sleeps.

    Args:
        name: of the thread.
        tick: called after work and after the time it asked for; answers the seconds until it wants to be called again,
            or None.

    Raises:
        LimitReached: the system gives no thread.
    """

    def __init__(self, name: str, tick: Callable[[], float | None] | None = None) -> None:
        self._tick = tick
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        """A heap by time, then order. The thread's own."""
        self._numbers = itertools.count()
        self._name = name
        self._thread = start_thread(self._run, name)

    def do(self, work: Callable[[], object]) -> None:
        """Have it done. What it raises is logged."""
        self._queue.put(work)

    def do_later(self, seconds: float, work: Callable[[], object]) -> None:
        """Have it done after so many seconds. What it raises is logged. Not done if the thread ends before."""
        self._queue.put(partial(self._keep, now() + seconds, work))

    def close(self, timeout: float) -> None:
        """End the thread when what was asked before is done; what is asked later is not done. Idempotent."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _keep(self, at: float, work: Callable[[], object]) -> None:
        heapq.heappush(self._later, (at, next(self._numbers), work))

    def _run(self) -> None:
        pause: float | None = None
        while True:
            try:
                work = self._queue.get(timeout=self._until_later(pause))
                if work is None:
                    return
                work()
            except queue.Empty:
                pass
            except Exception:
                logger.exception("work of thread %s failed", self._name)
            self._do_due()
            try:
                pause = self._tick() if self._tick is not None else None
            except Exception:
                logger.exception("thread %s looks again in %g s", self._name, LOOK_AGAIN)
                pause = LOOK_AGAIN

    def _until_later(self, pause: float | None) -> float | None:
        """Seconds to wait for work: `pause`, or until the first that has time, whichever is shorter."""
        if not self._later:
            return pause
        left = max(0.0, self._later[0][0] - now())
        return left if pause is None else min(pause, left)

    def _do_due(self) -> None:
        while self._later and self._later[0][0] <= now():
            _, _, work = heapq.heappop(self._later)
            try:
                work()
            except Exception:
                logger.exception("work of thread %s failed", self._name)
