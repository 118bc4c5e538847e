"""The clock of the node server: monotonic, and counting suspends, since a lease goes on while a host sleeps.

The domain never reads a clock by itself: it is given one, so that tests can turn time by hand.
"""

from __future__ import annotations

from typing import Protocol

import kvferry._clock


class Clock(Protocol):
    """Where a home takes its time from."""

    def now(self) -> float:
        """Seconds since some fixed point; never falls, and counts the time a host was suspended."""
        ...


class BootClock:
    """CLOCK_BOOTTIME of this host."""

    def now(self) -> float:
        """Seconds since boot, suspends included."""
        return kvferry._clock.now()
