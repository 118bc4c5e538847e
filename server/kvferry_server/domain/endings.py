"""How leases and publications end. Everything that ends one goes through `end_lease` or `end`, so that R2 and R3 hold
in one place.

- A lease ends by its time, by its reader's reports or cancel; never because its publication does.
- A publication ends once, for the first reason there is, and is released once: with its last live lease.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import EngineUnknown
from kvferry_server.domain.agenda import NEVER, Agenda
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.ledger import NUMBER_BYTES, Book, Standing
from kvferry_server.domain.publications import (
    PUBLICATION_BYTES,
    Lease,
    PublicationOutcome,
    PublicationRecord,
    PublicationStage,
)
from kvferry_server.domain.reads import LeaseState, ReadKey, RevokeReason
from kvferry_server.domain.shares import Memory, Shares
from kvferry_server.domain.times import Times


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """A publication, or a lease on it, is not what it was: its readers' streams look again."""

    publication: PublicationRecord


@dataclass(frozen=True, slots=True, eq=False)
class Released:
    """The source is to be told; again, if it has not acknowledged it."""

    publication: PublicationRecord


class Endings:
    """The books of a home, its leases, and their deadlines.

    Attributes:
        books: by incarnation.
        leases: by lease_id, live ones and ended ones whose outcome is kept. The time of a look-up says nothing of the
            others: a dictionary compares a keyed hash of the whole id before it looks at any byte of one.
        reads: the same by what makes two calls one read, its 128-bit read_id included.
        leases_by_source: the same by incarnation, then by the numbers of publication and lease.
        leases_of: how many those are.
        memory: what all this takes.
        effects: what others have to be told.
    """

    def __init__(self, times: Times, memory: Memory, leases_of: Shares) -> None:
        self.books: dict[EngineRef, Book] = {}
        self.leases: dict[bytes, Lease] = {}
        self.reads: dict[ReadKey, Lease] = {}
        self.leases_by_source: dict[EngineRef, dict[tuple[int, int], Lease]] = {}
        self.leases_of = leases_of
        self.memory = memory
        self.effects: list[Changed | Released] = []
        self._times = times
        self._publication_times: Agenda[PublicationRecord] = Agenda()
        self._lease_times: Agenda[Lease] = Agenda()

    def advance(self, now: float, most: int | None = None) -> None:
        """End and release what is due; at most so many of each kind."""
        # Leases first: a publication whose last lease ends at its final deadline is then released at once.
        self._lease_times.advance(now, self._on_lease_due, most)
        self._publication_times.advance(now, self._on_publication_due, most)

    def publication(self, book: Book, number: int, now: float) -> PublicationRecord | None:
        """What a book has under a number at this moment, even if `advance` has not come to it yet.

        Of its leases some may be over that `advance` has not come to: it is held or pinned for a moment longer then.
        """
        publication = book.publications.get(number)
        if publication is not None and publication.due() <= now:
            self._on_publication_due(publication, now)
        return book.publications.get(number)

    def lease(self, lease_id: bytes, now: float) -> Lease | None:
        """A lease as it is at this moment, likewise."""
        return self._at(self.leases.get(lease_id), now)

    def lease_of_read(self, read: ReadKey, now: float) -> Lease | None:
        """The lease of a read as it is at this moment, likewise."""
        return self._at(self.reads.get(read), now)

    def next_deadline(self) -> float:
        """When to call `advance` next."""
        return min(self._lease_times.next_deadline(), self._publication_times.next_deadline())

    def book(self, source: EngineRef) -> Book:
        """The book of an incarnation; raises `EngineUnknown`."""
        book = self.books.get(source)
        if book is None:
            raise EngineUnknown(f"no {source} at this home", engine_id=source.engine_id)
        return book

    def add_lease(self, lease: Lease) -> None:
        """A new lease, with its time running."""
        publication = lease.publication
        book = self.books[publication.source]
        self.leases[lease.lease_id] = self.reads[lease.ask.read] = lease
        self.leases_by_source.setdefault(publication.source, {})[publication.number, lease.number] = lease
        book.live_leases += 1
        publication.leases.add(lease)
        publication.reads.append(lease)
        self.leases_of.take(publication.source)
        self.memory.take(publication.source, lease.size)
        if publication.stage is PublicationStage.AWAITED:
            book.waiting.take(lease.ask.asker)
        self._lease_times.put(lease)

    def awaited(self, book: Book, number: int) -> PublicationRecord:
        """A record of a publication that has not come."""
        publication = book.publications[number] = PublicationRecord(book.source, number)
        self.memory.take(book.source, PUBLICATION_BYTES)
        return publication

    def seen(self, book: Book, publication: PublicationRecord, now: float) -> None:
        """An awaited publication came: from now on its number is live, or stale for ever."""
        numbers = book.numbers_size
        book.see(publication.number, now)
        self.memory.take(book.source, book.numbers_size - numbers)
        book.declined.discard(publication)
        for lease in publication.leases:
            book.waiting.give(lease.ask.asker)
        publication.first_at = now
        publication.stage = PublicationStage.PUBLISHING

    def reschedule(self, publication: PublicationRecord) -> None:
        """One of the publication's deadlines may have moved earlier."""
        self._publication_times.put(publication)

    def changed(self, publication: PublicationRecord) -> None:
        """Readers' streams have something to see."""
        self.effects.append(Changed(publication))

    def end_lease(self, lease: Lease, state: LeaseState, now: float) -> None:
        """The one end of a lease."""
        publication = lease.publication
        book = self.books[publication.source]
        book.live_leases -= 1
        if publication.stage is PublicationStage.AWAITED:
            book.waiting.give(lease.ask.asker)
        lease.ended_as = state
        lease.forget_at = now + self._times.outcomes
        self._lease_times.put(lease)
        publication.leases.discard(lease)
        publication.valid_reads += state is LeaseState.VALID
        if not publication.leases:
            # Back to hold, so that a retry elsewhere finds it.
            publication.hold_until = now + self._times.hold
        self.changed(publication)
        self.end_if_read(publication, now)
        self._settle(publication, now)

    def end_if_read(self, publication: PublicationRecord, now: float) -> None:
        """End a publication that was read as often as it was meant to be."""
        if publication.complete and publication.valid_reads >= publication.expected_reads:
            self.end(publication, PublicationOutcome.READ, now)

    def end(self, publication: PublicationRecord, outcome: PublicationOutcome, now: float) -> None:
        """The one end of a publication: no new leases from now on; released with the last live one."""
        if not publication.offered:
            return
        publication.stage, publication.outcome = PublicationStage.ENDING, outcome
        self.changed(publication)
        self._settle(publication, now)

    def revoke(self, publication: PublicationRecord, reason: RevokeReason) -> None:
        """Renew none of its leases any more; they run out as they would have."""
        for lease in publication.leases:
            lease.revoked = lease.revoked or reason
        self.changed(publication)

    def forget(self, publication: PublicationRecord) -> None:
        """Take it out of its book."""
        if publication.stage is PublicationStage.FORGOTTEN:
            return
        book = self.books[publication.source]
        del book.publications[publication.number]
        book.declined.discard(publication)
        if book.snapshot is not None:
            book.snapshot.discard(publication.number)
        size = PUBLICATION_BYTES + sum(lease.size for lease in publication.reads if lease.lease_id not in self.leases)
        if publication.stage is not PublicationStage.AWAITED:
            book.arrived -= 1
            book.released -= publication.stage is PublicationStage.RELEASED
            if book.recovering:
                book.gone.add(publication.number)
                size -= NUMBER_BYTES
        publication.stage = PublicationStage.FORGOTTEN
        self.memory.give(book.source, size)
        self.close_if_empty(book)

    def close_below(self, book: Book, high_water: int) -> None:
        """The source has told all it holds up to this number."""
        numbers = book.numbers_size
        book.close_below(high_water)
        self.memory.take(book.source, book.numbers_size - numbers)

    def close_if_empty(self, book: Book) -> None:
        """Drop the book of a replaced incarnation once nothing of it is held."""
        if book.standing is Standing.REPLACED and not book.publications and book.source in self.books:
            del self.books[book.source]
            self.memory.give(book.source, book.numbers_size)

    def _at(self, lease: Lease | None, now: float) -> Lease | None:
        if lease is None:
            return None
        if lease.due() <= now:
            self._on_lease_due(lease, now)
        if lease.due() <= now:
            # It was over for so long that its outcome is, too.
            self._on_lease_due(lease, now)
        return self.leases.get(lease.lease_id)

    def _settle(self, publication: PublicationRecord, now: float) -> None:
        """Release or forget what nothing holds any more."""
        if publication.leases or publication.stage is PublicationStage.FORGOTTEN:
            return
        if publication.stage is PublicationStage.ENDING and now >= publication.release_floor:
            self._release(publication, now)
        elif publication.stage is PublicationStage.AWAITED and not publication.declined:
            self.forget(publication)
        self.reschedule(publication)

    def _release(self, publication: PublicationRecord, now: float) -> None:
        book = self.books[publication.source]
        publication.stage = PublicationStage.RELEASED
        book.released += 1
        sums = publication.checksums.clear()
        self.memory.give(book.source, publication.size + sums)
        publication.drop_steps()
        book.checksum_bytes -= sums
        if book.standing is Standing.REPLACED:
            # Its memory is the new incarnation's, which `reuse_after` held back; nobody acknowledges.
            self.forget(publication)
        else:
            self._tell(publication, now)

    def _tell(self, publication: PublicationRecord, now: float) -> None:
        publication.tell_again_at = now + self._times.max_ttl
        self.effects.append(Released(publication))

    def _on_lease_due(self, lease: Lease, now: float) -> None:
        if lease.live:
            # As of its own time, however late the timer is.
            self.end_lease(lease, LeaseState.EXPIRED, lease.expires)
        else:
            del self.leases[lease.lease_id]
            del self.reads[lease.ask.read]
            lease.forget_at = NEVER
            source = lease.publication.source
            self.leases_of.give(source)
            found = self.leases_by_source[source]
            del found[lease.publication.number, lease.number]
            if not found:
                del self.leases_by_source[source]
            if lease.publication.stage is PublicationStage.FORGOTTEN:
                self.memory.give(source, lease.size)

    def _on_publication_due(self, publication: PublicationRecord, now: float) -> None:
        if publication.stage is PublicationStage.RELEASED:
            if self.books[publication.source].standing is Standing.LIVE:
                self._tell(publication, now)
            publication.tell_again_at = now + self._times.max_ttl
        elif publication.offered:
            self.end(
                publication, PublicationOutcome.FINAL if now >= publication.final_at else PublicationOutcome.UNREAD, now
            )
        else:
            publication.declined = False
            self.books[publication.source].declined.discard(publication)
            self._settle(publication, now)
