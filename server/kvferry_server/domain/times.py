"""The time of a home: its clock, the durations in force (PROTOCOL, Times), and a queue of deadlines. All in seconds."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

from kvferry import _clock
from kvferry.errors import InvalidField

NEVER = math.inf
UNSCHEDULED = NEVER, -1

ANSWER_HOLD = 10.0  # Longest hold, in seconds, of an answer to a question: its asker reads at once, or not at all
ENDED_KEPT = 2.0  # Seconds for which the end of a question without a publication is remembered
RECOVERING_RETRY_AFTER = 0.25  # Retry delay, in seconds, while a home waits for its engines after a restart


class Clock(Protocol):
    """The clock of a node server: monotonic, and it counts the time a host is suspended, because leases run on
    meanwhile. The domain gets a clock passed in, so that tests can move time by hand."""

    def now(self) -> float:
        """Return the seconds since some fixed point. Never decreases, and counts time suspended."""
        ...


BOOT: Clock = _clock  # CLOCK_BOOTTIME of this host


@dataclass(frozen=True, slots=True)
class Times:
    """Settings of a home, each in seconds. Engines and readers get them in answers; tests shrink them. Raises
    `InvalidField` if a duration is not positive, or `ttl` is longer than `max_ttl`."""

    ttl: float = 30.0  # How long a lease lasts from its acceptance, or from its last renewal
    max_ttl: float = 30.0  # The longest without a renewal; a restarted home keeps a re-published request as long
    engine_ttl: float = 10.0  # From the loss of an engine's Watch to its death. A restarted home waits as long
    hold: float = 120.0  # How long a publication is held without a live lease before it ends as unread
    final: float = 600.0  # From the first step of a publication to its final deadline. No lease extends past it
    max_wait: float = 120.0  # The longest that ReadBlocks waits for news of a publication
    retire: float = 600.0  # How long a replaced incarnation is refused, and a dead engine remembered

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < 1e9:
                raise InvalidField(field.name, value, "a positive number of seconds")
        if self.ttl > self.max_ttl:
            raise InvalidField("ttl", self.ttl, f"at most max_ttl, {self.max_ttl} s")

    @property
    def renew_every(self) -> float:
        """Seconds between a reader's renewals."""
        return self.ttl / 3

    @property
    def keep_outcome(self) -> float:
        """Seconds for which the outcome of an ended lease is kept and replayed unchanged."""
        return 2 * self.max_ttl


class Timed(Protocol):
    """An object with a deadline that may move."""

    scheduled: tuple[float, int]  # When the queue next looks at it, and its number there. Set by the queue only.

    def due(self) -> float:
        """When something must be done about the object; `NEVER` if nothing must."""
        ...


Item = TypeVar("Item", bound=Timed)


class DeadlineQueue:
    """Deadlines in order. Moving one later costs nothing: the queue looks at the item again at its old deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # What items have, or had, as `scheduled`
        self._items: dict[int, tuple[Any, Callable[[Any, float], None]]] = {}  # By number, with the functions that act
        self._numbers = itertools.count()

    def put(self, item: Item, act: Callable[[Item, float], None]) -> None:
        """Note an item's deadline, at which `act` is called with the item and the present: it must move the deadline
        past that. Call this again whenever the deadline may have moved earlier, and when it is `NEVER` for good: from
        then on the queue does not keep the item alive."""
        due, (before, number) = item.due(), item.scheduled
        if before <= due < NEVER:
            return
        self._items.pop(number, None)
        item.scheduled = UNSCHEDULED
        if due < NEVER:
            item.scheduled = due, next(self._numbers)
            heapq.heappush(self._heap, item.scheduled)
            self._items[item.scheduled[1]] = item, act
        if len(self._heap) > 2 * len(self._items) + 1024:
            self._heap = sorted(one.scheduled for one, _ in self._items.values())

    def next_deadline(self) -> float:
        """When to call `advance` next; `NEVER` if nothing is due."""
        return self._heap[0][0] if self._heap else NEVER

    def advance(self, now: float, most: int) -> None:
        """Act on the items that are due, the earliest first. At most `most` items are looked at."""
        while most and self._heap and self._heap[0][0] <= now:
            most -= 1
            _, number = heapq.heappop(self._heap)
            if number not in self._items:
                continue  # The item was put again since, with an earlier deadline, or has none any more.
            item, act = self._items.pop(number)
            item.scheduled = UNSCHEDULED
            if item.due() <= now:
                act(item, now)
            self.put(item, act)
