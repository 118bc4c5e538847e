"""The worker: one thread of a node server for decoding, comparing and encoding geometries of many planes.

There is one thread, not several, because it competes with the event loop for the interpreter, and renewals must stay
fast. It serves hosts in rotation, so that a host that asks for much delays only itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvferry.errors import LimitReached
from kvferry_server.home.time_slices import Rotation

Result = TypeVar("Result")


class Worker:
    """The worker thread of one event loop: a new one for each call, in 0.2 ms, so that without work there is none."""

    def __init__(self) -> None:
        self._busy = False
        self._waiting = Rotation(self._pass_on)
        self._last: ThreadPoolExecutor | None = None

    async def run(self, host: str, call: Callable[[], Result]) -> Result:
        """Run a call, which must not touch the home, on the thread and return its result. Calls of one host run in
        order; one that is cancelled while it waits is not run. Raises `LimitReached` if the system refuses a thread."""
        if self._busy:
            await self._waiting.wait(host)
        self._busy, executor = True, ThreadPoolExecutor(1, "kvferry-worker")
        try:
            running = asyncio.wrap_future(executor.submit(call))
        except RuntimeError as error:
            self._pass_on()
            threads = threading.active_count()
            raise LimitReached(f"the worker: {error}", retry_after=0.25, limit="threads", value=threads) from None
        executor.shutdown(wait=False)  # The thread ends with the call.
        self._last = executor
        running.add_done_callback(lambda _: self._pass_on())
        # A caller that leaves does not end the call, and the next call waits for its end: so there is one thread.
        return await asyncio.shield(running)

    def join(self) -> None:
        if self._last is not None:
            self._last.shutdown()

    def _pass_on(self) -> None:
        self._busy = self._waiting.wake()
