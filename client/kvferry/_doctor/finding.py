"""The findings of checks. The table `findings.md` has the texts of each finding."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a check, with the fields of `kvferry doctor --json`."""

    finding: str
    """Name in the table."""
    level: str
    """``ok``, ``warning``, ``problem`` or ``unknown``; see docs/doctor.md."""
    found: str
    """What the check saw, with numbers."""
    means: str
    """The consequence for kvferry; empty: none."""
    do: str
    """The remedy; empty: there is nothing to do."""


@functools.cache
def table() -> dict[str, tuple[str, str, str]]:
    """Return level, meaning and remedy of each finding, by name."""
    text = Path(__file__).with_name("findings.md").read_text(encoding="utf-8")
    rows = (re.split(r" ?\| ?", line) for line in text.splitlines() if line.startswith("| `"))
    return {name.strip("`"): (level, means, remedy) for _, name, level, means, remedy, _ in rows}


def finding(name: str, found: str, do: str = "") -> Finding:
    """Make the finding of that name in the table; `do` replaces the table's remedy where it depends on the case."""
    level, means, remedy = table()[name]
    return Finding(name, level, found, means, do or remedy)
