"""Puts the steps of reads in order, in whatever order they reach a worker."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from kvferry.engine.values import GrantStep

MAX_EARLY = 4096
"""Number of reads that were not started whose steps are kept: as many as may wait at once by default."""


@dataclass(slots=True)
class _StepsOfRead:
    """The steps of one read: the index of the `next` one, and the steps that came early, by index."""

    next: int = 1
    ahead: dict[int, GrantStep] = field(default_factory=dict)


class StepOrders:
    """The steps of a worker's reads. Not thread-safe."""

    def __init__(self) -> None:
        self._orders: dict[str, _StepsOfRead] = {}

    def put(self, step: GrantStep, started: Collection[str]) -> None:
        """Add a step; a repeated step is ignored. Besides the `started` reads (read_ids), only the latest `MAX_EARLY`
        are kept."""
        order = self._orders.setdefault(step.read_id, _StepsOfRead())
        if step.index >= order.next:
            order.ahead.setdefault(step.index, step)
        if len(self._orders) > len(started) + MAX_EARLY:
            del self._orders[next(read_id for read_id in self._orders if read_id not in started)]

    def take(self, read_id: str) -> list[GrantStep]:
        """Return the steps of a read that are next, each once."""
        order, found = self._orders.setdefault(read_id, _StepsOfRead()), list[GrantStep]()
        while order.next in order.ahead:
            found.append(order.ahead.pop(order.next))
            order.next += 1
        return found

    def forget(self, read_id: str) -> None:
        self._orders.pop(read_id, None)
