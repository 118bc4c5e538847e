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

    @property
    def over(self) -> bool:
        """Whether this call has used up its slice."""
        return time.monotonic() > self._until

    async def pause(self) -> None:
        """Let other calls run; then start the next slice."""
        await asyncio.sleep(0)
        self._recheck()
        self._until = time.monotonic() + TIME_SLICE

    async def pause_if_over(self) -> None:
        """Pause if the slice is over."""
        if self.over:
            await self.pause()
