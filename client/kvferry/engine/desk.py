"""A thread for work that an engine's step must not wait for."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Desk:
    """Does work in the order it came, one after the other.

    Threading: `do` may be called from any thread and returns at once. Without work the thread sleeps.

    Args:
        name: of the thread.
        tick: called after work and after the time it asked for; answers the seconds until it wants to be called again,
            or None.
    """

    def __init__(self, name: str, tick: Callable[[], float | None] | None = None) -> None:
        self._tick = tick
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        """Have it done. What it raises is logged."""
        self._queue.put(work)

    def close(self, timeout: float) -> None:
        """End the thread when what was asked before is done. Idempotent."""
        self._queue.put(None)
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
                logger.exception("work of thread %s failed", self._thread.name)
            pause = self._tick() if self._tick is not None else None
