"""Rotation: who waits for something that one caller has at a time, by host. Hosts come in turns, so that a host that
asks for much delays only itself."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Rotation:
    """The callers that wait. Belongs to one event loop.

    Args:
        pass_on: called when a caller was woken and has left instead of going on.
    """

    def __init__(self, pass_on: Callable[[], None]) -> None:
        self._pass_on = pass_on
        # By host, in the order in which hosts come; only hosts that have callers.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._last = ""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def wait(self, host: str) -> None:
        """Wait until it is this caller's turn. The callers of one host come in the order in which they began to
        wait."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._pass_on()
            raise

    def wake(self) -> bool:
        """Wake the first caller of the host that has waited longest. Returns whether there was one."""
        if again := self._waiting.pop(self._last, None):
            # Only now: behind hosts that began to wait while it was this one's turn.
            self._waiting[self._last] = again
        while self._waiting:
            self._last, turns = next(iter(self._waiting.items()))
            turn = turns.popleft()
            if not turns:
                del self._waiting[self._last]
            if not turn.done():
                turn.set_result(None)
                return True
        return False
