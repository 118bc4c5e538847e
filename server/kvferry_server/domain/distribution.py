"""Distributions: how often durations fell into which range, as plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator


class Distribution:
    """Counts of durations by range.

    Args:
        bounds: upper bounds of the ranges, in seconds, rising; a last range has no bound.

    Attributes:
        total: the sum of all durations, in seconds.
        count: how many there were.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self.count = 0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds
        self.count += 1

    def up_to(self) -> Iterator[tuple[float, int]]:
        """Yield each bound with how many durations were at most as long; the last bound is infinite."""
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            below += count
            yield bound, below
