"""A queue of work that one thread does, so that its callers do not wait."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry._clock import now
from kvferry._threads import guarded, start_loop

SHORTEST_SLEEP = 0.001
"""Seconds that a wait lasts at least: in CPython 3.11, `SimpleQueue.get` may wait for ever if its time-out of
microseconds passes inside it."""

LONGEST_SLEEP = 1.0
"""Seconds after which the thread checks delayed work again: a sleeping thread does not notice that its host was
suspended."""


@dataclass(frozen=True, order=True, slots=True)
class _Delayed:
    """Work to do at a given time, in the order in which it was queued if the times are equal."""

    at: float
    number: int
    work: Callable[[], object] = field(compare=False)


class WorkQueue:
    """Does work on one thread, in the order in which it was queued.

    Threading: `do` and `do_later` may be called from any thread and return at once. Without work the thread sleeps.
    Work must not wait: it would delay the work behind it.

    Args:
        name: name of the thread.

    Raises:
        LimitReached: the system refused another thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], object] | _Delayed | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        """Guards `_ended`, so that nothing is queued for a thread that has just ended."""
        self._ended = False
        self._delayed: list[_Delayed] = []
        self._closing = False
        self._thread = start_loop(self._turn, name)

    def do(self, work: Callable[[], object]) -> bool:
        """Queue work. Its exceptions are logged.

        Returns:
            Whether it will be done. False: the thread has ended.
        """
        with self._lock:
            if not self._ended:
                self._queue.put(work)
            return not self._ended

    def do_later(self, seconds: float, work: Callable[[], object]) -> None:
        """Queue work to do after this time, unless the queue is closed by then. Its exceptions are logged."""
        self._queue.put(_Delayed(now() + seconds, next(self._numbers), work))

    def close(self, timeout: float) -> None:
        """End the thread when the queue is empty. Work queued until then is done; delayed work is dropped. Idempotent.

        Args:
            timeout: seconds to wait for the end of the thread. On that thread itself, this does not wait.
        """
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _turn(self) -> bool:
        delayed = self._delayed
        pause = max(SHORTEST_SLEEP, min(LONGEST_SLEEP, delayed[0].at - now())) if delayed else None
        try:
            work = self._queue.get(timeout=pause)
        except queue.Empty:
            pass
        else:
            if work is None:
                self._closing = True
            elif isinstance(work, _Delayed):
                heapq.heappush(delayed, work)
            else:
                self._do(work)
        # Delayed work gets its turn even if the queue never becomes empty.
        while delayed and delayed[0].at <= now():
            self._do(heapq.heappop(delayed).work)
        return not (self._closing and self._end())

    def _end(self) -> bool:
        """End unless there is more work; returns whether the queue has ended."""
        with self._lock:
            self._ended = self._queue.empty()
            return self._ended

    def _do(self, work: Callable[[], object]) -> None:
        guarded(work, f"work of thread {self._name}")
