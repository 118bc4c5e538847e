"""Looks at the deadlines of what is under way: when the first one passes, and at times, since leases end as well."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable

from kvferry._clock import now
from kvferry._threads import guarded
from kvferry._work_queue import WorkQueue

LOOK_EVERY = 0.25
"""Most seconds between two looks while there is something to look at."""


class Looks:
    """Looks at deadlines, on a work queue. Thread-safe. Does nothing while nothing is under way.

    Args:
        work: the queue.
        look: acts on what is due, and returns the deadlines of all that is under way.
    """

    def __init__(self, work: WorkQueue, look: Callable[[], Iterable[float]]) -> None:
        self._work = work
        self._look = look
        self._lock = threading.Lock()
        self._next = math.inf
        """When the next look is due. Those that were planned for later times are dropped then."""

    def by(self, deadline: float) -> None:
        """Look at something new that is under way, when its deadline passes at the latest."""
        time = now()
        with self._lock:
            at = max(time, min(deadline, time + LOOK_EVERY))
            if at >= self._next:
                return
            self._next = at
        self._work.do_later(at - time, self._run)

    def _run(self) -> None:
        with self._lock:
            if now() < self._next:
                return
            self._next = math.inf
        deadlines, time = [math.inf], now()

        def look() -> None:
            deadlines[:] = self._look()

        # After one that fails there is another: what is under way must end.
        guarded(look, "a look at deadlines")
        if deadlines:
            self.by(min((deadline for deadline in deadlines if deadline > time), default=math.inf))
