"""A thread for work that its callers must not wait for."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry._clock import now
from kvferry._threads import start_thread

logger = logging.getLogger(__name__)

LONGEST_SLEEP = 1.0
"""Seconds after which delayed work is looked at again: what a thread sleeps does not count suspends."""


@dataclass(frozen=True, order=True, slots=True)
class _Delayed:
    """Work to do at a moment; what is due at the same one is done in the order in which it came."""

    at: float
    number: int
    work: Callable[[], object] = field(compare=False)


class WorkQueue:
    """Does work on one thread, in the order in which it came.

    Threading: `do` and `do_later` may be called from any thread and return at once. Without work the thread sleeps.
    Work must not wait for anything: other work waits behind it.

    Args:
        name: of the thread.

    Raises:
        LimitReached: the system gives no thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], object] | _Delayed | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        """Nothing is asked of a thread that has just ended."""
        self._ended = False
        self._thread = start_thread(self._run, name)

    def do(self, work: Callable[[], object]) -> bool:
        """Do it as soon as what came before is done. What it raises is logged.

        Returns:
            Whether it will be done; False: the thread has ended.
        """
        with self._lock:
            if not self._ended:
                self._queue.put(work)
            return not self._ended

    def do_later(self, seconds: float, work: Callable[[], object]) -> None:
        """Do it after this time, unless the queue is closed by then. What it raises is logged."""
        self._queue.put(_Delayed(now() + seconds, next(self._numbers), work))

    def close(self, timeout: float) -> None:
        """End the thread once there is nothing to do at once: what is asked meanwhile is done too, what is asked later
        and what is delayed is not. Idempotent.

        Args:
            timeout: seconds to wait for the end of the thread. On that thread itself there is no wait.
        """
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        delayed: list[_Delayed] = []
        closing = False
        while not (closing and self._end()):
            pause = max(0.0, min(LONGEST_SLEEP, delayed[0].at - now())) if delayed else None
            try:
                work = self._queue.get(timeout=pause)
            except queue.Empty:
                pass
            else:
                if work is None:
                    closing = True
                elif isinstance(work, _Delayed):
                    heapq.heappush(delayed, work)
                else:
                    self._do(work)
            # Also where there is always other work.
            while delayed and delayed[0].at <= now():
                self._do(heapq.heappop(delayed).work)

    def _end(self) -> bool:
        """End, unless there is something to do."""
        with self._lock:
            self._ended = self._queue.empty()
            return self._ended

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:
            logger.exception("work of thread %s failed", self._name)
