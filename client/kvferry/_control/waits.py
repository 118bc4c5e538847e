"""What is waited for without a thread, one thing after the other, and how to cut it short."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Waits:
    """The waits of one chain of calls and pauses. Each begins when the one before has ended.

    Threading: `interrupt` may be called from any thread at any time. What ends a wait may come several times, and from
    several threads: `ends` is true of the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wait = 0
        self._stop: Callable[[], object] = _nothing
        self._interrupted = False

    def begin(self) -> int:
        """A wait begins; its number."""
        with self._lock:
            self._wait += 1
            return self._wait

    def stop_by(self, wait: int, stop: Callable[[], object]) -> None:
        """How to cut a wait short. Done at once if there was an `interrupt` already; never if the wait has ended."""
        with self._lock:
            if self._wait != wait:
                return
            self._stop = stop
            interrupted = self._interrupted
        if interrupted:
            stop()

    def ends(self, wait: int) -> bool:
        """Whether a wait ends with this."""
        with self._lock:
            if self._wait != wait:
                return False
            self._wait += 1
            self._stop = _nothing
            return True

    def interrupt(self) -> None:
        """Cut the present wait short, and all later ones."""
        with self._lock:
            self._interrupted = True
            stop = self._stop
        stop()


def _nothing() -> None:
    """Nobody waits."""
