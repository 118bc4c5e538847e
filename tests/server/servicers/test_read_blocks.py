"""`ReadBlocks`: the lease, the blocks as they are published, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from kvferry._clock import from_duration
from kvferry._wire.reference import format_reference, parse_reference
from kvferry.errors import (
    BadReference,
    EngineIncomplete,
    EngineUnknown,
    InvalidField,
    KvferryError,
    LimitReached,
    PeerRestarted,
    PublicationReleased,
    PublicationStale,
    PublicationTimeout,
    WrongKey,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.limits import Limits
from tests.support.node_in_process import (
    ADVERTISE,
    TIMEOUT,
    Node,
    error_of,
    proto,
    publish_notification,
    raised,
    read_done,
    read_request,
    reference,
    running,
)
from tests.support.parties import P2, TIMES, D, E, P, key


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
        (read_request(1, reference=format_reference(router)), EngineUnknown),
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
