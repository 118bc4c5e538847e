"""Decisions of the home that mutation testing found untested (`make mutate`)."""

from __future__ import annotations

import pytest

from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.errors import EngineUnknown, HomeRecovering, LeaseEnded, PublicationStale
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.values import LeaseState, RankOutcome, RevokeReason, Verdict
from tests.support.parties import D, E, P, Scene


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (LeaseState, pb.ReadState),
        (RankOutcome, pb.RankOutcome),
        (Verdict, pb.Verdict),
        (RevokeReason, pb.RevokeReason),
        (ReleaseOutcome, pb.ReleaseOutcome),
    ],
)
def test_enum_numbers_equal_those_of_the_contract(ours: type[LeaseState], theirs: type[pb.ReadState]) -> None:
    named = {name.rpartition(f"{_prefix(theirs.keys())}_")[2]: number for name, number in theirs.items() if number}
    assert {one.name: one.value for one in ours} == named


def _prefix(names: list[str]) -> str:
    """Return the common prefix of the names of a proto's enum."""
    return names[0].removesuffix("_UNSPECIFIED")


def test_leased_publication_is_returned_while_the_lease_is_live() -> None:
    scene = Scene()
    publication = scene.publish()
    lease = scene.grant()
    assert scene.lessor.leased(lease.lease_id, D) is publication
    with pytest.raises(LeaseEnded):
        scene.lessor.leased(lease.lease_id, E)
    scene.clock.pass_by(scene.times.ttl)
    with pytest.raises(LeaseEnded):
        scene.lessor.leased(lease.lease_id, D)


def test_awaited_publication_is_not_offered() -> None:
    scene = Scene()
    scene.grant(2)
    with pytest.raises(HomeRecovering, match="has not arrived yet"):
        scene.records.unreleased(P, 2)
    publication = scene.publish(2)
    assert scene.records.unreleased(P, 2) is publication


def test_expected_reads_of_a_waiting_reader_count() -> None:
    scene = Scene()
    first = scene.grant(expected_reads=2)
    publication = scene.publish(expected_reads=1)
    scene.report(first, 0)
    assert scene.told() == []
    scene.report(scene.grant(name="second"), 0)
    assert scene.told() == [(publication.number, ReleaseOutcome.READ)]


def test_expiry_of_a_lease_wakes_its_waiting_call() -> None:
    scene = Scene()
    publication = scene.publish()
    scene.grant()
    scene.woken.clear()
    scene.wait(scene.times.ttl)
    assert publication in scene.woken


def test_a_read_whose_outcome_is_forgotten_is_a_new_read() -> None:
    scene = Scene()
    scene.publish(expected_reads=2)
    old = scene.grant()
    scene.report(old, 0)
    with pytest.raises(LeaseEnded):
        scene.grant()
    scene.wait(scene.times.keep_outcome + 1)
    new = scene.grant()
    assert new.live
    assert new.lease_id != old.lease_id


def test_number_that_was_just_skipped_may_arrive() -> None:
    scene = Scene()
    scene.publish(1)
    scene.publish(3)
    assert scene.publish(2).number == 2


def test_numbers_up_to_the_high_water_of_a_snapshot_are_closed() -> None:
    scene = Scene()
    scene.publish(1)
    scene.publish(4)
    scene.sources.begin_snapshot(P)
    scene.publish(1)
    scene.sources.end_snapshot(P, 2)
    with pytest.raises(PublicationStale):
        scene.publish(2)
    assert scene.publish(3).number == 3


def test_republished_publication_is_released_after_a_max_ttl() -> None:
    """Readers that a restarted home does not know may still be reading (R2)."""
    scene = Scene(recovering=True)
    scene.sources.begin_snapshot(P)
    scene.publish()
    scene.sources.abort(P, 1)
    scene.sources.end_snapshot(P, 1)
    scene.wait(scene.times.max_ttl - 0.001)
    assert scene.told() == []
    scene.wait(0.001)
    assert scene.told() == [(1, ReleaseOutcome.ABORTED)]


def test_records_of_a_replaced_incarnation_end_with_its_last_lease() -> None:
    scene = Scene()
    scene.publish()
    scene.grant()
    scene.registry.evict(P)
    assert not scene.records.of_engine(P).recovering
    scene.wait(scene.times.ttl)
    with pytest.raises(EngineUnknown):
        scene.records.of_engine(P)
