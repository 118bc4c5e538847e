"""The worker: one thread of a node server for decoding, comparing and encoding geometries of many planes.

There is one thread, not several, because it competes with the event loop for the interpreter, and renewals must stay
fast. It serves hosts in rotation, so that a host that asks for much delays only itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvferry.errors import LimitReached
from kvferry_server.domain.limits import Budget, check_budget
from kvferry_server.home.time_slices import Rotation
from kvferry_server.servicers.limits import MAX_WAITING_BYTES

WORKER_RETRY_AFTER = 0.25  # Retry delay, in seconds, when too many calls wait for the worker thread

Result = TypeVar("Result")


class Worker:
    """The worker thread of one event loop. Without work there is none: each call has a new thread, which costs a fifth
    of a millisecond, and ends with it."""

    def __init__(self) -> None:
        self._waiting_bytes = Budget(MAX_WAITING_BYTES)
        self._busy = False
        self._waiting = Rotation(self._pass_on)
        self._last: ThreadPoolExecutor | None = None

    async def run(self, host: str, size: int, call: Callable[[], Result]) -> Result:
        """Run a call, which must not touch the home, on the thread and return its result. Calls of one host run in
        order; a call that is cancelled while it waits is not run. `size` is the bytes of the message that the call
        works on. Raises `LimitReached` if too many bytes of this host wait already, or the system refuses a thread."""
        check_budget("worker_bytes", self._waiting_bytes, host, WORKER_RETRY_AFTER, size)
        self._waiting_bytes.take(host, size)
        try:
            if self._busy:
                await self._waiting.wait(host)
            running = self._start(call)
            # A caller that leaves does not end the call, and the next call waits for its end: so there is one thread.
            await asyncio.wait([running])
            return running.result()
        finally:
            self._waiting_bytes.give(host, size)

    def join(self) -> None:
        if self._last is not None:
            self._last.shutdown()

    def _start(self, call: Callable[[], Result]) -> asyncio.Future[Result]:
        self._busy = True
        executor = self._last = ThreadPoolExecutor(1, "kvferry-worker")
        try:
            running = asyncio.get_running_loop().run_in_executor(executor, call)
        except RuntimeError:
            self._pass_on()
            running_threads = threading.active_count()
            raise LimitReached(
                f"the system refused the worker a thread; {running_threads} threads of this process are running",
                retry_after=WORKER_RETRY_AFTER,
                limit="threads",
                value=running_threads,
            ) from None
        finally:
            # The thread ends once it has nothing to do.
            executor.shutdown(wait=False)
        running.add_done_callback(self._ended)
        return running

    def _ended(self, running: asyncio.Future[Any]) -> None:
        # Of a caller that has left, nobody looks at the error: this marks it as seen.
        if not running.cancelled():
            running.exception()
        self._pass_on()

    def _pass_on(self) -> None:
        self._busy = self._waiting.wake()
