"""Time that the state machine moves, and one clock per party.

A lease is as good as the clocks that measure it. The protocol's margins cover the following, and the
machine does no more to clocks:

- Rates differ by less than 1 %, the reader's margin (here 0.3 % to either side).
- Clocks count suspends. So a suspended host is one that does nothing for a while, which the machine's rules do to
  every party by not choosing it.
- A reader's clock may leap ahead: that only makes it more careful. One that falls behind, a paused virtual machine, is
  caught by the home's answer and by nothing else (PROTOCOL, Endings); the machine holds such a reader to that alone.
"""

from __future__ import annotations

RATES = (0.997, 1.0, 1.003)


class Violation(AssertionError):
    """A rule that always holds was broken."""


class RealTime:
    """The real time, which no participant can see."""

    def __init__(self) -> None:
        self.now = 0.0


class PartyClock:
    """The clock of one participant."""

    def __init__(self, time: RealTime, start: float, rate: float) -> None:
        self._time = time
        self._start = start
        self._rate = rate

    def now(self) -> float:
        return self._start + self._rate * self._time.now

    def leap(self, seconds: float) -> None:
        """Leap ahead, or back if negative."""
        self._start += seconds
