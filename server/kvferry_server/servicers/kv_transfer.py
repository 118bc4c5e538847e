"""`kvferry.v1.KVTransfer`: validate, ask the home, encode. Errors are raised as they are; the server's guard turns them
into statuses."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc.aio

from kvferry._clock import to_duration
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferServicer
from kvferry_server.domain.reads import Ask
from kvferry_server.domain.registry import MISSING_TOLD
from kvferry_server.home.home import Home
from kvferry_server.home.streams import poll_blocks, read_blocks, watch
from kvferry_server.servicers import checks, decode, encode
from kvferry_server.servicers.callers import names_of, peer_of
from kvferry_server.servicers.checksums import read_checksums
from kvferry_server.servicers.notify import notify
from kvferry_server.servicers.relay import Relays
from kvferry_server.servicers.worker import Worker

ANSWER_SHARE = 0.05
ANSWER_MOST = 0.1
"""Of a call's remaining time, 5 % but at most 100 ms are kept for the answer that a publication did not come."""


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class KVTransfer(KVTransferServicer):
    """The service over one home, on the home's event loop."""

    def __init__(self, home: Home, relays: Relays, worker: Worker) -> None:
        self._home = home
        self._relays = relays
        self._worker = worker

    async def RegisterCache(self, request: pb.RegisterCacheRequest, context: Context) -> pb.RegisterCacheResponse:
        """See the contract."""
        home = self._home
        home.check_taking()
        relayed = self._relays.applies(request.home, request.relayed_by)
        secret = checks.session_secret(request.session_secret)
        registration = await self._worker.run_if_heavy(
            peer_of(context), request.ByteSize(), lambda: decode.registration(request)
        )
        if relayed:
            return await self._relays.register_cache(request)
        with home.turn():
            engine = home.register(registration, secret)
            reuse_after = home.reuse_after(registration.engine)
        return pb.RegisterCacheResponse(
            home_epoch=home.epoch,
            reuse_after=to_duration(reuse_after),
            missing_ranks=engine.missing_ranks(MISSING_TOLD),
            num_missing=engine.num_missing,
            advertise=home.advertise,
        )

    async def Handshake(  # type: ignore[override]  # The messages are encoded already.
        self, request: pb.HandshakeRequest, context: Context
    ) -> AsyncGenerator[bytes, None]:
        """See the contract."""
        home = self._home
        home.check_taking()
        engine_id = checks.text("engine_id", request.engine_id)
        incarnation = checks.random_bytes("incarnation", request.incarnation, optional=True)
        reader = checks.engine_ref("reader", request.reader)
        shown = decode.handshake_reference(request)
        with home.turn():
            engine = home.engines.find_live(engine_id, incarnation)
            if shown is not None:
                named, number, key = shown
                engine = home.engines.find_live(named.engine_id, named.incarnation)
                home.lessor.check_reference(named, number, key)
            if reader.engine_id == engine_id:
                engine = home.engines.find(reader)
            source = home.engines.check_readable(engine)
        own = engine.ref == reader

        def answer() -> tuple[bytes, ...]:
            if not own:
                # Before anything is told (R8).
                source.check_readable_by(decode.reader_geometry(request))
            return source.pages(home.epoch, encode.times(home.times), agents=shown is not None and not own)

        peer = peer_of(context)
        for page in await self._worker.run(peer, request.ByteSize(), answer):
            with home.memory.telling(peer or reader, peer, len(page)):
                yield page

    async def ReadBlocks(
        self, request: pb.ReadBlocksRequest, context: Context
    ) -> AsyncGenerator[pb.ReadBlocksResponse, None]:
        """See the contract."""
        home = self._home
        ask, wait = self._asked(request, context)
        async with aclosing(read_blocks(home, ask, wait)) as messages:
            async for message in messages:
                answer = encode.read_message(home.epoch, message, home.times, home.clock.now())
                with home.memory.telling(ask.asker, ask.peer, answer.ByteSize()):
                    yield answer

    async def PollBlocks(  # type: ignore[override]  # One answer, whose bytes are counted until it is taken.
        self, request: pb.PollBlocksRequest, context: Context
    ) -> AsyncGenerator[pb.PollBlocksResponse, None]:
        """See the contract."""
        home = self._home
        ask, wait = self._asked(request.read, context)
        lease_id = checks.random_bytes("lease_id", request.lease_id, optional=True)
        answer = encode.PollAnswer(home.epoch)
        async with aclosing(poll_blocks(home, ask, wait, lease_id, request.next_step)) as messages:
            async for message in messages:
                answer.add(message, home.times, home.clock.now())
                if answer.full:
                    break
            with home.memory.telling(ask.asker, ask.peer, answer.message.ByteSize()):
                yield answer.message

    async def Notify(self, request: pb.NotifyRequest, context: Context) -> pb.NotifyResponse:
        """See the contract."""
        return await notify(self._home, request, names_of(context))

    async def ReadChecksums(self, request: pb.ReadChecksumsRequest, context: Context) -> pb.ReadChecksumsResponse:
        """See the contract."""
        return await read_checksums(self._home, self._worker, request, names_of(context), peer_of(context))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncGenerator[pb.WatchResponse, None]:
        """See the contract."""
        home = self._home
        process = decode.process(request)
        if self._relays.applies(request.home, request.relayed_by):
            home.check_taking()
            async with aclosing(self._relays.watch(request)) as relayed:
                async for answer in relayed:
                    yield answer
            return
        stream = watch(
            home, process, request.session_secret, request.resume_epoch, request.resume_sequence, peer_of(context)
        )
        async with aclosing(stream) as messages:
            async for message in messages:
                yield encode.watch_message(home.epoch, message, home.times, home.advertise)

    def _asked(self, request: pb.ReadBlocksRequest, context: Context) -> tuple[Ask, float]:
        """What a reader asks for, and the seconds that it waits."""
        ask = decode.ask(request, self._home.limits.ranks, names_of(context), peer_of(context))
        wait = min(_time_to_wait(context), self._home.times.max_wait)
        if request.HasField("wait"):
            wait = min(wait, checks.seconds("wait", request.wait) or wait)
        return ask, wait


def _time_to_wait(context: Context) -> float:
    """Seconds of the call's time that may be spent on waiting."""
    remaining = context.time_remaining()
    if remaining is None:
        return math.inf
    return max(0.0, remaining - min(ANSWER_MOST, ANSWER_SHARE * remaining))
