"""The journal of a home: its metrics, its last reads, and its event log, one structured line for each event.

A metric is a field of `Journal`, with its name, its labels and its explanation, and one line at the event; metrics that
can be computed when scraped are in `kvferry_server.admin.metrics`.

An event has a name and fields. Any handler of Python's `logging` writes ``name key=value ...``; formatters for programs
find the fields as attributes of the record, the name as `event`. Names of events and fields are fixed; values may come
from strangers and are quoted, so that no value can forge a line or a field. Events of single requests are logged at
DEBUG. Bad ends, and events of engines and ranks, are logged at INFO or WARNING, each kind at a bounded rate.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.stats import Distribution, counter, gauge, histogram, shown
from kvferry_server.domain.publications import Lease, PublicationRecord, PublicationStage
from kvferry_server.domain.router_keys import Question, QuestionOutcome
from kvferry_server.domain.times import Clock
from kvferry_server.domain.values import EngineRef, LeaseState, RevokeReason, Verdict

# In so many seconds an event is written at most so many times; the next one written has the number left out.
WINDOW, MOST_IN_WINDOW = 10.0, 20
MAX_KEYS = 1024  # Kinds of events that are told apart. This code names far fewer.

OUTCOMES = ("outcome", "verdict", "state", "reason")
"""Fields, the first of which tells events of one name apart."""

NAMING = (
    *("engine_id", "identity", "incarnation", "lease_number", "limit", "missing_ranks", "nodes", "publication", "rank"),
    *("request_id", "role"),
)
"""Values of an error that are ids; listings show them too."""

ALARMING = {
    *("BAD_AGENT_METADATA", "ENGINE_ID_IN_USE", "INTERNAL", "LIMIT", "NOT_ALLOWED", "WRONG_IDENTITY", "WRONG_KEY"),
    "WRONG_SESSION",
}
"""Reasons of refusals that an operator should look at."""

ROUTINE = {"PREFIX_MISS", "PUBLICATION_TIMEOUT"}
"""Reasons of refusals that are normal answers: the reader computes the prompt, or asks again."""

logger = logging.getLogger("kvferry_server.events")

_BARE = re.compile(r"[\w.:/@+\-\[\],]+", re.ASCII)


class EventLog:
    """Writes events, each kind at a bounded rate."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # By kind: start of its window, number of events written in it, number left out.
        self._windows: dict[str, tuple[float, int, int]] = {}

    def writes(self, level: int) -> bool:
        """Whether events of a level are written; to be asked before fields are put together."""
        return logger.isEnabledFor(level)

    def write(self, level: int, name: str, fields: Mapping[str, object], *, kind: str = "") -> None:
        """Write an event, without fields whose value is None. Only events from INFO on are limited in rate, all events
        of one `kind` (empty: the name with the outcome) together."""
        if not self.writes(level):
            return
        outcome = next((fields[field] for field in OUTCOMES if fields.get(field) is not None), "")
        left_out = self._left_out(kind or f"{name} {outcome}") if level >= logging.INFO else 0
        if left_out is None:
            return
        named = {key: value.name if isinstance(value, Enum) else value for key, value in fields.items()}
        given = {key: value for key, value in named.items() if value is not None}
        if left_out:
            given["left_out"] = left_out
        text = "".join(f" {key}={quoted(value)}" for key, value in given.items())
        logger.log(level, "%s%s", name, text, extra={"event": name, **given})

    def refusal(self, method: str, reason: str, values: Mapping[str, str], more: Mapping[str, object]) -> None:
        """Log that a call was refused, at a level that depends on the reason. Of the error's `values` only those in
        `NAMING` are written: others may hold what the caller sent."""
        level = logging.WARNING if reason in ALARMING else logging.DEBUG if reason in ROUTINE else logging.INFO
        named = {name: value for name, value in values.items() if name in NAMING}
        if "incarnation" in named:
            named["incarnation"] = named["incarnation"][:8]
        fields = {"method": method, "reason": reason, **named, **more}
        self.write(level, "refused", fields, kind=f"refused {method} {reason}")

    def _left_out(self, kind: str) -> int | None:
        """Return how many events of a kind were left out since the last written one; None: leave this one out too."""
        now = self._clock.now()
        if len(self._windows) >= MAX_KEYS:
            self._windows.clear()
        began, written, left_out = self._windows.get(kind, (now, 0, 0))
        if now - began >= WINDOW:
            began, written = now, 0
        if written >= MOST_IN_WINDOW:
            self._windows[kind] = began, written, left_out + 1
            return None
        self._windows[kind] = began, written + 1, 0
        return left_out


def short(incarnation: bytes) -> str:
    """Return the first digits of an incarnation, enough to tell two starts of one engine apart."""
    return incarnation.hex()[:8]


def quoted(value: object) -> str:
    """Return a value as text without blanks, line ends or quotes of its own."""
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


LAST_READS = 100  # Ended reads that are kept, even after their records are forgotten; and kinds of bad ends
RECENT = 600.0  # Seconds without another one after which bad ends of a kind are forgotten

# Bounds of the histograms of leases and pins, in seconds.
LASTING = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
UNIX_PEER = "unix"  # The peer, in events, of callers on the UNIX socket, which cannot be told apart
EXPECTED_OUTCOMES = frozenset({ReleaseOutcome.READ, ReleaseOutcome.DECLINED})  # Normal, of publications
EXPECTED_ENDS = frozenset({LeaseState.VALID, LeaseState.CANCELLED})  # Normal ends of leases


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
    """The metrics and events of one home."""

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
        "kvferry_questions", "Questions for the beginning of a prompt that have ended.", outcome=tuple(QuestionOutcome)
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
    # For the timeline, oldest first; times are seconds on the home's clock.
    last_reads: deque[dict[str, Any]] = field(default_factory=partial(deque, maxlen=LAST_READS))
    # The number of reads, and when the last of them ended; the kind of the latest end comes last. Apart from the last
    # reads, of which a busy home forgets a bad one within a moment.
    bad_ends: dict[BadEnd, tuple[int, float]] = field(default_factory=dict)
    events: EventLog = field(init=False)

    def __post_init__(self) -> None:
        self.events = EventLog(self.clock)

    def engine(self, event: str, ref: EngineRef, *, bad: bool = False, **fields: object) -> None:
        """Note an event of an engine or of one of its ranks, at WARNING if it is `bad`."""
        self.engine_events[event] += 1
        self._write(logging.WARNING if bad else logging.INFO, event, ref, **fields)

    def moved(self, publication: PublicationRecord, before: PublicationStage | None, now: float) -> None:
        """Note that a publication has left the stage `before`; None: it is new."""
        stage, age = publication.stage, now - publication.first_at
        if before is not None:
            self.stages[before] -= 1
        if stage is not PublicationStage.FORGOTTEN:
            self.stages[stage] += 1
        if before is PublicationStage.AWAITED and stage is PublicationStage.PUBLISHING:
            self.pinned[publication] = None
        elif stage in (PublicationStage.RELEASED, PublicationStage.FORGOTTEN):
            self.pinned.pop(publication, None)
        live, outcome = len(publication.leases), publication.outcome
        if stage is PublicationStage.PUBLISHED:
            self.published += 1
            # Leases that waited for blocks have all of them now.
            self.live_leases[LeaseState.WAITING] -= live
            self.live_leases[LeaseState.READING] += live
            self._write(logging.DEBUG, "publication_published", publication, blocks=publication.blocks)
        elif stage is PublicationStage.ENDING:
            level = logging.DEBUG if outcome in EXPECTED_OUTCOMES else logging.INFO
            self._write(level, "publication_ended", publication, outcome=outcome, age_s=age, live_leases=live)
        elif stage is PublicationStage.RELEASED:
            self.hold.add(age)
            if outcome is not None:
                self.outcomes[outcome] += 1
            valid = publication.valid_reads
            self._write(
                logging.DEBUG, "publication_released", publication, outcome=outcome, held_s=age, reads_valid=valid
            )

    def question_ended(self, question: Question, outcome: QuestionOutcome, now: float) -> None:
        self.questions[outcome] += 1
        lasted = now - question.asked_at
        self._write(logging.DEBUG, "question_ended", question, outcome=outcome, reason=question.why, lasted_s=lasted)

    def lease_granted(self, lease: Lease) -> None:
        self.granted += 1
        self.live_leases[lease.state] += 1
        self._write(logging.DEBUG, "lease_granted", lease, parties=lease.request.parties)

    def lease_ended(self, lease: Lease, state: LeaseState, now: float) -> None:
        """Note that a lease ends as `state`; to be called before `ended_as` is set."""
        self.live_leases[lease.state] -= 1
        self.ended[state] += 1
        lasted, size = now - lease.granted_at, sum(report.bytes for report in lease.reports.values())
        self.lasted.add(lasted)
        if state is LeaseState.VALID:
            self.read_bytes += size
        publication, reader = lease.publication, lease.request.read.reader.engine_id
        self.last_reads.append(
            {
                "lease_number": lease.number,
                "source": publication.source.engine_id,
                "reader": reader,
                "publication": publication.number,
                "request_id": publication.request_id,
                "state": shown(state),
                "granted_at": lease.granted_at,
                "ended_at": now,
                "bytes": size,
                "reason": lease.reason,
            }
        )
        if state not in EXPECTED_ENDS:
            # A reader that leaves sooner has stopped to renew.
            in_vain = lasted >= lease.times.max_wait and publication.stage is PublicationStage.AWAITED
            kind = BadEnd(state, publication.source.engine_id, reader, lease.reason, in_vain)
            count, last = self.bad_ends.pop(kind, (0, now))
            self.bad_ends[kind] = (count if last > now - RECENT else 0) + 1, now
            if len(self.bad_ends) > LAST_READS:
                del self.bad_ends[next(iter(self.bad_ends))]
        self._write(
            logging.DEBUG if state in EXPECTED_ENDS else logging.WARNING,
            "lease_ended",
            lease,
            verdict=state,
            reason=lease.reason,
            lasted_s=lasted,
            bytes=size,
            reported=len(lease.reports),
            parties=lease.request.parties,
            revoked=lease.revoked,
        )

    def revoked(self, publication: PublicationRecord, reason: RevokeReason) -> None:
        self._write(logging.INFO, "leases_revoked", publication, reason=reason, live_leases=len(publication.leases))

    def renewed(self, lease: Lease | None, reader: EngineRef, *, extended: bool = False) -> None:
        """Note a renewal of a lease (None: this home has no record of it), and whether it is extended."""
        self.renewals["extended" if extended else "refused"] += 1
        if lease is None:
            self._write(logging.WARNING, "renewal_refused", None, state="unknown", **_reader_fields(reader))
        elif not extended:
            self._write(logging.INFO, "renewal_refused", lease, state=lease.state, revoked=lease.revoked)

    def reported(self, verdict: Verdict, reader: EngineRef, lease: Lease | None) -> None:
        self.verdicts[verdict] += 1
        if verdict is not Verdict.VALID:
            fields = {"state": "unknown", **_reader_fields(reader)} if lease is None else {"state": lease.state}
            self._write(logging.WARNING, "report_too_late", lease, verdict=verdict, **fields)

    def notification_refused(self, kind: str, reason: str, values: Mapping[str, str], sender: EngineRef | None) -> None:
        self.refused[kind, reason] += 1
        self.events.refusal(f"Notify.{kind}", reason, values, {"sender_id": sender.engine_id if sender else None})

    def _write(
        self, level: int, event: str, of: EngineRef | PublicationRecord | Question | Lease | None, **fields: object
    ) -> None:
        if self.events.writes(level):
            self.events.write(level, event, {**_named(of), **fields})


def _named(of: EngineRef | PublicationRecord | Question | Lease | None) -> dict[str, object]:
    """Return the fields that name what an event is about."""
    if isinstance(of, EngineRef):
        return {"engine_id": of.engine_id, "incarnation": short(of.incarnation)}
    if isinstance(of, PublicationRecord):
        return {**_named(of.source), "publication": of.number, "request_id": of.request_id or None}
    if isinstance(of, Question):
        return {**_named(of.source), "question": of.number, **_reader_fields(of.ask.asker)}
    if of is None:
        return {}
    reader, peer = _reader_fields(of.request.read.reader), of.request.host or UNIX_PEER
    return {"lease_number": of.number, **_named(of.publication), **reader, "peer": peer}


def _reader_fields(reader: EngineRef) -> dict[str, object]:
    return {"reader_id": reader.engine_id, "reader_incarnation": short(reader.incarnation)}
