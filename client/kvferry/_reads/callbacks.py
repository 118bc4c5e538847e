"""Runs the callbacks that callers have added to reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue

from kvferry._logs import Log
from kvferry._threads import guarded, start_thread
from kvferry.errors import LimitReached

logger = Log(__name__)


class Callbacks:
    """Runs callbacks one after another on a thread of their own, so that they may wait, also for other reads.

    The thread starts with `start`. Thread-safe.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queue: Queue[Callable[[], object] | None] = Queue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread if it is not running yet; raises `LimitReached` if the system refuses it."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = start_thread(self._run, self._name)

    def do(self, callback: Callable[[], object]) -> None:
        """Run a callback on the thread, or, if the thread has ended, on a new thread; never on the caller's."""
        with self._lock:
            if self._thread is not None and not self._closed:
                self._queue.put(callback)
                return
        try:
            start_thread(callback, f"{self._name}-late")
        except LimitReached as error:
            logger.error("a callback of a read, which ended after its cache was closed, is lost: %s", error.message)

    def close(self, timeout: float) -> None:
        """End the thread after the queued callbacks, and wait at most `timeout` seconds. Idempotent."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while (callback := self._queue.get()) is not None:
            guarded(callback, f"a callback on thread {self._name}")
