"""Questions: what readers have asked an engine for, the KV of a prompt's beginning (PROTOCOL, Asking for a prefix).

    ask ─► open, told to the scheduler ─┬─(published under its key)─► ANSWERED: a publication like any other
                                        ├─(miss)────────────────────► MISSED      ┐
                                        ├─(time over, engine gone)──► UNANSWERED  ├─ PREFIX_MISS to its readers
                                        └─(declined)────────────────► WITHDRAWN   ┘

A question is a router's reference that the asker makes itself: the reads that wait for the answer wait under its router
key. That key's name is derived from its secret (`RouterKey.of_question`), so that no asker makes a source publish under
a name that a router uses, and a publication whose question has ended is recognised without a record of the question.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from kvferry._wire.outcomes import MissReason
from kvferry.errors import PrefixMiss
from kvferry_server.domain.identity import EngineRef, RouterKey
from kvferry_server.domain.limits import MAX_QUESTIONS, Budget, MemoryBudget, check_budget
from kvferry_server.domain.times import ENDED_KEPT, NEVER

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
    scheduled: float = NEVER

    @property
    def open(self) -> bool:
        return self.outcome is None

    @property
    def deadline(self) -> float:
        return self.asked_at + self.ask.wait

    def due(self) -> float:
        """When the question ends, or its end is forgotten."""
        return self.deadline if self.open else self.forget_at


class EngineQuestions:
    """The questions to one incarnation: the open ones, and for `ENDED_KEPT` seconds those that ended without a
    publication, for readers who come for the answer a little later.

    Questions count against the memory of their asker, not of the engine: a flood of them takes no room from the
    engine's publications.
    """

    def __init__(self, source: EngineRef, memory: MemoryBudget) -> None:
        self._source = source
        self._memory = memory
        self._places = Budget(MAX_QUESTIONS)
        self._by_key: dict[RouterKey, Question] = {}
        self._open: dict[int, Question] = {}  # By number. Few, of maybe thousands that are remembered.

    def open(self) -> list[Question]:
        return list(self._open.values())

    def get(self, key: RouterKey) -> Question | None:
        """Return the question with this key, open or ended without a publication; None: it is not remembered."""
        return self._by_key.get(key)

    def numbered(self, number: int) -> Question | None:
        """Return an open question by its number; None: it has ended."""
        return self._open.get(number)

    def check(self, key: RouterKey) -> None:
        """Raise `PrefixMiss` if the question with this key has ended without a publication."""
        question = self._by_key.get(key)
        if question is not None and question.outcome is not None:
            raise self.miss(f"the question {question.outcome.value}", question.why)

    def miss(self, problem: str, why: MissReason | None = None) -> PrefixMiss:
        """Return the error for readers of an answer that does not come; `why` is by default NO_ANSWER."""
        engine_id, why = self._source.engine_id, why or MissReason.NO_ANSWER
        told = f"engine {engine_id!r} gives nothing of the prompt ({why.name}): {problem}"
        return PrefixMiss(told, engine_id=engine_id, why=why.name)

    def add(self, ask: Ask, number: int, now: float) -> Question:
        """Add a question. Raises `LimitReached` if the engine has too many, or its asker, or there is no memory."""
        check_budget("questions", self._places, ask.holder, ENDED_KEPT)
        with self._memory.hold(ask.holder, ask.host, QUESTION_BYTES) as held:
            ask_memory = self._memory.hold(ask.holder, ask.host, ask.size)
            memory = held.pop_all()
        self._places.take(ask.holder)
        question = Question(self._source, number, ask, now, ask_memory, memory)
        self._by_key[ask.router_key] = self._open[number] = question
        return question

    def end(self, question: Question, outcome: QuestionOutcome, why: MissReason | None, now: float) -> None:
        """End an open question; only `Records.end_question` calls this. One that its source did not answer keeps its
        place until it is forgotten: an asker that withdraws, or waits for moments only, cannot send a source questions
        without end."""
        del self._open[question.number]
        question.outcome, question.why = outcome, why
        question.ask = replace(question.ask, reference="", prompt=b"")
        question.ask_memory.close()
        question.forget_at = now + ENDED_KEPT
        if outcome is QuestionOutcome.ANSWERED:
            self.forget(question)
        elif outcome is QuestionOutcome.MISSED:
            self._places.give(question.ask.holder)

    def forget(self, question: Question) -> None:
        """Forget a question that has ended."""
        del self._by_key[question.ask.router_key]
        question.forget_at = NEVER
        question.memory.close()
        if question.outcome is not QuestionOutcome.MISSED:
            self._places.give(question.ask.holder)

    def close(self) -> None:
        """Forget all questions, which have ended: the engine is gone."""
        for question in tuple(self._by_key.values()):
            self.forget(question)
