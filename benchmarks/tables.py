"""A benchmark's result: a table with a title and what it shows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text, the first column a label.

    Attributes:
        title: what was measured, against what.
        columns: headings.
        rows: as many cells as headings.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table as Markdown, below its title."""
        return f"### {self.title}\n\n{self.lines()}"

    def lines(self) -> str:
        """The table as Markdown, without its title."""
        lines = ["| " + " | ".join(self.columns) + " |", "|---|" + "---:|" * (len(self.columns) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"


def seconds(action: Callable[[], object], repeats: int) -> float:
    """Median time of an action, after one that does not count."""
    action()
    return statistics.median(once(action) for _ in range(repeats))


def once(action: Callable[[], object]) -> float:
    """The time that an action takes now."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
