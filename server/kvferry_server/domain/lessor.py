"""The lessor: what sources and readers may do with publications and leases (PROTOCOL, Leases, Endings, Home restart).

Pure: no I/O, no clock of its own, no threads. Every call first brings everything up to the present, so that a lease is
live exactly until its time, whenever the timer fires. What others have to be told is left in `take_effects`.

    publish ─────────► PUBLISHING ─► PUBLISHED ─► ENDING ─(no live lease)─► RELEASED ─(acknowledged)─► forgotten
    ask, decline ─► AWAITED ─┘                    read as often as expected, declined, aborted, unread, final
    lease: WAITING ─► READING ─► VALID | FAILED | CANCELLED | EXPIRED, kept for a while, then forgotten
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator

from kvferry.errors import (
    EngineIncomplete,
    HomeRecovering,
    InvalidField,
    KvferryError,
    LeaseEnded,
    PublicationStale,
    ServerDraining,
)
from kvferry.geometry.model import Group
from kvferry_server.domain.checksum_pages import Page
from kvferry_server.domain.clock import Clock
from kvferry_server.domain.endings import Changed, Endings, Released
from kvferry_server.domain.identity import NOBODY, EngineRef, Names
from kvferry_server.domain.ledger import Book, Standing
from kvferry_server.domain.limits import Limits, check_limit
from kvferry_server.domain.publications import (
    LEASE_BYTES,
    PUBLICATION_BYTES,
    Lease,
    PublicationOutcome,
    PublicationRecord,
    PublicationStage,
    check_follows,
)
from kvferry_server.domain.reads import (
    Ask,
    LeaseState,
    RankOutcome,
    RankReport,
    ReadKey,
    Renewal,
    ReportAnswer,
    RevokeReason,
    Verdict,
)
from kvferry_server.domain.shares import Memory, Shares, check_share
from kvferry_server.domain.steps import PublicationStep, check_step
from kvferry_server.domain.times import Times

SLICE = 256
"""Leases, and publications, that are ended in one go: a hundred thousand may be due at once, and everybody waits."""


class Lessor:
    """Publications and leases of all engines of a home. Not thread-safe: it belongs to its home's event loop."""

    def __init__(self, clock: Clock, times: Times, limits: Limits, memory: Memory | None = None) -> None:
        self._clock = clock
        self._times = times
        self._limits = limits
        self._memory = memory or Memory(limits.memory, limits.engine_memory, times.renew_every)
        self._endings = Endings(times, self._memory, Shares(limits.leases))
        self._draining = False
        self._lease_numbers = itertools.count(1)

    def advance(self, most: int | None = None) -> float:
        """Bring everything up to the present; returns it.

        Args:
            most: leases, and publications, to end or release in this call; None: all. The rest stays due, and whoever
                asks for one of them is told the truth all the same.
        """
        now = self._clock.now()
        self._endings.advance(now, most)
        return now

    def next_deadline(self) -> float:
        """When to call `advance` next."""
        return self._endings.next_deadline()

    def take_effects(self) -> list[Changed | Released]:
        """What others have to be told of what happened since the last call."""
        effects, self._endings.effects = self._endings.effects, []
        return effects

    # Engines come and go.

    def open(self, source: EngineRef, secret: bytes) -> None:
        """An incarnation lives (again). One without a record here has a snapshot to send.

        Args:
            source: the incarnation.
            secret: of its session.
        """
        self.advance(SLICE)
        book = self._endings.books.get(source)
        if book is None:
            waiting = Shares(self._limits.waiting_reads)
            self._endings.books[source] = Book(source, secret, waiting)
        else:
            book.standing = Standing.LIVE

    def lose(self, source: EngineRef) -> None:
        """The engine's Watch is lost: no renewals until it is back."""
        self._endings.book(source).standing = Standing.LOST

    def end_engine(self, source: EngineRef, standing: Standing) -> None:
        """The engine is `DEAD`, or `REPLACED`: all it published ends; leases run out as they would have."""
        now = self.advance(SLICE)
        book = self._endings.book(source)
        book.standing = standing
        for publication in list(book.publications.values()):
            self._endings.revoke(publication, RevokeReason.SOURCE_LOST)
            if publication.stage is not PublicationStage.AWAITED:
                self._endings.end(publication, PublicationOutcome.ABORTED, now)
            elif not publication.leases:
                self._endings.forget(publication)
            if publication.stage is PublicationStage.RELEASED and standing is Standing.REPLACED:
                self._endings.forget(publication)
        self._endings.close_if_empty(book)

    def set_groups(self, source: EngineRef, groups: Iterable[Group]) -> None:
        """The first rank said what groups the engine has. What a snapshot offered before that is checked now (R7)."""
        now = self.advance(SLICE)
        book = self._endings.book(source)
        if book.groups is not None:
            return
        book.groups = {group.name: group for group in groups}
        for publication in list(book.publications.values()):
            try:
                for offer in publication.steps:
                    check_step(book.groups, offer)
            except KvferryError:
                self._abort(publication, now)

    def drain(self) -> None:
        """Grant, renew and take no more (PROTOCOL, Leases 1); reports, cancels and acknowledgements work on."""
        self._draining = True

    # The source.

    def publish(self, source: EngineRef, offer: PublicationStep) -> PublicationRecord:
        """Take a step of a publication. Idempotent by (source, publication, step).

        Raises:
            InvalidField, BadBlock: the step contradicts itself, an earlier one, or the engine's groups.
            PublicationStale, PublicationReleased, PublicationAborted: the publication has ended.
            LimitReached: the engine has too many.
            ServerDraining: a new publication at a draining home.
        """
        now = self.advance(SLICE)
        book = self._endings.book(source)
        publication = self._endings.publication(book, offer.number, now)
        if publication is None or publication.stage is PublicationStage.AWAITED:
            book.check_may_come(offer.number, now - self._times.max_ttl)
        elif offer.step < publication.step_count:
            if publication.steps and publication.steps[offer.step] != offer:
                raise InvalidField("publish.step", offer.step, "the same content as when it was first sent")
            self._touch(book, publication, now)
            return publication
        elif publication.stage in (PublicationStage.ENDING, PublicationStage.RELEASED):
            raise publication.refusal()
        self._check_step(book, publication, offer)
        if publication is None:
            publication = self._endings.awaited(book, offer.number)
        if publication.stage is PublicationStage.AWAITED:
            self._arrive(book, publication, offer, now)
        self._append(book, publication, offer, now)
        return publication

    def abort(self, source: EngineRef, number: int) -> None:
        """The source takes a publication back: no new leases, no renewals; released with the last lease. Idempotent.

        A number that has not come is released as well, and can't come any more: its source keeps the blocks until it
        hears so.
        """
        now = self.advance(SLICE)
        book = self._endings.book(source)
        publication = self._endings.publication(book, number, now)
        if publication is None or publication.stage is PublicationStage.AWAITED:
            try:
                book.check_may_come(number, now - self._times.max_ttl)
            except PublicationStale:
                return
            # Its source acknowledges the release, or this home keeps it: as many as publications, and no more.
            self._check_room(book, number, 0)
            publication = publication or self._endings.awaited(book, number)
            self._endings.seen(book, publication, now)
            self._touch(book, publication, now)
        self._abort(publication, now)

    def acknowledge(self, source: EngineRef, numbers: Iterable[int]) -> None:
        """The source knows of these releases. Idempotent; says nothing of numbers that are not released."""
        self.advance(SLICE)
        book = self._endings.book(source)
        for number in numbers:
            publication = book.publications.get(number)
            if publication is not None and publication.stage is PublicationStage.RELEASED:
                self._endings.forget(publication)

    def offered(self, source: EngineRef, number: int) -> PublicationRecord:
        """A publication that somebody may be reading.

        Raises:
            PublicationStale, PublicationReleased: there is none of this number.
            HomeRecovering: it may be in the source's snapshot.
        """
        now = self.advance(SLICE)
        book = self._endings.book(source)
        publication = self._endings.publication(book, number, now)
        if publication is None or publication.stage is PublicationStage.AWAITED:
            if book.recovering:
                waits = f"this home restarted and waits for the snapshot of {source}"
                raise HomeRecovering(waits, engine_id=source.engine_id)
            message = f"publication {number} of {source} is gone, or never was"
            raise PublicationStale(message, engine_id=source.engine_id, publication=number)
        if publication.stage is PublicationStage.RELEASED:
            raise publication.refusal()
        return publication

    def add_checksums(self, source: EngineRef, number: int, rank: int, pages: Iterable[Page], *, last: bool) -> None:
        """Keep sums of a publication's blocks until it is released. Idempotent.

        Args:
            source, number: the publication; errors as `offered`.
            rank: whose blocks were summed.
            pages: of planes and blocks that there are.
            last: the rank sends no more.

        Raises:
            InvalidField: a page contradicts another one.
            LimitReached: the engine has too many.
        """
        publication = self.offered(source, number)
        book = self._endings.book(source)
        new = publication.checksums.new(pages)
        size = sum(page.size for page in new)
        most = self._limits.checksum_bytes
        check_limit("checksum_bytes", book.checksum_bytes + size, most, self._times.ttl)
        self._memory.check(source, size)
        self._memory.take(source, size)
        publication.checksums.add(new)
        book.checksum_bytes += size
        if last:
            publication.checksums.done.add(rank)

    def begin_snapshot(self, source: EngineRef, name: bytes = b"") -> None:
        """The source starts to tell all it holds published; `name` is the same at the end."""
        self.advance(SLICE)
        book = self._endings.book(source)
        book.snapshot, book.snapshot_name = set(), name

    def end_snapshot(self, source: EngineRef, high_water: int, name: bytes = b"") -> None:
        """The source has told all it holds: what else it published up to `high_water` it has not any more.

        Only up to there: a snapshot that is delivered twice must not end what came after it.

        Raises:
            InvalidField: this home saw no beginning, since it restarted in between; or another one since.
        """
        now = self.advance(SLICE)
        book = self._endings.book(source)
        if book.snapshot is None:
            raise InvalidField("resync.phase", "END", "a BEGIN before")
        if book.snapshot_name != name:
            raise InvalidField("resync.snapshot", name.hex(), f"{book.snapshot_name.hex()!r}, which has begun since")
        for number, publication in list(book.publications.items()):
            if number <= high_water and number not in book.snapshot and publication.offered:
                self._abort(publication, now)
        self._endings.close_below(book, high_water)
        book.snapshot, book.recovering = None, False

    # The reader.

    def check_reference(self, source: EngineRef, number: int, key: bytes) -> None:
        """Whether who shows a reference may have the agents of its engine.

        Args:
            source: the engine.
            number: of the publication, which is live or may come; 0: the reference is the engine's own.
            key: of the reference.

        Raises:
            WrongKey: the key is not the publication's, come or not, or not the engine's.
            PublicationStale, PublicationReleased: there is nothing to read any more.
            HomeRecovering: not now.
        """
        now = self.advance(SLICE)
        book = self._endings.book(source)
        if number == 0:
            book.check_engine_key(key)
            return
        book.check_key(number, key)
        publication = self._endings.publication(book, number, now)
        if publication is None:
            book.check_refilled()
            book.check_may_come(number, now - self._times.max_ttl)
        elif publication.stage is PublicationStage.RELEASED:
            raise publication.refusal()

    def grant(self, ask: Ask) -> Lease:
        """Lease a publication, perhaps before it has come. A replay gets the same lease, unextended.

        Raises:
            WrongKey: the key is not the publication's, come or not.
            WrongIdentity, PartiesMismatch: the call contradicts an earlier call of this read.
            LeaseEnded: this read was had, and has ended.
            PublicationStale, PublicationReleased, PublicationAborted: there is nothing to read.
            HomeRecovering, ServerDraining, LimitReached: not now.
        """
        now = self.advance(SLICE)
        book = self._endings.book(ask.read.source)
        book.check_key(ask.read.publication, ask.key)
        publication = self._endings.publication(book, ask.read.publication, now)
        lease = self._endings.lease_of_read(ask.read, now)
        if lease is not None:
            lease.check_replay(ask)
            self._expect(lease.publication, ask)
            return lease
        if self._draining:
            raise ServerDraining("this node server is draining: ask again")
        book.check_refilled()
        if publication is None:
            book.check_may_come(ask.read.publication, now - self._times.max_ttl)
        elif publication.stage in (PublicationStage.ENDING, PublicationStage.RELEASED):
            raise publication.refusal()
        self._check_room_to_read(book, publication, ask)
        if publication is None:
            publication = self._endings.awaited(book, ask.read.publication)
        expires = min(now + self._times.ttl, publication.final_at)
        lease = Lease(secrets.token_bytes(16), next(self._lease_numbers), ask, publication, now, expires)
        self._expect(publication, ask)
        self._endings.add_lease(lease)
        return lease

    def has_lease(self, read: ReadKey, lease_id: bytes) -> bool:
        """Whether this is the lease of a read, live or ended."""
        lease = self._endings.lease_of_read(read, self.advance(SLICE))
        return lease is not None and secrets.compare_digest(lease_id, lease.lease_id)

    def renew(self, lease_id: bytes, reader: EngineRef, names: Names = NOBODY) -> Renewal:
        """Extend a lease to a ttl from now, as far as it may be; never shortens or revives one.

        Raises:
            LeaseEnded: there is no record of the lease.
            WrongIdentity: it is somebody else's.
        """
        now = self.advance(SLICE)
        lease = self._lease(lease_id, reader, names, now)
        if lease is None:
            raise LeaseEnded("there is no record of this lease")
        if lease.live and lease.revoked is None and not self._draining:
            publication = lease.publication
            latest = publication.final_at
            if publication.stage is PublicationStage.AWAITED:
                latest = lease.granted_at + self._times.max_wait
            if self._endings.book(publication.source).standing is Standing.LIVE:
                lease.expires = max(lease.expires, min(now + self._times.ttl, latest))
            if lease.expires == publication.final_at:
                self._endings.revoke(publication, RevokeReason.FINAL_DEADLINE)
        return Renewal(lease.remaining(now), lease.revoked)

    def leased(self, lease_id: bytes, reader: EngineRef, names: Names = NOBODY) -> PublicationRecord:
        """What a live lease is on.

        Raises:
            LeaseEnded: there is no such lease, or it has ended.
            WrongIdentity: it is somebody else's.
        """
        now = self.advance(SLICE)
        lease = self._lease(lease_id, reader, names, now)
        if lease is None:
            raise LeaseEnded("there is no record of this lease")
        if not lease.live:
            raise LeaseEnded(f"{lease} is not live", lease_number=lease.number)
        return lease.publication

    def report(
        self, lease_id: bytes, reader: EngineRef, reports: Iterable[RankReport], names: Names = NOBODY
    ) -> ReportAnswer:
        """Take reports of ranks that ended their share, and judge them. Replays are answered alike.

        Raises:
            PartiesMismatch: more distinct ranks than parties.
            WrongIdentity: the lease is somebody else's.
        """
        now = self.advance(SLICE)
        lease = self._lease(lease_id, reader, names, now)
        if lease is None:
            return ReportAnswer(Verdict.UNKNOWN)
        before = lease.size
        verdict = lease.add(reports)
        self._memory.take(lease.publication.source, lease.size - before)
        if lease.live and lease.complete:
            done = all(report.outcome is RankOutcome.DONE for report in lease.reports.values())
            self._endings.end_lease(lease, LeaseState.VALID if done else LeaseState.FAILED, now)
        return ReportAnswer(verdict, len(lease.reports), lease.complete)

    def cancel(self, lease_id: bytes, reader: EngineRef, names: Names = NOBODY) -> None:
        """The reader gives up: the lease ends at once, since reading harms no source (PROTOCOL, Leases 7). Idempotent;
        raises `WrongIdentity` for somebody else's."""
        now = self.advance(SLICE)
        lease = self._lease(lease_id, reader, names, now)
        if lease is not None and lease.live:
            self._endings.end_lease(lease, LeaseState.CANCELLED, now)

    def decline(self, source: EngineRef, number: int, key: bytes) -> None:
        """Nobody will read this: released at once, or with the last live lease. Idempotent. Before the publication
        came, it is remembered for a while.

        Raises:
            WrongKey: the key is not the publication's.
            LimitReached: too many.
        """
        now = self.advance(SLICE)
        book = self._endings.book(source)
        book.check_key(number, key)
        publication = self._endings.publication(book, number, now)
        if publication is not None and publication.stage is not PublicationStage.AWAITED:
            self._endings.end(publication, PublicationOutcome.DECLINED, now)
            return
        if publication is None:
            try:
                book.check_may_come(number, now - self._times.max_ttl)
            except PublicationStale:
                return
        if publication is None or not publication.declined:
            most = self._limits.waiting_declines
            check_limit("waiting_declines", len(book.declined), most, self._times.ttl)
            self._memory.check(source, PUBLICATION_BYTES)
            publication = publication or self._endings.awaited(book, number)
            book.declined.add(publication)
            publication.declined = True
        publication.awaited_until = now + self._times.max_wait
        self._endings.reschedule(publication)

    # What is there.

    def key(self, publication: PublicationRecord) -> bytes:
        """The key in its reference."""
        return self._endings.book(publication.source).key(publication.number)

    def publications(self) -> Iterator[PublicationRecord]:
        """All publications that came, until their release is acknowledged."""
        found = (found for book in self._endings.books.values() for found in book.publications.values())
        return (publication for publication in found if publication.stage is not PublicationStage.AWAITED)

    def leases(self) -> Iterator[Lease]:
        """All leases, ended ones for as long as their outcome is kept."""
        return iter(self._endings.leases.values())

    def shelves_of_publications(self) -> dict[EngineRef, Iterator[tuple[tuple[int, ...], PublicationRecord]]]:
        """`publications` by incarnation and number, for who wants a few of many."""
        books = self._endings.books.items()
        return {source: _shelf_of_publications(book) for source, book in books}

    def shelves_of_leases(self) -> dict[EngineRef, Iterable[tuple[tuple[int, ...], Lease]]]:
        """`leases` by incarnation of the source, and the numbers of publication and lease."""
        return {source: found.items() for source, found in self._endings.leases_by_source.items()}

    def counts(self, source: EngineRef) -> tuple[int, int]:
        """How many publications of an incarnation are not released, and how many leases on them live."""
        book = self._endings.books.get(source)
        return (book.arrived - book.released, book.live_leases) if book else (0, 0)

    def released(self, source: EngineRef) -> list[PublicationRecord]:
        """Releases that the source has not acknowledged."""
        found = self._endings.book(source).publications.values()
        return [publication for publication in found if publication.stage is PublicationStage.RELEASED]

    def recovering(self, source: EngineRef) -> bool:
        """Whether the source has to send its snapshot."""
        return self._endings.book(source).recovering

    def others_until(self, engine: EngineRef) -> float:
        """When the last lease on another incarnation of the engine ends; 0 if there is none."""
        books = self._endings.books.items()
        others = (book for ref, book in books if ref.engine_id == engine.engine_id and ref != engine)
        return max((book.live_until() for book in others), default=0.0)

    # Within.

    def _lease(self, lease_id: bytes, reader: EngineRef, names: Names, now: float) -> Lease | None:
        """The lease, for the reader who has it; raises `WrongIdentity`."""
        lease = self._endings.lease(lease_id, now)
        if lease is None or lease.ask.read.reader != reader:
            return None
        lease.check_names(names)
        return lease

    def _check_step(self, book: Book, publication: PublicationRecord | None, offer: PublicationStep) -> None:
        if offer.step == 0:
            if self._draining:
                raise ServerDraining("this node server is draining: publish again")
            self._check_room(book, offer.number, offer.size)
        else:
            self._memory.check(book.source, offer.size)
            if book.recovering and (publication is None or publication.stage is PublicationStage.AWAITED):
                # Its first steps are in the snapshot.
                waits = f"this home restarted and waits for the snapshot of {book.source}"
                raise HomeRecovering(waits, engine_id=book.source.engine_id)
        check_follows(publication, offer)
        if book.groups is not None:
            check_step(book.groups, offer)
        elif not book.recovering:
            source = f"{book.source} offers blocks of groups that no rank has registered"
            raise EngineIncomplete(source, engine_id=book.source.engine_id, missing_ranks="")

    def _check_room(self, book: Book, number: int, size: int) -> None:
        """Whether the engine may have one more publication, of so many bytes."""
        check_limit("publications", book.arrived, self._limits.publications, self._times.ttl)
        self._memory.check(book.source, PUBLICATION_BYTES + book.passed_over_size(number) + size)

    def _arrive(self, book: Book, publication: PublicationRecord, offer: PublicationStep, now: float) -> None:
        """The first step of a publication."""
        # A lease that a waiting reader has is never cut short, not even by a final deadline below the ttl.
        waiting = max((lease.expires for lease in publication.leases), default=0.0)
        publication.final_at = max(now + self._times.final, waiting)
        publication.request_id = offer.request_id
        self._endings.seen(book, publication, now)

    def _append(self, book: Book, publication: PublicationRecord, offer: PublicationStep, now: float) -> None:
        publication.add(offer)
        publication.expected_reads = max(publication.expected_reads, offer.expected_reads)
        publication.hold_until = now + self._times.hold
        publication.stage = PublicationStage.PUBLISHED if offer.last else PublicationStage.PUBLISHING
        self._memory.take(book.source, offer.size)
        self._touch(book, publication, now)
        self._endings.reschedule(publication)
        self._endings.changed(publication)
        if publication.declined:
            self._endings.end(publication, PublicationOutcome.DECLINED, now)
        self._endings.end_if_read(publication, now)

    def _abort(self, publication: PublicationRecord, now: float) -> None:
        self._endings.revoke(publication, RevokeReason.ABORTED)
        self._endings.end(publication, PublicationOutcome.ABORTED, now)

    def _touch(self, book: Book, publication: PublicationRecord, now: float) -> None:
        """Part of a snapshot; and at a home that restarted, readers it does not know may still be inside their
        deadlines."""
        if book.snapshot is not None:
            book.snapshot.add(publication.number)
        if book.recovering:
            publication.release_floor = max(publication.release_floor, now + self._times.max_ttl)

    def _check_room_to_read(self, book: Book, publication: PublicationRecord | None, ask: Ask) -> None:
        """Whether there may be one more lease, and a record of what it waits for."""
        retry_after = self._times.ttl
        check_share("leases", self._endings.leases_of, book.source, retry_after)
        size = LEASE_BYTES
        if publication is not None:
            check_limit("reads", len(publication.reads), self._limits.reads, retry_after)
        else:
            size += PUBLICATION_BYTES
        if publication is None or publication.stage is PublicationStage.AWAITED:
            check_share("waiting_reads", book.waiting, ask.asker, retry_after)
        self._memory.check(book.source, size)

    def _expect(self, publication: PublicationRecord, ask: Ask) -> None:
        """A reader says how many reads there will be, within a bound: what never comes is waited for."""
        expected = min(ask.expected_reads, self._limits.raised_reads)
        publication.expected_reads = max(publication.expected_reads, expected)


def _shelf_of_publications(book: Book) -> Iterator[tuple[tuple[int, ...], PublicationRecord]]:
    found = book.publications.items()
    return (
        ((number,), publication) for number, publication in found if publication.stage is not PublicationStage.AWAITED
    )
