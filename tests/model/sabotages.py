"""Mistakes that the protocol's rules are there to prevent, each as the smallest change of the shipped code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvferry import judgement, leases, offers
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server import books, engines, lessor
from kvferry_server import leases as home_leases
from kvferry_server.books import Book, Standing
from kvferry_server.identity import EngineRef
from kvferry_server.leases import Ask, Lease, RankReport, ReadState, Verdict
from kvferry_server.publications import Publication
from tests.model import readers

Sabotage = Callable[[pytest.MonkeyPatch], None]
SABOTAGES: dict[str, Sabotage] = {}


def sabotage(make: Sabotage) -> Sabotage:
    SABOTAGES[make.__name__] = make
    return make


# The eight that the protocol names.


@sabotage
def reports_counted_instead_of_a_set(patch: pytest.MonkeyPatch) -> None:
    def add(self: Lease, reports: Iterable[RankReport]) -> Verdict:
        if not self.live:
            return Verdict.EXPIRED
        for report in reports:
            self.reports[len(self.reports)] = report
        return Verdict.VALID

    patch.setattr(Lease, "add", add)


@sabotage
def abort_cuts_leases_short(patch: pytest.MonkeyPatch) -> None:
    original = lessor.Lessor._abort

    def abort(self: lessor.Lessor, publication: Publication, now: float) -> None:
        original(self, publication, now)
        _end_leases(self, publication, now)

    patch.setattr(lessor.Lessor, "_abort", abort)


@sabotage
def new_incarnation_cuts_leases_short(patch: pytest.MonkeyPatch) -> None:
    original = lessor.Lessor.end_engine

    def end_engine(self: lessor.Lessor, source: EngineRef, standing: Standing) -> None:
        book = self._endings.book(source)
        original(self, source, standing)
        for publication in list(book.publications.values()):
            _end_leases(self, publication, self.advance())

    patch.setattr(lessor.Lessor, "end_engine", end_engine)


@sabotage
def deadline_counts_from_the_reply(patch: pytest.MonkeyPatch) -> None:
    original = leases.ReaderLease.renewed

    def renewed(self: leases.ReaderLease, sent_at: float, now: float, remaining: float, *, more: bool) -> None:
        original(self, now, now, remaining, more=more)

    patch.setattr(leases.ReaderLease, "renewed", renewed)


@sabotage
def replay_extends(patch: pytest.MonkeyPatch) -> None:
    original = lessor.Lessor.grant

    def grant(self: lessor.Lessor, ask: Ask) -> Lease:
        lease = original(self, ask)
        lease.expires = max(lease.expires, self.advance() + self._times.ttl)
        return lease

    patch.setattr(lessor.Lessor, "grant", grant)


@sabotage
def release_soon_after_a_home_restart(patch: pytest.MonkeyPatch) -> None:
    def touch(self: lessor.Lessor, book: Book, publication: Publication, now: float) -> None:
        if book.snapshot is not None:
            book.snapshot.add(publication.number)

    patch.setattr(lessor.Lessor, "_touch", touch)


@sabotage
def publication_is_revived(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(books.Book, "check_may_come", lambda self, number, not_before: None)


@sabotage
def incarnation_is_evicted_by_a_delayed_message(patch: pytest.MonkeyPatch) -> None:
    def replace(self: engines.Registry, engine: engines.Engine, now: float) -> None:
        self._forget(engine)

    patch.setattr(engines.Registry, "_replace", replace)
    patch.setattr(engines.Registry, "_is_retired", lambda self, ref: False)


@sabotage
def completion_per_rank_call(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(home_leases.Lease, "complete", property(lambda self: bool(self.reports)))


# Mistakes that this model has found, and others like them.


@sabotage
def aborts_are_forgotten_by_the_snapshot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(offers.Offers, "abort", lambda self, number: None)


@sabotage
def released_locally_while_a_home_is_told_again(patch: pytest.MonkeyPatch) -> None:
    original = offers.Offers.snapshot

    def snapshot(self: offers.Offers) -> offers.Snapshot:
        taken = original(self)
        for held in self._held.values():
            held.sending -= 1
        return offers.Snapshot((), taken.notifications, taken.end)

    patch.setattr(offers.Offers, "snapshot", snapshot)


@sabotage
def released_twice(patch: pytest.MonkeyPatch) -> None:
    def release(self: offers.Offers, number: int, outcome: Any, reads: Any = (), *, local: bool = False) -> None:
        if held := self._held.get(number):
            self._released.append(offers.Release(number, held.publication.request_id, outcome, reads, local))

    patch.setattr(offers.Offers, "_release", release)


@sabotage
def home_that_says_expired_is_not_believed(patch: pytest.MonkeyPatch) -> None:
    def judge(ended_at: float, deadline: float, verdict: pb.Verdict.ValueType | None) -> judgement.Judgement:
        late = ended_at >= deadline
        return judgement.Judgement.EXPIRED if late else judgement.Judgement.CONFIRMED

    patch.setattr(readers, "judge", judge)


@sabotage
def own_deadline_is_not_judged(patch: pytest.MonkeyPatch) -> None:
    def judge(ended_at: float, deadline: float, verdict: pb.Verdict.ValueType | None) -> judgement.Judgement:
        expired = verdict == pb.VERDICT_EXPIRED
        return judgement.Judgement.EXPIRED if expired else judgement.Judgement.TRUSTED

    patch.setattr(readers, "judge", judge)


def _end_leases(self: lessor.Lessor, publication: Publication, now: float) -> None:
    for lease in list(publication.leases):
        self._endings.end_lease(lease, ReadState.EXPIRED, now)
