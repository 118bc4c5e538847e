"""How late the event loop runs its timers: what every call waits at least."""

from __future__ import annotations

import asyncio

from kvferry.stats import Measured
from kvferry_server.admin.limits import LAG_POLL

LATE = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bounds, in seconds, of how late timers are."""


class LoopLag:
    """Measures the running event loop.

    Attributes:
        seen: how late the timers were.
    """

    def __init__(self) -> None:
        self.seen = Measured(LATE)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_POLL
            await asyncio.sleep(LAG_POLL)
            self.seen.add(max(0.0, loop.time() - due))
