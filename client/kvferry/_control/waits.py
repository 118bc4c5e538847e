"""Waits without a thread, for a call or a pause, and their interruption."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Waits:
    """The waits of a sequence of calls and pauses. Each begins when the one before has ended.

    Threading: `interrupt` may be called from any thread at any time. Several events, on several threads, may end the
    same wait: `ends` returns True for the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wait = 0
        self._stop: Callable[[], object] = _nothing
        self._interrupted = False

    def begin(self) -> int:
        """Begin a wait, and return its number."""
        with self._lock:
            self._wait += 1
            return self._wait

    def stop_by(self, wait: int, stop: Callable[[], object]) -> None:
        """Set the function that interrupts a wait.

        It is called at once if `interrupt` was called before, and ignored if the wait has ended.
        """
        with self._lock:
            if self._wait != wait:
                return
            self._stop = stop
            interrupted = self._interrupted
        if interrupted:
            stop()

    def ends(self, wait: int) -> bool:
        """End a wait; returns False if it has ended already."""
        with self._lock:
            if self._wait != wait:
                return False
            self._wait += 1
            self._stop = _nothing
            return True

    def interrupt(self) -> None:
        """Interrupt the current wait and all later ones."""
        with self._lock:
            self._interrupted = True
            stop = self._stop
        stop()


def _nothing() -> None:
    """Do nothing: there is no wait to interrupt."""
