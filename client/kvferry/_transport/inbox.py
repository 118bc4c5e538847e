"""What other threads ask of a reading thread."""

from __future__ import annotations

import threading
from typing import TypeAlias

from kvferry._transport.nixl_agent import AgentInfo
from kvferry._transport.peer_work import PeerWork

Message: TypeAlias = "PeerWork | AgentInfo | str"
"""Work to be posted, a peer to be added before it is needed, or the name of a peer to be dropped."""


class Inbox:
    """The messages for one reading thread, in the order they came. Thread-safe; only `wait` waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self._woken = False
        self._open = True

    @property
    def open(self) -> bool:
        """Whether it takes messages."""
        return self._open

    @property
    def empty(self) -> bool:
        """Whether no message waits to be taken."""
        return not self._messages

    @property
    def woken(self) -> bool:
        """Whether `wake` was called since `take_wake` was."""
        return self._woken

    def put(self, message: Message) -> bool:
        """Add a message. False: it is closed, and takes none."""
        with self._changed:
            if self._open:
                self._messages.append(message)
                self._changed.notify()
            return self._open

    def wake(self) -> None:
        """End the thread's `wait`, now or the next time."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """Take no more messages; those that wait can still be taken. Idempotent."""
        with self._changed:
            self._open = False

    def take(self) -> list[Message]:
        """The messages that wait."""
        with self._changed:
            messages, self._messages = self._messages, []
            return messages

    def take_wake(self) -> bool:
        """Whether `wake` was called since the last time."""
        with self._changed:
            woken, self._woken = self._woken, False
            return woken

    def wait(self, seconds: float | None) -> None:
        """Wait for a message or `wake`, at most so many seconds; None: for ever."""
        with self._changed:
            if not self._messages and not self._woken:
                self._changed.wait(seconds)
