"""The error about two engines whose caches cannot be read from each other."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors._peers import Refused


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One reason why a cache cannot be read.

    Attributes:
        kind: ``identity``, ``group``, ``format``, ``uncovered``, ``held_twice``, ``indivisible``, ``granule`` ...
        where: the plane, group or rank it is about.
        field: the field that differs; empty where it is not about one field.
        source: the source's value.
        destination: the destination's value.
        message: one sentence for people.
    """

    kind: str
    where: str
    field: str
    source: str
    destination: str
    message: str


class Incompatible(Refused):
    """The destination cannot read the source's cache. `.mismatches` lists every reason.

    The message, and what crosses the wire, combine mismatches that differ only in the place, because a wrong dtype is
    usually wrong in every layer. They list at most 16; `.values["mismatches"]` is the number of all. `.lines` has the
    sentences that the message is made of.
    """

    reason = "INCOMPATIBLE"
    SPELLED_OUT = 16
    lines: tuple[str, ...]

    def __init__(self, mismatches: tuple[Mismatch, ...]) -> None:
        sorts: dict[tuple[str, ...], tuple[Mismatch, int]] = {}
        for found in mismatches:
            sort = (found.kind, found.field, found.source, found.destination)
            first, alike = sorts.get(sort, (found, -1))
            sorts[sort] = first, alike + 1
        told = list(sorts.values())[: self.SPELLED_OUT]
        self.lines = _lines(told, len(mismatches))
        super().__init__("; ".join(self.lines))
        self.values = {"mismatches": str(len(mismatches))}
        for index, (found, alike) in enumerate(told):
            for name in Mismatch.__slots__:
                self.values[f"mismatch.{index}.{name}"] = getattr(found, name)
            if alike:
                self.values[f"mismatch.{index}.alike"] = str(alike)
        self.mismatches = mismatches

    def _set_attributes(self) -> None:
        """Set the mismatches that the values list. The message is composed again, because the wire may have cut it."""
        told: list[tuple[Mismatch, int]] = []
        while f"mismatch.{len(told)}.kind" in self.values:
            index = len(told)
            found = Mismatch(**{name: self.values.get(f"mismatch.{index}.{name}", "") for name in Mismatch.__slots__})
            told.append((found, _number(self.values.get(f"mismatch.{index}.alike", ""))))
        self.mismatches = tuple(found for found, _ in told)
        self.lines = (self.message,)
        if told:
            spelled_out = sum(1 + alike for _, alike in told)
            self.lines = _lines(told, max(spelled_out, _number(self.values.get("mismatches", ""))))
            self.message = "; ".join(self.lines)
            self.args = (self.message,)


def _lines(told: list[tuple[Mismatch, int]], total: int) -> tuple[str, ...]:
    lines = [found.message + (f" (and {alike} more alike)" if alike else "") for found, alike in told]
    left = total - sum(1 + alike for _, alike in told)
    if left:
        lines.append(f"and {left} more")
    return tuple(lines)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
