"""The clock of a node server: monotonic, and it counts the time a host is suspended, because leases run on meanwhile.

The domain never reads a clock itself. It is given one, so that tests can move time by hand.
"""

from __future__ import annotations

from typing import Protocol

import kvferry._clock


class Clock(Protocol):
    """Where a home takes its time from."""

    def now(self) -> float:
        """Return the seconds since some fixed point. Never decreases, and counts the time the host was suspended."""
        ...


class BootClock:
    """CLOCK_BOOTTIME of this host."""

    def now(self) -> float:
        """Return the seconds since boot, including time suspended."""
        return kvferry._clock.now()
