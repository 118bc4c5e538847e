"""Wakeups: how a call waits until a publication or a feed has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Literal


class Waker(asyncio.Event):
    """The event on which one call waits. Clear it, look, then wait: a change after the look sets it and ends the
    wait."""

    async def wait(self, seconds: float | None = None) -> Literal[True]:
        """Wait until something has changed, or until `seconds` have passed."""
        # Before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes together with the change: a task that
        # cancels a call or the home's loop would wait for ever. When the time is over the waiter only looks.
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.set)
        try:
            return await super().wait()
        finally:
            if timer is not None:
                timer.cancel()


class Wakeups:
    """The wakers of calls, by topic. Belongs to one event loop."""

    def __init__(self) -> None:
        self._wakers: dict[Hashable, set[Waker]] = {}

    @contextmanager
    def watching(self, topic: Hashable) -> Iterator[Waker]:
        """Give a waker that every change of the topic sets while the context lasts."""
        waker = Waker()
        self._wakers.setdefault(topic, set()).add(waker)
        try:
            yield waker
        finally:
            wakers = self._wakers[topic]
            wakers.discard(waker)
            if not wakers:
                del self._wakers[topic]

    def wake(self, topic: Hashable) -> None:
        for waker in self._wakers.get(topic, ()):
            waker.set()

    def wake_all(self) -> None:
        for topic in self._wakers:
            self.wake(topic)
