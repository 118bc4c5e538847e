"""The RPC Notify: a batch of notifications, each answered by its own result."""

from __future__ import annotations

from kvferry._clock import to_duration
from kvferry._wire.status import to_notification_error
from kvferry.errors import InvalidField, KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.identity import EngineRef, Names
from kvferry_server.home.home import Home
from kvferry_server.servicers import checks, decode, encode
from kvferry_server.servicers.checksums import publish_checksums
from kvferry_server.servicers.limits import MAX_ACKNOWLEDGED, MAX_NOTIFICATIONS, MAX_SNAPSHOT_NAME
from kvferry_server.servicers.time_slice import TimeSlice

OF_A_SOURCE = frozenset({"publish", "abort", "released_ack", "resync", "checksums", "rank_left"})
"""Kinds that are sent in an engine's name, and so need its session secret."""


async def notify(home: Home, request: pb.NotifyRequest, names: Names) -> pb.NotifyResponse:
    """Act on a batch of notifications, in order. An error of one becomes its result; the others are acted on.

    The answer fits one message: an error takes at most `status.NOTIFICATION_ERROR_BYTES`.

    Args:
        home: the home.
        request: the call.
        names: the names in the caller's certificate.

    Raises:
        InvalidField: there are too many notifications, or the sender is malformed.
        WrongSession, PeerRestarted, EngineUnknown, Unavailable: the sender is not the source it claims to be, or not
            known now.
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
            raise InvalidField("sender", None, "the source that sends the notifications")
        with home.turn():
            home.engines.check_session(sender, request.session_secret)

    check()
    results, time_slice = list[pb.NotificationResult](), TimeSlice(check)
    for notification in request.notifications:
        if time_slice.over:
            await time_slice.pause()
        home.journal.notifications[notification.WhichOneof("kind") or "unknown"] += 1
        results.append(await _result(home, sender, names, notification, time_slice))
    return pb.NotifyResponse(home_epoch=home.epoch, results=results)


async def _result(
    home: Home, sender: EngineRef | None, names: Names, notification: pb.Notification, time_slice: TimeSlice
) -> pb.NotificationResult:
    kind = notification.WhichOneof("kind")
    try:
        if kind is None:
            raise InvalidField("notification.kind", None, "a kind that this node server knows")
        if kind == "decline":
            return _decline(home, notification.decline)
        if sender is None:
            raise InvalidField("sender", None, "the engine that sends the notification")
        if kind == "checksums":
            await publish_checksums(home, sender, notification.checksums, time_slice)
            return _done()
        if kind in OF_A_SOURCE:
            return _from_source(home, sender, kind, notification)
        return _from_reader(home, sender, names, kind, notification)
    except KvferryError as error:
        home.journal.notification_refused(kind or "unknown", error.reason, error.values, sender)
        return pb.NotificationResult(error=to_notification_error(error))


def _from_source(home: Home, sender: EngineRef, kind: str, notification: pb.Notification) -> pb.NotificationResult:
    if kind == "publish":
        step = decode.publication_step(notification.publish, home.limits.reads)
        with home.turn() as now:
            publication = home.sources.publish(sender, step)
            published = pb.Published(
                reference=home.reference(publication),
                final_remaining=to_duration(publication.final_at - now),
            )
        return pb.NotificationResult(published=published)
    with home.turn():
        if kind == "abort":
            home.sources.abort(sender, checks.positive("abort.publication", notification.abort.publication))
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
        home.sources.begin_snapshot(sender, resync.snapshot)
    elif resync.phase == pb.RESYNC_PHASE_END:
        home.sources.end_snapshot(sender, resync.high_water, resync.snapshot)
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
            answer = home.lessor.report(lease_id, sender, reports, names)
        verdict = pb.Verdict.ValueType(answer.verdict)
        ended = pb.ReadEnded(verdict=verdict, reported=answer.reported, complete=answer.complete)
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
