"""What other threads ask of a reading thread."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TypeAlias

from kvferry._transport.nixl_agent import AgentInfo
from kvferry._transport.peer_work import PeerWork

Message: TypeAlias = "PeerWork | AgentInfo | str"
"""Work to be posted, a peer to be added before it is needed, or the name of a peer to be dropped."""


class Inbox:
    """The messages for one reading thread, in the order they came. Thread-safe; only `wait` waits.

    The thread sleeps on a lock and not on a condition: whoever is woken by a condition first has to wait for the
    condition's own lock, which the thread that woke it still holds.

    Attributes:
        open: whether it takes messages.
        woken: whether `wake` was called since `take_wake` was.
    """

    def __init__(self) -> None:
        self.open = True
        self.woken = False
        self._lock = threading.Lock()
        self._messages: list[Message] = []
        self._bell = threading.Lock()
        """Released when something has come, and taken by `wait` and `take`."""
        self._bell.acquire()

    @property
    def empty(self) -> bool:
        """Whether no message waits to be taken."""
        return not self._messages

    def put(self, message: Message) -> bool:
        """Add a message. False: it is closed, and takes none."""
        with self._lock:
            if not self.open:
                return False
            self._messages.append(message)
        self._ring()
        return True

    def wake(self) -> None:
        """End the thread's `wait`, now or the next time."""
        self.woken = True
        self._ring()

    def close(self) -> None:
        """Take no more messages; those that wait can still be taken. Idempotent."""
        with self._lock:
            self.open = False

    def take(self) -> list[Message]:
        """The messages that wait."""
        # What comes after this rings again, so that nothing is left behind.
        self._bell.acquire(blocking=False)
        if not self._messages:
            return []
        with self._lock:
            messages, self._messages = self._messages, []
            return messages

    def take_wake(self) -> bool:
        """Whether `wake` was called since the last time."""
        if not self.woken:
            return False
        self.woken = False
        return True

    def wait(self, seconds: float | None) -> None:
        """Wait for a message or `wake`, at most so many seconds; None: for ever."""
        if not self._messages and not self.woken:
            self._bell.acquire(timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX))

    def _ring(self) -> None:
        # A lock that is free already raises: the bell was rung before.
        with suppress(RuntimeError):
            self._bell.release()
