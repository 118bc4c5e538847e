"""A batch of notifications, each answered by its own result (the contract's Notify)."""

from __future__ import annotations

from kvferry._clock import to_duration
from kvferry._wire.status import to_notification_error
from kvferry.errors import InvalidField, KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.identity import EngineRef, Names
from kvferry_server.home.home import Home
from kvferry_server.servicers import checks, decode, encode
from kvferry_server.servicers.checksums import publish_checksums
from kvferry_server.servicers.turns import Turns

MAX_NOTIFICATIONS = 1024

OF_A_SOURCE = frozenset({"publish", "abort", "released_ack", "resync", "checksums", "rank_left"})
"""Said in an engine's name, so its session secret is needed."""

MAX_SNAPSHOT_NAME = 64
"""Bytes of the name of a snapshot."""


MAX_ACKNOWLEDGED = 1 << 16
"""Releases acknowledged by one notification."""


async def notify(home: Home, request: pb.NotifyRequest, names: Names) -> pb.NotifyResponse:
    """Do what a batch says; `names` are those of the caller's certificate.

    The answer fits a message: an error takes at most `status.NOTIFICATION_ERROR_BYTES`, and there are at most 1,024.

    Raises:
        InvalidField: too many notifications, or a malformed sender.
        WrongSession, PeerRestarted, EngineUnknown, Unavailable: the sender cannot be accepted as the source it claims
            to be.
    """
    if len(request.notifications) > MAX_NOTIFICATIONS:
        raise InvalidField("notifications", f"{len(request.notifications)}", f"at most {MAX_NOTIFICATIONS}")
    checks.session_secret(request.session_secret, optional=True)
    sender = checks.engine_ref("sender", request.sender) if request.HasField("sender") else None
    from_source = any(notification.WhichOneof("kind") in OF_A_SOURCE for notification in request.notifications)

    def check() -> None:
        if not from_source:
            return
        if sender is None:
            raise InvalidField("sender", None, "the source that speaks")
        with home.turn():
            home.engines.check_session(sender, request.session_secret)

    check()
    results, turns = list[pb.NotificationResult](), Turns(check)
    for notification in request.notifications:
        await turns.give()
        results.append(await _result(home, sender, names, notification, turns))
    return pb.NotifyResponse(home_epoch=home.epoch, results=results)


async def _result(
    home: Home, sender: EngineRef | None, names: Names, notification: pb.Notification, turns: Turns
) -> pb.NotificationResult:
    kind = notification.WhichOneof("kind")
    try:
        if kind is None:
            raise InvalidField("notification.kind", None, "one of the kinds")
        if kind == "decline":
            return _decline(home, notification.decline)
        if sender is None:
            raise InvalidField("sender", None, "the engine that speaks")
        if kind == "checksums":
            await publish_checksums(home, sender, notification.checksums, turns)
            return _done()
        if kind in OF_A_SOURCE:
            return _from_source(home, sender, kind, notification)
        return _from_reader(home, sender, names, kind, notification)
    except KvferryError as error:
        return pb.NotificationResult(error=to_notification_error(error))


def _from_source(home: Home, sender: EngineRef, kind: str, notification: pb.Notification) -> pb.NotificationResult:
    if kind == "publish":
        offer = decode.offer(notification.publish, home.limits.reads)
        with home.turn() as now:
            publication = home.lessor.publish(sender, offer)
            published = pb.Published(
                reference=home.reference(publication),
                final_remaining=to_duration(publication.final_at - now),
            )
        return pb.NotificationResult(published=published)
    with home.turn():
        if kind == "abort":
            home.lessor.abort(sender, checks.positive("abort.publication", notification.abort.publication))
        elif kind == "released_ack":
            _acknowledge(home, sender, notification.released_ack)
        elif kind == "rank_left":
            home.engines.rank_left(sender, notification.rank_left.rank)
        else:
            _resync(home, sender, notification.resync)
    return _done()


def _acknowledge(home: Home, sender: EngineRef, message: pb.ReleasedAck) -> None:
    if len(message.publications) > MAX_ACKNOWLEDGED:
        given, most = f"{len(message.publications)}", f"at most {MAX_ACKNOWLEDGED}"
        raise InvalidField("released_ack.publications", given, most)
    home.acknowledge(sender, frozenset(message.publications))


def _resync(home: Home, sender: EngineRef, resync: pb.Resync) -> None:
    if len(resync.snapshot) > MAX_SNAPSHOT_NAME:
        raise InvalidField("resync.snapshot", f"{len(resync.snapshot)} bytes", f"at most {MAX_SNAPSHOT_NAME}")
    if resync.phase == pb.RESYNC_PHASE_BEGIN:
        home.lessor.begin_snapshot(sender, resync.snapshot)
    elif resync.phase == pb.RESYNC_PHASE_END:
        home.lessor.end_snapshot(sender, resync.high_water, resync.snapshot)
    else:
        raise InvalidField("resync.phase", resync.phase, "RESYNC_PHASE_BEGIN or RESYNC_PHASE_END")


def _from_reader(
    home: Home, sender: EngineRef, names: Names, kind: str, notification: pb.Notification
) -> pb.NotificationResult:
    if kind == "renew":
        lease_id = checks.random_bytes("renew.lease_id", notification.renew.lease_id)
        with home.turn():
            renewal = home.lessor.renew(lease_id, sender, names)
        revoked = encode.revoke_reason(renewal.revoked)
        return pb.NotificationResult(renewed=pb.Renewed(remaining=to_duration(renewal.remaining), revoked=revoked))
    if kind == "read_done":
        lease_id = checks.random_bytes("read_done.lease_id", notification.read_done.lease_id)
        reports = decode.reports(notification.read_done, home.limits.ranks)
        with home.turn():
            judged = home.lessor.report(lease_id, sender, reports, names)
        verdict = pb.Verdict.ValueType(judged.verdict)
        ended = pb.ReadEnded(verdict=verdict, reported=judged.reported, complete=judged.complete)
        return pb.NotificationResult(read_ended=ended)
    lease_id = checks.random_bytes("cancel.lease_id", notification.cancel.lease_id)
    with home.turn():
        home.lessor.cancel(lease_id, sender, names)
    return _done()


def _decline(home: Home, decline: pb.Decline) -> pb.NotificationResult:
    source, number, key = decode.reference(decline.reference)
    with home.turn():
        engine = home.engines.find_live(source.engine_id, source.incarnation)
        home.lessor.decline(engine.ref, number, key)
    return _done()


def _done() -> pb.NotificationResult:
    return pb.NotificationResult(done=pb.Acknowledged())
