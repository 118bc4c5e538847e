"""What is due when: a heap of things that know their own next deadline."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

NEVER = math.inf


class Timed(Protocol):
    """Something with a deadline that may move."""

    scheduled: float
    """Kept by the agenda: when it looks at this thing next; `NEVER` before it was put."""

    def due(self) -> float:
        """When something is to be done about it; `NEVER` if nothing is."""
        ...


Item = TypeVar("Item", bound=Timed)


class Agenda(Generic[Item]):
    """Deadlines in order. A deadline that moves later costs nothing: it is looked at again when the old one comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._order = itertools.count()

    def put(self, item: Item) -> None:
        """Note an item's deadline; call it again whenever that may have moved earlier."""
        due = item.due()
        if due < item.scheduled:
            item.scheduled = due
            heapq.heappush(self._heap, (due, next(self._order), item))

    def next_deadline(self) -> float:
        """When to call `advance` next; `NEVER` if nothing is due."""
        return self._heap[0][0] if self._heap else NEVER

    def advance(self, now: float, act: Callable[[Item, float], None], most: int | None = None) -> None:
        """Act on every item that is due, the earliest first. `act` must move the item's deadline past `now`.

        Args:
            now: the present.
            act: what to do about an item.
            most: items to look at in this call; None: all.
        """
        looked_at = 0
        while self._heap and self._heap[0][0] <= now and looked_at != most:
            looked_at += 1
            at, _, item = heapq.heappop(self._heap)
            if item.scheduled != at:
                continue  # Put again since, with an earlier deadline.
            item.scheduled = NEVER
            if item.due() <= now:
                act(item, now)
            self.put(item)
