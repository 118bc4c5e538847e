"""The lessor: what readers may do with publications and leases (PROTOCOL, Leases, Endings).

grant ─► WAITING ─(published)─► READING ─► VALID | FAILED | CANCELLED | EXPIRED, kept for a while, then forgotten
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import replace

from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.errors import BadReference, LeaseEnded, PublicationAborted, ServerDraining
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.limits import check_budget, check_limit
from kvferry_server.domain.publications import PUBLICATION_BYTES, Lease, PublicationRecord, PublicationStage
from kvferry_server.domain.records import Records
from kvferry_server.domain.values import (
    NOBODY,
    EngineRef,
    LeaseRequest,
    LeaseState,
    Names,
    RankOutcome,
    RankReport,
    ReadKey,
    RevokeReason,
    Verdict,
)


class Lessor:
    """The calls of readers and routers."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._times, self._limits, self._memory = records.times, records.limits, records.memory

    def check_reference(self, source: EngineRef, number: int, key: bytes) -> None:
        """Check that a reference with this key entitles its bearer to the agents of its engine. `number` 0: the
        engine's own reference. Raises `WrongKey`; `PublicationStale` or `PublicationReleased` if there is nothing to
        read any more; and `HomeRecovering` while the engine's snapshot, which may have the publication, is awaited."""
        engine, publication, now = self._records.begin_with(source, number)
        engine.check_key(number, key)
        if publication is None and number:
            engine.check_recovered()
            engine.check_may_arrive(number, now)
        elif publication is not None and publication.stage is PublicationStage.RELEASED:
            raise publication.refusal()

    def grant(self, request: LeaseRequest) -> Lease:
        """Grant a lease on a publication, arrived or not. A replay gets the same lease, not extended. Raises
        `WrongKey`; `PublicationStale`, `PublicationReleased` or `PublicationAborted` if there is nothing to read;
        `HomeRecovering`, `ServerDraining` or `LimitReached` if the call is to be repeated later; and as
        `Lease.check_replay`."""
        engine, publication, now = self._records.begin_with(request.read.source, request.read.publication)
        engine.check_key(request.read.publication, request.key)
        lease = self._records.as_of(self._records.leases_by_read.get(request.read), now)
        if lease is not None:
            lease.check_replay(request)
            self._expect(lease.publication, request)
            return lease
        if self._records.draining:
            raise ServerDraining("this node server is draining: ask again")
        engine.check_recovered()
        if publication is None:
            engine.check_may_arrive(request.read.publication, now)
        elif publication.stage in (PublicationStage.ENDING, PublicationStage.RELEASED):
            raise publication.refusal()
        return self._add_lease(engine, publication, request, now)

    def has_lease(self, read: ReadKey, lease_id: bytes) -> bool:
        """Whether `lease_id` is that of the read's lease, live or ended."""
        lease = self._records.as_of(self._records.leases_by_read.get(read), self._records.advance())
        return lease is not None and secrets.compare_digest(lease_id, lease.lease_id)

    def renew(self, lease_id: bytes, reader: EngineRef, names: Names = NOBODY) -> Lease:
        """Extend a lease to a ttl from now, within its limits. Never shortens or revives a lease. Raises `LeaseEnded`
        if this home has no record of it, `WrongIdentity` if another caller acquired it."""
        lease, now = self._lease(lease_id, reader, names)
        if lease is None:
            self._records.journal.renewed(None, reader)
            raise _unknown()
        extended = False
        if lease.live and lease.revoked is None:
            publication = lease.publication
            engine = self._records.of_engine(publication.source)
            if engine.lost_ranks and publication.stage is not PublicationStage.AWAITED:
                # The reader's network card reports no lost rank. A rank that is back before the renewal lost nothing.
                self._records.revoke_lease(lease, RevokeReason.SOURCE_LOST)
            elif not self._records.draining:
                extended = self._extend(lease, engine, now)
        self._records.journal.renewed(lease, reader, extended=extended)
        return lease

    def leased(self, lease_id: bytes, reader: EngineRef, names: Names = NOBODY) -> PublicationRecord:
        """Return the publication of a live lease. Raises `LeaseEnded`, and `WrongIdentity` for another caller."""
        lease, _ = self._lease(lease_id, reader, names)
        if lease is None:
            raise _unknown()
        if not lease.live:
            raise LeaseEnded(f"{lease} has ended", lease_number=lease.number)
        return lease.publication

    def report(
        self, lease_id: bytes, reader: EngineRef, reports: Iterable[RankReport], names: Names = NOBODY
    ) -> pb.ReadEnded:
        """Take reports of ranks whose transfers ended, and return the verdict. A replay gets the same answer. A lease
        without a record has EXPIRED, unless this home has just started and may have granted it before. The reader may
        not know: its machine, and its clock, may have been paused for long. Raises `WrongIdentity` if another caller
        acquired the lease, and as `Lease.add`."""
        lease, now = self._lease(lease_id, reader, names)
        if lease is None:
            verdict = Verdict.EXPIRED if now >= self._records.knows_all_leases_from else Verdict.UNKNOWN
            self._records.journal.reported(verdict, reader, None)
            return pb.ReadEnded(verdict=pb.Verdict.ValueType(verdict))
        if lease.live:
            # One rank reads no more than all ranks of the source hold, whatever the reader reports.
            most = self._records.of_engine(lease.publication.source).bytes_of(lease.publication)
            reports = [report if report.bytes <= most else replace(report, bytes=most) for report in reports]
        verdict = lease.add(reports)
        self._records.journal.reported(verdict, reader, lease)
        if lease.live and lease.complete:
            done = all(report.outcome is RankOutcome.DONE for report in lease.reports.values())
            self._records.end_lease(lease, LeaseState.VALID if done else LeaseState.FAILED, now)
        verdict_value = pb.Verdict.ValueType(verdict)
        return pb.ReadEnded(verdict=verdict_value, reported=len(lease.reports), complete=lease.complete)

    def validate(self, request: LeaseRequest, digest: bytes, reports: Iterable[RankReport]) -> pb.ReadEnded:
        """Take the end of a read without a lease, whose blocks come from the hint with this digest, and return the
        verdict (PROTOCOL, Optimistic reads). The read counts like one that was granted and has ended now. A replay gets
        the same answer. Raises `BadReference` if the publication has another hint or none, `PublicationAborted` if it
        or its source is lost, and as `grant` and `report`."""
        engine, now = self._records.begin(request.read.source)
        engine.check_key(request.read.publication, request.key)
        lease = self._records.as_of(self._records.leases_by_read.get(request.read), now)
        if lease is None:
            publication = self._still_published(engine, request.read.publication, now)
            self._check_hint(publication, digest)
            lease = self._add_lease(engine, publication, request, now)
        else:
            self._check_hint(lease.publication, digest)
            if request.parties != lease.request.parties:
                lease.check_replay(request)
        answer = self.report(lease.lease_id, request.read.reader, reports, request.names)
        if lease.live:
            # Its other ranks have not ended in time.
            self._records.end_lease(lease, LeaseState.FAILED, now)
        return answer

    def cancel(self, lease_id: bytes, reader: EngineRef, names: Names = NOBODY) -> None:
        """End a lease at once, for a reader that gives up (PROTOCOL, Leases 7). Idempotent. Raises `WrongIdentity`."""
        lease, now = self._lease(lease_id, reader, names)
        if lease is not None and lease.live:
            self._records.end_lease(lease, LeaseState.CANCELLED, now)

    def revoke(self, source: EngineRef, lease_number: int) -> Lease:
        """Stop renewals of a lease, for an operator, and advise its reader to stop. The lease ends by its time or by
        its reader's reports: to end it at once would let the source change blocks that are being read (R2). Idempotent.
        Raises `LeaseEnded` if this home has no record of the lease."""
        now = self._records.advance()
        read = self._records.reads_by_source.get(source, {}).get(lease_number)
        lease = self._records.as_of(read, now) if isinstance(read, Lease) else None
        if lease is None:
            problem = f"this home has no lease {lease_number} on a publication of {source}"
            raise LeaseEnded(f"{problem}: it never had one, or it ended long ago", lease_number=lease_number)
        self._records.revoke_lease(lease, RevokeReason.OPERATOR)
        return lease

    def decline(self, source: EngineRef, number: int, key: bytes) -> None:
        """End a publication that will not be read: it is released at once, or when its last live lease ends. A decline
        before the publication arrives is remembered for `max_wait` seconds. Idempotent. Raises `WrongKey`, and
        `LimitReached` if the engine has too many publications."""
        engine, publication, now = self._records.begin_with(source, number)
        engine.check_key(number, key)
        if publication is not None and publication.stage is not PublicationStage.AWAITED:
            self._records.end(publication, ReleaseOutcome.DECLINED, now)
            return
        if publication is None and not engine.may_arrive(number, now):
            return
        if publication is None or publication not in engine.declined:
            self._memory.check(source, PUBLICATION_BYTES)
            publication = publication or self._records.add_awaited(engine, number)
            engine.declined.add(publication)
        publication.awaited_until = now + self._times.max_wait
        self._records.reschedule(publication)

    def _still_published(self, engine: Engine, number: int, now: float) -> PublicationRecord:
        """Return a publication that is complete and not released, so that its bytes have not changed."""
        # The publish may be a late one, of a publication that was released before this home started: then the snapshot
        # does not name it.
        engine.check_recovered()
        publication = self._records.unreleased(engine.ref, number)
        if now >= publication.final_at:
            raise publication.refusal()
        if engine.dead or engine.gone or engine.lost_ranks:
            raise PublicationAborted(
                f"{publication}: its source is lost", engine_id=engine.ref.engine_id, publication=number
            )
        return publication

    def _check_hint(self, publication: PublicationRecord, digest: bytes) -> None:
        if not publication.hint_digest and publication.outcome is ReleaseOutcome.ABORTED:
            # Aborted before it came, or unknown to the snapshot: the reference was right.
            raise publication.refusal()
        if not secrets.compare_digest(publication.hint_digest, digest):
            raise BadReference(f"{publication}: this is not the hint in the reference that its source made")

    def _extend(self, lease: Lease, engine: Engine, now: float) -> bool:
        """Extend a live lease to a ttl from now, within its limits. Returns whether its engine is live."""
        publication, live = lease.publication, engine.watched
        awaited = publication.stage is PublicationStage.AWAITED
        latest = lease.granted_at + self._times.max_wait if awaited else publication.final_at
        if live:
            lease.expires = max(lease.expires, min(now + lease.times.ttl, latest))
        if lease.expires == publication.final_at:
            self._records.revoke(publication, RevokeReason.FINAL_DEADLINE)
        return live

    def _lease(self, lease_id: bytes, reader: EngineRef, names: Names) -> tuple[Lease | None, float]:
        """Act on what is due; return a reader's lease (None: no record) and the present. Raises `WrongIdentity`."""
        now = self._records.advance()
        lease = self._records.as_of(self._records.leases_by_id.get(lease_id), now)
        if lease is None or lease.request.read.reader != reader:
            return None, now
        lease.check_names(names)
        return lease, now

    def _add_lease(
        self, engine: Engine, publication: PublicationRecord | None, request: LeaseRequest, now: float
    ) -> Lease:
        """Add a lease on a publication; None: on one without a record, which is added too. Raises `LimitReached`."""
        retry_after = self._times.ttl
        check_budget("leases", self._records.lease_budget, engine.ref, retry_after)
        size = request.size
        if publication is not None:
            check_limit("reads", len(publication.reads), self._limits.reads, retry_after)
        else:
            size += PUBLICATION_BYTES
        self._memory.check(engine.ref, size)
        if publication is None:
            publication = self._records.add_awaited(engine, request.read.publication)
        times = engine.times
        expires = min(now + times.ttl, publication.final_at)
        number = next(self._records.read_numbers)
        lease = Lease(secrets.token_bytes(16), number, request, publication, times, now, expires)
        self._expect(publication, request)
        self._records.add_lease(lease)
        return lease

    def _expect(self, publication: PublicationRecord, request: LeaseRequest) -> None:
        """Raise a publication's expected reads to the number that a reader states, within a limit: the publication
        waits even for expected reads that never come."""
        expected = min(request.expected_reads, self._limits.raised_reads)
        publication.expected_reads = max(publication.expected_reads, expected)


def _unknown() -> LeaseEnded:
    return LeaseEnded("this home has no record of the lease: it ended long ago, or the home has restarted since")
