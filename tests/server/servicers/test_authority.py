"""A stranger with everything that is public can do no harm to others (DESIGN R13; PROTOCOL, Authority)."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from kvferry._clock import from_duration
from kvferry.errors import (
    EngineIdInUse,
    HomeRecovering,
    LeaseEnded,
    PeerRestarted,
    WrongKey,
    WrongSession,
)
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.values import EngineRef
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
    register_request,
    running,
    snapshot,
)
from tests.support.parties import P2, SECRETS, TIMES, D, E, P, read_id

IMPOSTOR = b"i" * 32


async def public_parts(node: Node) -> set[bytes]:
    """Return all runs of 16 bytes in listings and their page tokens."""
    found: set[bytes] = set()
    lists: tuple[tuple[Any, Any], ...] = (
        (node.introspection.ListEngines, ipb.ListEnginesRequest),
        (node.introspection.ListRequests, ipb.ListRequestsRequest),
        (node.introspection.ListTransfers, ipb.ListTransfersRequest),
    )
    for call, request in lists:
        token = ""
        while True:
            page = await call(request(page_size=1, page_token=token), timeout=TIMEOUT)
            raw = page.SerializeToString()
            found |= {raw[first : first + 16] for first in range(len(raw) - 15)}
            token = page.next_page_token
            for part in token.split("."):
                raw = base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
                found |= {raw[first : first + 16] for first in range(len(raw) - 15)}
            if not token:
                break
    return found


async def test_lease_cannot_be_stolen_with_the_content_of_listings_and_page_tokens(ready: Node) -> None:
    await ready.publish(expected_reads=3)
    leases = [
        (await ready.read(reader=reader, read_id=read_id(name))).accepted
        for reader, name in ((D, "one"), (D, "two"), (E, "three"))
    ]
    assert [lease.lease_number for lease in leases] == [1, 2, 3]
    stolen = sorted(await public_parts(ready))
    assert len(stolen) > 100
    for sender in (D, E):
        for first in range(0, len(stolen), 250):
            for guess in stolen[first : first + 250]:
                results = await ready.reader(
                    read_done(guess, 0),
                    pb.Notification(cancel=pb.CancelRead(lease_id=guess)),
                    pb.Notification(renew=pb.Renew(lease_id=guess)),
                    ref=sender,
                )
                assert results[0].read_ended.verdict == pb.VERDICT_EXPIRED
                assert isinstance(error_of(results[2]), LeaseEnded)
    # No report or cancel was accepted, and the leases are unchanged.
    for reader, lease in zip((D, D, E), leases, strict=True):
        [ended] = await ready.reader(read_done(lease.lease_id, 0), ref=reader)
        assert (ended.read_ended.verdict, ended.read_ended.reported) == (pb.VERDICT_VALID, 1)
    [released] = ready.home.records.released(P)
    assert released.valid_reads == 3


async def test_bearer_of_a_reference_without_the_read_id_gets_a_separate_lease(ready: Node) -> None:
    await ready.publish(expected_reads=2)
    victim = (await ready.read(read_id=read_id("secret"))).accepted
    stranger = (await ready.read(read_id=read_id("guess"))).accepted
    assert stranger.lease_id != victim.lease_id
    await ready.reader(pb.Notification(cancel=pb.CancelRead(lease_id=stranger.lease_id)))
    [ended] = await ready.reader(read_done(victim.lease_id, 0))
    assert ended.read_ended.verdict == pb.VERDICT_VALID


async def test_key_cannot_be_derived_from_numbers_and_names(ready: Node) -> None:
    """One reference does not help to make the next."""
    await ready.publish(1)
    for wrong in (P.incarnation, ready.home.epoch, SECRETS[P][:16], b"\0" * 16):
        for number in (1, 2):
            forged = reference(number, wrong=wrong)
            error = await raised(ready.read(reference=forged))
            assert isinstance(error, WrongKey)
            [declined] = await ready.reader(pb.Notification(decline=pb.Decline(reference=forged)))
            assert isinstance(error_of(declined), WrongKey)


async def test_an_impostor_that_is_first_after_a_restart_does_not_become_the_engine(tmp_path: Path) -> None:
    async with running(tmp_path, new=True) as node:
        # The incarnation is public; the impostor brings a secret of its own, and is first.
        for attempt in (
            Watch(node, P, secret=IMPOSTOR).next(),
            node.kv.RegisterCache(register_request(session_secret=IMPOSTOR), timeout=TIMEOUT),
            node.kv.Notify(
                pb.NotifyRequest(sender=proto(P), session_secret=IMPOSTOR, notifications=snapshot()), timeout=TIMEOUT
            ),
        ):
            assert isinstance(await raised(attempt), WrongSession)
        assert isinstance(await raised(node.read()), HomeRecovering)
        watch = await node.open_engine()
        await node.register()
        await node.publish()
        assert (await node.read()).HasField("accepted")
        for secret in (IMPOSTOR, SECRETS[P2]):
            assert isinstance(await raised(Watch(node, P, secret=secret).next()), WrongSession)
        watch.cancel()


async def test_impostor_under_the_same_engine_id_does_not_keep_the_engine_from_coming_back(tmp_path: Path) -> None:
    async with running(tmp_path, new=True) as node:
        impostor = await node.open_engine(P2)
        await node.register(ref=P2)
        await node.source(publish_notification(1), ref=P2)
        # The impostor's publication of the same number has another key.
        assert isinstance(await raised(node.read()), HomeRecovering)
        watch = Watch(node, P)
        assert await watch.kinds(2) == ["opened", "synced"]
        await node.source(*snapshot(publish_notification(1), high_water=1))
        # The home cannot know whose memory it is: an engine that restarts over memory waits for all possible reads.
        assert from_duration((await node.register()).reuse_after) == TIMES.final
        accepted = (await node.read()).accepted
        assert accepted.source == proto(P)
        request = ipb.ListEnginesRequest(page_size=1)
        first = await node.introspection.ListEngines(request, timeout=TIMEOUT)
        request.page_token = first.next_page_token
        second = await node.introspection.ListEngines(request, timeout=TIMEOUT)
        listed = [page.engines[0].engine.incarnation for page in (first, second)]
        assert listed == sorted([P.incarnation, P2.incarnation])
        # The end of one incarnation does not affect the other.
        await node.leaves(impostor)
        node.pass_by(TIMES.engine_ttl)
        [ended] = await node.reader(read_done(accepted.lease_id, 0))
        assert ended.read_ended.verdict == pb.VERDICT_VALID
        node.pass_by(TIMES.retire)
        assert [engine.ref for engine in node.home.engines.engines()] == [P]
        # From now on the home knows which incarnation was first.
        assert isinstance(await raised(Watch(node, P2).next()), EngineIdInUse)
        watch.cancel()


async def test_an_impostor_gets_the_name_only_once_the_engine_counts_as_dead(ready: Node) -> None:
    watch = Watch(ready, P)
    await watch.kinds(2)
    assert isinstance(await raised(Watch(ready, P2).next()), EngineIdInUse)
    await ready.leaves(watch)
    ready.pass_by(TIMES.engine_ttl - 1)
    assert isinstance(await raised(Watch(ready, P2).next()), EngineIdInUse)
    ready.pass_by(1)
    await ready.open_engine(P2)
    assert isinstance(await raised(Watch(ready, P).next()), PeerRestarted)


@pytest.mark.parametrize("ref", [P, EngineRef("prefill", b"x" * 16)])
async def test_session_cannot_be_ended_without_its_secret(ready: Node, ref: EngineRef) -> None:
    ranks = pb.WATCH_ROLE_RANK
    for role in (pb.WATCH_ROLE_SCHEDULER, ranks):
        assert isinstance(await raised(Watch(ready, ref, secret=IMPOSTOR, role=role).next()), WrongSession)
    for notification in (
        pb.Notification(abort=pb.Abort(publication=1)),
        pb.Notification(released_ack=pb.ReleasedAck(publications=[1])),
        *snapshot(),
        pb.Notification(checksums=pb.PublishChecksums(publication=1)),
        pb.Notification(rank_left=pb.RankLeft(rank=0)),
        publish_notification(1),
    ):
        request = pb.NotifyRequest(sender=proto(ref), session_secret=IMPOSTOR, notifications=[notification])
        assert isinstance(await raised(ready.kv.Notify(request, timeout=TIMEOUT)), WrongSession)
    await ready.publish()
    assert (await ready.read()).HasField("accepted")
