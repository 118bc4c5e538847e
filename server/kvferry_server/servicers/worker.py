"""The worker: one thread of a node server for decoding, comparing and encoding geometries of many planes.

There is one thread, not several, because it competes with the event loop for the interpreter, and renewals must stay
fast. It serves hosts in rotation, so that a host that asks for much delays only itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from kvferry_server.domain.budgets import Budget, check_budget
from kvferry_server.home.time_slices import Rotation
from kvferry_server.servicers.limits import MAX_INLINE_BYTES, MAX_WAITING_BYTES

WORKER_RETRY_AFTER = 0.25  # Retry delay, in seconds, when too many calls wait for the worker thread

Result = TypeVar("Result")


class Worker:
    """The worker thread of one event loop. Its owner closes it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "kvferry-worker")
        self._waiting_bytes = Budget(MAX_WAITING_BYTES)
        self._busy = False
        self._waiting = Rotation(self._pass_on)

    async def run(self, host: str, size: int, call: Callable[[], Result]) -> Result:
        """Run a call, which must not touch the home, on the thread and return its result. Calls of one host run in
        order; a call that is cancelled while it waits is not run. `size` is the bytes of the message that the call
        works on. Raises `LimitReached` if too many bytes of this host wait already."""
        check_budget("worker_bytes", self._waiting_bytes, host, WORKER_RETRY_AFTER, size)
        self._waiting_bytes.take(host, size)
        try:
            async with self._thread(host):
                return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        finally:
            self._waiting_bytes.give(host, size)

    async def run_if_heavy(self, host: str, size: int, call: Callable[[], Result]) -> Result:
        """Run a call at once if it works on at most `MAX_INLINE_BYTES`, otherwise on the thread. Raises as `run`."""
        return call() if size <= MAX_INLINE_BYTES else await self.run(host, size, call)

    def close(self, *, wait: bool = False) -> None:
        """Stop the thread; waiting calls are cancelled. With `wait`, the thread has ended on return. Idempotent."""
        self._executor.shutdown(wait=wait, cancel_futures=True)

    @asynccontextmanager
    async def _thread(self, host: str) -> AsyncIterator[None]:
        """Wait for the thread, and have it while the context lasts."""
        if self._busy:
            await self._waiting.wait(host)
        self._busy = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        self._busy = self._waiting.wake()
