"""References that a router makes: a home waits for the publication under the router's key, and ends every wait without
a publication with a typed error that says why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from kvferry._wire.reference import parse_reference
from kvferry.errors import (
    BadReference,
    EngineIncomplete,
    EngineUnknown,
    HomeRecovering,
    InvalidField,
    KvferryError,
    LimitReached,
    PeerRestarted,
    PublicationAborted,
    PublicationReleased,
    PublicationTimeout,
    RouterKeyUsed,
    ServerDraining,
    WrongKey,
)
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.limits import MAX_ENDED_AT_ONCE
from tests.server.servicers.routers import (
    KEY,
    OTHER_KEY,
    begin,
    decline,
    engine,
    made,
    publish,
    released,
    small,
    waiting_at,
)
from tests.support.node_in_process import (
    TIMEOUT,
    Node,
    Watch,
    error_of,
    publish_notification,
    raised,
    read_done,
    reference,
    running,
    snapshot,
)
from tests.support.parties import P2, TIMES, D, E, P, read_id


async def waited(node: Node, given: str) -> KvferryError:
    """Return the error of a read that waits for 20 ms of the home's clock."""
    read = await begin(node, given, wait=Duration(nanos=20_000_000))
    node.pass_by(0.02)
    return await raised(read)


async def test_a_poll_waits_for_the_publication_and_gets_its_own_reference(ready: Node) -> None:
    read = await begin(ready, made())
    # There is no lease before the publication arrives.
    assert ready.home.records.live_leases() == (0, 0.0)
    await publish(ready, payload=b"first")
    answer = await read
    accepted = answer.accepted
    assert (accepted.publication, accepted.reference) == (1, reference())
    assert [blocks.step for blocks in answer.blocks] == [0]
    assert answer.complete.payload == b"first"
    # From now on the reader uses the publication's own reference: the same read, with the same lease.
    again = await ready.read(reference=accepted.reference)
    assert (again.accepted.lease_id, again.accepted.reference) == (accepted.lease_id, "")
    assert (await ready.read(reference=made())).accepted.lease_id == accepted.lease_id
    found = await ready.handshake(reference=accepted.reference)
    assert found.has_agents
    [result] = await ready.reader(read_done(accepted.lease_id, 0))
    assert result.read_ended.verdict == pb.VERDICT_VALID


async def test_a_publication_that_is_there_is_found_at_once(ready: Node) -> None:
    await publish(ready)
    assert (await ready.read(reference=made())).accepted.reference == reference()


async def test_a_waiting_read_is_listed_without_its_secrets(ready: Node) -> None:
    read = await begin(ready, made(), parties=2)
    ready.clock.pass_by(3)
    request = ipb.ListTransfersRequest(engine_id=P.engine_id, reader_engine_id=D.engine_id)
    listed = await ready.introspection.ListTransfers(request, timeout=TIMEOUT)
    (transfer,) = listed.transfers
    assert (transfer.router_key, transfer.publication, transfer.read.lease_number) == ("room-7", 0, 0)
    assert (transfer.read.reader.engine_id, transfer.read.parties) == (D.engine_id, 2)
    assert (transfer.read.state, transfer.waited) == (pb.READ_STATE_WAITING, Duration(seconds=3))
    for secret in (KEY, read_id("read")):
        assert secret not in listed.SerializeToString()
    assert ready.home.journal.waiting == 1
    await publish(ready)
    await read
    assert ready.home.journal.waiting == 0
    listed = await ready.introspection.ListTransfers(request, timeout=TIMEOUT)
    (transfer,) = listed.transfers
    assert (transfer.router_key, transfer.publication, transfer.HasField("waited")) == ("room-7", 1, False)
    (found,) = (await ready.introspection.ListRequests(ipb.ListRequestsRequest(), timeout=TIMEOUT)).requests
    assert found.router_key == "room-7"


async def test_key_is_compared_when_the_publication_arrives(ready: Node) -> None:
    wrong = await begin(ready, made(key=OTHER_KEY))
    right = await begin(ready, made(), before=1, read_id=read_id("right"))
    await publish(ready)
    error = await raised(wrong)
    assert isinstance(error, WrongKey)
    assert KEY.hex() not in f"{error} {error.values}"
    assert (await right).accepted.publication == 1
    assert isinstance(await raised(ready.read(reference=made(key=OTHER_KEY))), WrongKey)


async def test_a_wait_ends_by_its_time(ready: Node) -> None:
    before = ready.home.memory.held(P)
    error = await waited(ready, made())
    assert isinstance(error, PublicationTimeout)
    assert error.values["waited_ms"] == "20"
    await waiting_at(ready, 0)
    assert ready.home.memory.held(P) == before


async def test_a_key_is_used_once(ready: Node) -> None:
    await publish(ready)
    refused = error_of(await publish(ready, 2))
    assert isinstance(refused, RouterKeyUsed)
    assert refused.values == {"engine_id": P.engine_id, "publication": "1"}
    # A repeated step is no second use. Another name is free, and so is the name at another engine.
    assert (await publish(ready)).HasField("published")
    assert (await publish(ready, 3, "room-8")).HasField("published")
    # Also a short time after the end: a late reader must not get another request's blocks.
    await decline(ready, made())
    await ready.source(pb.Notification(released_ack=pb.ReleasedAck(publications=[1])))
    assert isinstance(error_of(await publish(ready, 4)), RouterKeyUsed)
    ready.pass_by(TIMES.max_wait)
    assert (await publish(ready, 5)).HasField("published")


async def test_late_reader_gets_the_release_as_error(ready: Node) -> None:
    await publish(ready)
    await decline(ready, made())
    for acknowledged in (False, True):
        if acknowledged:
            await ready.source(pb.Notification(released_ack=pb.ReleasedAck(publications=[1])))
        late = await raised(ready.read(reference=made()))
        assert isinstance(late, PublicationReleased)
        assert (late.values["publication"], late.values["outcome"]) == ("1", "DECLINED")
        assert isinstance(await raised(ready.read(reference=made(key=OTHER_KEY))), WrongKey)
    ready.pass_by(TIMES.max_wait)
    assert isinstance(await waited(ready, made()), PublicationTimeout)


async def test_a_decline_that_comes_first_ends_the_waits_and_the_publication(node: Node) -> None:
    watch = await node.open_engine()
    await node.register()
    read = await begin(node, made())
    other = await begin(node, made(key=OTHER_KEY), before=1, read_id=read_id("other"))
    assert [result.HasField("done") for result in await decline(node, made(), made())] == [True, True]
    error = await raised(read)
    assert isinstance(error, PublicationReleased)
    assert error.values["outcome"] == "DECLINED"
    # Later readers get the error at once, and the source has its blocks back.
    assert isinstance(await raised(node.read(reference=made())), PublicationReleased)
    # The key of a decline cannot be checked yet, so the decline does not end reads with another key.
    await waiting_at(node, 1)
    assert (await publish(node)).HasField("published")
    assert await released(watch) == (1, pb.RELEASE_OUTCOME_DECLINED)
    assert isinstance(await raised(other), WrongKey)


async def test_a_decline_with_another_key_ends_nothing(ready: Node) -> None:
    read = await begin(ready, made())
    await decline(ready, made(key=OTHER_KEY))
    await publish(ready)
    assert (await read).accepted.publication == 1
    (refused,) = await decline(ready, made(key=OTHER_KEY))
    assert isinstance(error_of(refused), WrongKey)
    assert (await ready.read(reference=made())).accepted.publication == 1


async def test_decline_is_remembered_for_as_long_as_readers_may_wait(ready: Node) -> None:
    await decline(ready, made())
    ready.pass_by(TIMES.max_wait)
    read = await begin(ready, made())
    await publish(ready)
    assert (await read).accepted.publication == 1


async def test_decline_of_a_publication_releases_it(node: Node) -> None:
    watch = await node.open_engine()
    await node.register()
    await publish(node)
    await decline(node, made())
    assert await released(watch) == (1, pb.RELEASE_OUTCOME_DECLINED)


async def test_abort_reaches_readers_that_come_later(ready: Node) -> None:
    await publish(ready, last=False)
    assert (await ready.read(reference=made())).accepted.publication == 1
    await ready.source(pb.Notification(abort=pb.Abort(publication=1)))
    assert isinstance(await raised(ready.read(reference=made(), read_id=read_id("late"))), PublicationAborted)


async def test_reader_takes_at_most_half_of_the_waits(tmp_path: Path) -> None:
    async with small(tmp_path, router_keys=4) as node:
        waiting = [await begin(node, made(), before=index, read_id=read_id(f"{index}")) for index in range(2)]
        error = await raised(node.read(reference=made(), read_id=read_id("third")))
        assert isinstance(error, LimitReached)
        assert error.values["limit"] == "router_keys"
        waiting.append(await begin(node, made(), before=2, reader=E))
        await publish(node)
        assert [(await read).accepted.publication for read in waiting] == [1, 1, 1]
        # The room of the ended waits is free again.
        held = [await begin(node, made("next"), before=index, read_id=read_id(f"n{index}")) for index in range(2)]
        for read in held:
            read.cancel()
        await waiting_at(node, 0)


async def test_caller_takes_at_most_half_of_the_remembered_declines(tmp_path: Path) -> None:
    async with small(tmp_path, router_keys=4) as node:
        results = await decline(node, *(made(f"room-{index}") for index in range(3)))
        assert [result.HasField("done") for result in results] == [True, True, False]
        error = error_of(results[2])
        assert isinstance(error, LimitReached)
        assert error.values["limit"] == "router_keys"
        (told,) = await node.reader(pb.Notification(decline=pb.Decline(reference=made("room-9"))))
        assert told.HasField("done")
        node.pass_by(TIMES.max_wait)
        (again,) = await decline(node, made("room-2"))
        assert again.HasField("done")


async def test_declines_at_an_engine_that_nobody_asks_any_more_leave_their_places_to_others(tmp_path: Path) -> None:
    async with small(tmp_path, router_keys=4) as node:
        await node.open_engine(E)
        await node.register(ref=E)
        there = [made(f"room-{index}", engine_id=E.engine_id) for index in range(2)]
        assert [result.HasField("done") for result in await decline(node, *there)] == [True, True]
        (refused,) = await decline(node, made())
        assert isinstance(error_of(refused), LimitReached)
        node.pass_by(TIMES.max_wait)
        (told,) = await decline(node, made())
        assert told.HasField("done")


async def test_past_keys_are_bounded(ready: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry_server.domain.router_keys.MAX_PAST_ROUTER_KEYS", 2)
    before = ready.home.memory.held(P)
    for number in range(1, 6):
        await publish(ready, number, f"room-{number}")
        await decline(ready, made(f"room-{number}"))
        await ready.source(pb.Notification(released_ack=pb.ReleasedAck(publications=[number])))
    assert ready.home.memory.held(P) - before == 2 * 1024
    assert isinstance(await raised(ready.read(reference=made("room-5"))), PublicationReleased)
    assert isinstance(await waited(ready, made("room-1")), PublicationTimeout)


@pytest.mark.parametrize("stays_away", [False, True], ids=["replaced", "dead"])
async def test_a_source_that_restarts_ends_the_waits(node: Node, *, stays_away: bool) -> None:
    watch = await node.open_engine()
    await node.register()
    read = await begin(node, made())
    await node.leaves(watch)
    # The source may still come back.
    await waiting_at(node, 1)
    node.pass_by(TIMES.engine_ttl)
    error = await raised(read)
    assert isinstance(error, EngineUnknown)
    if stays_away:
        assert isinstance(await raised(node.read(reference=made())), EngineUnknown)
        return
    await node.open_engine(P2)
    assert isinstance(await raised(node.read(reference=made())), EngineIncomplete)
    await node.register(ref=P2)
    read = await begin(node, made())
    await node.source(publish_notification(router_key="room-7", key=KEY), ref=P2)
    assert (await read).accepted.source.incarnation == P2.incarnation


async def test_an_engine_that_is_evicted_ends_the_waits(node: Node) -> None:
    await node.open_engine()
    await node.register()
    read = await begin(node, made())
    with node.home.turn():
        node.home.engines.evict(P)
    assert isinstance(await raised(read), PeerRestarted)
    await waiting_at(node, 0)
    assert node.home.memory.used == 0


async def test_a_drain_ends_the_waits_until_later(ready: Node) -> None:
    read = await begin(ready, made())
    ready.home.drain()
    error = await raised(read)
    assert isinstance(error, ServerDraining)
    assert error.retryable
    assert isinstance(await raised(ready.read(reference=made())), ServerDraining)


async def test_restarted_home_gives_readers_a_retry_delay(tmp_path: Path) -> None:
    async with running(tmp_path, new=True) as node:
        assert isinstance(await raised(node.read(reference=made())), HomeRecovering)
        (refused,) = await decline(node, made())
        assert isinstance(error_of(refused), HomeRecovering)
        watch_opened = asyncio.create_task(node.open_engine())
        await watch_opened
        await node.register()
        await publish(node)
        assert (await node.read(reference=made())).accepted.publication == 1


async def test_a_snapshot_has_the_router_keys(tmp_path: Path) -> None:
    async with running(tmp_path, new=True) as node:
        await node.open_engine()
        await node.register()
        held = publish_notification(router_key="room-7", key=KEY)
        await node.source(*snapshot(held, high_water=1))
        assert (await node.read(reference=made())).accepted.reference == reference()


async def test_two_incarnations_of_a_home_that_has_just_started_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The home cannot tell yet which of them is an impostor's."""
    async with running(tmp_path, new=True) as node:
        await node.open_engine(P2)
        await node.register(ref=P2)
        await node.open_engine(P)
        await node.register(ref=P)
        read = await begin(node, made())
        await node.source(publish_notification(router_key="room-7", key=OTHER_KEY), ref=P2)
        await waiting_at(node, 1)
        await publish(node)
        assert (await read).accepted.source.incarnation == P.incarnation


async def test_data_parallel_engines_are_found_by_their_rank(node: Node) -> None:
    ranks = [engine(f"deployment_dp{rank}") for rank in range(2)]
    for ref in ranks:
        await node.open_engine(ref)
        await node.register(ref=ref)
    for rank, ref in enumerate(ranks):
        given = made(engine_id="deployment", rank=rank)
        read = await begin(node, given)
        await node.source(publish_notification(router_key="room-7", key=KEY), ref=ref)
        assert (await read).accepted.source.engine_id == ref.engine_id
        (result,) = await decline(node, given)
        assert result.HasField("done")
    # An engine of exactly that name is found as well.
    await node.open_engine(alone := engine("deployment"))
    await node.register(ref=alone)
    read = await begin(node, made("room-8", engine_id="deployment"))
    await node.source(publish_notification(router_key="room-8", key=KEY), ref=alone)
    assert (await read).accepted.source.engine_id == "deployment"
    assert isinstance(await raised(node.read(reference=made(engine_id="deployment", rank=2))), EngineUnknown)


async def test_router_keys_and_references_that_are_malformed_are_refused(ready: Node) -> None:
    wrong: list[tuple[dict[str, Any], Callable[[KvferryError], bool]]] = [
        ({"router_key": "r", "key": b"short"}, lambda error: error.values["field"] == "publish.key"),
        ({"router_key": "r"}, lambda error: error.values["field"] == "publish.key"),
        ({"key": KEY}, lambda error: error.values["field"] == "publish.key"),
        ({"router_key": "r" * 257, "key": KEY}, lambda error: error.values["field"] == "publish.router_key"),
    ]
    for changes, said in wrong:
        error = error_of(await ready.publish(1, **changes))
        assert isinstance(error, InvalidField)
        assert said(error), error
    await ready.publish(1, last=False)
    assert isinstance(error_of(await publish(ready, 1, step=1)), InvalidField)
    # A repeated step must have the same router_key.
    await publish(ready, 2)
    assert isinstance(error_of(await publish(ready, 2, "room-8")), InvalidField)
    long = made().replace("kvf1.", "kvf1.AAAA")
    assert isinstance(await raised(ready.read(reference=long)), BadReference)
    # A reference without an incarnation entitles to no agents.
    assert isinstance(await raised(ready.handshake(reference=made())), InvalidField)
    assert parse_reference(made()).router_key == "room-7"
    assert (await ready.read(2)).accepted.reference == ""


async def test_recovering_home_answers_recovering_for_router_keys(tmp_path: Path) -> None:
    """The publication may be part of the engine's snapshot, which has not arrived."""
    async with running(tmp_path, new=True) as node:
        watch = Watch(node, P)
        assert await watch.kinds(2) == ["opened", "synced"]
        await node.register()
        assert isinstance(await raised(node.read(reference=made())), HomeRecovering)
        # After the snapshot the read waits for the publication.
        await node.source(*snapshot())
        read = await begin(node, made())
        await publish(node)
        assert (await read).accepted.source.engine_id == P.engine_id


async def test_expired_publication_is_not_found_under_its_router_key(ready: Node) -> None:
    """Also if so many publications are due that the timers have not reached this one."""
    for number in range(1, MAX_ENDED_AT_ONCE + 2):
        await publish(ready, number, f"room-{number}")
    ready.clock.pass_by(TIMES.hold + 1)
    error = await raised(ready.read(reference=made(f"room-{MAX_ENDED_AT_ONCE + 1}")))
    assert isinstance(error, PublicationReleased)
    assert error.values["outcome"] == "UNREAD"
