"""The one thread of a node server for what is heavy: decoding, comparing and encoding geometries of many planes.

One thread, not several: it competes with the event loop for the interpreter, and renewals must stay fast whatever is
asked of a home. Hosts take turns on it, so that whoever asks for much waits behind himself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from kvferry.errors import LimitReached
from kvferry_server.domain.shares import Shares

LIGHT = 16 * 1024
"""Bytes of a message that are worked through on the event loop; heavier ones would hold everybody up."""

MAX_WAITING_BYTES = 256 << 20
"""Bytes of the messages that wait for the thread, or are being worked through. Hosts share them."""

RETRY_AFTER = 0.25
"""Seconds after which a call that found too many before it is worth repeating."""

Result = TypeVar("Result")


class Worker:
    """The thread. Used by one event loop; its owner closes it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "kvferry-worker")
        self._bytes = Shares(MAX_WAITING_BYTES)
        self._busy = False
        # By host, in the order of their turns; a host without calls is not there.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, host: str, size: int, call: Callable[[], Result]) -> Result:
        """Run what is heavy: in the order of a host's calls, and not at all if nobody waits for it any more.

        Args:
            host: who asks for it.
            size: bytes of the message that it works through.
            call: what to run; touches nothing of the home.

        Raises:
            LimitReached: too much of this host waits already.
        """
        if not self._bytes.fits(host, size):
            raise LimitReached(
                f"worker_bytes: {self._bytes.held(host)} bytes of yours wait for their turn, of "
                f"{self._bytes.used} of {MAX_WAITING_BYTES}; {size} more do not fit",
                retry_after=RETRY_AFTER,
                limit="worker_bytes",
                value=MAX_WAITING_BYTES,
            )
        self._bytes.take(host, size)
        try:
            async with self._turn(host):
                return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        finally:
            self._bytes.give(host, size)

    async def run_if_heavy(self, host: str, size: int, call: Callable[[], Result]) -> Result:
        """Run a call of `size` on the thread, or at once if it is light."""
        return call() if size <= LIGHT else await self.run(host, size, call)

    def close(self) -> None:
        """Run nothing more. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def _turn(self, host: str) -> AsyncIterator[None]:
        if self._busy:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(host, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                # Given and not taken: it is the next one's.
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._busy = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the host that has waited longest for one."""
        while self._waiting:
            host = next(iter(self._waiting))
            turns = self._waiting.pop(host)
            turn = turns.popleft()
            if turns:
                self._waiting[host] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
