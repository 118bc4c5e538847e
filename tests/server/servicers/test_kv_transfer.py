"""KVTransfer over a real server: each call's good and bad cases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

from kvferry._clock import from_duration
from kvferry._wire.geometry_codec import rank_to_proto
from kvferry._wire.reference import format_reference, parse_reference
from kvferry._wire.status import from_notification_error
from kvferry.errors import (
    BadAgentMetadata,
    BadBlock,
    BadGeometry,
    BadReference,
    CacheDiffers,
    EngineIdInUse,
    EngineIncomplete,
    EngineUnknown,
    HomeRecovering,
    Incompatible,
    InvalidField,
    KvferryError,
    LeaseEnded,
    LimitReached,
    NotImplementedHere,
    PeerRestarted,
    PublicationReleased,
    PublicationStale,
    PublicationTimeout,
    RelayLoop,
    ServerDraining,
    WatchTakenOver,
    WrongKey,
    WrongSession,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.limits import Limits
from tests.support.node_in_process import (
    ADVERTISE,
    TIMEOUT,
    Node,
    Watch,
    handshake_request,
    proto,
    publish_notification,
    raised,
    read_done,
    read_request,
    reference,
    register_request,
    running,
    snapshot,
)
from tests.support.parties import P2, SECRETS, TIMES, D, E, P, key, rank_geometry


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path) as node:
        yield node


@pytest_asyncio.fixture
async def ready(node: Node) -> AsyncIterator[Node]:
    """A node whose engine P has its one rank."""
    watch = await node.open_engine()
    await node.register()
    yield node
    watch.cancel()


def error_of(result: pb.NotificationResult) -> KvferryError:
    assert result.WhichOneof("kind") == "error", result
    return from_notification_error(result.error)


# Watch.


async def test_the_first_watch_opens_an_engine_and_says_what_the_home_needs(node: Node) -> None:
    watch = Watch(node)
    first = await watch.next()
    assert first.home_epoch == node.home.epoch
    assert first.sequence == 0
    assert first.opened.advertise == ADVERTISE
    assert from_duration(first.opened.times.ttl) == TIMES.ttl
    assert not first.opened.resumed
    # A home cannot know whether an engine that it has not seen has published anything.
    assert (await watch.next()).synced.need_resync
    assert isinstance(await raised(node.read().next()), HomeRecovering | EngineIncomplete)
    await node.source(*snapshot())
    await node.register()
    assert (await node.read().next()).HasField("accepted")
    again = Watch(node)
    await again.next()
    assert not (await again.next()).synced.need_resync


async def test_a_newer_watch_takes_over_and_the_old_one_is_told(node: Node) -> None:
    old = await node.open_engine()
    new = Watch(node)
    await new.next()
    assert isinstance(await raised(old.next()), WatchTakenOver)
    # The end of the old one is not a loss.
    node.pass_by(2 * TIMES.engine_ttl)
    assert node.home.engines.find_live(P.engine_id).lost_at is None


async def test_another_incarnation_waits_until_the_first_is_dead(node: Node) -> None:
    watch = await node.open_engine()
    error = await raised(Watch(node, P2).next())
    assert isinstance(error, EngineIdInUse)
    assert error.retry_after == TIMES.engine_ttl
    await node.leaves(watch)
    node.pass_by(TIMES.engine_ttl)
    await node.open_engine(P2)
    assert isinstance(await raised(Watch(node, P).next()), PeerRestarted)


async def test_released_is_told_in_every_full_state_until_it_is_acknowledged(ready: Node) -> None:
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


async def test_released_tells_what_became_of_every_read(node: Node) -> None:
    watch = await node.open_engine()
    await node.register()
    await node.publish(expected_reads=1)
    stream = node.read(parties=2)
    lease_id = (await stream.next()).accepted.lease_id
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


async def test_a_slow_consumer_is_told_that_it_lagged_and_then_the_full_state(tmp_path: Path) -> None:
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


async def test_a_rank_that_is_lost_is_told_to_its_scheduler_and_makes_the_engine_unreadable(node: Node) -> None:
    watch = await node.open_engine()
    rank = Watch(node, role=pb.WATCH_ROLE_RANK, rank=1)
    await rank.next()
    assert (await rank.next()).synced.need_resync
    for index in range(2):
        await node.register(index, 2)
    await node.leaves(rank)
    node.pass_by(TIMES.engine_ttl)
    assert (await watch.next()).rank_lost.rank == 1
    assert isinstance(await raised(node.read().next()), EngineIncomplete)
    error = await raised(node.handshake())
    assert isinstance(error, EngineIncomplete)
    assert error.values["missing_ranks"] == "1"
    # Registering again heals it.
    await node.register(1, 2)
    await node.handshake()


@pytest.mark.parametrize("left", [True, False])
async def test_of_a_rank_that_its_node_server_says_has_left_the_node_is_not_lost(node: Node, left: bool) -> None:
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
async def test_every_field_of_a_watch_is_checked(node: Node, changes: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {"engine": proto(P), "role": pb.WATCH_ROLE_SCHEDULER, "session_secret": SECRETS[P]}
    error = await raised(node.kv.Watch(pb.WatchRequest(**{**given, **changes})).read())
    assert isinstance(error, InvalidField)
    assert error.values["field"] == field


# RegisterCache.


async def test_a_rank_registers_and_hears_who_is_missing(node: Node) -> None:
    await node.open_engine()
    first = await node.register(0, 2)
    assert list(first.missing_ranks) == [1]
    assert first.advertise == ADVERTISE
    assert not (await node.register(1, 2)).missing_ranks
    assert await node.register(0, 2) == await node.register(0, 2)


async def test_registrations_need_an_open_session(node: Node) -> None:
    request = register_request()
    assert isinstance(await raised(node.kv.RegisterCache(request, timeout=TIMEOUT)), EngineUnknown)
    await node.open_engine()
    request.session_secret = b"s" * 32
    assert isinstance(await raised(node.kv.RegisterCache(request, timeout=TIMEOUT)), WrongSession)
    request.session_secret = SECRETS[P]
    await node.kv.RegisterCache(request, timeout=TIMEOUT)


async def test_another_content_for_a_rank_is_refused(ready: Node) -> None:
    error = await raised(ready.register(geometry=rank_geometry(base=1 << 20)))
    assert isinstance(error, CacheDiffers)
    assert error.values["field"] == "rank.planes[layers.0/key].base"


async def test_a_new_incarnation_hears_when_the_last_lease_on_the_old_one_ends(node: Node) -> None:
    watch = await node.open_engine()
    assert from_duration((await node.register()).reuse_after) == 0
    await node.publish()
    await node.read().next()
    await node.leaves(watch)
    node.pass_by(TIMES.engine_ttl)
    await node.open_engine(P2)
    answer = await node.register(ref=P2)
    assert from_duration(answer.reuse_after) == TIMES.ttl - TIMES.engine_ttl


async def test_a_home_that_is_new_does_not_know_older_leases(tmp_path: Path) -> None:
    async with running(tmp_path, new=True) as node:
        await node.open_engine()
        assert from_duration((await node.register()).reuse_after) == TIMES.max_ttl


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"relayed_by": "third:1", "home": "other:1"}, RelayLoop),
        ({"home": "other:1"}, InvalidField),
        ({"home": "nonsense"}, InvalidField),
        ({"session_secret": b""}, InvalidField),
        ({"num_ranks": 0}, InvalidField),
        ({"num_ranks": 1 << 31}, InvalidField),
    ],
)
async def test_registrations_that_cannot_be(node: Node, changes: dict[str, Any], expected: type[KvferryError]) -> None:
    await node.open_engine()
    assert isinstance(await raised(node.register(**changes)), expected)


async def test_damaged_agent_metadata_is_refused(node: Node) -> None:
    await node.open_engine()
    request = register_request()
    request.agent.metadata += b"!"
    assert isinstance(await raised(node.kv.RegisterCache(request, timeout=TIMEOUT)), BadAgentMetadata)
    request = register_request()
    request.ClearField("rank")
    assert isinstance(await raised(node.kv.RegisterCache(request, timeout=TIMEOUT)), InvalidField)


async def test_a_big_rank_registers_and_is_handshaken(node: Node) -> None:
    # Big enough to be decoded and planned with on a thread.
    await node.open_engine()
    geometry = rank_geometry()
    request = register_request()
    del request.rank.planes[:]
    for layer in range(200):
        for plane in rank_to_proto(geometry).planes[:2]:
            plane.layer = f"layers.{layer}"
            request.rank.planes.append(plane)
    await node.kv.RegisterCache(request, timeout=TIMEOUT)
    # Layers may share their memory at a source, but not where they are read into.
    for index, plane in enumerate(request.rank.planes):
        plane.base += index << 27
    answer = await node.handshake(rank=request.rank)
    assert len(answer.geometry.ranks[0].planes) == 400


# Handshake.


async def test_a_handshake_answers_the_whole_engine(node: Node) -> None:
    await node.open_engine()
    for rank in range(2):
        await node.register(rank, 2)
    answer = await node.handshake()
    engine = answer.geometry
    assert (engine.engine_id, engine.incarnation) == (P.engine_id, P.incarnation)
    assert [rank.rank for rank in engine.ranks] == [0, 1]
    assert {rank: agent.name for rank, agent in answer.agents.items()} == {
        rank: f"prefill/{P.incarnation.hex()}/{rank}" for rank in (0, 1)
    }
    first, *pages = [message async for message in node.kv.Handshake(handshake_request(), timeout=TIMEOUT)]
    assert (from_duration(first.times.final), first.num_ranks) == (TIMES.final, 2)
    assert {message.home_epoch for message in (first, *pages)} == {node.home.epoch}


async def test_what_cannot_be_read_is_refused_before_any_metadata(ready: Node) -> None:
    request = handshake_request(identity={"model": "another"})
    request.rank.planes[0].format = "other"
    error = await raised(ready.handshake(request))
    assert isinstance(error, Incompatible)
    fields = {(mismatch.kind, mismatch.source, mismatch.destination) for mismatch in error.mismatches}
    assert ("identity", "m", "another") in fields
    assert any(kind == "format" for kind, _, _ in fields)


async def test_a_reader_that_declares_a_byte_twice_is_refused(ready: Node) -> None:
    request = handshake_request()
    request.rank.planes[1].base = request.rank.planes[0].base
    error = await raised(ready.handshake(request))
    assert isinstance(error, BadGeometry)
    assert error.values["where"] == "rank 0, planes layers.0/key and layers.0/value"


async def test_an_engine_that_handshakes_with_itself_learns_its_geometry_without_agents(node: Node) -> None:
    await node.open_engine()
    await node.register(0, 2)
    own = pb.HandshakeRequest(engine_id=P.engine_id, reader=proto(P))
    error = await raised(node.handshake(own))
    assert isinstance(error, EngineIncomplete)
    assert error.values["missing_ranks"] == "1"
    await node.register(1, 2)
    answer = await node.handshake(own)
    assert len(answer.geometry.ranks) == 2
    assert not answer.agents
    own.reader.incarnation = P2.incarnation
    assert isinstance(await raised(node.handshake(own)), PeerRestarted)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"engine_id": "nobody", "incarnation": b"", "reference": ""}, EngineUnknown),
        ({"engine_id": ""}, InvalidField),
        ({"incarnation": b"x"}, InvalidField),
        ({"incarnation": P2.incarnation}, PeerRestarted),
        ({"reader": None}, InvalidField),
        ({"rank": None}, InvalidField),
        ({"groups": []}, KvferryError),
        ({"identity": {str(key): "" for key in range(300)}}, InvalidField),
    ],
)
async def test_handshakes_that_cannot_be(ready: Node, changes: dict[str, Any], expected: type[KvferryError]) -> None:
    error = await raised(ready.handshake(**changes))
    assert isinstance(error, expected)
    assert error.code != "INTERNAL"


# Publish and ReadBlocks.


async def test_publish_answers_the_reference(ready: Node) -> None:
    published = (await ready.publish()).published
    assert published.reference == reference()
    assert parse_reference(published.reference).request_id == "r1"
    assert from_duration(published.final_remaining) == TIMES.final


async def test_a_read_gets_its_lease_then_the_blocks_then_complete_and_ends_with_the_lease(ready: Node) -> None:
    await ready.publish(payload=b"first token")
    ready.pass_by(5)
    stream = ready.read()
    accepted = (await stream.next()).accepted
    assert from_duration(accepted.remaining) == TIMES.ttl
    assert from_duration(accepted.renew_every) == TIMES.ttl / 3
    assert (accepted.source, accepted.publication, accepted.request_id) == (proto(P), 1, "r1")
    blocks = (await stream.next()).blocks
    assert blocks.groups[0] == publish_notification().publish.groups[0]
    complete = (await stream.next()).complete
    assert (complete.payload, complete.steps) == (b"first token", 1)
    [result] = await ready.reader(read_done(accepted.lease_id, 0))
    assert result.read_ended == pb.ReadEnded(verdict=pb.VERDICT_VALID, reported=1, complete=True)
    with pytest.raises(EOFError):
        await stream.next()


async def test_a_read_that_overtakes_its_publication_waits_and_gets_it_in_steps(ready: Node) -> None:
    stream = ready.read()
    assert (await stream.next()).accepted.request_id == ""
    for step in range(3):
        await ready.publish(step=step, last=step == 2)
        assert (await stream.next()).blocks.step == step
    assert (await stream.next()).complete.steps == 3


async def test_a_stream_that_is_lost_ends_nothing_and_a_resume_gets_everything_again(ready: Node) -> None:
    await ready.publish(last=False)
    first = ready.read()
    lease_id = (await first.next()).accepted.lease_id
    await first.next()
    first.cancel()
    ready.pass_by(10)
    again = ready.read()
    accepted = (await again.next()).accepted
    assert accepted.lease_id == lease_id
    assert from_duration(accepted.remaining) == TIMES.ttl - 10
    assert (await again.next()).blocks.step == 0
    await ready.publish(step=1)
    assert (await again.next()).blocks.step == 1
    await again.next()
    ready.pass_by(TIMES.ttl - 10)
    with pytest.raises(EOFError):
        await again.next()


async def test_readers_are_told_of_an_abort_and_keep_their_lease(ready: Node) -> None:
    await ready.publish()
    stream = ready.read()
    lease_id = (await stream.next()).accepted.lease_id
    await stream.next()
    await stream.next()
    await ready.source(pb.Notification(abort=pb.Abort(publication=1)))
    assert (await stream.next()).revoked.reason == pb.REVOKE_REASON_ABORTED
    [renewed] = await ready.reader(pb.Notification(renew=pb.Renew(lease_id=lease_id)))
    assert from_duration(renewed.renewed.remaining) == TIMES.ttl
    assert renewed.renewed.revoked == pb.REVOKE_REASON_ABORTED
    ready.pass_by(TIMES.ttl)
    with pytest.raises(EOFError):
        await stream.next()


async def test_readers_are_told_of_the_source_s_death(node: Node) -> None:
    watch = await node.open_engine()
    await node.register()
    stream = node.read()
    await stream.next()
    await node.leaves(watch)
    assert isinstance(await raised(node.read(2).next()), EngineIncomplete)
    node.pass_by(TIMES.engine_ttl)
    assert (await stream.next()).revoked.reason == pb.REVOKE_REASON_SOURCE_LOST
    assert isinstance(await raised(node.read(2).next()), EngineUnknown)


async def test_a_publication_that_does_not_come_is_a_typed_timeout(ready: Node) -> None:
    stream = ready.read(wait=Duration(nanos=20_000_000))
    await stream.next()
    ready.clock.pass_by(0.02)
    error = await raised(stream.next())
    assert isinstance(error, PublicationTimeout)
    assert error.values["waited_ms"] == "20"


async def test_reads_that_cannot_be(ready: Node) -> None:
    await ready.publish(1)
    stream = ready.read(1)
    await ready.reader(read_done((await stream.next()).accepted.lease_id, 0))
    router = pb.Reference(home=ADVERTISE, engine_id="e", key=key(), router_key="r")
    cases: list[tuple[pb.ReadBlocksRequest, type[KvferryError]]] = [
        (read_request(1, reader=E), PublicationReleased),
        (read_request(1, reference="no reference"), BadReference),
        (read_request(1, reference=format_reference(router)), NotImplementedHere),
        (read_request(1, reference=reference(1, P2)), PeerRestarted),
        (read_request(1, reference=reference(1, D)), EngineUnknown),
        (read_request(1, reference=reference(1, wrong=b"x" * 16)), WrongKey),
        (read_request(1, read_id=b""), InvalidField),
        (read_request(1, read_id=b"x" * 17), InvalidField),
        (read_request(1, parties=0), InvalidField),
        (read_request(1, parties=1 << 31), InvalidField),
        (read_request(1, wait=Duration(seconds=-1)), InvalidField),
        (read_request(1, wait=Duration(nanos=-1)), InvalidField),
        (pb.ReadBlocksRequest(), InvalidField),
    ]
    for request, expected in cases:
        error = await raised(ready.kv.ReadBlocks(request, timeout=TIMEOUT).read())
        assert isinstance(error, expected), (request, error)
    await ready.source(pb.Notification(released_ack=pb.ReleasedAck(publications=[1])))
    assert isinstance(await raised(ready.read(1, reader=E).next()), PublicationStale)


async def test_a_wrong_key_is_refused_at_once_also_before_the_publication_comes(ready: Node) -> None:
    wrong = reference(1, wrong=b"x" * 16)
    assert isinstance(await raised(ready.read(reference=wrong).next()), WrongKey)
    [declined] = await ready.reader(pb.Notification(decline=pb.Decline(reference=wrong)))
    assert isinstance(error_of(declined), WrongKey)
    await ready.publish()
    assert (await ready.read().next()).HasField("accepted")


async def test_reads_beyond_a_limit_are_asked_to_come_again(tmp_path: Path) -> None:
    async with running(tmp_path, Limits(waiting_reads=1)) as node:
        await node.open_engine()
        await node.register()
        await node.read(1).next()
        error = await raised(node.read(2).next())
        assert isinstance(error, LimitReached)
        assert error.retryable


# Notify.


async def test_a_notification_that_fails_does_not_stop_the_others(ready: Node) -> None:
    bad = publish_notification(2)
    bad.publish.groups[0].run_starts[0] = 5000
    results = await ready.source(
        publish_notification(1),
        bad,
        pb.Notification(),
        pb.Notification(abort=pb.Abort()),
        pb.Notification(resync=pb.Resync()),
        publish_notification(3),
    )
    assert [result.WhichOneof("kind") for result in results] == [
        "published",
        "error",
        "error",
        "error",
        "error",
        "published",
    ]
    assert isinstance(error_of(results[1]), BadBlock)
    assert all(isinstance(error_of(results[index]), InvalidField) for index in (2, 3, 4))


async def test_a_source_speaks_with_its_session_secret_only(ready: Node) -> None:
    request = pb.NotifyRequest(sender=proto(P), notifications=[publish_notification()])
    assert isinstance(await raised(ready.kv.Notify(request, timeout=TIMEOUT)), WrongSession)
    for wrong in (b"x" * 32, SECRETS[P2]):
        request.session_secret = wrong
        assert isinstance(await raised(ready.kv.Notify(request, timeout=TIMEOUT)), WrongSession)
    request.session_secret = SECRETS[P]
    request.ClearField("sender")
    assert isinstance(await raised(ready.kv.Notify(request, timeout=TIMEOUT)), InvalidField)
    request.sender.CopyFrom(proto(P2))
    assert isinstance(await raised(ready.kv.Notify(request, timeout=TIMEOUT)), WrongSession)
    request.session_secret = SECRETS[P2]
    assert isinstance(await raised(ready.kv.Notify(request, timeout=TIMEOUT)), PeerRestarted)


async def test_a_batch_is_bounded(ready: Node) -> None:
    request = pb.NotifyRequest(sender=proto(D), notifications=[pb.Notification()] * 1025)
    assert isinstance(await raised(ready.kv.Notify(request, timeout=TIMEOUT)), InvalidField)
    assert await ready.reader() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"number": 0},
        {"request_id": ""},
        {"request_id": "x" * 257},
        {"payload": b"x" * (64 * 1024 + 1)},
        {"payload": b"x", "last": False},
        {"step": 1},
        {"groups": [pb.GroupBlocks(group="full", end_token=16, run_starts=[1, 2], run_counts=[1])]},
        {"groups": [pb.GroupBlocks(group="full", end_token=16, run_starts=[1], run_counts=[0])]},
        {"groups": [pb.GroupBlocks(group="full", end_token=16, run_starts=[1], run_counts=[2**32 - 1])]},
        {"groups": [pb.GroupBlocks(group="full", end_token=16, run_starts=[2**64 - 1], run_counts=[1])]},
        {"groups": [pb.GroupBlocks(group="full", first_token=32, end_token=16)]},
        {"groups": [pb.GroupBlocks(group="full", end_token=2**64 - 1, run_starts=[1], run_counts=[1])]},
        {"groups": [pb.GroupBlocks(group="full", state_token=2**63)]},
        {"groups": [pb.GroupBlocks(group="")]},
        {"groups": [pb.GroupBlocks(group="nobody")]},
    ],
)
async def test_every_field_of_a_publication_is_checked(ready: Node, changes: dict[str, Any]) -> None:
    assert isinstance(error_of(await ready.publish(**changes)), InvalidField)
    assert not list(ready.home.records.publications())


async def test_readers_notifications_are_checked_and_answered_by_kind(ready: Node) -> None:
    lost = b"?" * 16
    results = await ready.reader(
        pb.Notification(renew=pb.Renew(lease_id=lost)),
        read_done(lost, 0),
        pb.Notification(cancel=pb.CancelRead(lease_id=lost)),
        pb.Notification(renew=pb.Renew(lease_id=b"x")),
        read_done(lost),
        read_done(lost, 0, outcome=0),
        pb.Notification(decline=pb.Decline(reference="?")),
        pb.Notification(decline=pb.Decline(reference=reference(1, D))),
    )
    assert isinstance(error_of(results[0]), LeaseEnded)
    assert results[1].read_ended.verdict == pb.VERDICT_UNKNOWN
    assert results[2].HasField("done")
    assert all(isinstance(error_of(results[index]), InvalidField) for index in (3, 4, 5))
    assert isinstance(error_of(results[6]), BadReference)
    assert isinstance(error_of(results[7]), EngineUnknown)
    unsigned = pb.NotifyRequest(notifications=[pb.Notification(renew=pb.Renew(lease_id=lost))])
    answer = await ready.kv.Notify(unsigned, timeout=TIMEOUT)
    assert isinstance(error_of(answer.results[0]), InvalidField)


async def test_a_cancel_ends_the_stream_and_the_lease(ready: Node) -> None:
    await ready.publish()
    stream = ready.read()
    lease_id = (await stream.next()).accepted.lease_id
    await stream.next()
    await stream.next()
    await ready.reader(pb.Notification(cancel=pb.CancelRead(lease_id=lease_id)))
    with pytest.raises(EOFError):
        await stream.next()
    assert isinstance(await raised(ready.read().next()), LeaseEnded)
    assert (await ready.read(reader=E).next()).HasField("accepted")


# A home that restarted.


async def test_a_restarted_home_is_refilled_and_answers_unavailable_until_then(tmp_path: Path) -> None:
    async with running(tmp_path, new=True) as node:
        assert isinstance(await raised(node.read().next()), HomeRecovering)
        assert isinstance(await raised(node.register()), HomeRecovering)
        old = b"o" * 16
        watch = Watch(node, resume_epoch=old, resume_sequence=9)
        opened = (await watch.next()).opened
        assert not opened.resumed
        assert (await watch.next()).synced.need_resync
        # The scheduler may be faster than its ranks.
        begin = pb.Notification(resync=pb.Resync(phase=pb.RESYNC_PHASE_BEGIN, high_water=9))
        await node.source(begin, publish_notification(4))
        await node.register()
        assert isinstance(await raised(node.read(4).next()), HomeRecovering)
        end = pb.Notification(resync=pb.Resync(phase=pb.RESYNC_PHASE_END, high_water=9))
        assert (await node.source(end))[0].HasField("done")
        stream = node.read(4)
        lease_id = (await stream.next()).accepted.lease_id
        assert isinstance(await raised(node.read(5).next()), PublicationStale)
        await node.reader(read_done(lease_id, 0))
        node.pass_by(TIMES.max_ttl - 1)
        assert not node.home.records.released(P)
        node.pass_by(1)
        assert (await watch.next()).released.publication == 4


# Draining.


async def test_a_draining_home_says_so_ends_its_streams_and_still_takes_reports(ready: Node) -> None:
    await ready.publish()
    watch, stream = Watch(ready), ready.read()
    await watch.kinds(2)
    lease_id = (await stream.next()).accepted.lease_id
    await stream.next()
    await stream.next()
    ready.home.drain()
    assert await watch.kinds(1) == ["draining"]
    for call in (
        watch.next(),
        stream.next(),
        ready.read(2).next(),
        ready.register(),
        Watch(ready).next(),
        ready.handshake(),
    ):
        assert isinstance(await raised(call), ServerDraining)
    assert isinstance(error_of(await ready.publish(2)), ServerDraining)
    renewed, ended = await ready.reader(pb.Notification(renew=pb.Renew(lease_id=lease_id)), read_done(lease_id, 0))
    assert from_duration(renewed.renewed.remaining) == TIMES.ttl
    assert ended.read_ended.verdict == pb.VERDICT_VALID
