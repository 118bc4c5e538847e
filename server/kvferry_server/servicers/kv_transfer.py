"""The service `kvferry.v1.KVTransfer`: each method validates, calls the home and encodes. The server's guard turns
errors into statuses."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvferry._clock import to_duration
from kvferry._wire.authority import SECRET_BYTES
from kvferry._wire.version import OURS_ENCODED, check_caller
from kvferry.errors import InvalidField, PublicationTimeout, ServerDraining
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferServicer
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.limits import MAX_NAMED_RANKS
from kvferry_server.domain.publications import Lease, PublicationStage
from kvferry_server.domain.routing import unless_all_refuse
from kvferry_server.domain.values import EngineRef, LeaseRequest
from kvferry_server.home.home import Home
from kvferry_server.home.time_slices import Worker
from kvferry_server.servicers import checks, decode, encode
from kvferry_server.servicers.callers import Context, NamesOf, names_of, on_end, relaying, remote_host
from kvferry_server.servicers.checksums import read_checksums
from kvferry_server.servicers.limits import MAX_DIGESTED_BYTES, READ_BYTES, READ_STEPS
from kvferry_server.servicers.notify import notify
from kvferry_server.servicers.relay import Caller, Relays
from kvferry_server.servicers.watch import watch

# How long before its deadline a ReadBlocks stops waiting, so that its answer arrives in time: a share of the time that
# remained at its start, and at most this many seconds.
ANSWER_FRACTION, ANSWER_MOST = 0.05, 0.1


class KVTransfer(KVTransferServicer):
    """The service of one home. Runs on the home's event loop."""

    def __init__(self, home: Home, relays: Relays, worker: Worker, names_of: NamesOf = names_of) -> None:
        self._home = home
        self._names_of = names_of
        self._relays = relays
        self._worker = worker

    async def RegisterCache(self, request: pb.RegisterCacheRequest, context: Context) -> pb.RegisterCacheResponse:
        home = self._home
        check_caller(request.version, request.relayed_by)
        home.check_not_draining()
        relayed = self._relays.applies(request.home, request.relayed_by)
        secret = checks.exactly("session_secret", request.session_secret, SECRET_BYTES)
        host = remote_host(context)
        registration = await self._worker.run(host, lambda: decode.registration(request))
        if relayed:
            with relaying(context):
                return await self._relays.register_cache(request, self._caller(context))
        with home.turn():
            whole = home.engines.completed_by(registration, secret)
        if whole is not None:
            # Checked before the registration counts, so that the rank may correct itself. Meanwhile no other rank can
            # become the last.
            await self._worker.run(host, whole.check_complete)
        with home.turn():
            engine = home.engines.register(registration, secret)
            reuse_after = home.engines.reuse_after(registration.engine)
        return pb.RegisterCacheResponse(
            home_epoch=home.epoch,
            reuse_after=to_duration(reuse_after),
            missing_ranks=engine.missing_ranks(MAX_NAMED_RANKS),
            num_missing=engine.num_missing,
            advertise=home.advertise,
            version=OURS_ENCODED,
        )

    async def Handshake(  # type: ignore[override]  # It yields encoded messages.
        self, request: pb.HandshakeRequest, context: Context
    ) -> AsyncGenerator[bytes, None]:
        home = self._home
        version = check_caller(request.version)
        home.check_not_draining()
        engine_id = checks.text("engine_id", request.engine_id)
        incarnation = checks.random_bytes("incarnation", request.incarnation, optional=True)
        reader = checks.engine_ref("reader", request.reader)
        reference = decode.handshake_reference(request)
        with home.turn():
            engine = home.engines.find_live(engine_id, incarnation)
            if reference is not None:
                source = reference.source
                engine = home.engines.find_live(source.engine_id, source.incarnation)
                home.lessor.check_reference(source, reference.publication, reference.key)
            if reader.engine_id == engine_id:
                engine = home.engines.find(reader)
            description = engine.check_readable()
        description.check_version(version)
        own, host = engine.ref == reader, remote_host(context)
        agents = reference is not None and not own
        digest = decode.reader_digest(request) if not own and request.ByteSize() <= MAX_DIGESTED_BYTES else b""

        def answer() -> tuple[bytes, ...]:
            if not own:
                # Checked before any metadata is returned (R8).
                description.check_readable_by(decode.reader_geometry(request))
                if digest:
                    description.note_reader(digest)
            return description.pages(home.epoch, encode.times(home.times), agents=agents)

        pages = description.made_pages(digest, agents=agents)
        if pages is None:
            pages = await self._worker.run(host, answer)
        for page in pages:
            with home.memory.hold(host or reader, host, len(page)):
                yield page

    async def ReadBlocks(  # type: ignore[override]  # It returns an encoded message.
        self, request: pb.ReadBlocksRequest, context: Context
    ) -> bytes:
        home = self._home
        check_caller(request.version)
        names, host = self._names_of(context), remote_host(context)
        lease_request = decode.lease_request(request, home.limits.ranks, names, host)
        lease_id = checks.random_bytes("lease_id", request.lease_id, optional=True)
        wait = min(_time_to_wait(context), home.times.max_wait)
        if request.HasField("wait"):
            wait = min(wait, checks.seconds("wait", request.wait) or wait)
        answer = await read_blocks(home, lease_request, wait, lease_id, request.next_step)
        # The guard counts large answers only, and lets a host wait in thousands of these calls. Counted against the
        # host of this call, not that of the lease's first call.
        on_end(context, home.memory.hold(lease_request.holder, host, len(answer)).close)
        return answer

    async def Notify(self, request: pb.NotifyRequest, context: Context) -> pb.NotifyResponse:
        check_caller(request.version)
        with relaying(context):
            caller = self._caller(context)
            return await notify(self._home, self._relays, request, _time_to_wait(context), caller)

    async def ReadChecksums(self, request: pb.ReadChecksumsRequest, context: Context) -> pb.ReadChecksumsResponse:
        return await read_checksums(self._home, self._worker, request, self._names_of(context), remote_host(context))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncGenerator[pb.WatchResponse, None]:
        home = self._home
        check_caller(request.version, request.relayed_by)
        process = decode.process(request)
        if self._relays.applies(request.home, request.relayed_by):
            home.check_not_draining()
            stream = self._relays.watch(request, self._caller(context))
        else:
            secret, epoch, host = request.session_secret, request.resume_epoch, remote_host(context)
            stream = watch(home, process, secret, epoch, request.resume_sequence, host)
        async with aclosing(stream) as messages:
            async for message in messages:
                yield message

    def _caller(self, context: Context) -> Caller:
        return Caller(remote_host(context), self._names_of(context))


def _time_to_wait(context: Context) -> float:
    """Return the seconds that a call, which has a deadline, may wait, so that its answer arrives before that."""
    remaining = context.time_remaining()
    return max(0.0, remaining - min(ANSWER_MOST, ANSWER_FRACTION * remaining))


async def read_blocks(
    home: Home, request: LeaseRequest, wait: float, lease_id: bytes = b"", next_step: int = 0
) -> bytes:
    """Grant a lease on a publication, or find the reader's lease, and answer as soon as there is something that the
    reader lacks; with nothing new when the `wait`, in seconds, is over. Cancelling the call does not end the lease. If
    `lease_id` is empty, or another lease's, the answer has the lease and all steps, and comes at once. `next_step` is
    the index of the first step that the reader lacks under that lease. Returns an encoded `ReadBlocksResponse`. Raises
    `InvalidField` if `next_step` is above the number of steps; `PublicationTimeout` if the publication did not arrive
    in time; `LeaseEnded`; `ServerDraining`, while the lease goes on; and as `Lessor.grant`, `Routing.find` and
    `Engine.check_readable`."""
    waits_until = home.clock.now() + wait
    asked = await _found(home, request, waits_until, wait)
    source = asked.read.source
    with home.turn():
        # A reader that shows the lease_id goes on even if its source is gone.
        if not (lease_id and home.lessor.has_lease(asked.read, lease_id)):
            home.engines.find_live(source.engine_id, source.incarnation).check_readable()
        lease = home.lessor.grant(asked)
    publication = lease.publication
    if not secrets.compare_digest(lease_id, lease.lease_id):
        # The reader goes on with the publication's own reference.
        reference = home.reference(publication) if request.routed is not None else ""
        accepted = pb.Accepted(
            lease_id=lease.lease_id,
            remaining=to_duration(lease.remaining(home.clock.now())),
            renew_every=to_duration(lease.times.renew_every),
            source=encode.engine_ref(publication.source),
            publication=publication.number,
            request_id=publication.request_id,
            lease_number=lease.number,
            reference=reference,
        )
        return _answer(home, lease, 0, accepted)
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
    """Return the request for a lease. A read with a router's reference waits here, since nothing is pinned yet."""
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
        with home.wakeups.watching(wanted.name) as waker:
            while True:
                with home.turn():
                    found = home.routing.find(_living(home, sources), wanted)
                    if found is not None:
                        return home.routing.request(found, request)
                left = waits_until - home.clock.now()
                if left <= 0:
                    break
                await waker.wait(left)
                waker.clear()
    finally:
        home.routing.end_wait(waiting)
    problem = f"nothing was published by engine {sources[0].engine_id!r} under the router key {wanted.name!r}"
    raise _timeout(problem, sources[0], 0, wait)


def _living(home: Home, sources: Sequence[EngineRef]) -> list[EngineRef]:
    """Return the incarnations that are alive. Raises `PeerRestarted` or `EngineUnknown` if none is."""
    return unless_all_refuse(sources, lambda ref: home.engines.find_live(ref.engine_id, ref.incarnation).ref)


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
            answer.revoked.reason = pb.RevokeReason.ValueType(lease.revoked or 0)
    return b"".join((answer.SerializeToString(), *steps))
