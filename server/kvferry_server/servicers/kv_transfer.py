"""The service `kvferry.v1.KVTransfer`: each method validates, calls the home and encodes. The server's guard turns
errors into statuses."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

from kvferry._clock import to_duration
from kvferry._wire.version import OURS_ENCODED, check_caller
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferServicer
from kvferry_server.domain.limits import MAX_NAMED_RANKS
from kvferry_server.home.home import Home
from kvferry_server.servicers import checks, decode, encode
from kvferry_server.servicers.callers import Context, NamesOf, names_of, on_end, relaying, remote_host
from kvferry_server.servicers.checksums import read_checksums
from kvferry_server.servicers.limits import MAX_DIGESTED_BYTES
from kvferry_server.servicers.notify import notify
from kvferry_server.servicers.read_blocks import read_blocks
from kvferry_server.servicers.relay import Caller, Relays
from kvferry_server.servicers.watch import watch
from kvferry_server.servicers.worker import Worker

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
        secret = checks.session_secret(request.session_secret)
        host, size = remote_host(context), request.ByteSize()
        registration = await self._worker.run(host, size, lambda: decode.registration(request))
        if relayed:
            with relaying(context):
                return await self._relays.register_cache(request, self._caller(context))
        with home.turn():
            whole = home.engines.completed_by(registration, secret)
        if whole is not None:
            # Checked before the registration counts, so that the rank may correct itself. Meanwhile no other rank can
            # become the last.
            await self._worker.run(host, size, whole.check_complete)
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
        own, host, size = engine.ref == reader, remote_host(context), request.ByteSize()
        agents = reference is not None and not own
        digest = decode.reader_digest(request) if size <= MAX_DIGESTED_BYTES and not own else b""

        def answer() -> tuple[bytes, ...]:
            if not own:
                # Checked before any metadata is returned (R8).
                description.check_readable_by(decode.reader_geometry(request))
                if digest:
                    description.note_reader(digest)
            return description.pages(home.epoch, encode.times(home.times), agents=agents)

        pages = description.made_pages(digest, agents=agents)
        if pages is None:
            pages = await self._worker.run(host, size, answer)
        for page in pages:
            with home.memory.hold(host or reader, host, len(page)):
                yield page

    async def ReadBlocks(  # type: ignore[override]  # It returns an encoded message.
        self, request: pb.ReadBlocksRequest, context: Context
    ) -> bytes:
        home = self._home
        check_caller(request.version)
        host = remote_host(context)
        lease_request = decode.lease_request(request, home.limits.ranks, self._names_of(context), host)
        lease_id = checks.random_bytes("lease_id", request.lease_id, optional=True)
        wait = min(_time_to_wait(context), home.times.max_wait)
        if request.HasField("wait"):
            wait = min(wait, checks.seconds("wait", request.wait) or wait)
        answer = await read_blocks(home, lease_request, wait, lease_id, request.next_step)
        # Counted against the host of this call, not that of the lease's first call.
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
    """Return the seconds that a call may wait, so that its answer arrives before its deadline."""
    remaining = context.time_remaining()
    if remaining is None:
        return math.inf
    return max(0.0, remaining - min(ANSWER_MOST, ANSWER_FRACTION * remaining))
