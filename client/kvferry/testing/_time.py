"""The time of a fabric, which a test may move forward."""

from __future__ import annotations

from kvferry._clock import now


class FabricClock:
    """This host's clock, plus the seconds that a test has added."""

    def __init__(self) -> None:
        self._added = 0.0

    def now(self) -> float:
        """Return the time in seconds."""
        return now() + self._added

    def add(self, seconds: float) -> None:
        """Move the time forward."""
        self._added += seconds
