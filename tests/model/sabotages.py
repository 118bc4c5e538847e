"""Mistakes that the protocol's rules prevent, each as the smallest change of the shipped code."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import pytest

from kvferry._control import publications, reader_lease
from kvferry._control.backoff import CALL_TIMEOUT
from kvferry._control.granted_steps import GrantedPart, GrantedSteps
from kvferry._control.reader_lease import ReaderVerdict
from kvferry.errors import PublicationReleased, PublicationStale, WrongSession
from kvferry.geometry.blocks import Unfinished
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain import lessor, records, registry, router_keys, routing, sources
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.publications import Lease, PublicationRecord, PublicationStage
from kvferry_server.domain.steps import PublicationStep
from kvferry_server.domain.times import NEVER
from kvferry_server.domain.values import (
    EngineRef,
    LeaseRequest,
    LeaseState,
    Names,
    RankReport,
    RevokeReason,
    RouterKey,
    Verdict,
)
from kvferry_server.servicers import decode, introspection, kv_transfer
from tests.model import readers
from tests.model.hinted import HintedShare
from tests.model.readers import Share
from tests.model.source import LAYERS

Sabotage = Callable[[pytest.MonkeyPatch], None]
SABOTAGES: dict[str, Sabotage] = {}
OF_A_LIAR: dict[str, Sabotage] = {}
"""Sabotages that show only with a lying peer."""
OF_AN_OPERATOR: dict[str, Sabotage] = {}
"""Sabotages of an operator's calls."""
OF_A_ROUTER: dict[str, Sabotage] = {}
"""Sabotages of references that a router makes."""
OF_A_LIAR_AND_A_ROUTER: dict[str, Sabotage] = {}
"""Sabotages of such references that show only with a lying peer."""


def sabotage(make: Sabotage) -> Sabotage:
    SABOTAGES[make.__name__] = make
    return make


def of_a_liar(make: Sabotage) -> Sabotage:
    OF_A_LIAR[make.__name__] = make
    return make


def of_an_operator(make: Sabotage) -> Sabotage:
    OF_AN_OPERATOR[make.__name__] = make
    return make


def of_a_router(make: Sabotage) -> Sabotage:
    OF_A_ROUTER[make.__name__] = make
    return make


def of_a_liar_and_a_router(make: Sabotage) -> Sabotage:
    OF_A_LIAR_AND_A_ROUTER[make.__name__] = make
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
    original = sources.Sources._abort

    def abort(self: sources.Sources, publication: PublicationRecord, now: float) -> None:
        original(self, publication, now)
        _end_leases(self._records, publication, now)

    patch.setattr(sources.Sources, "_abort", abort)


@sabotage
def new_incarnation_cuts_leases_short(patch: pytest.MonkeyPatch) -> None:
    original = records.Records.end_all

    def end_all(self: records.Records, engine: Engine, reason: RevokeReason) -> None:
        original(self, engine, reason)
        for publication in list(engine.publications.values()):
            _end_leases(self, publication, self.advance())

    patch.setattr(records.Records, "end_all", end_all)


@sabotage
def deadline_counts_from_the_reply(patch: pytest.MonkeyPatch) -> None:
    original = reader_lease.ReaderLease.renewed

    def renewed(self: reader_lease.ReaderLease, sent_at: float, now: float, remaining: float, *, more: bool) -> None:
        original(self, now, now, remaining, more=more)

    patch.setattr(reader_lease.ReaderLease, "renewed", renewed)


@sabotage
def replay_extends(patch: pytest.MonkeyPatch) -> None:
    original = lessor.Lessor.grant

    def grant(self: lessor.Lessor, request: LeaseRequest) -> Lease:
        lease = original(self, request)
        lease.expires = max(lease.expires, self._records.advance() + self._times.ttl)
        return lease

    patch.setattr(lessor.Lessor, "grant", grant)


@sabotage
def release_soon_after_a_home_restart(patch: pytest.MonkeyPatch) -> None:
    def touch(self: sources.Sources, engine: Engine, publication: PublicationRecord, now: float) -> None:
        if engine.snapshot is not None:
            engine.snapshot.add(publication.number)

    patch.setattr(sources.Sources, "_touch", touch)


@sabotage
def publication_is_revived(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "may_arrive", lambda self, number, now: True)


@sabotage
def incarnation_is_evicted_by_a_delayed_message(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(registry.Registry, "_check_not_in_use", _evict)
    patch.setattr(registry.Registry, "_is_retired", lambda self, ref: False)


@sabotage
def completion_per_rank_call(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "complete", property(lambda self: bool(self.reports)))


@sabotage
def renewals_reach_past_the_final_deadline(patch: pytest.MonkeyPatch) -> None:
    """So a reader that goes on for ever puts the forced release off for as long."""
    original = lessor.Lessor._extend

    def extend(self: lessor.Lessor, lease: Lease, engine: Engine, now: float) -> bool:
        final_at, lease.publication.final_at = lease.publication.final_at, NEVER
        try:
            return original(self, lease, engine, now)
        finally:
            lease.publication.final_at = final_at

    patch.setattr(lessor.Lessor, "_extend", extend)


# Mistakes that this model has found, and others like them.


@sabotage
def aborts_are_forgotten_by_the_snapshot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(publications.Offers, "abort", lambda self, number: None)


@sabotage
def released_locally_during_a_resync(patch: pytest.MonkeyPatch) -> None:
    original = publications.Offers.snapshot

    def snapshot(self: publications.Offers) -> publications.Snapshot:
        taken = original(self)
        for held in self._held.values():
            held.sending -= 1
        return publications.Snapshot((), taken.notifications, taken.end)

    patch.setattr(publications.Offers, "snapshot", snapshot)


@sabotage
def released_twice(patch: pytest.MonkeyPatch) -> None:
    def release(self: publications.Offers, number: int, outcome: Any, reads: Any = (), *, local: bool = False) -> None:
        if held := self._held.get(number):
            self._released.append(publications.Release(number, held.publication.request_id, outcome, reads, local))

    patch.setattr(publications.Offers, "_release", release)


@sabotage
def expired_answer_of_the_home_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def verdict_of(ended_at: float, deadline: float, verdict: pb.Verdict.ValueType | None) -> ReaderVerdict:
        late = ended_at >= deadline
        return ReaderVerdict.EXPIRED if late else ReaderVerdict.CONFIRMED

    patch.setattr(readers, "verdict_of", verdict_of)


@sabotage
def own_deadline_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    def verdict_of(ended_at: float, deadline: float, verdict: pb.Verdict.ValueType | None) -> ReaderVerdict:
        expired = verdict == pb.VERDICT_EXPIRED
        return ReaderVerdict.EXPIRED if expired else ReaderVerdict.TRUSTED

    patch.setattr(readers, "verdict_of", verdict_of)


# Mistakes of a reader that moves each step on arrival.


@sabotage
def deadline_is_checked_for_the_first_step_only(patch: pytest.MonkeyPatch) -> None:
    """By the time of the first step, without regard to the lease at the others."""
    original, first = readers.Share.copy, dict[readers.Share, float]()

    def copy(self: readers.Share, rank: int) -> None:
        original(self, rank)
        if self.progressive:
            since = first.setdefault(self, self.copied_at)
            self.ended_at = None if self.ended_at is None else since

    patch.setattr(readers.Share, "copy", copy)


@sabotage
def a_read_ends_before_its_last_step(patch: pytest.MonkeyPatch) -> None:
    original = readers.Share.copy

    def copy(self: readers.Share, rank: int) -> None:
        original(self, rank)
        if self.progressive and not self.copying():
            self.granted, self.ended_at = True, self.copied_at

    patch.setattr(readers.Share, "copy", copy)


@sabotage
def blocks_move_before_their_step_was_granted(patch: pytest.MonkeyPatch) -> None:
    """The blocks that the source is likely to publish next."""
    copying, copy = readers.Share.copying, readers.Share.copy

    def ahead(self: readers.Share) -> list[int]:
        found = copying(self)
        if self.progressive and self.begun and not self.granted and self._found.source.free:
            found += [rank for rank, copied in self.copies.items() if len(copied) == len(self.pieces)]
        return found

    def copy_ahead(self: readers.Share, rank: int) -> None:
        copied = self.copies[rank]
        if len(copied) < len(self.pieces):
            copy(self, rank)
        else:
            copied.append(self.memory.contents[self._found.source.free[0]])

    patch.setattr(readers.Share, "copying", ahead)
    patch.setattr(readers.Share, "copy", copy_ahead)


@sabotage
def all_layers_move_when_the_first_is_named(patch: pytest.MonkeyPatch) -> None:
    original = GrantedSteps.take

    def take(self: GrantedSteps) -> GrantedPart:
        found = original(self)
        return (
            found
            if found.unfinished is None
            else replace(found, unfinished=Unfinished(found.unfinished.groups, LAYERS))
        )

    patch.setattr(GrantedSteps, "take", take)


# Mistakes of a home with blocks that are published layer by layer.


@sabotage
def unfinished_blocks_are_sent_as_complete(patch: pytest.MonkeyPatch) -> None:
    def blocks(message: pb.Publish) -> pb.Blocks:
        return pb.Blocks(step=message.step, groups=[*message.groups, *message.unfinished.groups])

    patch.setattr(decode, "blocks_of", blocks)


@sabotage
def unfinished_blocks_are_never_complete(patch: pytest.MonkeyPatch) -> None:
    original = PublicationRecord.add

    def add(self: PublicationRecord, step: PublicationStep) -> None:
        before = self.unfinished
        original(self, step)
        self.unfinished = {**before, **self.unfinished}

    patch.setattr(PublicationRecord, "add", add)


@sabotage
def a_step_that_overtakes_the_snapshot_is_refused(patch: pytest.MonkeyPatch) -> None:
    """By a home that has received some of the earlier steps."""
    original = sources.Sources._check_step

    def check_step(
        self: sources.Sources, engine: Engine, publication: PublicationRecord, step: PublicationStep
    ) -> None:
        recovering = engine.recovering
        engine.recovering = recovering and not publication.steps
        try:
            original(self, engine, publication, step)
        finally:
            engine.recovering = recovering

    patch.setattr(sources.Sources, "_check_step", check_step)


# Mistakes that only a liar exploits: a proof that is not checked, or a secret that is public.


@sabotage
def a_source_that_stops_in_order_leaves_its_memory_at_once(patch: pytest.MonkeyPatch) -> None:
    """The source's leases are forgotten with it."""
    retire, reuse_after = registry.Registry.retire, registry.Registry.reuse_after
    stopped = WeakSet[registry.Registry]()

    def forget(self: registry.Registry, ref: EngineRef) -> None:
        retire(self, ref)
        stopped.add(self)

    patch.setattr(registry.Registry, "retire", forget)
    patch.setattr(
        registry.Registry, "reuse_after", lambda self, ref: 0.0 if self in stopped else reuse_after(self, ref)
    )


@sabotage
def an_outage_that_outlasts_a_call_releases_what_was_published_in_it(patch: pytest.MonkeyPatch) -> None:
    """As soon as the source stops sending it, although a home may have it, or get it later."""
    sent = publications.Offers.sent

    def release(self: publications.Offers, number: int, now: float) -> None:
        sent(self, number, now)
        if number in self._held:
            self._held[number].release_at = self.next_deadline = now + CALL_TIMEOUT

    patch.setattr(publications.Offers, "sent", release)


@of_a_liar
def leases_are_known_by_their_public_number(patch: pytest.MonkeyPatch) -> None:
    original = lessor.Lessor._lease

    def lease(self: lessor.Lessor, lease_id: bytes, reader: EngineRef, names: Names) -> tuple[Lease | None, float]:
        number = int.from_bytes(lease_id, "big")
        found = next((one.lease_id for one in self._records.leases_by_id.values() if one.number == number), lease_id)
        return original(self, found, reader, names)

    patch.setattr(lessor.Lessor, "_lease", lease)


@of_a_liar
def lease_ids_in_page_tokens(patch: pytest.MonkeyPatch) -> None:
    original = introspection.page

    def page(listed: Any, encode: Any, page_size: int, page_token: str, wanted: Any) -> tuple[list[Any], str]:
        found, token = original(listed, encode, page_size, page_token, wanted)
        leases = (entry for every in listed.values() for entry in every.values() if isinstance(entry, Lease))
        last = [lease.lease_id for lease in leases if token and lease.number == found[-1].read.lease_number]
        return found, ".".join([token, *(base64.urlsafe_b64encode(lease_id).decode().rstrip("=") for lease_id in last)])

    patch.setattr(introspection, "page", page)


@of_a_liar
def any_reader_may_report(patch: pytest.MonkeyPatch) -> None:
    """A report is accepted under any reader's name, for that reader's newest lease."""

    def lease(self: lessor.Lessor, lease_id: bytes, reader: EngineRef, names: Names) -> tuple[Lease | None, float]:
        now = self._records.advance()
        found = self._records.leases_by_id.get(lease_id)
        own = [one for one in self._records.leases_by_id.values() if one.request.read.reader == reader]
        return found or (own[-1] if own else None), now

    patch.setattr(lessor.Lessor, "_lease", lease)


@of_a_liar
def a_restarted_home_adopts_the_first_secret(patch: pytest.MonkeyPatch) -> None:
    original, adopted = registry.Registry.__init__, dict[EngineRef, bytes]()

    def start(self: registry.Registry, *arguments: Any) -> None:
        adopted.clear()
        original(self, *arguments)

    def check_secret(ref: EngineRef, secret: bytes) -> None:
        if adopted.setdefault(ref, secret) != secret:
            raise WrongSession(f"the session secret is not that of {ref}", engine_id=ref.engine_id)

    patch.setattr(registry.Registry, "__init__", start)
    patch.setattr(registry, "check_secret", check_secret)


@of_a_liar
def sources_need_no_secret(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(registry, "check_secret", lambda ref, secret: None)


@of_a_liar
def decline_without_a_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "check_key", lambda self, number, key: None)


@of_a_liar
def another_incarnation_evicts_the_live_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(registry.Registry, "_check_not_in_use", _evict)


@of_a_liar
def first_engine_at_a_restarted_home_gets_the_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(registry.Registry, "recovering", property(lambda self: False))


# A call of an operator has the effect of a source's abort, a reader's loss or a source's death, and no more.


@of_an_operator
def an_operators_abort_cuts_leases_short(patch: pytest.MonkeyPatch) -> None:
    original = sources.Sources.withdraw

    def withdraw(self: sources.Sources, source: EngineRef, number: int) -> PublicationRecord:
        publication = original(self, source, number)
        _end_leases(self._records, publication, self._records.advance())
        return publication

    patch.setattr(sources.Sources, "withdraw", withdraw)


@of_an_operator
def a_publication_that_an_operator_has_aborted_is_revived(patch: pytest.MonkeyPatch) -> None:
    """By a repeated step."""
    original = sources.Sources._touch

    def touch(self: sources.Sources, engine: Engine, publication: PublicationRecord, now: float) -> None:
        original(self, engine, publication, now)
        if publication.stage is PublicationStage.ENDING and publication.complete:
            self._records.move(publication, PublicationStage.PUBLISHED, now)

    patch.setattr(sources.Sources, "_touch", touch)


@of_an_operator
def an_operator_ends_leases_at_once(patch: pytest.MonkeyPatch) -> None:
    original = lessor.Lessor.revoke

    def revoke(self: lessor.Lessor, source: EngineRef, lease_number: int) -> Lease:
        lease = original(self, source, lease_number)
        if lease.live:
            self._records.end_lease(lease, LeaseState.EXPIRED, self._records.advance())
        return lease

    patch.setattr(lessor.Lessor, "revoke", revoke)


@of_an_operator
def eviction_cuts_leases_short(patch: pytest.MonkeyPatch) -> None:
    original = registry.Registry.evict

    def evict(self: registry.Registry, ref: EngineRef) -> None:
        original(self, ref)
        for lease in [lease for lease in self._records.leases() if lease.live and lease.publication.source == ref]:
            self._records.end_lease(lease, LeaseState.EXPIRED, self._clock.now())

    patch.setattr(registry.Registry, "evict", evict)


# A router's calls before a publication hold when it arrives, and calls of others about it do not count.


@of_a_router
def a_decline_that_came_first_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sources.Sources, "_arrive", _arrive_undeclined)


@of_a_router
def reads_wait_for_a_source_that_is_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_transfer, "_living", lambda home, named: named)


@of_a_router
def any_name_finds_the_newest_publication(patch: pytest.MonkeyPatch) -> None:
    def find(self: router_keys.RouterKeys, wanted: RouterKey, now: float) -> PublicationRecord | None:
        return next(reversed(self._held.values()), None)

    patch.setattr(router_keys.RouterKeys, "find", find)


@of_a_liar_and_a_router
def router_keys_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(router_keys.RouterKeys, "_check", lambda self, wanted, key, number: None)


@of_a_liar_and_a_router
def first_decline_counts_with_any_key(patch: pytest.MonkeyPatch) -> None:
    """The key is unknown before the publication arrives, and is not checked afterwards."""
    original = router_keys.RouterKeys.decline

    def decline(self: router_keys.RouterKeys, key: RouterKey, *rest: Any, not_published: bool = False) -> None:
        original(self, RouterKey(key.name, b""), *rest, not_published=not_published)

    def arrived(self: router_keys.RouterKeys, publication: PublicationRecord, now: float) -> bool:
        key = publication.router_key
        if key is not None:
            self._held[key.name] = publication
        return key is not None and self._declined.pop(RouterKey(key.name, b""), None) is not None

    patch.setattr(router_keys.RouterKeys, "decline", decline)
    patch.setattr(router_keys.RouterKeys, "arrived", arrived)


@of_a_liar_and_a_router
def an_impostor_under_the_same_name_ends_the_wait(patch: pytest.MonkeyPatch) -> None:
    """While a home cannot tell yet which of two incarnations is the older."""
    original = routing.Routing.find

    def find(self: routing.Routing, named: Sequence[EngineRef], wanted: RouterKey) -> PublicationRecord | None:
        for source in named:
            self._records.of_engine(source).router_keys.find(wanted, self._records.advance())
        return original(self, named, wanted)

    patch.setattr(routing.Routing, "find", find)


def _arrive_undeclined(
    self: sources.Sources, engine: Engine, publication: PublicationRecord, step: PublicationStep, now: float
) -> None:
    publication.request_id, publication.router_key = step.request_id, step.router_key
    publication.final_at = now + self._times.final
    self._records.arrive(engine, publication, now)
    engine.router_keys.arrived(publication, now)


def _end_leases(self: records.Records, publication: PublicationRecord, now: float) -> None:
    for lease in list(publication.leases):
        self.end_lease(lease, LeaseState.EXPIRED, now)


def _evict(self: registry.Registry, engine: Engine, now: float) -> None:
    if not engine.dead:
        self._forget(engine)


# Of reads from hints.


@sabotage
def released_publications_are_validated(patch: pytest.MonkeyPatch) -> None:
    validate = lessor.Lessor.validate

    def found(self: lessor.Lessor, request: LeaseRequest, digest: bytes, reports: Iterable[RankReport]) -> pb.ReadEnded:
        try:
            return validate(self, request, digest, reports)
        except (PublicationReleased, PublicationStale):
            return pb.ReadEnded(verdict=pb.VERDICT_VALID)

    patch.setattr(lessor.Lessor, "validate", found)


@sabotage
def any_hint_is_validated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lessor.Lessor, "_check_hint", lambda *_: None)


@sabotage
def the_home_is_asked_before_the_last_byte(patch: pytest.MonkeyPatch) -> None:
    def step(self: HintedShare) -> bool:
        if self._hint and self.lease is None and self.begun and not (self.over or self._reported):
            self.ended_at = self.reader.clock.now()
            self._validate()
            return True
        return Share.step(self)

    def copied(self: HintedShare, found: ReaderVerdict, ended_at: float, deadline: float) -> None:
        for rank in self.copying():
            while len(self.copies[rank]) < len(self.pieces):
                self.copy(rank)
        Share._check_good(self, found, self.reader.clock.now(), deadline)

    patch.setattr(HintedShare, "step", step)
    patch.setattr(HintedShare, "_check_good", copied, raising=False)
