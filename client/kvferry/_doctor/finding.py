"""What a check finds. The sentences about each kind of finding stand once, here made and in docs/doctor.md compared."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Level(enum.Enum):
    """How bad a finding is. Only a `PROBLEM` makes `kvferry doctor` end with 1."""

    OK = "ok"
    WARNING = "warning"
    """Something is slower than it could be, or fails in some uses."""
    PROBLEM = "problem"
    """Something fails here, or is several times slower than it has to be."""
    UNKNOWN = "unknown"
    """It could not be found out."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One thing that a check can find.

    Attributes:
        name: unique; it is in the table of docs/doctor.md.
        level: how bad it is.
        means: what follows from it for kvferry; empty if nothing does.
        remedy: what to do; empty if there is nothing to do.
    """

    name: str
    level: Level
    means: str = ""
    remedy: str = ""

    def found(self, what: str, remedy: str = "") -> Finding:
        """Make a finding of this kind.

        Args:
            what: what was found here, with numbers.
            remedy: what to do, where the case at hand decides it.
        """
        return Finding(self, what, remedy or self.remedy)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found here: its kind, what it saw, and what to do in this case."""

    kind: Kind
    found: str
    remedy: str

    def as_dict(self) -> dict[str, str]:
        """Return it as plain values, as `kvferry doctor --json` prints it."""
        return {
            "finding": self.kind.name,
            "level": self.kind.level.value,
            "found": self.found,
            "means": self.kind.means,
            "do": self.remedy,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, str]) -> Finding:
        """Make a finding of what `as_dict` returned."""
        kind = Kind(values["finding"], Level(values["level"]), values["means"])
        return cls(kind, values["found"], values["do"])
