"""`Notify`: each notification of a batch has its own result; homes that have restarted, or drain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry._clock import from_duration
from kvferry.errors import (
    BadBlock,
    BadReference,
    EngineUnknown,
    HomeRecovering,
    InvalidField,
    LeaseEnded,
    PartiesMismatch,
    PeerRestarted,
    PublicationStale,
    ServerDraining,
    WrongSession,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.node_in_process import (
    TIMEOUT,
    Node,
    Watch,
    error_of,
    proto,
    publish_notification,
    raised,
    read_done,
    reference,
    running,
)
from tests.support.parties import P2, SECRETS, TIMES, D, E, P, arrived

DIGEST = bytes(range(16))


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


async def test_source_needs_its_session_secret(ready: Node) -> None:
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
        {"marks": [pb.PromptMark(digest=b"d" * 16)]},
        {"marks": [pb.PromptMark(end=1)]},
        {"marks": [pb.PromptMark(end=1, digest=b"d" * 15)]},
        {"marks": [pb.PromptMark(end=1, digest=b"d" * 17)]},
        {"marks": [pb.PromptMark(end=1, digest=b"d" * 16), pb.PromptMark(end=1, digest=b"e" * 16)]},
        {"marks": [pb.PromptMark(end=end, digest=b"d" * 16) for end in range(1, 66)]},
    ],
)
async def test_publication_fields_are_all_checked(ready: Node, changes: dict[str, Any]) -> None:
    assert isinstance(error_of(await ready.publish(**changes)), InvalidField)
    assert not arrived(ready.home.records)


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
    assert results[1].read_ended.verdict == pb.VERDICT_EXPIRED
    assert results[2].HasField("done")
    assert all(isinstance(error_of(results[index]), InvalidField) for index in (3, 4, 5))
    assert isinstance(error_of(results[6]), BadReference)
    assert isinstance(error_of(results[7]), EngineUnknown)
    unsigned = pb.NotifyRequest(notifications=[pb.Notification(renew=pb.Renew(lease_id=lost))])
    answer = await ready.kv.Notify(unsigned, timeout=TIMEOUT)
    assert isinstance(error_of(answer.results[0]), InvalidField)


async def test_a_cancel_ends_the_lease(ready: Node) -> None:
    await ready.publish()
    lease_id = (await ready.read()).accepted.lease_id
    await ready.reader(pb.Notification(cancel=pb.CancelRead(lease_id=lease_id)))
    assert isinstance(await raised(ready.read()), LeaseEnded)
    assert (await ready.read(reader=E)).HasField("accepted")


async def test_a_restarted_home_is_refilled_and_answers_unavailable_until_then(tmp_path: Path) -> None:
    async with running(tmp_path, new=True) as node:
        assert isinstance(await raised(node.read()), HomeRecovering)
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
        assert isinstance(await raised(node.read(4)), HomeRecovering)
        end = pb.Notification(resync=pb.Resync(phase=pb.RESYNC_PHASE_END, high_water=9))
        assert (await node.source(end))[0].HasField("done")
        lease_id = (await node.read(4)).accepted.lease_id
        assert isinstance(await raised(node.read(5)), PublicationStale)
        await node.reader(read_done(lease_id, 0))
        node.pass_by(TIMES.max_ttl - 1)
        assert not node.home.records.released(P)
        node.pass_by(1)
        assert (await watch.next()).released.publication == 4


async def test_draining_home_refuses_new_reads_and_still_takes_reports(ready: Node) -> None:
    await ready.publish()
    watch = Watch(ready)
    await watch.kinds(2)
    lease_id = (await ready.read()).accepted.lease_id
    ready.home.drain()
    assert await watch.kinds(1) == ["draining"]
    for call in (
        ready.read(2),
        ready.register(),
        ready.handshake(),
    ):
        assert isinstance(await raised(call), ServerDraining)
    assert isinstance(error_of(await ready.publish(2)), ServerDraining)
    renewed, ended = await ready.reader(pb.Notification(renew=pb.Renew(lease_id=lease_id)), read_done(lease_id, 0))
    assert from_duration(renewed.renewed.remaining) == TIMES.ttl
    assert ended.read_ended.verdict == pb.VERDICT_VALID
    # The source gets the release event, so it does not publish the same again after the restart.
    assert (await watch.next()).released.publication == 1
    ready.home.end_watches()
    assert isinstance(await raised(watch.next()), ServerDraining)


def validate(*ranks: int, parties: int = 1, digest: bytes = DIGEST, **changes: Any) -> pb.Notification:
    reports = [pb.RankReport(rank=rank, outcome=pb.RANK_OUTCOME_DONE, bytes=7) for rank in ranks]
    given: dict[str, Any] = {"reference": reference(), "read_id": bytes(range(16)), **changes}
    return pb.Notification(validate=pb.Validate(hint_digest=digest, parties=parties, reports=reports, **given))


async def test_a_read_without_a_lease_is_validated_once_and_the_replay_answered_alike(ready: Node) -> None:
    await ready.source(publish_notification(hint_digest=DIGEST, expected_reads=2))
    results = await ready.reader(validate(0), validate(0), validate(0, parties=2), validate(0, digest=bytes(16)))
    assert [result.read_ended.verdict for result in results[:2]] == [pb.VERDICT_VALID] * 2
    assert isinstance(error_of(results[2]), PartiesMismatch)
    assert isinstance(error_of(results[3]), BadReference)
    (publication,) = arrived(ready.home.records)
    assert (publication.valid_reads, publication.leases) == (1, set())


@pytest.mark.parametrize(
    "wrong",
    [
        validate(0, 1),
        validate(),
        validate(0, parties=0),
        validate(0, digest=b""),
        validate(0, read_id=b""),
        validate(0, reference=""),
        validate(0, reference=reference(wrong=bytes(16))),
    ],
)
async def test_a_read_that_is_not_validated_pins_nothing(ready: Node, wrong: pb.Notification) -> None:
    await ready.source(publish_notification(hint_digest=DIGEST))
    (refused,) = await ready.reader(wrong)
    assert error_of(refused).reason
    (publication,) = arrived(ready.home.records)
    assert not publication.reads


async def test_a_home_that_ends_its_watches_validates_nothing_more(ready: Node) -> None:
    """The source would not hear of the release, and hold the publication again after the restart."""
    await ready.source(publish_notification(hint_digest=DIGEST))
    ready.home.drain()
    (valid,) = await ready.reader(validate(0, read_id=bytes(16)))
    assert valid.read_ended.verdict == pb.VERDICT_VALID
    ready.home.end_watches()
    (refused,) = await ready.reader(validate(0))
    assert isinstance(error_of(refused), ServerDraining)


async def test_publications_without_a_hint_are_not_validated(ready: Node) -> None:
    await ready.source(publish_notification())
    (refused,) = await ready.reader(validate(0))
    assert isinstance(error_of(refused), BadReference)
