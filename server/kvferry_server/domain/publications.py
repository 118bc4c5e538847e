"""Publications and leases: the records that a home keeps of them."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry._prompt import MAX_MARKS
from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.errors import (
    InvalidField,
    KvferryError,
    LeaseEnded,
    NotPublished,
    PartiesMismatch,
    PublicationAborted,
    PublicationReleased,
    WrongIdentity,
)
from kvferry.geometry.blocks import MAX_LAYERS, MAX_UNFINISHED
from kvferry_server.domain.steps import Checksums, PublicationStep, PublishedExtent
from kvferry_server.domain.times import NEVER, UNSCHEDULED, Times
from kvferry_server.domain.values import (
    EngineRef,
    LeaseRequest,
    LeaseState,
    Names,
    RankReport,
    RevokeReason,
    RouterKey,
    Verdict,
)

PUBLICATION_BYTES = 2048  # Bytes that a publication takes in memory beside its steps, until it is forgotten; estimated


class PublicationStage(enum.Enum):
    """The stages of a publication, in the order in which it may pass them."""

    AWAITED = "awaited"  # Its source has not published it, but a reader asked for it or a router declined it
    PUBLISHING = "publishing"  # Further steps will arrive
    PUBLISHED = "published"  # All blocks are published
    ENDING = "ending"  # No new leases; it is released when its last live lease ends
    RELEASED = "released"  # The source may reuse the blocks, and has not acknowledged that yet
    FORGOTTEN = "forgotten"


@dataclass(slots=True, eq=False)
class PublicationRecord:
    """A publication at its home. All times are seconds on the home's clock."""

    source: EngineRef
    number: int  # rising per incarnation
    stage: PublicationStage = PublicationStage.AWAITED
    request_id: str = ""  # from its first step
    hint_digest: bytes = field(default=b"", repr=False)  # of the hint in its reference; empty: no hint
    router_key: RouterKey | None = None  # chosen by a router, sent with the first step; None: no router chose one
    steps: list[PublicationStep] = field(default_factory=list)  # dropped at release
    # What the steps hold of each group, so that a new step is checked without going through them.
    extents: dict[str, PublishedExtent] = field(default_factory=dict)
    unfinished: dict[str, int] = field(default_factory=dict)  # by group, the end of blocks with only some layers
    # Names of the complete layers of unfinished blocks. A set only from the first one on: an empty set takes 216 bytes.
    layers: set[str] | frozenset[str] = frozenset()
    mark_ends: tuple[int, ...] = ()  # ends of the prompt's marks so far
    step_count: int = 0  # steps that have arrived
    blocks: int = 0  # blocks published so far, over all groups
    expected_reads: int = 1  # the highest number that the source or a reader stated
    valid_reads: int = 0  # distinct reads that ended VALID
    last_failure: str = ""  # reason of the read that FAILED last; empty: none
    outcome: ReleaseOutcome | None = None  # set with ENDING; the first reason counts
    first_at: float = NEVER  # when the first step arrived
    final_at: float = NEVER  # the final deadline; no lease extends past it
    hold: float = NEVER  # seconds for which it is held without a live lease; set by `Sources`
    hold_until: float = NEVER  # end of the hold; applies while there is no live lease
    # Earliest release. A restarted home does not know all readers that may still be reading.
    release_not_before: float = 0.0
    leases: set[Lease] = field(default_factory=set)  # the live leases
    reads: list[Lease] = field(default_factory=list)  # all leases ever granted, in order
    not_published: bool = False  # the source's client has given the publication up
    awaited_until: float = NEVER  # until when a decline is remembered
    tell_again_at: float = NEVER  # when the release event is repeated, unless acknowledged
    acknowledged: bool = False  # during a recovery, until whose end the number may not arrive again
    checksums: Checksums = field(default_factory=Checksums)  # dropped at release
    scheduled: tuple[float, int] = UNSCHEDULED

    @property
    def grantable(self) -> bool:
        """Whether new leases may be granted."""
        return self.stage in (PublicationStage.PUBLISHING, PublicationStage.PUBLISHED)

    @property
    def complete(self) -> bool:
        """Whether the last step has arrived."""
        return bool(self.steps) and self.steps[-1].last

    @property
    def size(self) -> int:
        """Estimated bytes of the steps in memory."""
        return sum(step.size for step in self.steps)

    @property
    def awaits_checksums(self) -> bool:
        """Whether the source stated that its ranks send checksums. After a restart of this home, checksums that were
        sent before are not sent again, so none are awaited."""
        return self.release_not_before == 0.0 and any(step.checksums for step in self.steps)

    def add(self, step: PublicationStep) -> None:
        self.steps.append(step)
        self.step_count += 1
        self.hint_digest = step.hint_digest
        for new in step.groups:
            self.blocks += new.num_blocks
            before = self.extents.get(new.group) or PublishedExtent(new.first_token, new.end, 0)
            self.extents[new.group] = PublishedExtent(
                min(before.first_token, new.first_token), max(before.end_token, new.end), before.blocks + new.num_blocks
            )
        if step.groups:
            self.unfinished, self.layers = {}, frozenset()
        if step.unfinished is not None:
            self.unfinished.update({blocks.group: blocks.end for blocks in step.unfinished.groups})
            # In place: there may be thousands of layers, each in a step of its own.
            self.layers = self.layers or set()
            self.layers |= set(step.unfinished.layers)
        self.mark_ends += step.mark_ends

    def drop_steps(self) -> None:
        """Drop the steps and their checksums: no reader gets them any more."""
        self.steps.clear()
        self.extents.clear()
        self.unfinished.clear()
        self.layers, self.mark_ends = frozenset(), ()
        self.checksums = Checksums()

    def due(self) -> float:
        """When the publication ends, is released or forgotten, or its release event is repeated."""
        if self.stage is PublicationStage.FORGOTTEN:
            return NEVER
        if self.stage is PublicationStage.RELEASED:
            return NEVER if self.acknowledged else self.tell_again_at
        if self.grantable:
            return self.final_at if self.leases else min(self.final_at, self.hold_until)
        if self.leases:
            return NEVER
        return self.release_not_before if self.stage is PublicationStage.ENDING else self.awaited_until

    def refusal(self) -> KvferryError:
        """Return the error for a new lease; the publication must be ending or released."""
        engine_id, aborted = self.source.engine_id, self.outcome is ReleaseOutcome.ABORTED
        if aborted and self.stage is PublicationStage.ENDING and not self.not_published:
            return PublicationAborted(f"{self} was aborted", engine_id=engine_id, publication=self.number)
        return ended(f"{self}", engine_id, self.number, self.outcome, not_published=self.not_published)

    def __str__(self) -> str:
        return f"publication {self.number} of engine {self.source.engine_id!r}"


@dataclass(slots=True, eq=False)
class Lease:
    """A lease at its home. All times are seconds on the home's clock."""

    lease_id: bytes = field(repr=False)  # 16 random bytes; a secret of the reader
    number: int  # public name of the lease; rising per start of the home
    request: LeaseRequest  # the reader's call that was accepted
    publication: PublicationRecord
    times: Times  # those of the source's engine
    granted_at: float
    expires: float  # only moves later
    revoked: RevokeReason | None = None  # why there are no more renewals; advice to the reader
    reports: dict[int, RankReport] = field(default_factory=dict)  # by rank, those that arrived while the lease was live
    ended_as: LeaseState | None = None  # None while the lease is live
    forget_at: float = NEVER  # until when the outcome is kept
    scheduled: tuple[float, int] = UNSCHEDULED

    @property
    def live(self) -> bool:
        """Whether the lease had not ended when the records were last advanced."""
        return self.ended_as is None

    @property
    def complete(self) -> bool:
        return len(self.reports) == self.request.parties

    @property
    def reason(self) -> str:
        """The first failure reason that a rank reported; empty: none."""
        return next((report.reason for report in self.reports.values() if report.reason), "")

    @property
    def state(self) -> LeaseState:
        if self.ended_as is not None:
            return self.ended_as
        return LeaseState.READING if self.publication.complete else LeaseState.WAITING

    def due(self) -> float:
        """When the lease ends, or its outcome is forgotten."""
        return self.expires if self.live else self.forget_at

    def remaining(self, now: float) -> float:
        """Seconds left; 0 after the end."""
        return max(0.0, self.expires - now) if self.live else 0.0

    def check_names(self, names: Names) -> None:
        """Raise `WrongIdentity` if the caller's certificate shares no name with that of the caller that acquired the
        lease. Callers on a UNIX socket have no names: the mode of its directory decides who may connect."""
        if names and self.request.names and not names & self.request.names:
            raise WrongIdentity(f"{self} was acquired under another certificate", lease_number=self.number)

    def check_replay(self, request: LeaseRequest) -> None:
        """Check a further lease request of this read. Raises `WrongIdentity` for another caller, `PartiesMismatch` for
        another number of participants, and `LeaseEnded` if the read has ended."""
        self.check_names(request.names)
        if request.parties != self.request.parties:
            raise self._mismatch(f"not {request.parties}", request.parties)
        if not self.live:
            raise LeaseEnded(f"the read of {self} has ended as {self.state.name}", lease_number=self.number)

    def add(self, reports: Iterable[RankReport]) -> Verdict:
        """Add reports of ranks. The first report of each rank counts, and only while the lease is live. Raises
        `PartiesMismatch` if more distinct ranks have reported than the read has participants."""
        given = {report.rank: report for report in reversed(tuple(reports))}
        new = {rank: report for rank, report in given.items() if rank not in self.reports}
        if len(self.reports) + len(new) > self.request.parties:
            ranks = sorted({*self.reports, *new})
            raise self._mismatch(f"but ranks {ranks} have reported", len(ranks))
        if not self.live:
            # A rank that reports another outcome than before has read again, and perhaps after the lease had ended.
            again = any(self.reports[rank].outcome is not given[rank].outcome for rank in given.keys() - new.keys())
            return Verdict.EXPIRED if new or again else Verdict.VALID
        self.reports.update(new)
        return Verdict.VALID

    def _mismatch(self, problem: str, value: int) -> PartiesMismatch:
        expected = self.request.parties
        message = f"the read of {self} has {expected} parties, {problem}"
        return PartiesMismatch(message, lease_number=self.number, field="parties", value=value, expected=expected)

    def __str__(self) -> str:
        return f"lease {self.number}"


def ended(
    named: str, engine_id: str, number: int, outcome: ReleaseOutcome | None, *, not_published: bool
) -> NotPublished | PublicationReleased:
    """Return the error for a publication that has ended, or that its source has given up (`not_published`). `number` 0:
    it never arrived, and only its router key is known."""
    if not_published:
        problem = f"{named} was given up by its source, whose home did not take it; the source's log says why"
        return NotPublished(problem, engine_id=engine_id, publication=number)
    name = outcome.name if outcome else ""
    how = f"was released; its outcome is {name}" if number else "was declined before it came"
    return PublicationReleased(f"{named} {how}", engine_id=engine_id, publication=number, outcome=name)


def check_follows(publication: PublicationRecord, step: PublicationStep) -> None:
    """Raise `InvalidField` unless a step continues where the publication's steps ended."""
    count = len(publication.steps)
    if step.index != count:
        raise InvalidField("publish.step", step.index, f"{count}, the next step")
    if publication.complete:
        raise InvalidField("publish.step", step.index, f"at most {count - 1}, the last step of the publication")
    if count and step.request_id != publication.request_id:
        raise InvalidField("publish.request_id", step.request_id, f"{publication.request_id!r}, as in the first step")
    for blocks in step.groups:
        before = publication.extents.get(blocks.group)
        if before is not None and blocks.first_token != before.end_token:
            expected = f"{before.end_token}, where the step before ended"
            raise InvalidField(f"publish.groups[{blocks.group}].first_token", blocks.first_token, expected)
    _check_unfinished(publication, step)
    if step.mark_ends:
        ends = [*publication.mark_ends, *step.mark_ends]
        if len(ends) > MAX_MARKS:
            raise InvalidField("publish.marks", f"{len(ends)} marks", f"at most {MAX_MARKS} over all steps")
        twice = next((end for index, end in enumerate(ends) if end in ends[:index]), None)
        if twice is not None:
            raise InvalidField("publish.marks", f"end {twice} again", "each end once over all steps")


def _check_unfinished(publication: PublicationRecord, step: PublicationStep) -> None:
    unfinished, layers = publication.unfinished, publication.layers
    gained = {blocks.group: blocks.end for blocks in step.groups}
    if gained or step.last:
        for group, end in unfinished.items():
            if gained.get(group, 0) < end:
                expected = f"group {group!r} up to token {end} at least, of which some layers were complete"
                raise InvalidField("publish.groups", f"{group!r} up to {gained.get(group, 0)}", expected)
        unfinished, layers = {}, frozenset()
    if step.unfinished is None:
        return
    begun = step.unfinished.groups
    if bool(begun) == bool(unfinished):
        expected = "none, until the unfinished blocks before are complete" if begun else "at least one"
        raise InvalidField("publish.unfinished.groups", [blocks.group for blocks in begun], expected)
    # A reader looks at all layers with each further step.
    if len(layers) + len(set(step.unfinished.layers) - layers) > MAX_LAYERS:
        expected = f"at most {MAX_LAYERS} of the same blocks, over all steps"
        raise InvalidField("publish.unfinished.layers", f"{len(step.unfinished.layers)} more layers", expected)
    count = sum(blocks.num_blocks for blocks in begun)
    if count > MAX_UNFINISHED:
        raise InvalidField("publish.unfinished.groups", f"{count} blocks", f"at most {MAX_UNFINISHED}")
    for blocks in begun:
        before = publication.extents.get(blocks.group)
        start = gained.get(blocks.group, blocks.first_token if before is None else before.end_token)
        if blocks.first_token != start or blocks.end == start:
            where = f"publish.unfinished.groups[{blocks.group}]"
            expected = f"tokens from {start}, where the step before ended"
            raise InvalidField(where, (blocks.first_token, blocks.end), expected)
