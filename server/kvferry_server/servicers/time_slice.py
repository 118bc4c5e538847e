"""Time slices: how a call that works for long lets other calls run in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvferry_server.servicers.times import TIME_SLICE


class TimeSlice:
    """The current time slice of one call, on the event loop.

    Args:
        recheck: called after other calls have run, because what was checked before may no longer hold; an error that
            it raises ends the call.
    """

    def __init__(self, recheck: Callable[[], object]) -> None:
        self._recheck = recheck
        self._until = time.monotonic() + TIME_SLICE

    async def pause_if_over(self) -> None:
        """Let other calls run if this call has used up its slice; then start the next slice."""
        if time.monotonic() > self._until:
            await asyncio.sleep(0)
            self._recheck()
            self._until = time.monotonic() + TIME_SLICE
