"""PROTOCOL, The right prompt: a home sends marks to every reader, and compares none."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import Message

from kvferry._wire.reference import format_reference, parse_reference
from kvferry.errors import BadReference, InvalidField
from kvferry.v1 import errors_pb2
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.server.servicers.routers import begin, made, publish
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
from tests.support.parties import TIMES, E, P

DIGEST = b"a mark's digest."
OTHER_DIGEST = b"another's digest"


def marks(*ends: int, digest: bytes = DIGEST) -> list[pb.PromptMark]:
    return [pb.PromptMark(end=end, digest=digest) for end in ends]


def marked(*ends: int) -> str:
    """The reference of publication 1, with marks."""
    parsed = parse_reference(reference())
    parsed.marks.extend(marks(*ends))
    return format_reference(parsed)


async def listed(node: Node) -> ipb.RequestSummary:
    """Return the only request of a home."""
    [request] = (await node.introspection.ListRequests(ipb.ListRequestsRequest(), timeout=TIMEOUT)).requests
    return request


async def test_marks_reach_every_reader_with_the_step_that_stated_them(ready: Node) -> None:
    await ready.publish(last=False, marks=marks(64, 100))
    await ready.publish(step=1, last=False)
    await ready.publish(step=2, marks=marks(192, digest=OTHER_DIGEST))
    stated = [marks(64, 100), [], marks(192, digest=OTHER_DIGEST)]
    for answer in (await ready.read(), await ready.read(reader=E)):
        assert [list(blocks.marks) for blocks in answer.blocks] == stated


async def test_reader_by_a_routers_reference_gets_marks_and_the_key_at_once(ready: Node) -> None:
    read = await begin(ready, made())
    await publish(ready, marks=marks(64))
    answer = await read
    assert parse_reference(answer.accepted.reference).key == parse_reference(reference()).key
    assert list(answer.blocks[0].marks) == marks(64)


async def test_a_restarted_home_has_the_marks_of_the_snapshot(tmp_path: Path) -> None:
    async with running(tmp_path, new=True) as node:
        watch = Watch(node)
        assert await watch.kinds(2) == ["opened", "synced"]
        first = publish_notification(1, last=False, marks=marks(64))
        results = await node.source(*snapshot(first, publish_notification(1, 1, marks=marks(128)), high_water=1))
        assert [result.WhichOneof("kind") for result in results] == ["done", "published", "published", "done"]
        await node.register()
        assert [list(blocks.marks) for blocks in (await node.read()).blocks] == [marks(64), marks(128)]
        watch.cancel()


async def test_a_repeated_step_is_answered_alike_and_one_with_other_marks_is_refused(ready: Node) -> None:
    first = await ready.publish(marks=marks(64))
    assert (await ready.publish(marks=marks(64))).published.reference == first.published.reference
    for other in ([], marks(64, digest=OTHER_DIGEST), marks(65)):
        assert isinstance(error_of(await ready.publish(marks=other)), InvalidField)
    assert list((await ready.read()).blocks[0].marks) == marks(64)


async def test_publication_is_still_readable_after_a_mismatch(ready: Node) -> None:
    watch = Watch(ready)
    await watch.kinds(2)
    await ready.publish(marks=marks(64))
    wrong = (await ready.read()).accepted.lease_id
    report = read_done(wrong, 0, outcome=pb.RANK_OUTCOME_FAILED)
    report.read_done.reports[0].reason = errors_pb2.PROMPT_MISMATCH
    [answer] = await ready.reader(report)
    assert answer.read_ended.complete
    [read] = (await ready.introspection.ListTransfers(ipb.ListTransfersRequest(), timeout=TIMEOUT)).transfers
    assert (read.read.state, read.reports[0].reason) == (
        pb.READ_STATE_FAILED,
        errors_pb2.PROMPT_MISMATCH,
    )
    # The hold begins anew.
    ready.pass_by(TIMES.hold - 1)
    found = await listed(ready)
    assert (found.state, found.leases, found.last_failure) == (
        ipb.REQUEST_STATE_PUBLISHED,
        0,
        errors_pb2.PROMPT_MISMATCH,
    )
    assert (found.reads_valid, found.expected_reads) == (0, 1)
    right = await ready.read(reader=E)
    assert list(right.blocks[0].marks) == marks(64)
    [answer] = await ready.reader(read_done(right.accepted.lease_id, 0), ref=E)
    assert answer.read_ended.verdict == pb.VERDICT_VALID
    released = (await watch.next()).released
    assert released.outcome == pb.RELEASE_OUTCOME_READ
    assert [each.state for each in released.reads] == [pb.READ_STATE_VALID, pb.READ_STATE_FAILED]
    watch.cancel()


async def test_listings_show_where_marks_end_and_never_their_digests(ready: Node) -> None:
    await ready.publish(last=False, marks=marks(64, 100))
    await ready.publish(step=1, marks=marks(128))
    lease_id = (await ready.read()).accepted.lease_id
    assert list((await listed(ready)).marks) == [64, 100, 128]
    look = ready.introspection
    shown: list[Message] = [
        await look.ListRequests(ipb.ListRequestsRequest(), timeout=TIMEOUT),
        await look.ListTransfers(ipb.ListTransfersRequest(), timeout=TIMEOUT),
        await look.GetEngine(ipb.GetEngineRequest(engine_id=P.engine_id), timeout=TIMEOUT),
        await ready.publish(step=1, marks=marks(129)),
        await ready.publish(2, marks=marks(64, 64)),
    ]
    assert [message for message in shown if DIGEST in message.SerializeToString()] == []
    await ready.reader(read_done(lease_id, 0))
    found = await listed(ready)
    assert (found.state, list(found.marks)) == (ipb.REQUEST_STATE_RELEASED, [])


async def test_a_reference_may_have_marks_in_every_call_that_takes_one(ready: Node) -> None:
    await ready.publish(marks=marks(64))
    few, many = marked(64, 100, 128, 160), marked(1, 2, 3, 4, 5)
    assert (await ready.read(reference=few)).accepted.publication == 1
    assert (await ready.handshake(reference=few)).has_agents
    for call in (ready.read(reference=many), ready.handshake(reference=many)):
        assert isinstance(await raised(call), BadReference)
    bad, good = await ready.reader(*(pb.Notification(decline=pb.Decline(reference=each)) for each in (many, few)))
    assert isinstance(error_of(bad), BadReference)
    assert good.HasField("done")
