"""A publication and the leases on it, as their home knows them."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.errors import (
    InvalidField,
    KvferryError,
    LeaseEnded,
    PartiesMismatch,
    PublicationAborted,
    PublicationReleased,
    WrongIdentity,
)
from kvferry_server.domain.agenda import NEVER
from kvferry_server.domain.checksum_pages import Checksums
from kvferry_server.domain.identity import EngineRef, Names
from kvferry_server.domain.reads import Ask, LeaseState, RankReport, RevokeReason, Verdict
from kvferry_server.domain.steps import PublicationStep, PublishedExtent

PUBLICATION_BYTES = 2048
"""About what a publication takes in memory beside its steps, until it is forgotten."""


LEASE_BYTES = 1024
"""About what a lease takes in memory, with its place in the lists of its home."""

REPORT_BYTES = 160
"""About what a rank's report takes in memory."""


class PublicationStage(enum.Enum):
    """Where a publication stands. It moves downwards only."""

    AWAITED = "awaited"
    """Asked for or declined, but not come yet."""
    PUBLISHING = "publishing"
    """More steps will come."""
    PUBLISHED = "published"
    """All blocks are offered."""
    ENDING = "ending"
    """No new leases; it is released with its last one."""
    RELEASED = "released"
    """The source may reuse the blocks, and has not acknowledged that yet."""
    FORGOTTEN = "forgotten"
    """No part of any book."""


class PublicationOutcome(enum.IntEnum):
    """How a publication ended, numbered as in the proto."""

    READ = 1
    UNREAD = 2
    DECLINED = 3
    ABORTED = 4
    FINAL = 5


@dataclass(slots=True, eq=False)
class PublicationRecord:
    """A publication at its home.

    Attributes:
        source: the engine that offers it.
        number: rising per incarnation.
        stage: where it stands.
        request_id: as its first step said.
        steps: the offers so far; dropped when it is released.
        extents: what they hold together, by group: a step is checked without a look at all before it.
        step_count: how many came.
        blocks: offered so far, over all groups.
        expected_reads: the highest that anyone stated.
        valid_reads: distinct reads that ended VALID.
        outcome: why it ends; set with ENDING, the first reason counts.
        first_at: when the first step came.
        final_at: no lease reaches past it.
        hold_until: when it ends for want of a reader; counts while it has no live lease.
        release_floor: not released before: at a restarted home, readers that it does not know may still be reading.
        leases: the live ones.
        reads: all leases there ever were, in order.
        declined: before it came.
        awaited_until: until when that is remembered.
        tell_again_at: when its source is told of the release again, if it has not acknowledged it.
        checksums: of its blocks; dropped when it is released.
    """

    source: EngineRef
    number: int
    stage: PublicationStage = PublicationStage.AWAITED
    request_id: str = ""
    steps: list[PublicationStep] = field(default_factory=list)
    extents: dict[str, PublishedExtent] = field(default_factory=dict)
    step_count: int = 0
    blocks: int = 0
    expected_reads: int = 1
    valid_reads: int = 0
    outcome: PublicationOutcome | None = None
    first_at: float = NEVER
    final_at: float = NEVER
    hold_until: float = NEVER
    release_floor: float = 0.0
    leases: set[Lease] = field(default_factory=set)
    reads: list[Lease] = field(default_factory=list)
    declined: bool = False
    awaited_until: float = NEVER
    tell_again_at: float = NEVER
    checksums: Checksums = field(default_factory=Checksums)
    scheduled: float = NEVER

    @property
    def offered(self) -> bool:
        """Whether new readers may have it."""
        return self.stage in (PublicationStage.PUBLISHING, PublicationStage.PUBLISHED)

    @property
    def complete(self) -> bool:
        """Whether all blocks are offered."""
        return bool(self.steps) and self.steps[-1].last

    @property
    def size(self) -> int:
        """About as many bytes as it takes in memory."""
        return sum(offer.size for offer in self.steps)

    @property
    def awaits_checksums(self) -> bool:
        """Whether its source has said that its ranks send sums. What was sent to this home's predecessor is not sent
        again."""
        return self.release_floor == 0.0 and any(offer.checksums for offer in self.steps)

    def add(self, offer: PublicationStep) -> None:
        """Take the next step."""
        self.steps.append(offer)
        self.step_count += 1
        for new in offer.groups:
            self.blocks += new.blocks
            before = self.extents.get(new.group) or PublishedExtent(new.first_token, new.end_token, 0)
            self.extents[new.group] = PublishedExtent(
                min(before.first_token, new.first_token),
                max(before.end_token, new.end_token),
                before.blocks + new.blocks,
            )

    def drop_steps(self) -> None:
        """Nobody will be told them any more."""
        self.steps.clear()
        self.extents.clear()

    def due(self) -> float:
        """When it ends, is released or forgotten, or its source is told again."""
        if self.stage is PublicationStage.FORGOTTEN:
            return NEVER
        if self.stage is PublicationStage.RELEASED:
            return self.tell_again_at
        if self.offered:
            return self.final_at if self.leases else min(self.final_at, self.hold_until)
        if self.leases:
            return NEVER
        return self.release_floor if self.stage is PublicationStage.ENDING else self.awaited_until

    def refusal(self) -> KvferryError:
        """Why nobody can have it any more: it is ending, or released."""
        engine_id, outcome = self.source.engine_id, self.outcome.name if self.outcome else ""
        if self.stage is PublicationStage.ENDING and self.outcome is PublicationOutcome.ABORTED:
            return PublicationAborted(f"{self} was aborted", engine_id=engine_id, publication=self.number)
        message = f"{self} is released: {outcome}"
        return PublicationReleased(message, engine_id=engine_id, publication=self.number, outcome=outcome)

    def __str__(self) -> str:
        return f"publication {self.number} of engine {self.source.engine_id!r}"


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
        streams: that tell its blocks.
    """

    lease_id: bytes = field(repr=False)
    number: int
    ask: Ask
    publication: PublicationRecord
    granted_at: float
    expires: float
    revoked: RevokeReason | None = None
    reports: dict[int, RankReport] = field(default_factory=dict)
    ended_as: LeaseState | None = None
    forget_at: float = NEVER
    scheduled: float = NEVER
    streams: int = 0

    @property
    def size(self) -> int:
        """About as many bytes as it takes in memory."""
        return LEASE_BYTES + REPORT_BYTES * len(self.reports)

    @property
    def live(self) -> bool:
        """Whether it has not ended; true of the moment the lessor last advanced to."""
        return self.ended_as is None

    @property
    def complete(self) -> bool:
        """Whether all parties have reported."""
        return len(self.reports) == self.ask.parties

    @property
    def state(self) -> LeaseState:
        """State of the read."""
        if self.ended_as is not None:
            return self.ended_as
        return LeaseState.READING if self.publication.complete else LeaseState.WAITING

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


def check_follows(publication: PublicationRecord | None, offer: PublicationStep) -> None:
    """Check that a step goes on where the ones before it ended; raises `InvalidField`."""
    steps = publication.steps if publication is not None else []
    if offer.step != len(steps):
        raise InvalidField("publish.step", offer.step, f"{len(steps)}, the next one")
    if publication is None or not steps:
        return
    if steps[-1].last:
        raise InvalidField("publish.step", offer.step, f"at most {len(steps) - 1}, which was the last")
    if offer.request_id != publication.request_id:
        raise InvalidField("publish.request_id", "another one", "the same in every step")
    for blocks in offer.groups:
        before = publication.extents.get(blocks.group)
        if before is not None and blocks.first_token != before.end_token:
            problem = f"{before.end_token}, going on"
            raise InvalidField(f"publish.groups[{blocks.group}].first_token", blocks.first_token, problem)
