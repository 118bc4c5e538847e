"""The RPC ReadBlocks: how a home answers a reader that asks for a publication's blocks."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from kvferry._clock import to_duration
from kvferry._wire.version import OURS_ENCODED
from kvferry.errors import InvalidField, PublicationTimeout, ServerDraining
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.publications import Lease, PublicationStage
from kvferry_server.domain.reads import LeaseRequest
from kvferry_server.domain.routing import unless_all_refuse
from kvferry_server.home.home import Home
from kvferry_server.servicers import encode
from kvferry_server.servicers.limits import READ_BYTES, READ_STEPS


async def read_blocks(
    home: Home, request: LeaseRequest, wait: float, lease_id: bytes = b"", next_step: int = 0
) -> bytes:
    """Grant a lease on a publication, or find the reader's lease, and answer as soon as there is something that the
    reader lacks; with nothing new when the `wait`, in seconds, is over. Cancelling the call does not end the lease. If
    `lease_id` is empty, or another lease's, the answer has the lease and all steps, and comes at once. `next_step` is
    the index of the first step that the reader lacks under that lease. Returns an encoded `ReadBlocksResponse`.

    Raises:
        InvalidField: `next_step` is above the number of steps.
        PublicationTimeout: the publication did not arrive in time.
        LeaseEnded: the lease has ended.
        ServerDraining: the node server is draining; the lease goes on.
        KvferryError: all that `Lessor.grant`, `Routing.find` and `Engine.check_readable` raise.
    """
    waits_until = home.clock.now() + wait
    asked = await _found(home, request, waits_until, wait)
    lease = _granted(home, asked, lease_id)
    publication = lease.publication
    if not secrets.compare_digest(lease_id, lease.lease_id):
        # The reader goes on with the publication's own reference.
        reference = home.reference(publication) if request.routed is not None else ""
        return _answer(home, lease, 0, _accepted(lease, reference, home.clock.now()))
    there = len(publication.steps)
    if next_step > there:
        raise InvalidField("next_step", next_step, f"at most {there}, the steps there are")
    never_came = _timeout(f"{publication} was not published", publication.source, publication.number, wait)
    with home.wakeups.watching(publication) as waker:
        while len(publication.steps) <= next_step and not publication.complete and lease.revoked is None:
            if not lease.live and not publication.step_count:
                raise never_came
            lease.check_replay(asked)
            if home.draining:
                raise ServerDraining("this node server is draining; the lease goes on")
            left = waits_until - home.clock.now()
            if left <= 0:
                if publication.stage is PublicationStage.AWAITED:
                    raise never_came
                break
            await waker.wait(left)
            waker.clear()
    return _answer(home, lease, next_step)


async def _found(home: Home, request: LeaseRequest, waits_until: float, wait: float) -> LeaseRequest:
    """Return the request for a lease. A read with a router's reference first waits here for its publication, without a
    lease, because nothing is pinned for it yet."""
    routed = request.routed
    if routed is None:
        return request
    wanted = routed.router_key
    with home.turn():
        engines = home.engines.find_named(routed.engine_ids)
        sources = [engine.ref for engine in engines]
        found = home.routing.find(sources, wanted)
        if found is not None:
            return home.routing.request(found, request)
        unless_all_refuse(engines, Engine.check_readable)
        waiting = home.routing.wait(sources, wanted, request)
    try:
        with home.wakeups.watching(waiting) as waker:
            while True:
                with home.turn():
                    found = home.routing.find(_living(home, sources), wanted)
                    if found is not None:
                        return home.routing.request(found, request)
                left = waits_until - home.clock.now()
                if left <= 0:
                    problem = f"nothing was published by engine {sources[0].engine_id!r} under the router key"
                    raise _timeout(f"{problem} {wanted.name!r}", sources[0], 0, wait)
                await waker.wait(left)
                waker.clear()
    finally:
        home.routing.end_wait(waiting)


def _living(home: Home, sources: Sequence[EngineRef]) -> list[EngineRef]:
    """Return the incarnations that are alive. Raises `PeerRestarted` or `EngineUnknown` if none is."""
    return unless_all_refuse(sources, lambda ref: home.engines.find_live(ref.engine_id, ref.incarnation).ref)


def _granted(home: Home, request: LeaseRequest, lease_id: bytes) -> Lease:
    """Grant a lease. A reader that shows the lease_id goes on even if its source is gone. Raises as `Lessor.grant` and
    `Engine.check_readable`."""
    source = request.read.source
    with home.turn():
        if not (lease_id and home.lessor.has_lease(request.read, lease_id)):
            home.engines.find_live(source.engine_id, source.incarnation).check_readable()
        return home.lessor.grant(request)


def _timeout(problem: str, source: EngineRef, number: int, wait: float) -> PublicationTimeout:
    return PublicationTimeout(
        f"{problem} within {wait:.3f} s", engine_id=source.engine_id, publication=number, waited_ms=round(wait * 1000)
    )


def _answer(home: Home, lease: Lease, next_step: int, accepted: pb.Accepted | None = None) -> bytes:
    """Encode the steps from `next_step` on, as many as an answer may take. Each step came in one Notify, so one more
    step and the payload fit a message when the limits are reached."""
    publication = lease.publication
    answer = pb.ReadBlocksResponse(home_epoch=home.epoch, version=OURS_ENCODED, accepted=accepted)
    steps, room = list[bytes](), READ_BYTES
    for step in publication.steps[next_step : next_step + READ_STEPS]:
        if room <= 0:
            break
        steps.append(step.encoded)
        room -= len(step.encoded)
    if next_step + len(steps) == len(publication.steps):
        if publication.complete:
            answer.complete.MergeFrom(pb.Complete(payload=publication.steps[-1].payload, steps=len(publication.steps)))
        if lease.revoked is not None:
            answer.revoked.reason = encode.revoke_reason(lease.revoked)
    return b"".join((answer.SerializeToString(), *steps))


def _accepted(lease: Lease, reference: str, now: float) -> pb.Accepted:
    publication = lease.publication
    return pb.Accepted(
        lease_id=lease.lease_id,
        remaining=to_duration(lease.remaining(now)),
        renew_every=to_duration(lease.times.renew_every),
        source=encode.engine_ref(publication.source),
        publication=publication.number,
        request_id=publication.request_id,
        lease_number=lease.number,
        reference=reference,
    )
