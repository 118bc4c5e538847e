"""The journal of a home: its metrics, its last reads, and a line in the event log for each event.

A metric is a field of `Journal`, with its name, its labels and its explanation, and one line at the event; metrics that
can be computed when scraped are in `kvferry_server.admin.metrics`.

Events of single requests are logged at DEBUG, so that a thousand requests a second write nothing at INFO. Bad ends, and
events of engines and ranks, are logged at INFO or WARNING, each kind at a bounded rate.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from kvferry._wire.outcomes import MissReason, ReleaseOutcome
from kvferry.stats import Distribution, counter, gauge, histogram, shown
from kvferry_server.domain.event_log import EventLog, engine_fields, short
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.publications import Lease, PublicationRecord, PublicationStage
from kvferry_server.domain.questions import Question, QuestionOutcome
from kvferry_server.domain.reads import LeaseState, RevokeReason, Verdict
from kvferry_server.domain.times import Clock

LAST_READS = 100  # Ended reads that are kept, even after their records are forgotten; and kinds of bad ends
RECENT = 600.0  # Seconds without another one after which bad ends of a kind are forgotten

# Bounds of the histograms of leases and pins, in seconds.
LASTING = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
UNIX_PEER = "unix"  # The peer, in events, of callers on the UNIX socket, which cannot be told apart
EXPECTED_OUTCOMES = frozenset({ReleaseOutcome.READ, ReleaseOutcome.DECLINED})  # Normal, of publications
EXPECTED_ENDS = frozenset({LeaseState.VALID, LeaseState.CANCELLED})  # Normal ends of leases


@dataclass(frozen=True, slots=True)
class EndedRead:
    """A read that has ended, for the timeline. Times are seconds on the home's clock."""

    lease_number: int  # the lease's public name
    source: str  # engine_id
    reader: str  # engine_id
    publication: int
    request_id: str  # of the publication; empty if it never arrived
    state: str  # ``valid``, ``failed`` ...
    granted_at: float
    ended_at: float
    bytes: int  # as its ranks reported
    reason: str  # of the failure, if a rank reported one


@dataclass(frozen=True, slots=True)
class BadEnd:
    """What reads that ended badly have in common."""

    state: LeaseState  # FAILED or EXPIRED
    source: str  # engine_id
    reader: str  # engine_id
    reason: str  # of the failure, if a rank reported one
    in_vain: bool  # the publication had not arrived in the longest time that a lease may wait for it


LIVE = (LeaseState.WAITING, LeaseState.READING)  # The states of live leases


@dataclass(slots=True, eq=False)
class Journal:
    """The metrics and events of one home. Not thread-safe: it belongs to its home's event loop."""

    clock: Clock
    engine_events: Counter[str] = counter(
        "kvferry_engine_events",
        "What happened to engines and ranks, by the names of the events in the log.",
        event=(
            *("engine_opened", "engine_complete", "engine_lost", "engine_back", "engine_dead", "engine_replaced"),
            *("engine_evicted", "engine_retired", "engine_forgotten", "rank_registered", "rank_back", "rank_lost"),
        ),
    )
    stages: Counter[PublicationStage] = gauge(
        "kvferry_publications",
        "Publications.",
        state=[stage for stage in PublicationStage if stage is not PublicationStage.FORGOTTEN],
    )
    published: int = counter("kvferry_publications_published", "Publications that had all their blocks.")
    outcomes: Counter[ReleaseOutcome] = counter(
        "kvferry_released", "Released publications.", outcome=tuple(ReleaseOutcome)
    )
    hold: Distribution = histogram(
        "kvferry_hold_seconds", "From the first step of a publication to its release: its pins.", bounds=LASTING
    )
    waiting: int = gauge(
        "kvferry_router_waits", "Reads that wait for a publication under a router's own reference, without a lease."
    )
    questions: Counter[QuestionOutcome] = counter(
        "kvferry_questions",
        "Questions for the beginning of a prompt that have ended.",
        outcome=tuple(QuestionOutcome),
    )
    granted: int = counter("kvferry_leases_granted", "Leases granted, and reads validated without one.")
    ended: Counter[LeaseState] = counter(
        "kvferry_leases_ended", "Leases ended.", state=[state for state in LeaseState if state not in LIVE]
    )
    lasted: Distribution = histogram(
        "kvferry_lease_seconds", "How long leases lasted; 0: reads without one.", bounds=LASTING
    )
    renewals: Counter[str] = counter("kvferry_renewals", "Renewals.", result=("extended", "refused"))
    verdicts: Counter[Verdict] = counter("kvferry_verdicts", "Answers to reports.", verdict=tuple(Verdict))
    read_bytes: int = counter(
        "kvferry_read_bytes", "Bytes of valid reads, as readers report, and at most what the source's ranks hold."
    )
    notifications: Counter[str] = counter("kvferry_notifications", "Notifications in calls of Notify.", kind=())
    refused: Counter[tuple[str, str]] = counter(
        "kvferry_notifications_refused", "Notifications that were refused.", kind=(), reason=()
    )
    live_leases: Counter[LeaseState] = field(default_factory=Counter)
    pinned: dict[PublicationRecord, None] = field(default_factory=dict)  # arrived and not released, oldest first
    last_reads: deque[EndedRead] = field(default_factory=partial(deque, maxlen=LAST_READS))  # oldest first
    # The number of reads, and when the last of them ended; the kind of the latest end comes last. Apart from the last
    # reads, of which a busy home forgets a bad one within a moment.
    bad_ends: dict[BadEnd, tuple[int, float]] = field(default_factory=dict)
    events: EventLog = field(init=False)

    def __post_init__(self) -> None:
        self.events = EventLog(self.clock)

    # Engines and ranks.

    def engine(self, event: str, ref: EngineRef, *, bad: bool = False, **fields: object) -> None:
        """Note an event of an engine or of one of its ranks, at WARNING if it is `bad`."""
        self.engine_events[event] += 1
        self.events.write(logging.WARNING if bad else logging.INFO, event, {**engine_fields(ref), **fields})

    # Publications.

    def moved(self, publication: PublicationRecord, before: PublicationStage | None, now: float) -> None:
        """Note that a publication has left the stage `before`; None: it is new."""
        if before is not None:
            self.stages[before] -= 1
        stage = publication.stage
        if stage is not PublicationStage.FORGOTTEN:
            self.stages[stage] += 1
        if before is PublicationStage.AWAITED and stage is PublicationStage.PUBLISHING:
            self.pinned[publication] = None
        elif stage is PublicationStage.PUBLISHED:
            self.published += 1
            # Leases that waited for blocks have all of them now.
            waiting = len(publication.leases)
            self.live_leases[LeaseState.WAITING] -= waiting
            self.live_leases[LeaseState.READING] += waiting
            self._publication(logging.DEBUG, "publication_published", publication, blocks=publication.blocks)
        elif stage is PublicationStage.ENDING:
            level = logging.DEBUG if publication.outcome in EXPECTED_OUTCOMES else logging.INFO
            fields = {"age_s": now - publication.first_at, "live_leases": len(publication.leases)}
            self._publication(level, "publication_ended", publication, outcome=_name(publication.outcome), **fields)
        elif stage is PublicationStage.FORGOTTEN:
            self.pinned.pop(publication, None)
        elif stage is PublicationStage.RELEASED:
            self.pinned.pop(publication, None)
            held = now - publication.first_at
            self.hold.add(held)
            if publication.outcome is not None:
                self.outcomes[publication.outcome] += 1
            fields = {"held_s": held, "reads_valid": publication.valid_reads}
            level, outcome = logging.DEBUG, _name(publication.outcome)
            self._publication(level, "publication_released", publication, outcome=outcome, **fields)

    def _publication(self, level: int, event: str, publication: PublicationRecord, **fields: object) -> None:
        if self.events.writes(level):
            kind = f"{event} {fields.get('outcome') or fields.get('reason') or ''}"
            self.events.write(level, event, {**_publication_fields(publication), **fields}, kind=kind)

    def question_ended(self, question: Question, outcome: QuestionOutcome, now: float) -> None:
        """Note that a question has ended."""
        self.questions[outcome] += 1
        if self.events.writes(logging.DEBUG):
            ended = {"question": question.number, "outcome": outcome.name, "reason": _name(question.why)}
            named = {**engine_fields(question.source), **ended, **_reader_fields(question.ask.asker)}
            self.events.write(logging.DEBUG, "question_ended", {**named, "lasted_s": now - question.asked_at})

    # Leases.

    def lease_granted(self, lease: Lease) -> None:
        self.granted += 1
        self.live_leases[lease.state] += 1
        self._lease(logging.DEBUG, "lease_granted", lease, parties=lease.request.parties)

    def lease_ended(self, lease: Lease, state: LeaseState, now: float) -> None:
        """Note that a lease ends as `state`; to be called before `ended_as` is set."""
        self.live_leases[lease.state] -= 1
        self.ended[state] += 1
        lasted, size = now - lease.granted_at, sum(report.bytes for report in lease.reports.values())
        self.lasted.add(lasted)
        if state is LeaseState.VALID:
            self.read_bytes += size
        self.last_reads.append(
            EndedRead(
                lease_number=lease.number,
                source=lease.publication.source.engine_id,
                reader=lease.request.read.reader.engine_id,
                publication=lease.publication.number,
                request_id=lease.publication.request_id,
                state=shown(state),
                granted_at=lease.granted_at,
                ended_at=now,
                bytes=size,
                reason=lease.reason,
            )
        )
        if state not in EXPECTED_ENDS:
            self._ended_badly(lease, state, now)
        self._lease(
            logging.DEBUG if state in EXPECTED_ENDS else logging.WARNING,
            "lease_ended",
            lease,
            verdict=state.name,
            reason=lease.reason,
            lasted_s=lasted,
            bytes=size,
            reported=len(lease.reports),
            parties=lease.request.parties,
            revoked=_name(lease.revoked),
        )

    def _ended_badly(self, lease: Lease, state: LeaseState, now: float) -> None:
        publication, reader = lease.publication, lease.request.read.reader.engine_id
        # A reader that leaves sooner has stopped to renew.
        waited_out = now - lease.granted_at >= lease.times.max_wait
        in_vain = waited_out and publication.stage is PublicationStage.AWAITED
        kind = BadEnd(state, publication.source.engine_id, reader, lease.reason, in_vain)
        count, last = self.bad_ends.pop(kind, (0, now))
        self.bad_ends[kind] = (count if last > now - RECENT else 0) + 1, now
        if len(self.bad_ends) > LAST_READS:
            del self.bad_ends[next(iter(self.bad_ends))]

    def revoked(self, publication: PublicationRecord, reason: RevokeReason) -> None:
        self._publication(
            logging.INFO, "leases_revoked", publication, reason=reason.name, live_leases=len(publication.leases)
        )

    def renewed(self, lease: Lease | None, reader: EngineRef, *, extended: bool = False) -> None:
        """Note a renewal of a lease (None: this home has no record of it), and whether it is extended."""
        self.renewals["extended" if extended else "refused"] += 1
        if lease is None:
            fields = {"state": "unknown", **_reader_fields(reader)}
            self.events.write(logging.WARNING, "renewal_refused", fields, kind="renewal_refused unknown")
        elif not extended:
            self._lease(logging.INFO, "renewal_refused", lease, state=lease.state.name, revoked=_name(lease.revoked))

    def reported(self, verdict: Verdict, reader: EngineRef, lease: Lease | None) -> None:
        self.verdicts[verdict] += 1
        if verdict is Verdict.VALID:
            return
        if lease is not None:
            self._lease(logging.WARNING, "report_too_late", lease, verdict=verdict.name, state=lease.state.name)
        else:
            fields = {"verdict": verdict.name, "state": "unknown", **_reader_fields(reader)}
            self.events.write(logging.WARNING, "report_too_late", fields)

    def notification_refused(self, kind: str, reason: str, values: Mapping[str, str], sender: EngineRef | None) -> None:
        self.refused[kind, reason] += 1
        self.events.refusal(f"Notify.{kind}", reason, values, {"sender_id": sender.engine_id if sender else None})

    def _lease(self, level: int, event: str, lease: Lease, **fields: object) -> None:
        if not self.events.writes(level):
            return
        given = {
            "lease_number": lease.number,
            **_publication_fields(lease.publication),
            **_reader_fields(lease.request.read.reader),
            "peer": lease.request.host or UNIX_PEER,
            **fields,
        }
        self.events.write(level, event, given, kind=f"{event} {fields.get('verdict') or ''}")


def _publication_fields(publication: PublicationRecord) -> dict[str, object]:
    request_id = publication.request_id or None
    return {**engine_fields(publication.source), "publication": publication.number, "request_id": request_id}


def _reader_fields(reader: EngineRef) -> dict[str, object]:
    return {"reader_id": reader.engine_id, "reader_incarnation": short(reader.incarnation)}


def _name(value: ReleaseOutcome | RevokeReason | MissReason | None) -> str | None:
    return None if value is None else value.name
