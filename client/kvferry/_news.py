"""Tells threads and coroutines that there is something new."""

from __future__ import annotations

import asyncio
import threading


class News:
    """Whether something has happened since somebody looked. Thread-safe.

    Those who are woken look for what is new afterwards, so that nothing is lost.
    """

    def __init__(self) -> None:
        self._told = threading.Event()
        self._ended = False
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}

    def tell(self) -> None:
        """There is something new."""
        self._told.set()
        for waiting, loop in tuple(self._waiting.items()):
            try:
                loop.call_soon_threadsafe(_wake, waiting)
            except RuntimeError:
                # The loop was closed in the meantime, and nobody will ever wait there again.
                self._waiting.pop(waiting, None)

    def end(self) -> None:
        """There is nothing new any more: nobody waits from now on, however many do."""
        self._ended = True
        self.tell()

    def wait(self, timeout: float) -> bool:
        """Wait on a thread, at most this many seconds; returns whether there may be something new."""
        self._told.wait(timeout)
        return self._take()

    async def arrive(self, timeout: float) -> bool:
        """Wait in asyncio, on any event loop, at most this many seconds; returns whether there may be something new."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        self._waiting[waiting] = loop
        timer = loop.call_later(timeout, _wake, waiting)
        try:
            if not self._told.is_set():
                await waiting
        finally:
            timer.cancel()
            self._waiting.pop(waiting, None)
        return self._take()

    def _take(self) -> bool:
        found = self._told.is_set()
        if found:
            self._told.clear()
            if self._ended:
                self._told.set()
        return found


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
