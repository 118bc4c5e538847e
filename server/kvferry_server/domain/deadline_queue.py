"""The deadline queue: a heap of objects that each know their own next deadline."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

NEVER = math.inf


class Timed(Protocol):
    """An object with a deadline that may move."""

    scheduled: float  # When the queue next looks at this object; `NEVER` before `put`. Set by the queue only.

    def due(self) -> float:
        """When something must be done about the object; `NEVER` if nothing must."""
        ...


Item = TypeVar("Item", bound=Timed)


class DeadlineQueue(Generic[Item]):
    """Deadlines in order. Moving a deadline later costs nothing: the queue looks at the item again at its old
    deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._order = itertools.count()

    def put(self, item: Item) -> None:
        """Note an item's deadline. Call it again whenever the deadline may have moved earlier."""
        due = item.due()
        if due < item.scheduled:
            item.scheduled = due
            heapq.heappush(self._heap, (due, next(self._order), item))

    def next_deadline(self) -> float:
        """When to call `advance` next; `NEVER` if nothing is due."""
        return self._heap[0][0] if self._heap else NEVER

    def advance(self, now: float, act: Callable[[Item, float], None], most: int | None = None) -> None:
        """Call `act` for every item that is due, the earliest first. `act` must move the item's deadline past `now`. At
        most `most` items are looked at; None: all."""
        looked_at = 0
        while self._heap and self._heap[0][0] <= now and looked_at != most:
            looked_at += 1
            at, _, item = heapq.heappop(self._heap)
            if item.scheduled != at:
                continue  # The item was put again since, with an earlier deadline.
            item.scheduled = NEVER
            if item.due() <= now:
                act(item, now)
            self.put(item)
