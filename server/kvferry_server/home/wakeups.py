"""How a stream waits until something it looks at has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


class Waker:
    """One stream's bell. Clear it, look, wait: a change between the look and the wait is not missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def clear(self) -> None:
        """From here on a change ends the next `wait`."""
        self._event.clear()

    def ring(self) -> None:
        """Something has changed."""
        self._event.set()

    async def wait(self, seconds: float | None = None) -> None:
        """Until something has changed, or `seconds` have passed."""
        # Before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes together with the ring: whoever
        # cancels a stream or the home's loop would wait for it for ever. When the time is over the waiter only looks.
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._event.set)
        try:
            await self._event.wait()
        finally:
            if timer is not None:
                timer.cancel()


class Wakeups:
    """Who is to be woken when what changes. Belongs to one event loop."""

    def __init__(self) -> None:
        self._wakers: dict[Hashable, set[Waker]] = {}

    @contextmanager
    def watching(self, topic: Hashable) -> Iterator[Waker]:
        """A waker that rings when the topic changes."""
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
        """The topic has changed."""
        for waker in self._wakers.get(topic, ()):
            waker.ring()

    def wake_all(self) -> None:
        """Everything has changed."""
        for topic in self._wakers:
            self.wake(topic)
