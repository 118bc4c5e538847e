"""What readers say and are told: calls, reports, verdicts. Values only."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field

from kvferry_server.domain.identity import NOBODY, EngineRef, Names


class LeaseState(enum.IntEnum):
    """State of a read, numbered as in the proto. The first two are of a live lease."""

    WAITING = 1
    READING = 2
    VALID = 3
    FAILED = 4
    CANCELLED = 5
    EXPIRED = 6


class RankOutcome(enum.IntEnum):
    """How a rank's share ended, numbered as in the proto."""

    DONE = 1
    FAILED = 2
    CANCELLED = 3
    EXPIRED = 4


class Verdict(enum.IntEnum):
    """The home's judgement of a report, numbered as in the proto."""

    VALID = 1
    EXPIRED = 2
    UNKNOWN = 3


class RevokeReason(enum.IntEnum):
    """Why a lease will not be renewed any more, numbered as in the proto."""

    ABORTED = 1
    SOURCE_LOST = 2
    FINAL_DEADLINE = 3


@dataclass(frozen=True, slots=True)
class RankReport:
    """The end of one rank's share: `bytes` is what it moved."""

    rank: int
    outcome: RankOutcome
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReadKey:
    """What makes two calls one read (PROTOCOL, Identities). The read_id is the reader's secret, 16 bytes."""

    source: EngineRef
    publication: int
    reader: EngineRef
    read_id: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ask:
    """A reader's call for a publication.

    Attributes:
        read: which read.
        key: of the reference.
        parties: ranks that will report.
        expected_reads: reads that will be made of the publication; 0: as its source said.
        names: those of the caller's certificate.
        peer: that the call came from, if it can be told apart from others.
    """

    read: ReadKey
    key: bytes = field(repr=False)
    parties: int = 1
    expected_reads: int = 0
    names: Names = NOBODY
    peer: str = ""

    @property
    def asker(self) -> Hashable:
        """Whose share of what is left for readers this takes: readers name themselves as they like, peers do not."""
        return self.peer or self.read.reader


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to a renewal: seconds that remain, and why there will be no more, if so."""

    remaining: float
    revoked: RevokeReason | None


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """The answer to reports: the verdict on them, distinct ranks so far, and whether these are all."""

    verdict: Verdict
    reported: int = 0
    complete: bool = False
