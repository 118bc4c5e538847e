"""A thread for work that an engine's step must not wait for."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from kvferry._threads import start_thread

logger = logging.getLogger(__name__)

LOOK_AGAIN = 1.0
"""Seconds after which a tick that failed is made again."""


class WorkQueue:
    """Does work in the order it came, one after the other.

    Threading: `do` may be called from any thread and returns at once. Without work the thread sleeps.

    Args:
        name: of the thread.
        tick: called after work and after the time it asked for; answers the seconds until it wants to be called again,
            or None.

    Raises:
        LimitReached: the system gives no thread.
    """

    def __init__(self, name: str, tick: Callable[[], float | None] | None = None) -> None:
        self._tick = tick
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._name = name
        self._thread = start_thread(self._run, name)

    def do(self, work: Callable[[], None]) -> None:
        """Have it done. What it raises is logged."""
        self._queue.put(work)

    def close(self, timeout: float) -> None:
        """End the thread when what was asked before is done; what is asked later is not done. Idempotent."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        pause: float | None = None
        while True:
            try:
                work = self._queue.get(timeout=pause)
                if work is None:
                    return
                work()
            except queue.Empty:
                pass
            except Exception:
                logger.exception("work of thread %s failed", self._name)
            try:
                pause = self._tick() if self._tick is not None else None
            except Exception:
                logger.exception("thread %s looks again in %g s", self._name, LOOK_AGAIN)
                pause = LOOK_AGAIN
