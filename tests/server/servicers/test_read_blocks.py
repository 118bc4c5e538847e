"""`ReadBlocks`: the lease, the blocks as they are published, and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from google.protobuf.duration_pb2 import Duration

from kvferry._clock import from_duration
from kvferry._wire.channel import MAX_MESSAGE_BYTES
from kvferry._wire.reference import format_reference, parse_reference
from kvferry._wire.version import OURS_ENCODED
from kvferry.errors import (
    BadReference,
    EngineIncomplete,
    EngineUnknown,
    HomeRecovering,
    InvalidField,
    KvferryError,
    LeaseEnded,
    LimitReached,
    PartiesMismatch,
    PeerRestarted,
    PublicationReleased,
    PublicationStale,
    PublicationTimeout,
    ServerDraining,
    WrongKey,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.limits import Limits
from kvferry_server.domain.steps import PublicationStep
from kvferry_server.servicers.callers import nobody
from kvferry_server.servicers.kv_transfer import KVTransfer
from kvferry_server.servicers.limits import READ_STEPS
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
    snapshot,
)
from tests.support.parties import P2, SECRETS, TIMES, D, E, P, key, read_id

SOON = Duration(nanos=20_000_000)


def steps(answer: pb.ReadBlocksResponse) -> list[int]:
    return [blocks.step for blocks in answer.blocks]


async def until(condition: Callable[[], bool]) -> None:
    """Poll a condition that has no event."""
    for _ in range(int(TIMEOUT / 0.001)):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come about")


async def until_waiting(node: Node, number: int = 1, calls: int = 1) -> None:
    """Wait until calls wait for news of a publication."""
    wakers = node.home.wakeups._wakers
    publication = node.home.records.of_engine(P).publications[number]
    await until(lambda: len(wakers.get(publication, ())) == calls)


async def test_publish_answers_the_reference(ready: Node) -> None:
    published = (await ready.publish()).published
    assert published.reference == reference()
    assert parse_reference(published.reference).request_id == "r1"
    assert from_duration(published.final_remaining) == TIMES.final


async def test_answer_has_the_lease_and_all_blocks(ready: Node) -> None:
    await ready.publish(payload=b"first token")
    ready.pass_by(5)
    answer = await ready.read()
    assert answer.home_epoch == ready.home.epoch
    accepted = answer.accepted
    assert len(accepted.lease_id) == 16
    assert from_duration(accepted.remaining) == TIMES.ttl
    assert from_duration(accepted.renew_every) == TIMES.ttl / 3
    assert (accepted.source, accepted.publication, accepted.request_id) == (proto(P), 1, "r1")
    assert list(answer.blocks) == [pb.Blocks(step=0, groups=publish_notification().publish.groups)]
    assert answer.complete == pb.Complete(payload=b"first token", steps=1)
    assert not answer.HasField("revoked")
    [result] = await ready.reader(read_done(accepted.lease_id, 0))
    assert result.read_ended == pb.ReadEnded(verdict=pb.VERDICT_VALID, reported=1, complete=True)


async def test_late_publication_is_sent_in_steps(ready: Node) -> None:
    first = await ready.read()
    assert first.accepted.request_id == ""
    assert (steps(first), first.HasField("complete")) == ([], False)
    lease_id, answer = first.accepted.lease_id, first
    for step in range(3):
        waiting = asyncio.create_task(ready.read(lease_id=lease_id, next_step=step))
        await until_waiting(ready)
        await ready.publish(step=step, last=step == 2)
        answer = await waiting
        assert not answer.HasField("accepted")
        assert steps(answer) == [step]
        assert answer.HasField("complete") == (step == 2)
    assert answer.complete.steps == 3
    # A reader that lost an answer gets it again.
    assert steps(await ready.read(lease_id=lease_id, next_step=1)) == [1, 2]


async def test_a_replay_gets_the_same_lease_unextended_and_everything_again(ready: Node) -> None:
    await ready.publish(last=False)
    first = await ready.read()
    ready.pass_by(10)
    again = await ready.read()
    assert again.accepted.lease_id == first.accepted.lease_id
    assert from_duration(again.accepted.remaining) == TIMES.ttl - 10
    assert steps(again) == [0]
    other = await ready.read(read_id=read_id("another"))
    assert other.accepted.lease_id not in ("", first.accepted.lease_id)


async def test_lease_that_the_reader_lacks_is_sent_with_all_steps(ready: Node) -> None:
    await ready.publish()
    lease_id = (await ready.read()).accepted.lease_id
    other = (await ready.read(read_id=read_id("another"))).accepted.lease_id
    for wrong in (other, b"x" * 16):
        answer = await ready.read(lease_id=wrong, next_step=1)
        assert (answer.accepted.lease_id, steps(answer)) == (lease_id, [0])
        # Steps of another lease do not count.
        assert steps(await ready.read(lease_id=wrong, next_step=2**32 - 1)) == [0]


@pytest.mark.parametrize("next_step", [2, 3, 2**31, 2**32 - 1])
async def test_next_step_beyond_the_steps_is_refused(ready: Node, next_step: int) -> None:
    await ready.publish(last=False)
    lease_id = (await ready.read()).accepted.lease_id
    error = await raised(ready.read(lease_id=lease_id, next_step=next_step))
    assert isinstance(error, InvalidField)
    assert error.values["field"] == "next_step"
    await ready.publish(step=1)
    answer = await ready.read(lease_id=lease_id, next_step=2)
    assert (steps(answer), answer.complete.steps) == ([], 2)


async def test_wait_without_news_ends_in_time(ready: Node) -> None:
    lease_id = (await ready.read(wait=SOON)).accepted.lease_id
    waiting = asyncio.create_task(ready.read(lease_id=lease_id, wait=SOON))
    await until_waiting(ready)
    ready.clock.pass_by(0.02)
    error = await raised(waiting)
    assert isinstance(error, PublicationTimeout)
    assert error.values["waited_ms"] == "20"
    # For a publication that has begun, the answer has nothing new.
    await ready.publish(last=False)
    waiting = asyncio.create_task(ready.read(lease_id=lease_id, next_step=1, wait=SOON))
    await until_waiting(ready)
    ready.clock.pass_by(0.02)
    assert await waiting == pb.ReadBlocksResponse(home_epoch=ready.home.epoch, version=OURS_ENCODED)


async def test_a_call_waits_no_longer_than_its_deadline_allows(ready: Node) -> None:
    await ready.publish(last=False)
    lease_id = (await ready.read()).accepted.lease_id
    waiting = asyncio.create_task(ready.read(lease_id=lease_id, next_step=1))
    await until_waiting(ready)
    # The answer without news comes before the deadline.
    ready.clock.pass_by(TIMEOUT)
    # It looks at the home's clock at once: by its own time it would answer a tenth of a second before the call ends.
    ready.home.wakeups.wake_all()
    assert steps(await waiting) == []


async def test_large_steps_come_in_several_answers(ready: Node) -> None:
    runs, count, size = 1 << 17, 16, 0
    ids = [1 + 2 * (index % 400) for index in range(runs)]
    for step in range(count):
        tokens = {"first_token": 16 * step * runs, "end_token": 16 * (step + 1) * runs}
        part = pb.GroupBlocks(group="full", run_starts=ids, run_counts=[1] * runs, **tokens)
        size += part.ByteSize()
        last = step == count - 1
        published = await ready.publish(step=step, last=last, groups=[part], payload=b"x" * 65536 if last else b"")
        assert published.HasField("published"), published
    assert size > MAX_MESSAGE_BYTES
    answer = await ready.read()
    lease_id, found, calls = answer.accepted.lease_id, steps(answer), 1
    while not answer.HasField("complete"):
        assert len(answer.blocks) >= 1
        answer = await ready.read(lease_id=lease_id, next_step=len(found))
        found += steps(answer)
        calls += 1
    assert found == list(range(count))
    assert calls > 2
    assert len(answer.complete.payload) == 65536


async def test_many_small_steps_come_in_several_answers(ready: Node) -> None:
    count = READ_STEPS + 1
    empty = [publish_notification(step=step, last=False, groups=[]) for step in range(count)]
    for first in range(0, count, 1024):
        for result in await ready.source(*empty[first : first + 1024]):
            assert result.HasField("published"), result
    answer = await ready.read()
    assert steps(answer) == list(range(READ_STEPS))
    assert steps(await ready.read(lease_id=answer.accepted.lease_id, next_step=READ_STEPS)) == [READ_STEPS]


async def test_an_answer_looks_at_no_more_steps_than_it_takes(ready: Node) -> None:
    class Counted(list[PublicationStep]):
        looked_at = 0

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            self.looked_at += len(found) if isinstance(index, slice) else 1
            return found

    for first in range(0, 4 * READ_STEPS, 1024):
        empty = (publish_notification(step=step, last=False, groups=[]) for step in range(first, first + 1024))
        await ready.source(*empty)
    publication = ready.home.records.engines[P].publications[1]
    publication.steps = counted = Counted(publication.steps)
    lease_id = (await ready.read()).accepted.lease_id
    assert READ_STEPS <= counted.looked_at <= READ_STEPS + 8
    counted.looked_at = 0
    assert steps(await ready.read(lease_id=lease_id, next_step=READ_STEPS))[-1] == 2 * READ_STEPS - 1
    assert READ_STEPS <= counted.looked_at <= READ_STEPS + 8


async def test_abort_is_sent_to_a_waiting_reader_and_the_lease_stays(ready: Node) -> None:
    await ready.publish(last=False)
    lease_id = (await ready.read()).accepted.lease_id
    waiting = asyncio.create_task(ready.read(lease_id=lease_id, next_step=1))
    await until_waiting(ready)
    await ready.source(pb.Notification(abort=pb.Abort(publication=1)))
    told = await waiting
    assert told.revoked.reason == pb.REVOKE_REASON_ABORTED
    [renewed] = await ready.reader(pb.Notification(renew=pb.Renew(lease_id=lease_id)))
    assert from_duration(renewed.renewed.remaining) == TIMES.ttl
    assert renewed.renewed.revoked == pb.REVOKE_REASON_ABORTED
    assert not told.HasField("complete")
    # A repeated call does not wait, and gets everything.
    again = await ready.read()
    assert (again.accepted.lease_id, steps(again)) == (lease_id, [0])
    assert again.revoked == told.revoked


async def test_revoked_publication_that_was_complete_is_sent_whole(ready: Node) -> None:
    await ready.publish()
    lease_id = (await ready.read()).accepted.lease_id
    await ready.source(pb.Notification(abort=pb.Abort(publication=1)))
    answer = await ready.read()
    assert (answer.accepted.lease_id, steps(answer)) == (lease_id, [0])
    assert answer.HasField("complete")
    assert answer.HasField("revoked")


async def test_death_of_the_source_is_sent_to_the_holder_of_a_lease(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        watch = await node.open_engine()
        await node.register()
        lease_id = (await node.read()).accepted.lease_id
        waiting = [asyncio.create_task(node.read(lease_id=lease_id))]
        await until_waiting(node)
        await node.leaves(watch)
        assert isinstance(await raised(node.read(2)), EngineIncomplete)
        # A reader with a lease goes on after its call was lost. A new reader is refused.
        waiting.append(asyncio.create_task(node.read(lease_id=lease_id)))
        await until_waiting(node, calls=2)
        for other in (node.read(), node.read(2, lease_id), node.read(lease_id=lease_id, read_id=read_id("another"))):
            assert isinstance(await raised(other), EngineIncomplete)
        node.pass_by(TIMES.engine_ttl)
        for answer in (*await asyncio.gather(*waiting), await node.read(lease_id=lease_id)):
            assert answer.revoked.reason == pb.REVOKE_REASON_SOURCE_LOST
        assert isinstance(await raised(node.read(2)), EngineUnknown)


async def test_a_lease_that_ends_ends_the_wait(ready: Node) -> None:
    await ready.publish(last=False)
    lease_id = (await ready.read()).accepted.lease_id
    waiting = asyncio.create_task(ready.read(lease_id=lease_id, next_step=1))
    await until_waiting(ready)
    ready.pass_by(TIMES.ttl)
    assert isinstance(await raised(waiting), LeaseEnded)
    assert isinstance(await raised(ready.read(lease_id=lease_id, next_step=1)), LeaseEnded)
    # If the publication never arrived, the error says so.
    lease_id = (await ready.read(2)).accepted.lease_id
    waiting = asyncio.create_task(ready.read(2, lease_id=lease_id))
    await until_waiting(ready, 2)
    ready.pass_by(TIMES.ttl)
    assert isinstance(await raised(waiting), PublicationTimeout)


async def test_drain_ends_the_wait_after_all_steps_were_sent(ready: Node) -> None:
    await ready.publish(last=False)
    lease_id = (await ready.read()).accepted.lease_id
    waiting = asyncio.create_task(ready.read(lease_id=lease_id, next_step=1))
    await until_waiting(ready)
    with ready.home.turn():
        ready.home.drain()
    assert isinstance(await raised(waiting), ServerDraining)
    answer = await ready.read()
    assert (answer.accepted.lease_id, steps(answer)) == (lease_id, [0])
    assert isinstance(await raised(ready.read(read_id=read_id("new"))), ServerDraining)


async def test_restarted_home_grants_anew_and_sends_all_steps(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    async with running(tmp_path / "old") as node:
        await node.open_engine()
        await node.register()
        await node.publish(last=False)
        old = await node.read()
    async with running(tmp_path / "new", new=True) as node:
        assert isinstance(await raised(node.read(lease_id=old.accepted.lease_id, next_step=1)), KvferryError)
        with node.home.turn():
            node.home.engines.open_engine(P, SECRETS[P])
        await node.register()
        assert isinstance(await raised(node.read(lease_id=old.accepted.lease_id, next_step=1)), HomeRecovering)
        await node.source(*snapshot(publish_notification(last=False), high_water=1))
        await node.publish(step=1)
        answer = await node.read(lease_id=old.accepted.lease_id, next_step=1)
        assert answer.home_epoch != old.home_epoch
        assert answer.accepted.lease_id not in (b"", old.accepted.lease_id)
        assert steps(answer) == [0, 1]
        assert answer.HasField("complete")


async def test_reads_that_are_invalid_are_refused(ready: Node) -> None:
    await ready.publish(1)
    await ready.reader(read_done((await ready.read(1)).accepted.lease_id, 0))
    await ready.publish(2)
    await ready.read(2)
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
        (read_request(2, parties=2), PartiesMismatch),
        (read_request(1, wait=Duration(seconds=-1)), InvalidField),
        (read_request(1, wait=Duration(nanos=-1)), InvalidField),
        (read_request(1, lease_id=b"x"), InvalidField),
        (read_request(1, lease_id=b"x" * 17), InvalidField),
        (pb.ReadBlocksRequest(version=OURS_ENCODED), InvalidField),
    ]
    for request, expected in cases:
        error = await raised(ready.kv.ReadBlocks(request, timeout=TIMEOUT))
        assert isinstance(error, expected), (request, error)
    await ready.source(pb.Notification(released_ack=pb.ReleasedAck(publications=[1])))
    assert isinstance(await raised(ready.read(1, reader=E)), PublicationStale)


async def test_wrong_key_is_refused_before_the_publication_arrives(ready: Node) -> None:
    wrong = reference(1, wrong=b"x" * 16)
    assert isinstance(await raised(ready.read(reference=wrong)), WrongKey)
    [declined] = await ready.reader(pb.Notification(decline=pb.Decline(reference=wrong)))
    assert isinstance(error_of(declined), WrongKey)
    await ready.publish()
    assert (await ready.read()).HasField("accepted")


async def test_reads_beyond_a_limit_get_a_retry_delay(tmp_path: Path) -> None:
    async with running(tmp_path, Limits(publications=1)) as node:
        await node.open_engine()
        await node.register()
        await node.read(1)
        error = await raised(node.read(2))
        assert isinstance(error, LimitReached)
        assert error.retryable


async def test_caller_that_leaves_while_waiting_leaves_no_waiter_behind(ready: Node) -> None:
    lease_id = (await ready.read()).accepted.lease_id
    call: Any = ready.kv.ReadBlocks(read_request(lease_id=lease_id), timeout=TIMEOUT)
    await until_waiting(ready)
    call.cancel()
    await until_waiting(ready, calls=0)
    await ready.publish()
    assert steps(await ready.read(lease_id=lease_id)) == [0]


async def test_an_answer_is_counted_against_the_host_that_asked_for_it(ready: Node) -> None:
    """Also if another host asks again for the same read, as ranks of one engine do."""
    await ready.publish()
    service, held = KVTransfer(ready.home, cast(Any, None), cast(Any, None), nobody), ready.home.memory._by_host.held
    for host in ("192.0.2.1", "192.0.2.2"):
        context = Mock(peer=lambda host=host: f"ipv4:{host}:4711", time_remaining=lambda: TIMEOUT)
        answer = await service.ReadBlocks(read_request(), context)
        assert held(host) == len(answer)
        context.add_done_callback.call_args.args[0](context)
        assert held(host) == 0
