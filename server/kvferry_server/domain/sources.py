"""The sources of a home: calls of engines on their publications (PROTOCOL, What the source promises, Endings, Home
restart).

    publish ─────────► PUBLISHING ─► PUBLISHED ─► ENDING ─(no live lease)─► RELEASED ─(acknowledged)─► forgotten
    read or declined early ─► AWAITED ─┘          read as often as expected, declined, aborted, unread, final
"""

from __future__ import annotations

from collections.abc import Collection

from kvferry._wire.outcomes import MissReason, ReleaseOutcome
from kvferry.errors import EngineIncomplete, InvalidField, PublicationStale, ServerDraining
from kvferry.geometry.model import Group
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.limits import check_limit
from kvferry_server.domain.publications import PUBLICATION_BYTES, PublicationRecord, PublicationStage, check_follows
from kvferry_server.domain.records import Records
from kvferry_server.domain.router_keys import QuestionOutcome
from kvferry_server.domain.steps import ChecksumPage, PublicationStep, check_indexes, check_step
from kvferry_server.domain.times import ANSWER_HOLD
from kvferry_server.domain.values import EngineRef, RevokeReason


class Sources:
    """The calls of sources on a home's records."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._times, self._limits, self._memory = records.times, records.limits, records.memory

    # Publications.

    def publish(self, source: EngineRef, step: PublicationStep) -> PublicationRecord:
        """Accept a step of a publication. Idempotent by (source, publication, step). Raises `InvalidField` or
        `BadBlock` if the step contradicts itself, an earlier step, or the engine's groups; `PublicationStale`,
        `PublicationReleased` or `PublicationAborted` if the publication has ended; `EngineIncomplete` if no rank has
        registered groups yet; `HomeRecovering` if the steps before this one are missing, which the engine's snapshot
        has; `RouterKeyUsed` if another publication has the router key; `LimitReached` or `ServerDraining` if the home
        takes no new publication of this engine, or none at all."""
        engine, publication, now = self._records.begin_with(source, step.number)
        if publication is None or publication.stage is PublicationStage.AWAITED:
            engine.check_may_arrive(step.number, now)
        elif publication.acknowledged:
            # Nothing would be told of it any more.
            raise publication.refusal()
        elif step.index < publication.step_count:
            if publication.steps and publication.steps[step.index] != step:
                raise InvalidField("publish.step", step.index, "the same content as when it was first sent")
            self._touch(engine, publication, now)
            return publication
        elif publication.stage in (PublicationStage.ENDING, PublicationStage.RELEASED):
            raise publication.refusal()
        self._check_step(engine, publication or PublicationRecord(source, step.number), step)
        if step.router_key is not None:
            engine.router_keys.check_free(step.router_key.name, now)
        if publication is None:
            publication = self._records.add_awaited(engine, step.number)
        if publication.stage is PublicationStage.AWAITED:
            self._arrive(engine, publication, step, now)
        self._append(engine, publication, step, now)
        return publication

    def abort(self, source: EngineRef, number: int, *, not_published: bool = False) -> None:
        """Abort a publication: no new leases and no renewals; it is released when its last live lease ends. Idempotent.
        A publication that has not arrived is released as well, and cannot arrive any more: its source keeps the blocks
        until the release event. With `not_published`, readers get the reason that the source's client has given the
        publication up. Raises `LimitReached` if the engine has too many publications."""
        engine, publication, now = self._records.begin_with(source, number)
        if publication is None or publication.stage is PublicationStage.AWAITED:
            if not engine.may_arrive(number, now):
                return
            # The record is kept until the source acknowledges the release, so it counts as a publication.
            self._memory.check(source, PUBLICATION_BYTES)
            publication = publication or self._records.add_awaited(engine, number)
            self._records.arrive(engine, publication, now)
            self._touch(engine, publication, now)
        publication.not_published = publication.not_published or (not_published and publication.grantable)
        self._abort(publication, now)

    def withdraw(self, source: EngineRef, number: int) -> PublicationRecord:
        """Abort a publication for an operator, as `abort` does for its source. Idempotent. Raises `PublicationStale` if
        the publication has not arrived, or was forgotten."""
        _, publication, now = self._records.begin_with(source, number)
        if publication is None or publication.stage is PublicationStage.AWAITED:
            problem = f"this home has no publication {number} of {source}: it has not come, or its release is settled"
            raise PublicationStale(problem, engine_id=source.engine_id, publication=number)
        if publication.grantable:
            self._abort(publication, now)
        return publication

    def acknowledge(self, source: EngineRef, numbers: Collection[int]) -> None:
        """Forget released publications whose release the source acknowledges. Idempotent; other numbers are ignored."""
        engine, _ = self._records.begin(source)
        if engine.scheduler is not None:
            engine.scheduler.acknowledged(numbers)
        for number in numbers:
            publication = engine.publications.get(number)
            if publication is not None and publication.stage is PublicationStage.RELEASED:
                publication.acknowledged = True
                if not engine.recovering:
                    self._records.forget(publication)

    def miss(self, source: EngineRef, number: int, why: MissReason) -> None:
        """Answer a question with nothing. Idempotent; a question that has ended stays as it is."""
        engine, _ = self._records.begin(source)
        question = engine.router_keys.open_questions.get(number)
        if question is not None:
            self._records.end_question(question, QuestionOutcome.MISSED, why)

    def add_checksums(self, source: EngineRef, number: int, group: Group, page: ChecksumPage) -> None:
        """Keep checksums of a publication's blocks in a group until it is released. Idempotent. Raises `InvalidField`
        if the page contradicts another, `LimitReached`, and as `Records.unreleased` and `check_indexes`."""
        publication, engine = self._records.unreleased(source, number), self._records.of_engine(source)
        check_indexes(group, publication.extents, page, complete=publication.complete)
        checksums = publication.checksums
        if checksums.has(page):
            return
        most = self._limits.checksum_bytes
        check_limit("checksum_bytes", engine.checksum_bytes + page.size, most, self._times.ttl)
        self._memory.check(source, page.size)
        self._memory.take(source, page.size)
        checksums.add(page)
        engine.checksum_bytes += page.size

    # Snapshots.

    def begin_snapshot(self, source: EngineRef, name: bytes = b"") -> None:
        """Begin a snapshot, in which the source names all that it holds published. Its end must repeat the `name`."""
        engine, _ = self._records.begin(source)
        engine.snapshot, engine.snapshot_name = set(), name

    def end_snapshot(self, source: EngineRef, high_water: int, name: bytes = b"") -> None:
        """End a snapshot: abort the publications with numbers up to `high_water` that the source did not name. Later
        numbers are left alone: a snapshot that is delivered twice must not end later publications. Raises
        `InvalidField` if this home saw no begin of this snapshot, because it restarted since or another snapshot has
        begun."""
        engine, now = self._records.begin(source)
        if engine.snapshot is None:
            raise InvalidField("resync.phase", "END", "BEGIN first")
        if engine.snapshot_name != name:
            raise InvalidField("resync.snapshot", name.hex(), f"{engine.snapshot_name.hex()!r}, which has begun since")
        for number, publication in list(engine.publications.items()):
            if number <= high_water and number not in engine.snapshot:
                # The source may have changed its blocks: it heard of the release from this home's predecessor, and a
                # late publish came after that. No read without a lease counts any more.
                publication.hint_digest = b""
                if publication.grantable:
                    self._abort(publication, now)
        engine.close_below(high_water)
        engine.snapshot, engine.recovering = None, False
        for publication in [one for one in engine.publications.values() if one.acknowledged]:
            self._records.forget(publication)

    def _check_step(self, engine: Engine, publication: PublicationRecord, step: PublicationStep) -> None:
        if step.index == 0 and self._records.draining:
            raise ServerDraining("this node server is draining: publish again")
        self._memory.check(engine.ref, step.size if step.index else PUBLICATION_BYTES + step.size)
        if step.index > len(publication.steps):
            # The earlier steps are in the snapshot, of which this home may have received a part.
            engine.check_recovered()
        check_follows(publication, step)
        if engine.groups is not None:
            check_step(engine.groups, step)
        elif not engine.recovering:
            problem = f"no rank of {engine.ref} has registered groups: register its caches before publishing"
            raise EngineIncomplete(problem, engine_id=engine.ref.engine_id, missing_ranks="")

    def _arrive(self, engine: Engine, publication: PublicationRecord, step: PublicationStep, now: float) -> None:
        # The lease of a waiting reader is never cut short, not even by a `final` that is shorter than the ttl.
        waiting = max((lease.expires for lease in publication.leases), default=0.0)
        publication.final_at = max(now + self._times.final, waiting)
        publication.request_id, publication.router_key = step.request_id, step.router_key
        self._records.arrive(engine, publication, now)
        publication.hold = self._times.hold
        declined = engine.router_keys.arrived(publication, now)
        if step.router_key is not None and step.router_key.of_question:
            publication.hold = min(ANSWER_HOLD, publication.hold)
            question = engine.router_keys.questions.get(step.router_key)
            if question is not None and question.open:
                self._records.end_question(question, QuestionOutcome.ANSWERED)
            else:
                # Too late. In a snapshot it may be one that is being read, since before this home started.
                declined = declined or not engine.recovering
        if declined:
            engine.declined.add(publication)
        if step.router_key is not None:
            self._records.wake(step.router_key.name)

    def _append(self, engine: Engine, publication: PublicationRecord, step: PublicationStep, now: float) -> None:
        publication.add(step)
        for blocks in step.groups:
            engine.pinned_blocks[blocks.group] += blocks.num_blocks
        publication.expected_reads = max(publication.expected_reads, step.expected_reads)
        publication.hold_until = now + publication.hold
        self._records.move(publication, PublicationStage.PUBLISHED if step.last else PublicationStage.PUBLISHING, now)
        self._memory.take(engine.ref, step.size)
        self._touch(engine, publication, now)
        self._records.reschedule(publication)
        self._records.wake(publication)
        if publication in engine.declined:
            self._records.end(publication, ReleaseOutcome.DECLINED, now)
        self._records.end_if_read(publication, now)

    def _abort(self, publication: PublicationRecord, now: float) -> None:
        reason = RevokeReason.NOT_PUBLISHED if publication.not_published else RevokeReason.ABORTED
        self._records.abort(publication, reason, now)

    def _touch(self, engine: Engine, publication: PublicationRecord, now: float) -> None:
        """Note that the source named a publication: it is part of the current snapshot; at a restarted home, it is not
        released while readers from before the restart may still be reading."""
        if engine.snapshot is not None:
            engine.snapshot.add(publication.number)
        if engine.recovering:
            publication.release_not_before = max(publication.release_not_before, now + self._times.max_ttl)
