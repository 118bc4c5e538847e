"""Routing: calls of readers and routers with a reference that a router or an asker made, until the publication is
found. From then on its number is used, as with its own reference."""

from __future__ import annotations

import hmac
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.errors import (
    EngineIncomplete,
    KvferryError,
    NotPublished,
    PrefixMiss,
    PublicationReleased,
    ServerDraining,
    WrongKey,
)
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.limits import Budget, check_budget
from kvferry_server.domain.publications import PublicationRecord
from kvferry_server.domain.records import Records
from kvferry_server.domain.router_keys import Ask, QuestionOutcome, RouterKeys, WaitingRead
from kvferry_server.domain.values import EngineRef, LeaseRequest, RouterKey

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Routing:
    """The calls with references of routers on a home's records. `sources` are the living engines that a reference may
    mean: mostly one, but two names may fit, and a home that has just started cannot tell which of two incarnations is
    the older. The source is the engine that has the publication under the router's key. A refusal of another engine
    does not count: that engine may be an impostor. `first_question`, the number of the first question, is another one
    at each start of a home: a miss that comes after a restart is about no question of the new start."""

    def __init__(self, records: Records, first_question: int = 1) -> None:
        self._records = records
        self._times, self._waits = records.times, Budget(records.limits.router_keys)
        self._question_numbers = itertools.count(first_question)

    def find(self, sources: Sequence[EngineRef], wanted: RouterKey) -> PublicationRecord | None:
        """Return the publication under a router's key; None: the publication has to be waited for. Raises
        `EngineUnknown` if a source is gone, `HomeRecovering` or `ServerDraining` if the call is to be repeated later,
        and as `RouterKeys.find`."""
        now = self._records.advance()
        for source in sources:
            try:
                if found := self._records.of_engine(source).router_keys.find(wanted, now):
                    return found
            except WrongKey:
                if len(sources) == 1:
                    raise
        if self._records.draining:
            raise ServerDraining("this node server is draining: ask again")
        unless_all_refuse(sources, lambda source: self._records.of_engine(source).check_recovered())
        return None

    def request(self, publication: PublicationRecord, asked: LeaseRequest) -> LeaseRequest:
        """Return the request for a lease on the publication that `find` returned."""
        read = replace(asked.read, source=publication.source, publication=publication.number)
        return replace(asked, read=read, key=self._records.key(publication), routed=None)

    def wait(self, sources: Sequence[EngineRef], wanted: RouterKey, asked: LeaseRequest) -> WaitingRead:
        """Note that a read waits, until `end_wait`. `Records.wake` says when those of the key's name must look again.
        Raises `LimitReached` if too many reads of this caller wait for publications."""
        now = self._records.advance()
        check_budget("router_keys", self._waits, asked.holder, self._times.ttl)
        waiting = WaitingRead(next(self._records.read_numbers), tuple(sources), wanted, asked, now)
        self._records.journal.waiting += 1
        self._waits.take(asked.holder)
        self._records.list_read(sources[0], waiting)
        self._records.waits.setdefault(wanted.name, set()).add(waiting)
        return waiting

    def end_wait(self, waiting: WaitingRead) -> None:
        """Note that a read has stopped waiting. To be called once. Its engines may be gone."""
        self._records.journal.waiting -= 1
        self._waits.give(waiting.request.holder)
        self._records.unlist_read(waiting.sources[0], waiting.number)
        name, waits = waiting.router_key.name, self._records.waits
        waits[name].discard(waiting)
        if not waits[name]:
            del waits[name]

    def ask(self, source: EngineRef, ask: Ask) -> None:
        """Ask a source for the beginning of a prompt. Idempotent by router key: a question that is open, or was
        answered, stays as it is, and one that has ended otherwise for as long as that is remembered. Raises
        `PrefixMiss` if the question has ended without a publication, or the engine cannot be asked or read from now;
        `PublicationReleased` if it was declined before it came, or its publication was released; `HomeRecovering`,
        `ServerDraining` or `LimitReached` if the call is to be repeated; `EngineUnknown` if the source is gone."""
        now = self._records.advance()
        engine = self._records.of_engine(source)
        keys = engine.router_keys
        if keys.find(ask.router_key, now) or ask.router_key in keys.questions:
            return
        if self._records.draining:
            raise ServerDraining("this node server is draining: ask again")
        engine.check_recovered()
        try:
            engine.check_readable()
        except EngineIncomplete as error:
            raise keys.miss(error.message) from None
        self._records.add_question(engine, keys.add_question(ask, next(self._question_numbers), now))

    def decline(
        self,
        sources: Sequence[EngineRef],
        wanted: RouterKey,
        holder: Hashable,
        *,
        not_published: bool = False,
        elsewhere: bool = False,
    ) -> bool:
        """End a publication that will not be read, as `Lessor.decline` does. If it has not arrived, the reads that wait
        for it end, and the decline is remembered for `max_wait` seconds. Idempotent. A question of an asker who
        declines its reference is withdrawn. With `not_published`, readers get the reason that the source's client has
        given the publication up. If the reference may be meant for `elsewhere`, returns False, and does nothing, unless
        a source has, or had, a publication under this key, or a read or a question waits there for one. Raises
        `WrongKey`, and `LimitReached` if this caller has declined too many publications before they arrived."""
        now, known = self._records.advance(), not elsewhere
        not_here = list[Engine]()
        for source in sources:
            engine = self._records.of_engine(source)
            try:
                publication = engine.router_keys.find(wanted, now)
            except (NotPublished, PublicationReleased, PrefixMiss):
                known = True
                continue
            except WrongKey:
                if len(sources) == 1 and known:
                    raise
                continue
            if publication is not None:
                publication.not_published = publication.not_published or (not_published and publication.grantable)
                outcome = ReleaseOutcome.ABORTED if not_published else ReleaseOutcome.DECLINED
                self._records.end(publication, outcome, now)
                return True
            if question := engine.router_keys.questions.get(wanted):
                ended = QuestionOutcome.UNANSWERED if not_published else QuestionOutcome.WITHDRAWN
                self._records.end_question(question, ended)
                return True
            reads = (read for read in self._records.waits.get(wanted.name, ()) if source in read.sources)
            known = known or any(hmac.compare_digest(read.router_key.key, wanted.key) for read in reads)
            not_here.append(engine)
        if not known:
            return False
        for engine in not_here:
            until = now + self._times.max_wait
            keys = engine.router_keys
            keys.decline(wanted, holder, now, until, not_published=not_published)
            self._records.deadlines.put(keys, RouterKeys.drop_old)
            self._records.wake(wanted.name)
        return True


def unless_all_refuse(asked: Iterable[Asked], call: Callable[[Asked], Answer]) -> list[Answer]:
    """Return the answers of those that do not refuse a call; raise the first refusal if all do."""
    answers, refusals = list[Answer](), list[KvferryError]()
    for each in asked:
        try:
            answers.append(call(each))
        except KvferryError as error:
            refusals.append(error)
    if refusals and not answers:
        raise refusals[0]
    return answers
