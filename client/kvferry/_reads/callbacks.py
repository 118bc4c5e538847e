"""Calls back the callers of reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvferry._threads import start_thread
from kvferry._work_queue import WorkQueue
from kvferry.errors import LimitReached

logger = logging.getLogger(__name__)


class Callbacks:
    """Calls back, one after the other, on a thread that starts when the first callback is to come: they may wait, for
    other reads too. Thread-safe.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._work: WorkQueue | None = None
        self._closed = False

    def start(self) -> None:
        """Have the thread, before there is anything to call back. Raises `LimitReached`."""
        with self._lock:
            if self._work is None and not self._closed:
                self._work = WorkQueue(self._name)

    def do(self, callback: Callable[[], None]) -> None:
        """Call back, never on the thread that calls this; once the thread has ended, on one of its own."""
        with self._lock:
            work = self._work
        if work is None or not work.do(callback):
            try:
                start_thread(callback, f"{self._name}-late")
            except LimitReached as error:
                logger.error("a callback of a read that ended after its cache was closed is lost: %s", error.message)

    def close(self, timeout: float) -> None:
        """End the thread once what waits is called. Idempotent."""
        with self._lock:
            self._closed = True
            work = self._work
        if work is not None:
            work.close(timeout)
