"""The journal's metrics equal a recount of all records after any calls, and its log is what an operator needs."""

from __future__ import annotations

import logging
import random
from collections import Counter

import pytest

from kvferry.errors import KvferryError, LeaseEnded
from kvferry.v1 import errors_pb2
from kvferry_server.domain.journal import ALARMING, LAST_READS, MOST_IN_WINDOW, ROUTINE, WINDOW, EventLog
from kvferry_server.domain.publications import Lease, PublicationStage
from kvferry_server.domain.times import Times
from kvferry_server.domain.values import RankOutcome
from tests.support.parties import GROUPS, D, E, FakeClock, P, Scene, key

EVENTS = "kvferry_server.events"
DOINGS = (
    *("publish", "more", "grant", "grant", "grant", "report", "report", "fail", "cancel", "renew", "wait", "wait"),
    *("abort", "acknowledge", "decline"),
)


def recount(scene: Scene) -> None:
    """Compare the counters with a count of the records."""
    records, journal = scene.records, scene.records.journal
    publications = [one for engine in records.engines.values() for one in engine.publications.values()]
    assert +journal.stages == Counter(one.stage for one in publications)
    pinned = [one for one in publications if one.stage not in (PublicationStage.AWAITED, PublicationStage.RELEASED)]
    assert set(journal.pinned) == set(pinned)
    if pinned:
        assert next(iter(journal.pinned)).first_at == min(one.first_at for one in pinned)
    engine = records.engines[P]
    assert list(engine.pinned) == [one for one in journal.pinned if one.source == P]
    assert engine.pinned_bytes == sum(engine.bytes_of(one) for one in pinned)
    assert not set(engine.pinned_blocks) - {group for one in pinned for group in one.extents}
    live = [lease for lease in records.leases() if lease.live]
    assert +journal.live_leases == Counter(lease.state for lease in live)
    assert journal.granted == len(live) + sum(journal.ended.values())
    assert journal.lasted.count == sum(journal.ended.values())
    assert journal.hold.count == sum(journal.outcomes.values())


@pytest.mark.parametrize("seed", range(12))
def test_metrics_equal_a_recount_of_all_records(seed: int) -> None:
    chance = random.Random(seed)
    scene = Scene(Times(ttl=2, max_ttl=2, hold=3, final=20, max_wait=4))
    scene.engine.block_bytes.update({group.name: 1000 for group in GROUPS})
    leases = list[Lease]()
    for turn in range(150):
        number = turn // 10 + chance.randint(1, 4)
        try:
            what = chance.choice(DOINGS)
            if what == "publish":
                scene.publish(number, 0, last=chance.random() < 0.6)
            elif what == "more":
                publication = scene.records.engines[P].publications[number]
                scene.publish(number, publication.step_count, last=True, groups=(), request_id=publication.request_id)
            elif what == "grant":
                leases.append(scene.grant(number, chance.choice([D, E]), f"read {turn}"))
            elif what == "report":
                scene.report(chance.choice(leases), 0)
            elif what == "fail":
                scene.report(chance.choice(leases), 0, outcome=RankOutcome.FAILED)
            elif what == "cancel":
                scene.cancel(chance.choice(leases))
            elif what == "renew":
                scene.renew(chance.choice(leases))
            elif what == "wait":
                scene.wait(chance.choice([0.1, 1.0, 3.0]))
            elif what == "abort":
                scene.sources.abort(P, number)
            elif what == "acknowledge":
                scene.sources.acknowledge(P, [number])
            else:
                scene.lessor.decline(P, number, key(number))
        except (KvferryError, IndexError, KeyError):
            pass
        recount(scene)
    scene.wait(100)
    recount(scene)
    assert not +scene.records.journal.live_leases
    assert sum(scene.records.journal.ended.values()) > 5


def test_last_hundred_reads_are_kept() -> None:
    scene = Scene()
    for number in range(1, LAST_READS + 31):
        scene.publish(number)
        lease = scene.grant(number, name=f"read {number}")
        scene.report(lease, 0)
    kept = scene.records.journal.last_reads
    assert [read["publication"] for read in kept] == list(range(31, LAST_READS + 31))
    scene.wait(1000)
    assert len(kept) == LAST_READS
    assert {read["state"] for read in kept} == {"valid"}


def test_expired_lease_is_logged_as_a_warning_with_its_ids(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    caplog.set_level(logging.INFO, EVENTS)
    scene.publish(1)
    lease = scene.grant(1)
    scene.wait(scene.times.ttl + 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    fields = vars(record)
    assert fields["event"] == "lease_ended"
    assert fields["verdict"] == "EXPIRED"
    assert fields["engine_id"] == P.engine_id
    assert fields["incarnation"] == P.incarnation.hex()[:8]
    assert fields["publication"] == 1
    assert fields["request_id"] == lease.publication.request_id
    assert fields["lease_number"] == lease.number
    assert fields["reader_id"] == D.engine_id
    assert f"lease_number={lease.number}" in record.getMessage()
    assert lease.lease_id.hex() not in record.getMessage()


def test_successful_requests_are_not_logged_at_info(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    caplog.set_level(logging.INFO, EVENTS)
    for number in range(1, 51):
        scene.publish(number)
        lease = scene.grant(number)
        scene.renew(lease)
        scene.report(lease, 0)
        scene.sources.acknowledge(P, [number])
    assert caplog.records == []
    caplog.set_level(logging.DEBUG, EVENTS)
    scene.publish(51)
    scene.report(scene.grant(51), 0)
    events = [vars(record)["event"] for record in caplog.records]
    assert events == [
        "publication_published",
        "lease_granted",
        "lease_ended",
        "publication_ended",
        "publication_released",
    ]
    # All events have the same request_id.
    assert len({vars(record)["request_id"] for record in caplog.records}) == 1


def test_warnings_of_one_kind_are_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    caplog.set_level(logging.INFO, EVENTS)
    for number in range(1, 101):
        scene.publish(number)
        scene.grant(number)
    scene.wait(scene.times.ttl + 1)
    expired = [record for record in caplog.records if vars(record)["event"] == "lease_ended"]
    assert len(expired) == MOST_IN_WINDOW
    caplog.clear()
    scene.wait(WINDOW)
    lease = scene.grant(1, name="again")
    scene.wait(scene.times.ttl + 1)
    (last,) = [record for record in caplog.records if vars(record)["event"] == "lease_ended"]
    assert vars(last)["left_out"] == 100 - MOST_IN_WINDOW
    assert vars(last)["lease_number"] == lease.number


def test_refused_renewals_and_late_reports_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    caplog.set_level(logging.INFO, EVENTS)
    scene.publish(1)
    lease = scene.grant(1)
    scene.sources.abort(P, 1)
    scene.renew(lease)
    scene.wait(scene.times.ttl + 1)
    scene.report(lease, 0)
    scene.wait(scene.times.keep_outcome)
    with pytest.raises(LeaseEnded):
        scene.renew(lease)
    events = [vars(record)["event"] for record in caplog.records]
    assert events == [
        "leases_revoked",
        "publication_ended",
        "renewal_refused",
        "lease_ended",
        "report_too_late",
        "renewal_refused",
    ]
    assert scene.records.journal.renewals["refused"] == 2


def test_names_chosen_by_strangers_forge_neither_log_lines_nor_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, EVENTS)
    evil = 'x" lease_number=7\n2026-01-01 ERROR \x1b[31mroot: pwned\u2028'
    EventLog(FakeClock()).write(logging.INFO, "engine_opened", {"engine_id": evil, "peer": "10.0.0.1"})
    text = caplog.records[0].getMessage()
    assert text == (
        'engine_opened engine_id="x\\" lease_number=7\\n2026-01-01 ERROR \\u001b[31mroot: pwned\\u2028" peer=10.0.0.1'
    )


def test_logged_refusals_have_ids_and_no_other_values(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, EVENTS)
    log = EventLog(FakeClock())
    log.refusal("Notify.renew", "LEASE_ENDED", {"lease_number": "3", "value": "secret", "incarnation": "ab" * 16}, {})
    (record,) = caplog.records
    assert record.getMessage() == ("refused method=Notify.renew reason=LEASE_ENDED lease_number=3 incarnation=abababab")


def test_reasons_with_a_level_of_their_own_exist() -> None:
    known = set(errors_pb2.ErrorReason.keys())
    assert known >= ALARMING | ROUTINE
