"""How a call that has much to do lets others have their turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TURN_SECONDS = 0.005
"""A call goes on for so long before others have their turn: a thousand heavy notifications take seconds."""


class Turns:
    """The turns of one call.

    Args:
        again: called after others had theirs, since what was checked before may be true no more; what it raises ends
            the call.
    """

    def __init__(self, again: Callable[[], object]) -> None:
        self._again = again
        self._until = time.monotonic() + TURN_SECONDS

    async def give(self) -> None:
        """Let others have their turn, if this call's was long enough."""
        if time.monotonic() > self._until:
            await asyncio.sleep(0)
            self._again()
            self._until = time.monotonic() + TURN_SECONDS
