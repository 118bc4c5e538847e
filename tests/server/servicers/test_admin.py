"""Operators' calls over a real server, their effect on leases and engines, and the audit log."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable

import pytest

from kvferry._clock import from_duration
from kvferry.errors import (
    EngineUnknown,
    InvalidField,
    KvferryError,
    LeaseEnded,
    PeerRestarted,
    PublicationAborted,
    PublicationStale,
    ServerDraining,
)
from kvferry.v1 import admin_pb2 as apb
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.node_in_process import TIMEOUT, Node, Watch, error_of, proto, publish_notification, raised, read_done
from tests.support.parties import P2, TIMES, D, P, read_id


def drain(node: Node, epoch: bytes | None = None) -> Awaitable[apb.DrainResponse]:
    request = apb.DrainRequest(home_epoch=node.home.epoch if epoch is None else epoch)
    return node.admin.Drain(request, timeout=TIMEOUT)


def end_lease(node: Node, number: int, **changes: object) -> Awaitable[apb.EndLeaseResponse]:
    given = {"home_epoch": node.home.epoch, "source": proto(P), "lease_number": number}
    return node.admin.EndLease(apb.EndLeaseRequest(**{**given, **changes}), timeout=TIMEOUT)  # type: ignore[arg-type]


def abort(node: Node, number: int = 1, **changes: object) -> Awaitable[apb.AbortPublicationResponse]:
    given = {"source": proto(P), "publication": number}
    request = apb.AbortPublicationRequest(**{**given, **changes})  # type: ignore[arg-type]
    return node.admin.AbortPublication(request, timeout=TIMEOUT)


def evict(node: Node, engine: pb.EngineRef | None = None) -> Awaitable[apb.EvictEngineResponse]:
    return node.admin.EvictEngine(apb.EvictEngineRequest(engine=engine or proto(P)), timeout=TIMEOUT)


async def renewed(node: Node, lease_id: bytes) -> pb.Renewed:
    (result,) = await node.reader(pb.Notification(renew=pb.Renew(lease_id=lease_id)))
    return result.renewed


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name.endswith("audit")]


async def test_an_ended_lease_is_not_renewed_and_still_lasts_its_time(ready: Node) -> None:
    await ready.publish()
    accepted = (await ready.read()).accepted
    ready.pass_by(TIMES.ttl / 2)
    for _ in range(2):
        answer = await end_lease(ready, accepted.lease_number)
        assert answer.state == pb.READ_STATE_READING
        # Never cut short: the reader may be reading at this moment.
        assert from_duration(answer.remaining) == pytest.approx(TIMES.ttl / 2)
    again = await ready.read(lease_id=accepted.lease_id, next_step=1)
    assert again.HasField("complete")
    assert again.revoked.reason == pb.REVOKE_REASON_OPERATOR
    told = await renewed(ready, accepted.lease_id)
    assert told.revoked == pb.REVOKE_REASON_OPERATOR
    assert from_duration(told.remaining) == pytest.approx(TIMES.ttl / 2)
    (ended,) = await ready.reader(read_done(accepted.lease_id, 0))
    assert ended.read_ended.verdict == pb.VERDICT_VALID


async def test_an_ended_lease_runs_out_and_its_publication_is_held_again(ready: Node) -> None:
    await ready.publish()
    accepted = (await ready.read()).accepted
    await end_lease(ready, accepted.lease_number)
    ready.pass_by(TIMES.ttl)
    answer = await end_lease(ready, accepted.lease_number)
    assert answer.state == pb.READ_STATE_EXPIRED
    assert not from_duration(answer.remaining)
    again = (await ready.read(read_id=read_id("again"))).accepted
    assert again.lease_number != accepted.lease_number


async def test_lease_is_named_by_number_source_and_start_of_the_home(ready: Node) -> None:
    await ready.publish()
    number = (await ready.read()).accepted.lease_number
    for wrong in (
        end_lease(ready, number, home_epoch=bytes(16)),
        end_lease(ready, number, source=proto(D)),
        end_lease(ready, number + 1),
    ):
        assert isinstance(await raised(wrong), LeaseEnded)
    for malformed in ({"home_epoch": b""}, {"source": pb.EngineRef()}):
        assert isinstance(await raised(end_lease(ready, number, **malformed)), InvalidField)
    assert isinstance(await raised(end_lease(ready, 0)), InvalidField)


async def test_an_aborted_publication_is_released_with_its_last_lease(ready: Node) -> None:
    watch = await ready.open_engine()
    await ready.publish()
    accepted = (await ready.read()).accepted
    for _ in range(2):
        answer = await abort(ready)
        assert (answer.state, answer.leases) == (ipb.REQUEST_STATE_ENDING, 1)
        assert from_duration(answer.leases_remaining) == pytest.approx(TIMES.ttl)
    assert isinstance(await raised(ready.read(read_id=read_id("late"))), PublicationAborted)
    await ready.reader(read_done(accepted.lease_id, 0))
    released = (await watch.next()).released
    assert (released.publication, released.outcome) == (1, pb.RELEASE_OUTCOME_ABORTED)
    assert (await abort(ready)).state == ipb.REQUEST_STATE_RELEASED
    await ready.source(pb.Notification(released_ack=pb.ReleasedAck(publications=[1])))
    assert isinstance(await raised(abort(ready)), PublicationStale)


async def test_abort_of_an_awaited_publication_is_refused_and_lets_the_publication_arrive(ready: Node) -> None:
    assert isinstance(await raised(abort(ready, 5)), PublicationStale)
    assert isinstance(await raised(abort(ready, source=proto(D))), EngineUnknown)
    assert isinstance(await raised(abort(ready, 0)), InvalidField)
    assert (await ready.publish(5)).WhichOneof("kind") == "published"


async def test_an_evicted_engine_is_gone_for_good_and_its_leases_run_out(node: Node) -> None:
    watch = await node.open_engine()
    await node.register()
    await node.publish()
    accepted = (await node.read()).accepted
    for _ in range(2):
        answer = await evict(node)
        assert answer.leases == 1
        assert from_duration(answer.leases_remaining) == pytest.approx(TIMES.ttl)
    assert node.home.journal.engine_events["engine_evicted"] == 1
    # Its process gets an error, and may not come back, in any way.
    assert isinstance(await raised(watch.next()), PeerRestarted)
    assert isinstance(await raised(Watch(node).next()), PeerRestarted)
    assert isinstance(await raised(node.register()), PeerRestarted)
    assert isinstance(await raised(node.publish(2)), PeerRestarted)
    # Readers are refused as after a restart. The reader with a lease may finish.
    assert isinstance(await raised(node.read(read_id=read_id("late"))), PeerRestarted)
    assert isinstance(await raised(node.handshake()), PeerRestarted)
    assert (await renewed(node, accepted.lease_id)).revoked == pb.REVOKE_REASON_SOURCE_LOST
    # The engine_id is free at once, and the successor waits for the lease before it reuses the memory.
    await node.open_engine(P2)
    assert from_duration((await node.register(ref=P2)).reuse_after) == pytest.approx(TIMES.ttl)
    (ended,) = await node.reader(read_done(accepted.lease_id, 0))
    assert ended.read_ended.verdict == pb.VERDICT_VALID
    assert (await evict(node)).leases == 0
    # The call names the incarnation: a repeated call does not evict the successor.
    (published,) = await node.source(publish_notification(1), ref=P2)
    assert published.WhichOneof("kind") == "published"


async def test_watches_of_the_ranks_of_an_evicted_engine_end(node: Node) -> None:
    await node.open_engine()
    await node.register()
    rank = Watch(node, role=pb.WATCH_ROLE_RANK)
    assert await rank.kinds(2) == ["opened", "synced"]
    await evict(node)
    assert isinstance(await raised(rank.next()), PeerRestarted)


async def test_unknown_engine_cannot_be_evicted(node: Node) -> None:
    assert isinstance(await raised(evict(node)), EngineUnknown)
    assert isinstance(await raised(evict(node, pb.EngineRef(engine_id="P"))), InvalidField)


async def test_drained_home_takes_no_new_work_and_finishes_live_leases(ready: Node) -> None:
    await ready.publish()
    watch = await ready.open_engine()
    accepted = (await ready.read()).accepted
    for _ in range(2):
        answer = await drain(ready)
        assert answer.leases == 1
        assert from_duration(answer.leases_remaining) == pytest.approx(TIMES.ttl)
    assert await watch.kinds(1) == ["draining"]
    assert isinstance(await raised(ready.read(read_id=read_id("late"))), ServerDraining)
    assert isinstance(error_of(await ready.publish(2)), ServerDraining)
    assert isinstance(await raised(ready.register(ref=P)), ServerDraining)
    assert isinstance(await raised(Watch(ready, D).next()), ServerDraining)
    # The engine gets release events, also over a Watch that it had to open again.
    watch = Watch(ready)
    assert await watch.kinds(2) == ["opened", "synced"]
    await ready.reader(read_done(accepted.lease_id, 0))
    assert (await watch.next()).released.publication == 1
    answer = await drain(ready)
    assert (answer.leases, from_duration(answer.leases_remaining)) == (0, 0)
    info = await ready.introspection.GetServerInfo(ipb.GetServerInfoRequest(), timeout=TIMEOUT)
    assert info.draining
    # kvferryd ends nevertheless.
    ready.home.end_watches()
    assert isinstance(await raised(watch.next()), ServerDraining)


async def test_a_drain_names_the_start_that_it_means(ready: Node) -> None:
    for epoch in (b"", bytes(16), ready.home.epoch + b"x"):
        assert isinstance(await raised(drain(ready, epoch)), InvalidField)
    assert not ready.home.draining


async def test_each_call_is_audited_with_its_caller_its_object_and_its_result(
    ready: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvferry_server.audit")
    await ready.publish()
    accepted = (await ready.read()).accepted
    await end_lease(ready, accepted.lease_number)
    await abort(ready)
    await raised(abort(ready, 9))
    await evict(ready)
    await raised(drain(ready, bytes(16)))
    await drain(ready)
    engine = f"engine_id='prefill' incarnation='{P.incarnation.hex()}'"
    start = "by the UNIX socket"
    assert lines(caplog) == [
        (logging.INFO, f"EndLease {start} {engine} lease_number={accepted.lease_number}: OK"),
        (logging.INFO, f"AbortPublication {start} {engine} publication=1: OK"),
        (logging.WARNING, f"AbortPublication {start} {engine} publication=9: PUBLICATION_STALE"),
        (logging.INFO, f"EvictEngine {start} {engine}: OK"),
        (logging.WARNING, f"Drain {start}: INVALID_FIELD"),
        (logging.INFO, f"Drain {start}: OK"),
    ]
    assert accepted.lease_id.hex() not in caplog.text


async def test_audit_log_is_neither_flooded_nor_forged_by_a_caller(
    ready: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvferry_server.audit")
    await raised(
        evict(ready, pb.EngineRef(engine_id="x\nEvictEngine by root: OK" + "y" * 50_000, incarnation=b"\0" * 99))
    )
    ((_, line),) = lines(caplog)
    assert "\n" not in line
    assert len(line) < 500


async def test_names_of_any_kind_end_in_a_typed_error(ready: Node) -> None:
    turns = random.Random(7)
    for _ in range(50):
        noise = turns.randbytes(turns.randint(1, 40))
        engine = pb.EngineRef(engine_id=noise.hex(), incarnation=noise)
        for call in (evict(ready, engine), abort(ready, turns.getrandbits(64), source=engine), drain(ready, noise)):
            error = await raised(call)
            assert isinstance(error, KvferryError)
            assert error.reason not in ("", "INTERNAL")
