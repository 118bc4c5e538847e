"""The messages of other threads to a reading thread."""

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

    The thread sleeps on a lock and not on a condition: a thread that a condition wakes first waits for the condition's
    own lock, which the waking thread still holds. `open`: whether the inbox accepts messages. `woken`: whether `wake`
    was called since `take_wake` was.
    """

    def __init__(self) -> None:
        self.open = True
        self.woken = False
        self._lock = threading.Lock()
        self._messages: list[Message] = []
        self._bell = threading.Lock()
        """Released when a message or `wake` has come, and taken by `wait` and `take`."""
        self._bell.acquire()

    @property
    def empty(self) -> bool:
        return not self._messages

    def put(self, message: Message) -> bool:
        """Add a message. False: the inbox is closed."""
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
        """Accept no more messages; waiting messages can still be taken. Idempotent."""
        with self._lock:
            self.open = False

    def take(self) -> list[Message]:
        # A later message rings again, so no message is left behind.
        self._bell.acquire(blocking=False)
        if not self._messages:
            return []
        with self._lock:
            messages, self._messages = self._messages, []
            return messages

    def take_wake(self) -> bool:
        """Whether `wake` was called since the last call."""
        if not self.woken:
            return False
        self.woken = False
        return True

    def wait(self, seconds: float | None) -> None:
        """Wait for a message or `wake`, at most this many seconds; None: without a limit."""
        if not self._messages and not self.woken:
            self._bell.acquire(timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX))

    def _ring(self) -> None:
        # Releasing a free lock raises: the bell was rung before.
        with suppress(RuntimeError):
            self._bell.release()
