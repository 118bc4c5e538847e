"""The clock of a node server: monotonic, and it counts the time a host is suspended, because leases run on meanwhile.
The domain gets a clock passed in, so that tests can move time by hand."""

from __future__ import annotations

from typing import Protocol

from kvferry import _clock


class Clock(Protocol):
    """The source of a home's time."""

    def now(self) -> float:
        """Return the seconds since some fixed point. Never decreases, and counts time suspended."""
        ...


BOOT: Clock = _clock
"""CLOCK_BOOTTIME of this host."""
