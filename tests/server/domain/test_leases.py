"""PROTOCOL, Leases: grants, renewals, reports and ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.errors import (
    LeaseEnded,
    LimitReached,
    PartiesMismatch,
    PublicationAborted,
    PublicationReleased,
    PublicationStale,
    ServerDraining,
    WrongIdentity,
    WrongKey,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.limits import MAX_ENDED_AT_ONCE, Limits
from kvferry_server.domain.publications import PublicationStage
from kvferry_server.domain.times import Times
from kvferry_server.domain.values import LeaseState, RankOutcome, RevokeReason
from tests.support.parties import SECRETS, TIMES, D, E, P, Scene, ask, done, key, read_id


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_lease_lasts_exactly_its_ttl(scene: Scene) -> None:
    scene.publish()
    lease = scene.grant()
    scene.clock.pass_by(TIMES.ttl - 0.001)
    assert scene.renew(lease) > 0
    scene.clock.pass_by(TIMES.ttl)
    # No timer has fired; the answer is right all the same.
    assert scene.report(lease, 0).verdict == pb.VERDICT_EXPIRED
    assert lease.state is LeaseState.EXPIRED


def test_a_renewal_extends_to_a_ttl_from_now_and_never_shortens(scene: Scene) -> None:
    scene.publish()
    lease = scene.grant()
    scene.wait(20)
    assert scene.renew(lease) == TIMES.ttl
    expires = lease.expires
    assert scene.renew(lease) == TIMES.ttl
    assert lease.expires == expires


def test_a_delayed_renewal_revives_nothing(scene: Scene) -> None:
    scene.publish()
    expired, completed = scene.grant(name="a"), scene.grant(name="b", reader=E)
    scene.report(completed, 0)
    assert scene.renew(completed) == 0
    expires = expired.expires
    scene.wait(TIMES.ttl)
    assert scene.renew(expired) == 0
    assert (expired.state, expired.expires) == (LeaseState.EXPIRED, expires)
    # Nor after the lease's source is gone.
    scene.registry.evict(P)
    assert scene.renew(expired) == 0
    with pytest.raises(LeaseEnded):
        scene.lessor.renew(b"?" * 16, D)


def test_a_replay_gets_the_same_lease_unextended(scene: Scene) -> None:
    scene.publish()
    lease = scene.grant()
    expires = lease.expires
    scene.wait(10)
    assert scene.grant() is lease
    assert lease.expires == expires


def test_ended_read_gets_no_new_lease(scene: Scene) -> None:
    scene.publish(expected_reads=2)
    lease = scene.grant()
    scene.report(lease, 0)
    with pytest.raises(LeaseEnded):
        scene.grant()


def test_calls_of_a_read_state_the_same_number_of_participants(scene: Scene) -> None:
    scene.publish()
    scene.grant(parties=2)
    with pytest.raises(PartiesMismatch) as caught:
        scene.grant(parties=3)
    assert caught.value.values == {"lease_number": "1", "field": "parties", "value": "3", "expected": "2"}


def test_lease_is_never_extended_past_the_final_deadline(scene: Scene) -> None:
    publication = scene.publish()
    scene.grant(name="early")
    lease = scene.grant(name="kept", reader=E)
    while scene.clock.time + 20 < publication.final_at:
        scene.wait(20)
        scene.renew(lease)
    scene.wait(10)
    renewal = scene.lessor.renew(lease.lease_id, E)
    assert renewal.remaining(scene.clock.now()) == publication.final_at - scene.clock.time
    assert renewal.revoked is RevokeReason.FINAL_DEADLINE
    assert not scene.told()
    scene.wait(renewal.remaining(scene.clock.now()))
    # The forced release is nothing but the end of the last lease.
    assert scene.told() == [(1, ReleaseOutcome.FINAL)]
    assert lease.state is LeaseState.EXPIRED


def test_a_late_read_gets_what_is_left_until_the_final_deadline(scene: Scene) -> None:
    publication = scene.publish()
    for turn in range(5):
        scene.wait(99)
        scene.grant(name=str(turn))
    scene.wait(99)
    lease = scene.grant(name="late")
    assert lease.expires == publication.final_at
    scene.wait(6)
    assert scene.told() == [(1, ReleaseOutcome.FINAL)]


def test_abort_stops_new_leases_and_renewals_and_shortens_none(scene: Scene) -> None:
    publication = scene.publish()
    lease = scene.grant()
    expires = lease.expires
    scene.wait(5)
    scene.sources.abort(P, 1)
    assert lease.live
    assert lease.expires == expires
    assert scene.renew(lease) == expires - scene.clock.time
    assert lease.revoked is RevokeReason.ABORTED
    with pytest.raises(PublicationAborted):
        scene.grant(reader=E)
    assert publication.stage is PublicationStage.ENDING
    assert not scene.told()
    scene.wait(expires - scene.clock.time)
    assert scene.told() == [(1, ReleaseOutcome.ABORTED)]


@pytest.mark.parametrize("gone", [False, True])
def test_lease_is_not_shortened_by_the_end_of_its_source(scene: Scene, gone: bool) -> None:
    scene.publish()
    lease = scene.grant()
    expires = lease.expires
    if gone:
        scene.registry.evict(P)
    else:
        scene.lose()
    scene.wait(5)
    assert scene.renew(lease) == expires - scene.clock.time
    assert lease.revoked is RevokeReason.SOURCE_LOST
    assert scene.report(lease, 0).verdict == pb.VERDICT_VALID


def test_lease_and_publication_outlast_a_lost_rank(scene: Scene) -> None:
    publication = scene.publish()
    lease = scene.grant()
    expires = lease.expires
    scene.engine.lost_ranks.add(0)
    scene.wait(5)
    assert scene.renew(lease) == expires - scene.clock.time
    assert lease.revoked is RevokeReason.SOURCE_LOST
    assert publication.stage is PublicationStage.PUBLISHED
    assert scene.report(lease, 0).verdict == pb.VERDICT_VALID


def test_renewals_after_a_rank_was_lost_are_revoked_except_for_waiting_readers(scene: Scene) -> None:
    # A reader that has handshaken once asks for no agents again, and a home that drains has lost the rank as well.
    scene.engine.lost_ranks.add(0)
    waiting = scene.grant(2)
    scene.publish()
    lease = scene.grant()
    scene.records.draining = True
    scene.wait(5)
    scene.renew(lease)
    assert lease.revoked is RevokeReason.SOURCE_LOST
    scene.records.draining = False
    assert scene.renew(waiting) == TIMES.ttl
    assert waiting.revoked is None


def test_renewals_pause_while_the_watch_of_the_source_is_lost(scene: Scene) -> None:
    scene.publish()
    lease = scene.grant()
    scene.registry.close_engine(P)
    scene.wait(9)
    assert scene.renew(lease) == TIMES.ttl - 9
    assert lease.revoked is None
    scene.open(P)
    assert scene.renew(lease) == TIMES.ttl


def test_a_draining_home_answers_renewals_and_takes_reports_and_grants_nothing(scene: Scene) -> None:
    scene.publish()
    lease = scene.grant()
    scene.records.draining = True
    scene.wait(10)
    assert scene.renew(lease) == TIMES.ttl - 10
    assert scene.grant() is lease
    with pytest.raises(ServerDraining):
        scene.grant(reader=E)
    with pytest.raises(ServerDraining):
        scene.publish(2)
    assert scene.report(lease, 0).verdict == pb.VERDICT_VALID


def test_a_read_may_come_before_its_publication(scene: Scene) -> None:
    lease = scene.grant()
    states = [lease.state]
    scene.wait(20)
    assert scene.renew(lease) == TIMES.ttl
    publication = scene.publish(last=False)
    assert lease.publication is publication
    states.append(lease.state)
    scene.publish(step=1)
    states.append(lease.state)
    assert states == [LeaseState.WAITING, LeaseState.WAITING, LeaseState.READING]
    scene.report(lease, 0)
    assert scene.told() == [(1, ReleaseOutcome.READ)]


def test_the_lease_of_a_waiting_reader_is_not_renewed_for_ever(scene: Scene) -> None:
    lease = scene.grant()
    for _ in range(11):
        scene.wait(10)
        scene.renew(lease)
    assert lease.state is LeaseState.EXPIRED
    assert scene.clock.time > lease.granted_at + TIMES.max_wait


def test_a_waiting_reader_keeps_its_lease_even_where_the_final_deadline_is_shorter() -> None:
    scene = Scene(Times(ttl=30, max_ttl=30, final=5))
    lease = scene.grant()
    expires = lease.expires
    publication = scene.publish()
    assert publication.final_at == expires
    scene.wait(10)
    assert lease.live


@pytest.mark.parametrize("published", [False, True])
def test_key_is_checked_before_its_publication_arrives(scene: Scene, published: bool) -> None:
    if published:
        scene.publish(2)
    held = scene.grant(2, reader=E)
    for wrong in (b"x" * 16, key(1), key(3), b""):
        for changes in ({}, {"name": "another"}, {"reader": E}):
            with pytest.raises(WrongKey):
                scene.lessor.grant(ask(2, key=wrong, **changes))
        with pytest.raises(WrongKey):
            scene.lessor.decline(P, 2, wrong)
    assert [lease for lease in scene.records.leases() if lease.live] == [held]


def test_reports_are_a_set_by_rank(scene: Scene) -> None:
    scene.publish()
    lease = scene.grant(parties=3)
    assert scene.report(lease, 0).reported == 1
    again = scene.report(lease, 0, 0)
    assert (again.reported, again.complete) == (1, False)
    assert scene.report(lease, 1).reported == 2
    assert lease.live
    last = scene.report(lease, 2)
    assert (last.reported, last.complete, last.verdict) == (3, True, pb.VERDICT_VALID)
    assert lease.state is LeaseState.VALID


def test_first_report_of_a_rank_counts(scene: Scene) -> None:
    scene.publish()
    lease = scene.grant(parties=2)
    scene.report(lease, 0, outcome=RankOutcome.FAILED)
    scene.report(lease, 0)
    scene.report(lease, 1)
    assert lease.state is LeaseState.FAILED


def test_reports_come_from_at_most_as_many_ranks_as_a_read_has_participants(scene: Scene) -> None:
    scene.publish()
    lease = scene.grant(parties=2)
    with pytest.raises(PartiesMismatch):
        scene.report(lease, 0, 1, 2)
    assert not lease.reports
    scene.report(lease, 0, 1)
    with pytest.raises(PartiesMismatch):
        scene.report(lease, 2)


def test_report_of_a_rank_that_is_too_late_is_answered_expired(scene: Scene) -> None:
    publication = scene.publish()
    lease = scene.grant(parties=2)
    assert scene.report(lease, 0).verdict == pb.VERDICT_VALID
    scene.wait(TIMES.ttl)
    assert scene.report(lease, 1).verdict == pb.VERDICT_EXPIRED
    # Replays get the same answers.
    assert scene.report(lease, 0).verdict == pb.VERDICT_VALID
    assert scene.report(lease, 0, 1).verdict == pb.VERDICT_EXPIRED
    assert publication.valid_reads == 0


def test_a_rank_that_has_read_again_after_it_had_failed_gets_no_verdict_of_before(scene: Scene) -> None:
    """Its second reading may have lasted longer than the lease, which the other rank's report has ended."""
    scene.publish()
    lease = scene.grant(parties=2)
    scene.report(lease, 0, outcome=RankOutcome.CANCELLED)
    scene.report(lease, 1)
    assert lease.state is LeaseState.FAILED
    assert scene.report(lease, 0).verdict == pb.VERDICT_EXPIRED
    assert scene.report(lease, 0, outcome=RankOutcome.CANCELLED).verdict == pb.VERDICT_VALID
    assert scene.report(lease, 1).verdict == pb.VERDICT_VALID


def test_outcomes_are_kept_for_two_max_ttl_and_replayed_unchanged(scene: Scene) -> None:
    scene.publish()
    lease = scene.grant()
    assert scene.report(lease, 0).verdict == pb.VERDICT_VALID
    scene.sources.acknowledge(P, [1])
    scene.wait(2 * TIMES.max_ttl - 1)
    assert scene.report(lease, 0).verdict == pb.VERDICT_VALID
    scene.wait(1)
    # There is no record of the lease; but it has ended, since this home was up before the grant.
    assert scene.report(lease, 0).verdict == pb.VERDICT_EXPIRED
    assert not list(scene.records.leases())


def test_a_lease_without_a_record_has_ended_unless_the_home_has_just_started(
    scene: Scene,
) -> None:
    """A reader whose machine was paused for long, and its clock with it, believes that its lease is live."""
    scene.wait(TIMES.max_ttl - 0.1)
    assert scene.lessor.report(b"?" * 16, D, done(0)).verdict == pb.VERDICT_UNKNOWN
    scene.wait(0.1)
    assert scene.lessor.report(b"?" * 16, D, done(0)).verdict == pb.VERDICT_EXPIRED


def test_lease_accepts_calls_of_its_reader_only(scene: Scene) -> None:
    scene.publish()
    lease = scene.grant()
    assert scene.lessor.report(lease.lease_id, E, []).verdict == pb.VERDICT_UNKNOWN
    scene.lessor.cancel(lease.lease_id, E)
    with pytest.raises(LeaseEnded):
        scene.lessor.renew(lease.lease_id, E)
    assert lease.live


def test_cancel_ends_the_lease_at_once_and_is_idempotent(scene: Scene) -> None:
    publication = scene.publish()
    lease = scene.grant()
    scene.cancel(lease)
    scene.cancel(lease)
    scene.lessor.cancel(b"?" * 16, D)
    assert lease.state is LeaseState.CANCELLED
    assert not publication.leases
    assert scene.report(lease, 0).verdict == pb.VERDICT_EXPIRED


@pytest.mark.parametrize("end", ["failure", "cancel", "death"])
def test_a_read_that_fails_leaves_the_publication_to_a_retry_elsewhere(scene: Scene, end: str) -> None:
    publication = scene.publish()
    lease = scene.grant()
    if end == "failure":
        scene.report(lease, 0, outcome=RankOutcome.FAILED)
    elif end == "cancel":
        scene.cancel(lease)
    else:
        scene.wait(TIMES.ttl)
    assert publication.stage is PublicationStage.PUBLISHED
    scene.wait(TIMES.hold - 1)
    second = scene.grant(reader=E)
    scene.report(second, 0)
    assert scene.told() == [(1, ReleaseOutcome.READ)]
    assert scene.states(publication)[1] is LeaseState.VALID


def test_expected_reads_count_distinct_valid_reads_and_the_highest_wins(scene: Scene) -> None:
    publication = scene.publish(expected_reads=2)
    first = scene.grant(name="1", expected_reads=3)
    for _ in range(3):
        scene.report(first, 0)
    scene.report(scene.grant(name="2"), 0, outcome=RankOutcome.FAILED)
    scene.report(scene.grant(name="3"), 0)
    assert publication.valid_reads == 2
    assert not scene.told()
    scene.report(scene.grant(name="4"), 0)
    assert scene.told() == [(1, ReleaseOutcome.READ)]


def test_a_read_of_a_publication_that_is_not_complete_does_not_end_it(scene: Scene) -> None:
    publication = scene.publish(last=False)
    scene.report(scene.grant(), 0)
    assert publication.stage is PublicationStage.PUBLISHING
    scene.publish(step=1)
    assert scene.told() == [(1, ReleaseOutcome.READ)]


def test_publication_is_released_with_the_last_live_lease(scene: Scene) -> None:
    scene.publish()
    first, second = scene.grant(), scene.grant(reader=E)
    scene.report(first, 0)
    assert not scene.told()
    assert scene.renew(second) == TIMES.ttl
    with pytest.raises(PublicationReleased):
        scene.grant(name="third")
    scene.report(second, 0)
    assert scene.told() == [(1, ReleaseOutcome.READ)]


def test_numbers_of_forgotten_publications_are_stale(scene: Scene) -> None:
    scene.publish()
    scene.report(scene.grant(), 0)
    with pytest.raises(PublicationReleased) as released:
        scene.grant(reader=E)
    assert released.value.values["outcome"] == "READ"
    scene.sources.acknowledge(P, [1])
    with pytest.raises(PublicationStale):
        scene.grant(reader=E)
    with pytest.raises(PublicationStale):
        scene.publish(1, request_id="another request")


def test_leases_of_a_publication_are_limited() -> None:
    scene = Scene(limits=Limits(reads=3))
    scene.publish(1)
    for name in "abc":
        scene.grant(1, name=name)
    with pytest.raises(LimitReached) as caught:
        scene.grant(1, name="d")
    assert caught.value.retryable
    assert caught.value.values["limit"] == "reads"


def test_lease_numbers_are_public_and_a_repr_has_no_secret(scene: Scene) -> None:
    scene.publish(expected_reads=2)
    leases = [scene.grant(), scene.grant(reader=E)]
    assert [lease.number for lease in leases] == [1, 2]
    shown = repr(leases)
    for secret in (SECRETS[P], key(), read_id("read"), *(lease.lease_id for lease in leases)):
        assert repr(secret)[2:-1] not in shown
        assert secret.hex() not in shown


def test_lease_under_mutual_tls_accepts_only_the_certificate_that_acquired_it(scene: Scene) -> None:
    scene.publish()
    ours, theirs = frozenset({b"node-1", b"decode"}), frozenset({b"node-2"})
    lease = scene.grant(names=ours)
    stranger: tuple[Callable[[], object], ...] = (
        lambda: scene.grant(names=theirs),
        lambda: scene.lessor.renew(lease.lease_id, D, theirs),
        lambda: scene.lessor.report(lease.lease_id, D, [], theirs),
        lambda: scene.lessor.cancel(lease.lease_id, D, theirs),
        lambda: scene.lessor.leased(lease.lease_id, D, theirs),
    )
    for call in stranger:
        with pytest.raises(WrongIdentity) as caught:
            call()
        assert caught.value.values == {"lease_number": "1"}
    # Another node's certificate of the same engine shares a name; a UNIX socket has none.
    assert scene.grant(names=frozenset({b"node-3", b"decode"})) is lease
    assert scene.renew(lease) == TIMES.ttl
    assert scene.report(lease, 0).verdict == pb.VERDICT_VALID


def test_leases_that_are_due_count_as_ended_before_the_timer_reaches_them() -> None:
    scene = Scene(limits=Limits(reads=10_000))
    scene.publish(1, expected_reads=2)
    scene.publish(2)
    leases = [scene.grant(1, name=str(number)) for number in range(5 * MAX_ENDED_AT_ONCE)]
    alone = scene.grant(2)
    scene.clock.pass_by(TIMES.ttl)
    scene.records.advance()
    assert leases[0].state is LeaseState.EXPIRED
    assert alone.live
    assert scene.records.deadlines.next_deadline() <= scene.clock.now()
    # The lease has ended exactly at its time, although no timer has acted on it.
    assert scene.report(alone, 0).verdict == pb.VERDICT_EXPIRED
    assert scene.renew(leases[-1]) == 0
    with pytest.raises(LeaseEnded):
        scene.grant(1, name=str(5 * MAX_ENDED_AT_ONCE - 1))
    calls = 0
    while scene.records.deadlines.next_deadline() <= scene.clock.now():
        scene.records.advance()
        calls += 1
    assert calls <= 6
    assert {lease.state for lease in leases} == {LeaseState.EXPIRED}


def test_a_lease_is_forgotten_at_its_time_though_even_its_end_is_not_acted_on_yet() -> None:
    scene = Scene(limits=Limits(reads=10_000))
    scene.publish(1, expected_reads=2)
    leases = [scene.grant(1, name=str(number)) for number in range(5 * MAX_ENDED_AT_ONCE)]
    scene.clock.pass_by(TIMES.ttl + TIMES.keep_outcome)
    # The home's timer was late for both.
    assert leases[-1].live
    with pytest.raises(LeaseEnded, match="it ended long ago"):
        scene.lessor.revoke(P, leases[-1].number)
    assert leases[-1].ended_as is LeaseState.EXPIRED
    with pytest.raises(LeaseEnded, match="no record"):
        scene.renew(leases[-1])


def test_publication_that_is_due_counts_as_ended_before_the_timer_reaches_it() -> None:
    scene = Scene(limits=Limits(publications=10_000))
    for number in range(1, 4 * MAX_ENDED_AT_ONCE):
        scene.publish(number)
    last = 4 * MAX_ENDED_AT_ONCE - 1
    scene.clock.pass_by(TIMES.hold)
    with pytest.raises(PublicationReleased):
        scene.grant(last)
    with pytest.raises(PublicationReleased):
        scene.records.unreleased(P, last - 1)
    scene.wait(0)
    assert sorted(number for number, _ in scene.told()) == list(range(1, 4 * MAX_ENDED_AT_ONCE))
