"""A client's event loop of a test's own, whose time passes as the test says."""

from __future__ import annotations

import threading

from kvferry._clock import now
from kvferry._loop import Loop


class PlayedLoop(Loop):
    """An event loop whose clock the test moves.

    Attributes:
        leap: seconds by which its clock is ahead of the real one.
        still: what its clock shows instead, if it stands still.
    """

    def __init__(self, still: float | None = None) -> None:
        self.leap, self.still = 0.0, still
        super().__init__("kvferry-test-loop", lambda: (now() if self.still is None else self.still) + self.leap)

    def set(self, time: float) -> None:
        """Set a clock that stands still, and do what is due by then."""
        self.still = time
        self.turn()

    def pass_time(self, seconds: float) -> None:
        """Move the clock, and do what is due by then."""
        self.leap += seconds
        self.turn()

    def turn(self) -> None:
        """Wait until it has done all that it has to do now, and what follows from that."""
        for _ in range(8):
            done = threading.Event()
            assert self.call(done.set)
            assert done.wait(30)
