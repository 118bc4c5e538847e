"""Runs the callbacks that callers have added to reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvferry._threads import start_thread
from kvferry._work_queue import WorkQueue
from kvferry.errors import LimitReached

logger = logging.getLogger(__name__)


class Callbacks:
    """Runs callbacks one after another on a thread of their own, so that they may wait, also for other reads.

    The thread starts with `start`. Thread-safe.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._work: WorkQueue | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread if it is not running yet; raises `LimitReached` if the system refuses it."""
        with self._lock:
            if self._work is None and not self._closed:
                self._work = WorkQueue(self._name)

    def do(self, callback: Callable[[], None]) -> None:
        """Run a callback on the thread, or, if that has ended, on a new one; never on the caller's."""
        with self._lock:
            work = self._work
        if work is None or not work.do(callback):
            try:
                start_thread(callback, f"{self._name}-late")
            except LimitReached as error:
                logger.error("a callback of a read, which ended after its cache was closed, is lost: %s", error.message)

    def close(self, timeout: float) -> None:
        """End the thread after the queued callbacks. Idempotent.

        Args:
            timeout: seconds to wait for it.
        """
        with self._lock:
            self._closed = True
            work = self._work
        if work is not None:
            work.close(timeout)
