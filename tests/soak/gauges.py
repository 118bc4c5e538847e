"""Memory and file descriptors of every process over the run, and threads that should be gone."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import psutil

from kvferry._clock import now

SETTLES = 4
"""The first part of a process's life, one in so many, in which it grows to its size."""
STARTS = 20.0
"""Seconds that belong to it at least: a process that is started again on a busy machine."""
GROWTH = 48 << 20
"""Bytes by which a process may grow after that: allocators keep some of what was freed."""
FILES = 24
"""File descriptors by which it may: connections come and go."""
SAMPLES = 12
"""Fewer say nothing."""

ONE_CALL = ("kvferry-handshake-", "kvferry-warm-")
"""Names of threads that live for one read or one call."""


@dataclass
class Line:
    """What one process took over time.

    Attributes:
        name: whose.
        bounded: whether it has to stay flat. A process that makes engine after engine does not: served memory stays
            mapped for the life of its process.
    """

    name: str
    bounded: bool
    times: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    @property
    def settled(self) -> slice:
        """After it has grown to its size."""
        return slice(max(bisect_right(self.times, self.times[0] + STARTS), len(self.times) // SETTLES), None)

    @property
    def says(self) -> bool:
        """Whether it was looked at often enough after that."""
        return len(self.times[self.settled]) >= SAMPLES

    @property
    def slope(self) -> float:
        """Bytes per hour, by least squares."""
        times, values = self.times[self.settled], self.resident[self.settled]
        middle, mean = sum(times) / len(times), sum(values) / len(values)
        spread = sum((at - middle) ** 2 for at in times)
        rise = sum((at - middle) * (value - mean) for at, value in zip(times, values, strict=True))
        return 3600 * rise / spread if spread else 0.0

    def growth(self, values: list[int]) -> int:
        """From the first third of the settled life to the last, by their medians."""
        found = values[self.settled]
        third = max(1, len(found) // 3)
        return sorted(found[-third:])[third // 2] - sorted(found[:third])[third // 2]

    def problems(self) -> list[str]:
        """What has grown that should be flat."""
        if not (self.bounded and self.says):
            return []
        found = []
        if self.growth(self.resident) > GROWTH:
            found.append(f"{self.name} has grown by {self.growth(self.resident) >> 20} MiB")
        if self.growth(self.files) > FILES:
            found.append(f"{self.name} has {self.growth(self.files)} more file descriptors")
        return found

    def __str__(self) -> str:
        last = f"{self.resident[-1] >> 20:5} MiB, {self.files[-1]:4} files"
        return f"{last}, {self.slope / (1 << 20):+8.1f} MiB/h over {len(self.times)} samples  {self.name}"


class Gauges:
    """The lines of all processes there were."""

    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}

    def sample(self, processes: Mapping[str, int], *, bounded: bool = True) -> None:
        """Look at processes, by name."""
        for name, pid in processes.items():
            try:
                process = psutil.Process(pid)
                resident, files = process.memory_info().rss, process.num_fds()
            except psutil.Error:
                continue
            if not resident:
                # It was killed a moment ago.
                continue
            line = self._lines.setdefault(pid, Line(name, bounded))
            line.times.append(now())
            line.resident.append(resident)
            line.files.append(files)

    @property
    def lines(self) -> list[Line]:
        """Those that say something, the steepest first."""
        found = [line for line in self._lines.values() if line.says]
        return sorted(found, key=lambda line: -line.slope)


def left(names: Iterable[str]) -> list[str]:
    """Of the names of threads of a process that does nothing, those that should be gone."""
    return [name for name in names if name.startswith(ONE_CALL)]


def left_here() -> list[str]:
    """Threads of kvferry in this process, in which every client is closed."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry")]
