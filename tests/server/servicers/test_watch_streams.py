"""`Watch`: the events for a process of an engine, their order, and the end of the stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry._clock import from_duration
from kvferry.errors import (
    EngineIdInUse,
    EngineIncomplete,
    EngineUnknown,
    HomeRecovering,
    InvalidField,
    PeerRestarted,
    WatchTakenOver,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.limits import Limits
from tests.support.node_in_process import (
    ADVERTISE,
    Node,
    Watch,
    error_of,
    proto,
    raised,
    read_done,
    reference,
    running,
    snapshot,
)
from tests.support.parties import P2, SECRETS, TIMES, P


async def test_first_watch_opens_an_engine_and_asks_for_a_resync(node: Node) -> None:
    watch = Watch(node)
    first = await watch.next()
    assert first.home_epoch == node.home.epoch
    assert first.sequence == 0
    assert first.opened.advertise == ADVERTISE
    assert from_duration(first.opened.times.ttl) == TIMES.ttl
    assert not first.opened.resumed
    # A home cannot know whether an engine that it has not seen has published anything.
    assert (await watch.next()).synced.need_resync
    assert isinstance(await raised(node.read()), HomeRecovering | EngineIncomplete)
    await node.source(*snapshot())
    await node.register()
    assert (await node.read()).HasField("accepted")
    again = Watch(node)
    await again.next()
    assert not (await again.next()).synced.need_resync


async def test_newer_watch_takes_over_and_the_old_one_ends_with_an_error(node: Node) -> None:
    old = await node.open_engine()
    new = Watch(node)
    await new.next()
    assert isinstance(await raised(old.next()), WatchTakenOver)
    # The end of the old Watch is not a loss.
    node.pass_by(2 * TIMES.engine_ttl)
    assert node.home.engines.find_live(P.engine_id).lost_at is None


async def test_incarnation_is_refused_until_the_earlier_is_dead(node: Node) -> None:
    watch = await node.open_engine()
    error = await raised(Watch(node, P2).next())
    assert isinstance(error, EngineIdInUse)
    assert error.retry_after == TIMES.engine_ttl
    await node.leaves(watch)
    node.pass_by(TIMES.engine_ttl)
    await node.open_engine(P2)
    assert isinstance(await raised(Watch(node, P).next()), PeerRestarted)


async def test_released_is_in_every_full_state_until_acknowledged(ready: Node) -> None:
    await ready.publish()
    assert (await ready.reader(pb.Notification(decline=pb.Decline(reference=reference()))))[0].HasField("done")
    for _ in range(2):
        watch = Watch(ready)
        await watch.next()
        released = (await watch.next()).released
        assert (released.publication, released.request_id) == (1, "r1")
        assert released.outcome == pb.RELEASE_OUTCOME_DECLINED
        assert await watch.kinds(1) == ["synced"]
        watch.cancel()
    await ready.source(pb.Notification(released_ack=pb.ReleasedAck(publications=[1])))
    assert await Watch(ready).kinds(2) == ["opened", "synced"]


async def test_released_lists_the_end_of_every_read(node: Node) -> None:
    watch = await node.open_engine()
    await node.register()
    await node.publish(expected_reads=1)
    lease_id = (await node.read(parties=2)).accepted.lease_id
    await node.reader(read_done(lease_id, 3, 5))
    told = await watch.next()
    assert told.sequence == 1
    assert told.released.outcome == pb.RELEASE_OUTCOME_READ
    [read] = told.released.reads
    assert (read.reader.engine_id, read.lease_number, read.state) == ("decode", 1, pb.READ_STATE_VALID)
    assert (read.parties, read.reported, read.bytes) == (2, 2, 14)


async def test_a_watch_resumes_by_epoch_and_sequence(node: Node) -> None:
    watch = await node.open_engine()
    await node.register()
    for number in (1, 2, 3):
        await node.publish(number)
        await node.reader(pb.Notification(decline=pb.Decline(reference=reference(number))))
    assert [(await watch.next()).sequence for _ in range(2)] == [1, 2]
    watch.cancel()
    resumed = Watch(node, resume_epoch=node.home.epoch, resume_sequence=2)
    assert (await resumed.next()).opened.resumed
    told = await resumed.next()
    assert (told.sequence, told.released.publication) == (3, 3)
    for epoch, sequence in ((b"?" * 16, 2), (node.home.epoch, 7)):
        full = Watch(node, resume_epoch=epoch, resume_sequence=sequence)
        assert not (await full.next()).opened.resumed
        assert await full.kinds(4) == ["released", "released", "released", "synced"]


async def test_slow_consumer_gets_lagged_and_then_the_full_state(tmp_path: Path) -> None:
    async with running(tmp_path, Limits(watch_queue=2)) as node:
        watch = await node.open_engine()
        await node.register()
        with node.home.turn():
            for number in range(1, 6):
                node.home.sources.abort(P, number)
        lagged = await watch.next()
        assert lagged.lagged.dropped == 3
        assert await watch.kinds(6) == ["released"] * 5 + ["synced"]
        await node.publish(6)
        await node.source(pb.Notification(abort=pb.Abort(publication=6)))
        assert (await watch.next()).sequence == 6


async def test_lost_rank_is_sent_to_the_scheduler_and_makes_the_engine_unreadable(node: Node) -> None:
    watch = await node.open_engine()
    rank = Watch(node, role=pb.WATCH_ROLE_RANK, rank=1)
    await rank.next()
    assert (await rank.next()).synced.need_resync
    for index in range(2):
        await node.register(index, 2)
    await node.leaves(rank)
    node.pass_by(TIMES.engine_ttl)
    assert (await watch.next()).rank_lost.rank == 1
    assert isinstance(await raised(node.read()), EngineIncomplete)
    error = await raised(node.handshake())
    assert isinstance(error, EngineIncomplete)
    assert error.values["missing_ranks"] == "1"
    # The engine is readable again once the rank has registered.
    await node.register(1, 2)
    await node.handshake()


async def test_ranks_of_a_forgotten_engine_come_back_with_its_scheduler(node: Node) -> None:
    """Otherwise they would keep Watches that nobody serves, and the engine would lack them for ever."""
    watch = await node.open_engine()
    await node.register()
    rank = Watch(node, role=pb.WATCH_ROLE_RANK)
    assert await rank.kinds(2) == ["opened", "synced"]
    await node.leaves(watch)
    node.pass_by(TIMES.engine_ttl)
    node.pass_by(TIMES.retire)
    assert isinstance(await raised(rank.next()), EngineUnknown)
    await node.open_engine()
    again = Watch(node, role=pb.WATCH_ROLE_RANK)
    await again.next()
    assert (await again.next()).synced.need_resync


async def test_watches_of_the_ranks_of_a_replaced_engine_end(node: Node) -> None:
    watch = await node.open_engine()
    rank = Watch(node, role=pb.WATCH_ROLE_RANK)
    assert await rank.kinds(2) == ["opened", "synced"]
    await node.leaves(watch)
    node.pass_by(TIMES.engine_ttl)
    await node.open_engine(P2)
    error = await raised(rank.next())
    assert isinstance(error, PeerRestarted)
    assert error.values["current"] == P2.incarnation.hex()


@pytest.mark.parametrize("left", [True, False])
async def test_node_of_a_relayed_rank_that_left_is_not_lost(node: Node, left: bool) -> None:
    watch = await node.open_engine()
    rank = Watch(node, role=pb.WATCH_ROLE_RANK, rank=1, relayed_by="other:1")
    await rank.next()
    for index in range(2):
        await node.register(index, 2)
    said = [pb.Notification(rank_left=pb.RankLeft(rank=number)) for number in (0, 1)]
    if left:
        refused, taken = await node.source(*said)
        assert error_of(refused).values["field"] == "rank_left.rank"
        assert taken.WhichOneof("kind") == "done"
    await node.leaves(rank)
    node.pass_by(TIMES.engine_ttl)
    assert (await watch.next()).rank_lost == pb.RankLost(rank=1, node="other:1", node_lost=not left)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"role": 0}, "role"),
        ({"role": 9}, "role"),
        ({"rank": 1}, "rank"),
        ({"session_secret": b"short"}, "session_secret"),
        ({"resume_epoch": b"short"}, "resume_epoch"),
        ({"engine": pb.EngineRef(engine_id="", incarnation=b"i" * 16)}, "engine.engine_id"),
        ({"engine": pb.EngineRef(engine_id="x" * 257, incarnation=b"i" * 16)}, "engine.engine_id"),
        ({"engine": pb.EngineRef(engine_id="e", incarnation=b"i" * 15)}, "engine.incarnation"),
        ({"session_secret": b""}, "session_secret"),
        ({"role": pb.WATCH_ROLE_RANK, "session_secret": b""}, "session_secret"),
    ],
)
async def test_watch_fields_are_all_checked(node: Node, changes: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {"engine": proto(P), "role": pb.WATCH_ROLE_SCHEDULER, "session_secret": SECRETS[P]}
    error = await raised(node.kv.Watch(pb.WatchRequest(**{**given, **changes})).read())
    assert isinstance(error, InvalidField)
    assert error.values["field"] == field
