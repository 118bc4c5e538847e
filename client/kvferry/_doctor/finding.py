"""What a check finds. The sentences about each finding stand once, in the table `findings.md`."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found here; the fields are those of `kvferry doctor --json`.

    Attributes:
        finding: its name in the table.
        level: ``ok``, ``warning``, ``problem`` or ``unknown``; docs/doctor.md says what they mean.
        found: what the check saw, with numbers.
        means: what follows from it for kvferry; empty if nothing does.
        do: what to do; empty if there is nothing to do.
    """

    finding: str
    level: str
    found: str
    means: str
    do: str


@functools.cache
def table() -> dict[str, tuple[str, str, str]]:
    """Return the level, the meaning and the remedy of each finding, by its name."""
    text = Path(__file__).with_name("findings.md").read_text(encoding="utf-8")
    rows = (re.split(r" ?\| ?", line) for line in text.splitlines() if line.startswith("| `"))
    return {name.strip("`"): (level, means, remedy) for _, name, level, means, remedy, _ in rows}


def finding(name: str, found: str, do: str = "") -> Finding:
    """Make a finding of that name in the table, given what was found here, with numbers, and what to do, where the case
    at hand decides it."""
    level, means, remedy = table()[name]
    return Finding(name, level, found, means, do or remedy)
