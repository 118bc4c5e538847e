"""Router keys: which publications an engine has under the keys that routers chose, and which reads wait for one
(PROTOCOL, Identities: reference); and questions: what readers have asked an engine for, the KV of a prompt's beginning
(PROTOCOL, Asking for a prefix).

    wait ─► waiting ─┬─(published)───────────────────────────────────► the publication, and a lease on it
                     └─(declined | missed | time over | engine gone)─► a typed error
    publish ─► held ─(released, and acknowledged)─► past, remembered for a while ─► free again

    ask ─► open, told to the scheduler ─┬─(published under its key)─► ANSWERED: a publication like any other
                                        ├─(miss)────────────────────► MISSED      ┐
                                        ├─(time over, engine gone)──► UNANSWERED  ├─ PREFIX_MISS to its readers
                                        └─(declined)────────────────► WITHDRAWN   ┘

A router's reference has a name, which is public, and a key, which is secret. Before the publication arrives the home
cannot check the key: early declines and waits are kept with their key, and count for the same key only (R13).

A question is a router's reference that the asker makes itself: the reads that wait for the answer wait under its router
key. That key's name is derived from its secret (`RouterKey.of_question`), so that no asker makes a source publish under
a name that a router uses, and a publication whose question has ended is recognised without a record of the question."""

from __future__ import annotations

import enum
import hmac
import math
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from kvferry._wire.outcomes import MissReason, ReleaseOutcome
from kvferry.errors import PrefixMiss, RouterKeyUsed, WrongKey
from kvferry_server.domain.limits import MAX_PAST_ROUTER_KEYS, MAX_QUESTIONS, Budget, MemoryBudget, check_budget
from kvferry_server.domain.publications import PublicationRecord, ended
from kvferry_server.domain.times import ENDED_KEPT, NEVER, UNSCHEDULED
from kvferry_server.domain.values import EngineRef, LeaseRequest, RouterKey

ROUTER_KEY_BYTES = 1024  # Bytes of the remembered key of a publication, estimated
QUESTION_BYTES = 4096  # Bytes that a question takes in memory beside its prompt, until it is forgotten; estimated


class QuestionOutcome(enum.Enum):
    """How a question ended."""

    ANSWERED = "was answered"
    MISSED = "was answered with a miss"
    UNANSWERED = "was not answered in time"
    WITHDRAWN = "was withdrawn"


@dataclass(frozen=True, slots=True)
class Ask:
    """A reader's call that asks an engine."""

    router_key: RouterKey
    # Of an ended question these two are empty: the prompt may be large.
    reference: str = field(repr=False)  # has the key
    prompt: bytes = field(repr=False)  # the encoded `Prompt`: only asker and source look into it
    first_token: int  # the first that the asker lacks
    wait: float  # seconds that it waits for the answer
    asker: EngineRef
    host: str = ""  # the host the call came from; empty if unknown

    @property
    def holder(self) -> Hashable:
        """The holder in budgets, as `LeaseRequest.holder`."""
        return self.host or self.asker

    @property
    def size(self) -> int:
        """Bytes in memory, and in a message."""
        return len(self.prompt) + len(self.reference)


@dataclass(slots=True, eq=False)
class Question:
    """A question at the home of the engine that is asked. All times are seconds on the home's clock."""

    source: EngineRef
    number: int  # rising per start of the home
    ask: Ask
    asked_at: float
    ask_memory: ExitStack = field(repr=False)  # holds the memory of what `ask` has until the question ends
    memory: ExitStack = field(repr=False)  # holds the memory of all else
    outcome: QuestionOutcome | None = None  # None while the question is open
    why: MissReason | None = None  # what the source said, if it missed
    forget_at: float = NEVER  # until when the end is remembered
    scheduled: tuple[float, int] = UNSCHEDULED

    @property
    def open(self) -> bool:
        return self.outcome is None

    @property
    def deadline(self) -> float:
        return self.asked_at + self.ask.wait

    def due(self) -> float:
        """When the question ends, or its end is forgotten."""
        return self.deadline if self.open else self.forget_at


@dataclass(slots=True, eq=False)
class WaitingRead:
    """A call that waits for a publication under a router's key. It has no lease yet."""

    number: int  # its name in listings; rising per start of the home
    sources: tuple[EngineRef, ...]  # the engines at which it waits: mostly one
    router_key: RouterKey
    request: LeaseRequest = field(repr=False)
    since: float  # seconds on the home's clock


@dataclass(frozen=True, slots=True)
class _Past:
    """A key whose publication was released and forgotten, or was declined before it arrived."""

    until: float
    not_published: bool
    outcome: ReleaseOutcome | None = ReleaseOutcome.DECLINED
    number: int = 0  # of a publication that has arrived
    key: bytes = field(default=b"", repr=False)  # of a publication that has arrived
    holder: Hashable = None  # who declined one that had not


class RouterKeys:
    """The router keys of one incarnation, and the questions to it. `declines` is the budget, by caller, of all
    incarnations for declines of publications that have not arrived. Questions count against the memory of their asker,
    not of the engine: a flood of them takes no room from the engine's publications."""

    def __init__(self, source: EngineRef, memory: MemoryBudget, declines: Budget) -> None:
        # The open ones, and for `ENDED_KEPT` seconds those that ended without a publication, for readers who come a
        # little later.
        self.questions: dict[RouterKey, Question] = {}
        self.open_questions: dict[int, Question] = {}  # By number. Few, of maybe thousands that are remembered.
        self._places = Budget(MAX_QUESTIONS)
        self._source = source
        self._memory = memory
        self._declines = declines
        self._held: dict[str, PublicationRecord] = {}
        # In the order in which they expire.
        self._past: dict[str, _Past] = {}
        self._declined: dict[RouterKey, _Past] = {}
        self.scheduled = UNSCHEDULED

    def due(self) -> float:
        """When a decline is forgotten, whose place other engines' routers may need."""
        return next((declined.until for declined in self._declined.values()), NEVER)

    def find(self, wanted: RouterKey, now: float) -> PublicationRecord | None:
        """Return the publication under a key; None: it has not arrived. Raises `WrongKey` if the publication of this
        name has another key, `PublicationReleased` if it was released and forgotten, or declined before it arrived,
        `NotPublished` if its source has given it up, and `PrefixMiss` if it was asked for and will not arrive."""
        self.drop_old(now)
        # First: a publication that comes after the end of its question is no answer.
        question = self.questions.get(wanted)
        if question is not None and question.outcome is not None:
            raise self.miss(f"the question {question.outcome.value}", question.why)
        publication = self._held.get(wanted.name)
        if publication is not None and publication.router_key is not None:
            self._check(wanted, publication.router_key.key, publication.number)
            return publication
        engine_id = self._source.engine_id
        named = f"a publication of engine {engine_id!r} under the router key {wanted.name!r}"
        past = self._past.get(wanted.name)
        if past is not None:
            self._check(wanted, past.key, past.number)
        past = past or self._declined.get(wanted)
        if past is not None:
            raise ended(named, engine_id, past.number, past.outcome, not_published=past.not_published)
        return None

    def check_free(self, name: str, now: float) -> None:
        """Raise `RouterKeyUsed` if another publication has this name, or had it a short time ago."""
        self.drop_old(now)
        other = self._held.get(name) or self._past.get(name)
        if other is not None:
            engine_id = self._source.engine_id
            problem = f"publication {other.number} of engine {engine_id!r} has the router key {name!r}, or had it a"
            then = "short time ago: draw a new reference for every request and every attempt"
            raise RouterKeyUsed(f"{problem} {then}", engine_id=engine_id, publication=other.number)

    def arrived(self, publication: PublicationRecord, now: float) -> bool:
        """Note that a publication arrived. Returns whether its router key was declined before."""
        self.drop_old(now)
        if publication.router_key is None:
            return False
        self._held[publication.router_key.name] = publication
        declined = self._declined.pop(publication.router_key, None)
        if declined is not None:
            self._declines.give(declined.holder)
        return declined is not None

    def forgotten(self, publication: PublicationRecord, now: float, until: float) -> None:
        """Note that a publication was forgotten; remember its key for a while."""
        self.drop_old(now)
        key = publication.router_key
        if key is None or self._held.get(key.name) is not publication:
            return
        del self._held[key.name]
        self._past[key.name] = _Past(until, publication.not_published, publication.outcome, publication.number, key.key)
        self._memory.take(self._source, ROUTER_KEY_BYTES)
        if len(self._past) > MAX_PAST_ROUTER_KEYS:
            self._drop_past()

    def decline(
        self, key: RouterKey, holder: Hashable, now: float, until: float, *, not_published: bool = False
    ) -> None:
        """Remember, until a time, that `holder` declined a key before its publication arrived; or, with
        `not_published`, that the source gave it up. Raises `LimitReached` if this caller has declined too many."""
        self.drop_old(now)
        check_budget("router_keys", self._declines, holder, until - now)
        self._declines.take(holder)
        self._declined[key] = _Past(until, not_published, holder=holder)

    def close(self) -> None:
        """Forget everything: the engine is gone."""
        self.drop_old(math.inf)
        for question in tuple(self.questions.values()):
            self.forget_question(question)

    def miss(self, problem: str, why: MissReason | None = None) -> PrefixMiss:
        """Return the error for readers of an answer that does not come; `why` is by default NO_ANSWER."""
        engine_id, why = self._source.engine_id, why or MissReason.NO_ANSWER
        told = f"engine {engine_id!r} gives nothing of the prompt ({why.name}): {problem}"
        return PrefixMiss(told, engine_id=engine_id, why=why.name)

    def add_question(self, ask: Ask, number: int, now: float) -> Question:
        """Add a question. Raises `LimitReached` if the engine has too many, or its asker, or there is no memory."""
        check_budget("questions", self._places, ask.holder, ENDED_KEPT)
        with self._memory.hold(ask.holder, ask.host, QUESTION_BYTES) as held:
            ask_memory = self._memory.hold(ask.holder, ask.host, ask.size)
            memory = held.pop_all()
        self._places.take(ask.holder)
        question = Question(self._source, number, ask, now, ask_memory, memory)
        self.questions[ask.router_key] = self.open_questions[number] = question
        return question

    def end_question(self, question: Question, outcome: QuestionOutcome, why: MissReason | None, now: float) -> None:
        """End an open question; only `Records.end_question` calls this. One that its source did not answer keeps its
        place until it is forgotten: an asker that withdraws, or waits for moments only, cannot send a source questions
        without end."""
        del self.open_questions[question.number]
        question.outcome, question.why = outcome, why
        question.ask = replace(question.ask, reference="", prompt=b"")
        question.ask_memory.close()
        question.forget_at = now + ENDED_KEPT
        if outcome is QuestionOutcome.ANSWERED:
            self.forget_question(question)
        elif outcome is QuestionOutcome.MISSED:
            self._places.give(question.ask.holder)

    def forget_question(self, question: Question) -> None:
        del self.questions[question.ask.router_key]
        question.forget_at = NEVER
        question.memory.close()
        if question.outcome is not QuestionOutcome.MISSED:
            self._places.give(question.ask.holder)

    def _check(self, wanted: RouterKey, key: bytes, number: int) -> None:
        if not hmac.compare_digest(wanted.key, key):
            engine_id = self._source.engine_id
            problem = f"the reference's key is not that of the publication of engine {engine_id!r} under its router key"
            raise WrongKey(problem, engine_id=engine_id, publication=number)

    def drop_old(self, now: float) -> None:
        while self._past and next(iter(self._past.values())).until <= now:
            self._drop_past()
        while self._declined and next(iter(self._declined.values())).until <= now:
            self._declines.give(self._declined.pop(next(iter(self._declined))).holder)

    def _drop_past(self) -> None:
        del self._past[next(iter(self._past))]
        self._memory.give(self._source, ROUTER_KEY_BYTES)
