"""The RPC Notify: a batch of notifications, each answered by its own result."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence

from kvferry._clock import to_duration
from kvferry._wire.authority import SECRET_BYTES
from kvferry._wire.status import NOTIFICATION_ERROR_BYTES, to_notification_error
from kvferry._wire.version import OURS_ENCODED
from kvferry.errors import EngineUnknown, HomeRecovering, InvalidField, KvferryError, NotAllowed
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.values import EngineRef, RouterReference
from kvferry_server.home.home import Home
from kvferry_server.servicers import checks, decode
from kvferry_server.servicers.checksums import publish_checksums
from kvferry_server.servicers.limits import MAX_ACKNOWLEDGED, MAX_NOTIFICATIONS, MAX_SNAPSHOT_NAME
from kvferry_server.servicers.relay import Caller, Relays

DECLINE_TIMEOUT = 5.0  # Seconds for declines that are sent on to their home

DONE = pb.NotificationResult(done=pb.Acknowledged())

OF_A_SOURCE = frozenset({"publish", "abort", "released_ack", "resync", "checksums", "rank_left", "retire", "miss"})
"""Kinds in an engine's name, which need its session secret."""


async def notify(
    home: Home, relays: Relays, request: pb.NotifyRequest, time_left: float, caller: Caller
) -> pb.NotifyResponse:
    """Act on a batch of notifications, in order. An error of one notification becomes its result; the others are acted
    on. Declines of other homes' publications are sent on at the end. The answer fits one message: an error takes at
    most `status.NOTIFICATION_ERROR_BYTES`. `time_left`: seconds until the call's deadline. Raises `InvalidField` if
    there are too many notifications, or the sender is malformed; and as `Registry.check_session` if the sender is not
    the source it claims to be, or is unknown at present."""
    checks.within("notifications", len(request.notifications), MAX_NOTIFICATIONS, unit="notifications")
    checks.exactly("session_secret", request.session_secret, SECRET_BYTES, optional=True)
    sender = checks.engine_ref("sender", request.sender) if request.HasField("sender") else None
    kinds = [notification.WhichOneof("kind") or "unknown" for notification in request.notifications]
    from_source = not OF_A_SOURCE.isdisjoint(kinds)

    def check() -> None:
        if not from_source:
            return
        if sender is None:
            raise InvalidField("sender", None, "the source that sends the notifications")
        with home.turn():
            home.engines.check_session(sender, request.session_secret)

    slices = home.time_slices
    short = (len(kinds) == 1 and kinds[0] != "ask") or all(kind == "renew" for kind in kinds)

    async def pause() -> None:
        await slices.wait(caller.host, short=short)
        # Earlier checks may no longer hold, now that other calls have worked.
        check()

    await slices.begin(caller.host, short=short)
    check()
    results = list[pb.NotificationResult]()
    elsewhere: dict[str, dict[int, pb.Decline]] = {}  # by home and index
    for index, (kind, notification) in enumerate(zip(kinds, request.notifications, strict=True)):
        if slices.over:
            await pause()
        home.journal.notifications[kind] += 1
        try:
            if kind == "checksums" and sender is not None:
                await publish_checksums(home, sender, notification.checksums, pause)
                result = None
            else:
                with home.turn():
                    result = _act(home, relays, sender, caller, kind, notification)
        except KvferryError as error:
            home.journal.notification_refused(kind, error.reason, error.values, sender)
            result = pb.NotificationResult(error=to_notification_error(error))
        if isinstance(result, str):
            elsewhere.setdefault(result, {})[index] = notification.decline
        results.append(result if isinstance(result, pb.NotificationResult) else DONE)
    if elsewhere:
        timeout = min(DECLINE_TIMEOUT, time_left)
        answers = await asyncio.gather(
            *(_sent_on(relays, at, list(declines.values()), timeout, caller) for at, declines in elsewhere.items())
        )
        for declines, answered in zip(elsewhere.values(), answers, strict=True):
            for index, result in zip(declines, answered, strict=True):
                results[index] = result
    return pb.NotifyResponse(home_epoch=home.epoch, results=results, version=OURS_ENCODED)


def _act(
    home: Home, relays: Relays, sender: EngineRef | None, caller: Caller, kind: str, notification: pb.Notification
) -> pb.NotificationResult | str | None:
    """Act on one notification, within a turn. Returns its result; None: it is done; or the address of the home to which
    a decline must be sent on."""
    if kind == "unknown":
        raise InvalidField("notification.kind", None, "a kind that this node server knows")
    if kind == "decline":
        return _decline(home, relays, notification.decline, caller.host or sender)
    if sender is None:
        raise InvalidField("sender", None, "the engine that sends the notification")
    if kind in OF_A_SOURCE:
        return _from_source(home, sender, kind, notification)
    return _from_reader(home, sender, caller, kind, notification)


def _from_source(
    home: Home, sender: EngineRef, kind: str, notification: pb.Notification
) -> pb.NotificationResult | None:
    if kind == "publish":
        publication = home.sources.publish(sender, decode.publication_step(notification.publish, home.limits.reads))
        final_remaining = to_duration(publication.final_at - home.clock.now())
        published = pb.Published(reference=home.reference(publication), final_remaining=final_remaining)
        return pb.NotificationResult(published=published)
    if kind == "abort":
        number = checks.positive("abort.publication", notification.abort.publication)
        home.sources.abort(sender, number, not_published=notification.abort.not_published)
    elif kind == "released_ack":
        numbers = notification.released_ack.publications
        checks.within("released_ack.publications", len(numbers), MAX_ACKNOWLEDGED, unit="publications")
        home.sources.acknowledge(sender, frozenset(numbers))
    elif kind == "rank_left":
        home.engines.rank_left(sender, notification.rank_left.rank)
    elif kind == "miss":
        home.sources.miss(sender, notification.miss.question, decode.miss_reason(notification.miss))
    elif kind == "retire":
        home.engines.retire(sender)
    else:
        resync = notification.resync
        checks.within("resync.snapshot", len(resync.snapshot), MAX_SNAPSHOT_NAME, unit="bytes")
        if resync.phase == pb.RESYNC_PHASE_BEGIN:
            home.sources.begin_snapshot(sender, resync.snapshot)
        elif resync.phase == pb.RESYNC_PHASE_END:
            home.sources.end_snapshot(sender, resync.high_water, resync.snapshot)
        else:
            raise InvalidField("resync.phase", resync.phase, "RESYNC_PHASE_BEGIN or RESYNC_PHASE_END")
    return None


def _from_reader(
    home: Home, sender: EngineRef, caller: Caller, kind: str, notification: pb.Notification
) -> pb.NotificationResult | None:
    names = caller.names
    if kind == "renew":
        lease_id = checks.random_bytes("renew.lease_id", notification.renew.lease_id)
        lease = home.lessor.renew(lease_id, sender, names)
        remaining = to_duration(lease.remaining(home.clock.now()))
        revoked = pb.RevokeReason.ValueType(lease.revoked or 0)
        return pb.NotificationResult(renewed=pb.Renewed(remaining=remaining, revoked=revoked))
    if kind == "read_done":
        lease_id = checks.random_bytes("read_done.lease_id", notification.read_done.lease_id)
        reports = decode.reports(notification.read_done, home.limits.ranks)
        return pb.NotificationResult(read_ended=home.lessor.report(lease_id, sender, reports, names))
    if kind == "validate":
        validate = notification.validate
        request, digest = decode.hinted_read(validate, sender, home.limits.ranks, names, caller.host)
        reports = decode.reports(validate, request.parties)
        source = request.read.source
        if home.stopping:
            # Its source would not hear of the release any more.
            home.check_not_draining()
        home.engines.find_live(source.engine_id, source.incarnation)
        return pb.NotificationResult(read_ended=home.lessor.validate(request, digest, reports))
    if kind == "ask":
        _ask(home, sender, caller, notification.ask)
    else:
        lease_id = checks.random_bytes("cancel.lease_id", notification.cancel.lease_id)
        home.lessor.cancel(lease_id, sender, names)
    return None


def _ask(home: Home, sender: EngineRef, caller: Caller, message: pb.Ask) -> None:
    names, engine, ask = decode.ask(message, sender, caller.host)
    if engine is not None:
        source = home.engines.find_live(engine.source.engine_id, engine.source.incarnation).ref
        home.lessor.check_reference(source, 0, engine.key)
    elif caller.names:
        source = home.engines.find_named(names)[0].ref
    else:
        # Whoever may ask learns what an engine has computed, so the name of an engine alone is not enough.
        raise NotAllowed(
            "a caller without a certificate has to name the engine by its engine_reference",
            identity="",
            role="reader",
            engine_id=names[0],
            method="Notify.ask",
        )
    home.routing.ask(source, ask)


def _decline(home: Home, relays: Relays, decline: pb.Decline, holder: Hashable) -> str | None:
    found = decode.reference(decline.reference)
    try:
        if not isinstance(found, RouterReference):
            home.engines.find_live(found.source.engine_id, found.source.incarnation)
            home.lessor.decline(found.source, found.publication, found.key)
            return None
        sources = [engine.ref for engine in home.engines.find_named(found.engine_ids)]
        # The reference names no incarnation, and an engine of another home may have the same name.
        elsewhere, given_up = not decline.relayed_by and relays.applies(found.home, ""), decline.not_published
        here = home.routing.decline(sources, found.router_key, holder, not_published=given_up, elsewhere=elsewhere)
        return None if here else found.home
    except (EngineUnknown, HomeRecovering):
        # Sent on only if unknown here: a home may be known by several addresses.
        if relays.applies(found.home, decline.relayed_by):
            return found.home
        raise


async def _sent_on(
    relays: Relays, home: str, declines: Sequence[pb.Decline], timeout: float, caller: Caller
) -> list[pb.NotificationResult]:
    """Send declines on to their home. Returns its results, or an error for each."""
    try:
        return [_checked(relays, home, result) for result in await relays.decline(home, declines, timeout, caller)]
    except KvferryError as error:
        return [pb.NotificationResult(error=to_notification_error(error))] * len(declines)


def _checked(relays: Relays, home: str, result: pb.NotificationResult) -> pb.NotificationResult:
    """Return another home's answer if it is an answer to a decline that fits this home's own answer; else an error."""
    if result.WhichOneof("kind") in ("done", "error") and result.ByteSize() <= NOTIFICATION_ERROR_BYTES:
        return result
    error = relays.unreachable(home, "it answered a decline with something else")
    return pb.NotificationResult(error=to_notification_error(error))
