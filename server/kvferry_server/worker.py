"""The one thread of a node server for what is heavy: decoding, comparing and encoding geometries of many planes.

One thread, not several: it competes with the event loop for the interpreter, and renewals must stay fast whatever is
asked of a home.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvferry_server.limits import check_limit

LIGHT = 16 * 1024
"""Bytes of a message that are worked through on the event loop; heavier ones would hold everybody up."""

MAX_WAITING_BYTES = 256 << 20
"""Bytes of the messages that wait for the thread, or are being worked through."""

RETRY_AFTER = 0.25
"""Seconds after which a call that found too many before it is worth repeating."""

Result = TypeVar("Result")


class Worker:
    """The thread. Used by one event loop; its owner closes it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "kvferry-worker")
        self._waiting_bytes = 0

    async def run(self, size: int, call: Callable[[], Result]) -> Result:
        """Run what is heavy: in the order of the calls, and not at all if nobody waits for it any more.

        Args:
            size: bytes of the message that it works through.
            call: what to run; touches nothing of the home.

        Raises:
            LimitReached: too much waits already.
        """
        check_limit("worker_bytes", self._waiting_bytes + size, MAX_WAITING_BYTES, RETRY_AFTER)
        self._waiting_bytes += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        finally:
            self._waiting_bytes -= size

    async def run_if_heavy(self, size: int, call: Callable[[], Result]) -> Result:
        """Run a call of `size` on the thread, or at once if it is light."""
        return call() if size <= LIGHT else await self.run(size, call)

    def close(self) -> None:
        """Run nothing more. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
