"""How late the event loop runs its timers: what every call waits at least."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvferry.stats import Distribution, histogram
from kvferry_server.admin.limits import LAG_POLL

LATE = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bounds, in seconds, of how late timers are."""


@dataclass(slots=True, eq=False)
class LoopLag:
    """Measures the running event loop."""

    seen: Distribution = histogram("kvferry_loop_lag_seconds", "How late timers of the event loop are.", bounds=LATE)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_POLL
            await asyncio.sleep(LAG_POLL)
            self.seen.add(max(0.0, loop.time() - due))
