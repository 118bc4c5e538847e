"""The records of a home: its engines' publications and leases, their deadlines, and the one place where each ends.
Every end of a lease goes through `end_lease`, every end of a publication through `end`, so that R2 and R3 hold in one
place, and every end of a question through `end_question`:

- A lease ends by its time, or by its reader's reports or cancel; never because its publication ends.
- A publication ends once, for the first reason, and is released once: when its last live lease ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias

from kvferry._wire.outcomes import MissReason, ReleaseOutcome
from kvferry.errors import EngineUnknown, HomeRecovering
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Engine, Event, Feed
from kvferry_server.domain.journal import Journal
from kvferry_server.domain.limits import MAX_ENDED_AT_ONCE, Budget, Limits, MemoryBudget, check_limit
from kvferry_server.domain.publications import PUBLICATION_BYTES, Lease, PublicationRecord, PublicationStage
from kvferry_server.domain.router_keys import Question, QuestionOutcome, RouterKeys, WaitingRead
from kvferry_server.domain.times import NEVER, Clock, DeadlineQueue, Times
from kvferry_server.domain.values import EngineRef, LeaseState, ReadKey, RevokeReason

Changed: TypeAlias = PublicationRecord | str | Feed
"""A publication, the name of a router's key, or a feed, whose waiting calls must look for news again."""


class Records:
    """The publications of each engine, and leases, of a home. Every public call of `Sources` and `Lessor` first calls
    `advance`, so that a lease is live exactly until its time, however late the home's timer is. The home's other parts
    share `clock`, `times`, `limits`, `memory` and `journal`, and when it `started`. `wake` is called with what has
    changed; its waiting calls must not go on before the present call has ended."""

    def __init__(
        self, clock: Clock, times: Times, limits: Limits, wake: Callable[[Changed], None] = lambda _: None
    ) -> None:
        self.clock, self.times, self.limits, self.wake = clock, times, limits, wake
        self.started = clock.now()
        # From then on every lease without a record here has ended: leases from before a restart last for a max_ttl.
        self.knows_all_leases_from = self.started + times.max_ttl
        self.memory = MemoryBudget(limits.memory, limits.engine_memory, limits.engines, times.renew_every)
        self.journal = Journal(clock)
        self.engines: dict[EngineRef, Engine] = {}
        # The live leases, and the ended ones whose outcome is kept. The duration of a look-up by lease_id reveals
        # nothing about other ids: a dictionary compares a keyed hash of the whole id first.
        self.leases_by_id: dict[bytes, Lease] = {}
        self.leases_by_read: dict[ReadKey, Lease] = {}
        # By their public numbers, which rise. With the reads that wait under a router's key.
        self.reads_by_source: dict[EngineRef, dict[int, Lease | WaitingRead]] = {}
        self.waits: dict[str, set[WaitingRead]] = {}  # By router_key
        self.read_numbers = itertools.count(1)
        self.lease_budget = Budget(limits.leases)  # By source
        self._router_declines = Budget(limits.router_keys)
        # Nothing is granted, renewed or accepted any more; reports, cancels and acknowledgements go on.
        self.draining = False
        self.deadlines = DeadlineQueue()  # Of leases, publications, questions and engines

    # Time.

    def advance(self) -> float:
        """Act on at most `MAX_ENDED_AT_ONCE` deadlines that have passed. The others stay due, and looking a lease or
        publication up still gives its present state. Returns the present, in seconds on the home's clock."""
        now = self.clock.now()
        self.deadlines.advance(now, MAX_ENDED_AT_ONCE)
        return now

    # Looking up.

    def begin(self, source: EngineRef) -> tuple[Engine, float]:
        """Act on what is due; return an engine's publications and the present. Raises `EngineUnknown`."""
        now = self.advance()
        return self.of_engine(source), now

    def begin_with(self, source: EngineRef, number: int) -> tuple[Engine, PublicationRecord | None, float]:
        """Return, beside what `begin` does, the engine's publication of this number, as `publication` does."""
        engine, now = self.begin(source)
        return engine, self.publication(engine, number, now), now

    def of_engine(self, source: EngineRef) -> Engine:
        """Return the publications of an engine; raises `EngineUnknown`."""
        engine = self.engines.get(source)
        if engine is None:
            raise EngineUnknown(f"this home has no {source}", engine_id=source.engine_id)
        return engine

    def publication(self, engine: Engine, number: int, now: float) -> PublicationRecord | None:
        """Return a publication of an engine as of the present, even if `advance` has not acted on its deadline yet.
        Leases on it whose deadline `advance` has not acted on still count as live: the publication stays held or pinned
        for a moment longer."""
        publication = engine.publications.get(number)
        if publication is not None and publication.due() <= now:
            self._on_publication_due(publication, now)
        return engine.publications.get(number)

    def unreleased(self, source: EngineRef, number: int) -> PublicationRecord:
        """Return a publication that has arrived and is not released, so that it may have readers. Raises
        `PublicationStale` or `PublicationReleased` if there is none with this number any more, and `HomeRecovering` if
        it has not arrived yet, or the source's snapshot may have it."""
        engine, publication, now = self.begin_with(source, number)
        if publication is None or publication.stage is PublicationStage.AWAITED:
            engine.check_recovered()
            engine.check_may_arrive(number, now)
            # A scheduler and its ranks call the home concurrently.
            problem = f"publication {number} of {engine.ref} has not arrived yet"
            raise HomeRecovering(problem, engine_id=engine.ref.engine_id)
        if publication.stage is PublicationStage.RELEASED:
            raise publication.refusal()
        return publication

    def as_of(self, lease: Lease | None, now: float) -> Lease | None:
        """Return a lease as of the present, even if `advance` has not acted on its deadline yet; None: forgotten."""
        if lease is None:
            return None
        while lease.due() <= now:
            # Twice, if the lease ended so long ago that its outcome is due to be forgotten as well.
            self._on_lease_due(lease, now)
        return self.leases_by_id.get(lease.lease_id)

    def key(self, publication: PublicationRecord) -> bytes:
        return self.of_engine(publication.source).key(publication.number)

    def live_leases(self, source: EngineRef | None = None) -> tuple[int, float]:
        """Return the number of live leases on an incarnation (None: on all), and the seconds until the last ends."""
        engines = [engine for ref, engine in self.engines.items() if source in (None, ref)]
        until = max((engine.live_until() for engine in engines), default=0.0)
        return sum(engine.live_leases for engine in engines), max(0.0, until - self.clock.now())

    def leases(self) -> Iterator[Lease]:
        """Yield all leases, including ended ones whose outcome is kept."""
        return iter(self.leases_by_id.values())

    def pinning(self) -> bool:
        """Whether a live lease pins blocks. A lease on a publication that has not arrived pins none."""
        return any(lease.live and lease.publication.stage is not PublicationStage.AWAITED for lease in self.leases())

    def released(self, source: EngineRef) -> list[PublicationRecord]:
        """Return the released publications that their source has not acknowledged."""
        found = self.of_engine(source).publications.values()
        return [one for one in found if one.stage is PublicationStage.RELEASED and not one.acknowledged]

    # Adding.

    def list_read(self, source: EngineRef, read: Lease | WaitingRead) -> None:
        self.reads_by_source.setdefault(source, {})[read.number] = read

    def unlist_read(self, source: EngineRef, number: int) -> None:
        del self.reads_by_source[source][number]
        if not self.reads_by_source[source]:
            del self.reads_by_source[source]

    def open(self, ref: EngineRef, secret: bytes) -> Engine:
        """Note that an incarnation is alive. One without records here must send its snapshot."""
        engine = self.engines.get(ref)
        if engine is not None:
            # It was gone, but leases on its publications are live. Its ranks must register again.
            engine.gone, engine.groups = False, None
            engine.block_bytes.clear()
            return engine
        router_keys = RouterKeys(ref, self.memory, self._router_declines)
        self.engines[ref] = Engine(ref, self.times, secret, router_keys)
        return self.engines[ref]

    def add_lease(self, lease: Lease) -> None:
        publication = lease.publication
        engine = self.engines[publication.source]
        self.leases_by_id[lease.lease_id] = self.leases_by_read[lease.request.read] = lease
        self.list_read(publication.source, lease)
        engine.live_leases += 1
        publication.leases.add(lease)
        publication.reads.append(lease)
        self.lease_budget.take(publication.source)
        self.memory.take(publication.source, lease.request.size)
        self.deadlines.put(lease, self._on_lease_due)
        self.journal.lease_granted(lease)

    def add_awaited(self, engine: Engine, number: int) -> PublicationRecord:
        """Add a publication that has not arrived. Raises `LimitReached` if the engine has too many."""
        check_limit("publications", len(engine.publications), self.limits.publications, self.times.ttl)
        publication = engine.publications[number] = PublicationRecord(engine.ref, number)
        self.memory.take(engine.ref, PUBLICATION_BYTES)
        self.journal.moved(publication, None, self.clock.now())
        return publication

    def arrive(self, engine: Engine, publication: PublicationRecord, now: float) -> None:
        """Note that an awaited publication has arrived: its number is now in use, and afterwards stale for ever."""
        engine.see(publication.number, now)
        engine.pinned[publication] = None
        publication.first_at = now
        self.move(publication, PublicationStage.PUBLISHING, now)

    def move(self, publication: PublicationRecord, stage: PublicationStage, now: float) -> None:
        """Set a publication's stage, which may be its present one."""
        before, publication.stage = publication.stage, stage
        if before is not stage:
            self.journal.moved(publication, before, now)

    def reschedule(self, publication: PublicationRecord) -> None:
        """Note that one of a publication's deadlines may have moved earlier."""
        self.deadlines.put(publication, self._on_publication_due)

    def add_question(self, engine: Engine, question: Question) -> None:
        self.deadlines.put(question, self._on_question_due)
        self.tell(engine, question)

    def tell(self, engine: Engine, event: Event) -> None:
        """Add an event to the Watch of an engine's scheduler."""
        if engine.scheduler is not None:
            engine.scheduler.push(event)
            self.wake(engine.scheduler)

    def waiting(self, source: EngineRef) -> list[WaitingRead]:
        """Return the reads that wait for publications of this engine under routers' keys. Looks at all that wait."""
        return [read for reads in self.waits.values() for read in reads if source in read.sources]

    # Ending.

    def end_lease(self, lease: Lease, state: LeaseState, now: float) -> None:
        """End a live lease. The only place where a lease ends."""
        publication = lease.publication
        engine = self.engines[publication.source]
        engine.live_leases -= 1
        self.journal.lease_ended(lease, state, now)
        lease.ended_as = state
        lease.forget_at = now + self.times.keep_outcome
        self.deadlines.put(lease, self._on_lease_due)
        publication.leases.discard(lease)
        publication.valid_reads += state is LeaseState.VALID
        if state is LeaseState.FAILED:
            publication.last_failure = lease.reason
        if not publication.leases:
            # The publication is held again for a retry elsewhere.
            publication.hold_until = now + publication.hold
        self.wake(publication)
        self.end_if_read(publication, now)
        self._settle(publication, now)

    def end_question(self, question: Question, outcome: QuestionOutcome, why: MissReason | None = None) -> None:
        """End an open question: its source is told, and its readers look again. The only place where one ends."""
        engine = self.engines[question.source]
        now = self.clock.now()
        engine.router_keys.end_question(question, outcome, why, now)
        self.journal.question_ended(question, outcome, now)
        self.tell(engine, pb.QuestionEnded(number=question.number))
        self.wake(question.ask.router_key.name)

    def end_questions(self, engine: Engine) -> None:
        """End all open questions to an engine, which cannot answer any more."""
        for question in tuple(engine.router_keys.open_questions.values()):
            self.end_question(question, QuestionOutcome.UNANSWERED)

    def end_all(self, engine: Engine, reason: RevokeReason) -> None:
        """End all publications of an engine that is dead or gone. Live leases end at their time."""
        self.end_questions(engine)
        # Without `advance`, which may have called this: of a thousand engines lost at once, each would end the next.
        now = self.clock.now()
        for read in self.waiting(engine.ref):
            self.wake(read.router_key.name)
        for publication in list(engine.publications.values()):
            self.abort(publication, reason, now)
            unasked = publication.stage is PublicationStage.AWAITED and not publication.leases
            if unasked or (publication.stage is PublicationStage.RELEASED and engine.gone):
                self.forget(publication)
        self.close_if_empty(engine)

    def end_if_read(self, publication: PublicationRecord, now: float) -> None:
        if publication.complete and publication.valid_reads >= publication.expected_reads:
            self.end(publication, ReleaseOutcome.READ, now)

    def end(self, publication: PublicationRecord, outcome: ReleaseOutcome, now: float) -> None:
        """End a publication, unless it has ended before: it gets no new leases, and is released when its last live
        lease ends. The only place where a publication ends."""
        if not publication.grantable:
            return
        publication.outcome = outcome
        self.engines[publication.source].declined.discard(publication)
        self.move(publication, PublicationStage.ENDING, now)
        self.wake(publication)
        self._settle(publication, now)

    def abort(self, publication: PublicationRecord, reason: RevokeReason, now: float) -> None:
        """End a publication whose source cannot hold it; its readers get the reason."""
        self.revoke(publication, reason)
        self.end(publication, ReleaseOutcome.ABORTED, now)

    def revoke(self, publication: PublicationRecord, reason: RevokeReason) -> None:
        """Mark the live leases of a publication as not renewable. They end at the time they had anyway."""
        unrevoked = [lease for lease in publication.leases if lease.revoked is None]
        for lease in unrevoked:
            lease.revoked = reason
        if unrevoked:
            self.journal.revoked(publication, reason)
        self.wake(publication)

    def revoke_lease(self, lease: Lease, reason: RevokeReason) -> None:
        """Mark a lease as not renewable, as `revoke` does with all of a publication."""
        if lease.live:
            lease.revoked = lease.revoked or reason
            self.wake(lease.publication)

    def forget(self, publication: PublicationRecord) -> None:
        engine = self.engines[publication.source]
        del engine.publications[publication.number]
        now = self.clock.now()
        engine.router_keys.forgotten(publication, now, now + self.times.max_wait)
        engine.declined.discard(publication)
        if engine.snapshot is not None:
            engine.snapshot.discard(publication.number)
        kept = [lease for lease in publication.reads if lease.lease_id in self.leases_by_id]
        size = sum(lease.request.size for lease in set(publication.reads).difference(kept))
        size += 0 if kept else PUBLICATION_BYTES  # Kept outcomes keep the publication in memory.
        publication.reads = kept
        self.move(publication, PublicationStage.FORGOTTEN, self.clock.now())
        self.reschedule(publication)
        self.memory.give(engine.ref, size)
        self.close_if_empty(engine)

    def close_if_empty(self, engine: Engine) -> None:
        """Forget an incarnation that is gone and has no publications left."""
        if engine.gone and not engine.publications and engine.ref in self.engines:
            del self.engines[engine.ref]
            engine.router_keys.close()

    def _settle(self, publication: PublicationRecord, now: float) -> None:
        """Release or forget a publication that has no live leases."""
        if publication.leases or publication.stage is PublicationStage.FORGOTTEN:
            return
        engine = self.engines[publication.source]
        if publication.stage is PublicationStage.ENDING and now >= publication.release_not_before:
            self._release(publication, now)
        elif publication.stage is PublicationStage.AWAITED and publication not in engine.declined:
            self.forget(publication)
        self.reschedule(publication)

    def _release(self, publication: PublicationRecord, now: float) -> None:
        engine = self.engines[publication.source]
        self.move(publication, PublicationStage.RELEASED, now)
        engine.unpin(publication)
        engine.checksum_bytes -= publication.checksums.size
        self.memory.give(engine.ref, publication.size + publication.checksums.size)
        publication.drop_steps()
        if engine.gone:
            # No process acknowledges this release: the blocks belong to the new incarnation, which waited for
            # `reuse_after`.
            self.forget(publication)
        else:
            publication.tell_again_at = now + self.times.max_ttl
            self.tell(engine, publication)

    def _on_lease_due(self, lease: Lease, now: float) -> None:
        if lease.live:
            # The lease ended at its own time, however late the timer is.
            self.end_lease(lease, LeaseState.EXPIRED, lease.expires)
        else:
            del self.leases_by_id[lease.lease_id]
            del self.leases_by_read[lease.request.read]
            lease.forget_at = NEVER
            source = lease.publication.source
            self.lease_budget.give(source)
            self.unlist_read(source, lease.number)
            if (publication := lease.publication).stage is PublicationStage.FORGOTTEN:
                publication.reads.remove(lease)
                self.memory.give(source, lease.request.size + (0 if publication.reads else PUBLICATION_BYTES))

    def _on_question_due(self, question: Question, now: float) -> None:
        if question.open:
            self.end_question(question, QuestionOutcome.UNANSWERED)
        else:
            self.engines[question.source].router_keys.forget_question(question)

    def _on_publication_due(self, publication: PublicationRecord, now: float) -> None:
        if publication.stage is PublicationStage.RELEASED:
            publication.tell_again_at = now + self.times.max_ttl
            if (engine := self.engines[publication.source]).watched:
                self.tell(engine, publication)
        elif publication.grantable:
            # For the first reason, however late the timer is: this host may have slept.
            final = bool(publication.leases) or publication.final_at <= publication.hold_until
            self.end(publication, ReleaseOutcome.FINAL if final else ReleaseOutcome.UNREAD, now)
        else:
            self.engines[publication.source].declined.discard(publication)
            self._settle(publication, now)
