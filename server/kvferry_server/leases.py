"""One read of a publication, as its home knows it: the lease, the reports of its ranks, and what they came to."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.errors import LeaseEnded, PartiesMismatch, WrongIdentity
from kvferry_server.agenda import NEVER
from kvferry_server.identity import NOBODY, EngineRef, Names

if TYPE_CHECKING:
    from kvferry_server.publications import Publication


class ReadState(enum.IntEnum):
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
    """

    read: ReadKey
    key: bytes = field(repr=False)
    parties: int = 1
    expected_reads: int = 0
    names: Names = NOBODY


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to a renewal: seconds that remain, and why there will be no more, if so."""

    remaining: float
    revoked: RevokeReason | None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The answer to reports: the verdict on them, distinct ranks so far, and whether these are all."""

    verdict: Verdict
    reported: int = 0
    complete: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """The home's promise to a reader, and what became of it.

    Attributes:
        lease_id: 16 random bytes; the reader's secret.
        number: names it in public; rising per start of the home.
        ask: the call that was accepted.
        publication: what is read.
        granted_at: when it was accepted.
        expires: when it ends by time; moves later only.
        revoked: why it will not be renewed; advice.
        reports: by rank, those that came while it was live. A set: repeating one changes nothing.
        ended_as: how it ended; None while it is live.
        forget_at: until when its outcome is kept.
    """

    lease_id: bytes = field(repr=False)
    number: int
    ask: Ask
    publication: Publication
    granted_at: float
    expires: float
    revoked: RevokeReason | None = None
    reports: dict[int, RankReport] = field(default_factory=dict)
    ended_as: ReadState | None = None
    forget_at: float = NEVER
    scheduled: float = NEVER

    @property
    def live(self) -> bool:
        """Whether it has not ended; true of the moment the lessor last advanced to."""
        return self.ended_as is None

    @property
    def complete(self) -> bool:
        """Whether all parties have reported."""
        return len(self.reports) == self.ask.parties

    @property
    def state(self) -> ReadState:
        """State of the read."""
        if self.ended_as is not None:
            return self.ended_as
        return ReadState.READING if self.publication.complete else ReadState.WAITING

    def due(self) -> float:
        """When it ends, or its outcome is forgotten."""
        return self.expires if self.live else self.forget_at

    def remaining(self, now: float) -> float:
        """Seconds left; 0 once it has ended."""
        return max(0.0, self.expires - now) if self.live else 0.0

    def check_names(self, names: Names) -> None:
        """Raise `WrongIdentity` for a caller whose certificate shares no name with that of who acquired the lease.
        Callers on a UNIX socket have none: its directory's mode says who they may be."""
        if names and self.ask.names and not names & self.ask.names:
            raise WrongIdentity(f"{self} was acquired under another certificate", lease_number=self.number)

    def check_replay(self, ask: Ask) -> None:
        """Check another call of this read.

        Raises:
            WrongIdentity: it comes from somebody else.
            PartiesMismatch: it has other parties.
            LeaseEnded: the read has ended.
        """
        self.check_names(ask.names)
        if ask.parties != self.ask.parties:
            raise PartiesMismatch(
                f"the read of {self} has {self.ask.parties} parties, not {ask.parties}",
                lease_number=self.number,
                field="parties",
                value=ask.parties,
                expected=self.ask.parties,
            )
        if not self.live:
            raise LeaseEnded(f"the read of {self} has ended: {self.state.name}", lease_number=self.number)

    def add(self, reports: Iterable[RankReport]) -> Verdict:
        """Take reports of ranks: the first of each rank counts, and only while the lease is live.

        Raises:
            PartiesMismatch: more distinct ranks than parties.
        """
        new = {report.rank: report for report in reversed(tuple(reports)) if report.rank not in self.reports}
        if len(self.reports) + len(new) > self.ask.parties:
            ranks = sorted({*self.reports, *new})
            raise PartiesMismatch(
                f"the read of {self} has {self.ask.parties} parties, reports come from ranks {ranks}",
                lease_number=self.number,
                field="parties",
                value=len(ranks),
                expected=self.ask.parties,
            )
        if not self.live:
            return Verdict.EXPIRED if new else Verdict.VALID
        self.reports.update(new)
        return Verdict.VALID

    def __str__(self) -> str:
        return f"lease {self.number}"
