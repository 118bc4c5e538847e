"""Wakes threads and coroutines that wait for news."""

from __future__ import annotations

import asyncio
import threading


class News:
    """A flag that is set with each event, and cleared by a wait. Thread-safe.

    A woken thread or coroutine fetches the new events after the wait, so that none is lost.
    """

    def __init__(self) -> None:
        self._told = threading.Event()
        self._ended = False
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}

    def tell(self) -> None:
        """Set the flag, and end all waits."""
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
        """Wait on a thread, at most `timeout` seconds; returns whether there may be news."""
        self._told.wait(timeout)
        return self._take()

    async def arrive(self, timeout: float) -> bool:
        """Wait in asyncio, on any event loop, at most `timeout` seconds; returns whether there may be news."""
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
