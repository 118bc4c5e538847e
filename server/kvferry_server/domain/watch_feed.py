"""What each process of an engine is told on its Watch: numbered events, a bounded number of which are kept.

The same few events serve a Watch that keeps up, one that resumes, and one that lagged. Pure.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.publications import PublicationRecord


class Role(enum.IntEnum):
    """What a process is in its engine, numbered as in the proto."""

    SCHEDULER = 1
    RANK = 2


@dataclass(frozen=True, slots=True)
class Process:
    """One process of an engine.

    Attributes:
        rank: 0 for the scheduler.
        node: address of the node server that relays for it; empty: it is a process of the home's own node.
    """

    engine: EngineRef
    role: Role
    rank: int = 0
    node: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class PublicationReleased:
    """The source may reuse a publication's blocks. State: told in full until acknowledged."""

    publication: PublicationRecord


@dataclass(frozen=True, slots=True)
class RankLost:
    """The process of a rank is gone, alone or with the `node` server that relayed for it."""

    rank: int
    node: str = ""
    node_lost: bool = False


@dataclass(frozen=True, slots=True)
class Draining:
    """The node server takes no new work."""


Event: TypeAlias = PublicationReleased | RankLost | Draining


@dataclass(frozen=True, slots=True)
class Numbered:
    """An event with its place in the feed."""

    sequence: int
    event: Event


class Feed:
    """The events of one process.

    Attributes:
        process: whose.
        sequence: number of the last event, from 1; 0 before the first.
        holder: number of the Watch that has it now; an older one was taken over.
        tellings: Watches that are being told the full state, older ones included.
    """

    def __init__(self, process: Process, kept: int) -> None:
        self.process = process
        self.sequence = 0
        self.holder = 0
        self.tellings = 0
        self._kept = kept
        self._dropped = 0
        self._events: deque[Numbered] = deque()

    def push(self, event: Event) -> None:
        """Add an event; the oldest makes room."""
        self.sequence += 1
        if len(self._events) == self._kept:
            self._dropped = self._events.popleft().sequence
        self._events.append(Numbered(self.sequence, event))

    def acknowledged(self, numbers: Collection[int]) -> None:
        """Its process knows of these releases: they need not be told again, nor be held."""
        self._events = deque(
            numbered
            for numbered in self._events
            if not isinstance(numbered.event, PublicationReleased) or numbered.event.publication.number not in numbers
        )

    def take_over(self) -> int:
        """A newer Watch takes the feed; returns its number."""
        self.holder += 1
        return self.holder

    def dropped_after(self, sequence: int) -> int | None:
        """How many events after this one are not kept any more; None if this one has never been."""
        if sequence > self.sequence:
            return None
        return max(0, self._dropped - sequence)

    def after(self, sequence: int) -> list[Numbered]:
        """The kept events after this one, in order."""
        return [numbered for numbered in self._events if numbered.sequence > sequence]
