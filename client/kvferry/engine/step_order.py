"""Puts the steps of reads into their order, whatever order they reach a worker in."""

from __future__ import annotations

from kvferry.engine.values import GrantStep


class StepOrder:
    """The steps of one read that have come, as far as one before them is missing.

    Attributes:
        next: index of the step that is missing.
    """

    def __init__(self) -> None:
        self.next = 1
        self._ahead: dict[int, GrantStep] = {}

    def put(self, step: GrantStep) -> None:
        """Add a step. One that came before is ignored."""
        if step.index >= self.next:
            self._ahead.setdefault(step.index, step)

    def take(self) -> list[GrantStep]:
        """Return the steps whose turn it is, each once."""
        found: list[GrantStep] = []
        while self.next in self._ahead:
            found.append(self._ahead.pop(self.next))
            self.next += 1
        return found
