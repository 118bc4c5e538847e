"""Feeds: the numbered events for the Watch of each process of an engine, bounded, so that a Watch may resume or lag."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

from kvferry.errors import KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.publications import PublicationRecord
from kvferry_server.domain.router_keys import Question
from kvferry_server.domain.values import EngineRef


class Role(enum.IntEnum):
    """The role of a process in its engine, numbered as in the proto."""

    SCHEDULER = 1
    RANK = 2


@dataclass(frozen=True, slots=True)
class Process:
    """One process of an engine."""

    engine: EngineRef
    role: Role
    rank: int = 0  # 0 for the scheduler
    node: str = field(default="", compare=False)  # address of the relaying node server; empty: the home's own node


Event: TypeAlias = PublicationRecord | pb.RankLost | pb.Draining | Question | pb.QuestionEnded
"""A publication means that it is released, so that its source may reuse the blocks. This is state: part of every full
state until acknowledged. A question is state while it is open."""


class Feed:
    """The events of one process: the last `kept` of them."""

    def __init__(self, process: Process, kept: int) -> None:
        self.process = process
        self.sequence = 0  # Number of the last event, from 1; 0 before the first
        self.current_watch = 0  # Number of the Watch that the feed serves; older ones were taken over
        self.ended: KvferryError | None = None  # Why its Watches end: the home has forgotten the engine
        self._kept = kept
        self._dropped = 0
        self._events: dict[int, Event] = {}  # By number, in order
        self._questions: dict[int, int] = {}  # By number of an open question, the number of its event

    def push(self, event: Event) -> None:
        """Add an event; a full feed drops its oldest. The end of a question replaces the question."""
        self.sequence += 1
        if isinstance(event, Question):
            self._questions[event.number] = self.sequence
        elif isinstance(event, pb.QuestionEnded):
            self._events.pop(self._questions.pop(event.number, 0), None)
        if len(self._events) == self._kept:
            self._dropped = next(iter(self._events))
            del self._events[self._dropped]
        self._events[self.sequence] = event

    def acknowledged(self, numbers: Collection[int]) -> None:
        """Remove the release events of these publications: the process has received them."""
        # An engine that keeps up has few events; none has more than `kept`.
        for sequence, event in list(self._events.items()):
            if isinstance(event, PublicationRecord) and event.number in numbers:
                del self._events[sequence]

    def dropped_after(self, sequence: int) -> int | None:
        """Return how many events after this one were dropped; None if there has been no such event."""
        if sequence > self.sequence:
            return None
        return max(0, self._dropped - sequence)

    def after(self, sequence: int) -> list[tuple[int, Event]]:
        """Return the events after this one, with their numbers."""
        # From the end: a process that keeps up lacks only the last of maybe a thousand events.
        found = list(takewhile(lambda numbered: numbered[0] > sequence, reversed(self._events.items())))
        found.reverse()
        return found
