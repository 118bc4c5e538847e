"""Ranks whose engine's home is another node server (PROTOCOL, Watch, liveness, relays).

A relay keeps nothing: it passes a rank's registration and its Watch on to the home, marked with its own address, and
the home's answers back. So there is nothing to lose: after a restart of either, the rank's own Watch ends, comes again,
and is told whether the home needs its registration again. The Watch at the home ends with the rank's, or with this
server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kvferry._wire.channel import TlsConfig, connect_async, is_loopback, parse_address
from kvferry._wire.status import from_rpc_error
from kvferry.errors import InvalidField, LimitReached, RelayLoop
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferStub

if TYPE_CHECKING:
    from kvferry.v1.kv_transfer_pb2_grpc import KVTransferAsyncStub

logger = logging.getLogger(__name__)

LEFT_TIMEOUT = 1.0
"""Seconds to tell a home that a rank has left; a home that does not hear it takes this node for lost."""

HOMES = 256
"""Homes that are connected to at once."""

RETRY_AFTER = 1.0
"""Seconds after which there may be room for another."""

REGISTER_TIMEOUT = 5.0
"""Seconds for a home to take a registration: a rank that waits for a dead one repeats it."""


class Relays:
    """Connections to the homes of ranks that are here. Belongs to the event loop that runs it.

    Args:
        advertise: our own address, as others reach us.
        tls: credentials. With an authority they cover every home: only its certificates are talked to.
        anywhere: whether any home may be dialled without TLS; else only loopback.
        patterns: shell patterns of ``host:port``; if there are any, they alone say which homes may be dialled.
    """

    def __init__(self, advertise: str, tls: TlsConfig | None, *, anywhere: bool, patterns: Sequence[str] = ()) -> None:
        self._advertise = advertise
        self._tls = tls
        self._anywhere = anywhere or (tls is not None and tls.ca is not None)
        self._patterns = tuple(patterns)
        self._channels: dict[str, tuple[grpc.aio.Channel, int]] = {}
        self._endings: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._ending = False

    def end(self) -> None:
        """This node server ends: the Watches that end from now on do not end because of their ranks."""
        self._ending = True

    async def close(self) -> None:
        """Wait until every Watch has ended at its home."""
        if self._endings:
            await asyncio.wait(tuple(self._endings.values()))

    def applies(self, home: str, relayed_by: str) -> bool:
        """Whether a call is for another home.

        Raises:
            RelayLoop: it is, and was relayed to us.
        """
        if not home or home == self._advertise:
            return False
        if relayed_by:
            raise RelayLoop(
                f"{relayed_by} relayed a call for {home} to {self._advertise}, which is not that home",
                relayed_by=relayed_by,
            )
        return True

    async def register_cache(self, request: pb.RegisterCacheRequest) -> pb.RegisterCacheResponse:
        """Pass a registration on. What the home refuses is raised as the home says it; `Unreachable` if it is not
        there."""
        home = request.home
        request.relayed_by = self._advertise
        stub = self._enter(home)
        try:
            answer = await stub.RegisterCache(request, timeout=REGISTER_TIMEOUT)
        except grpc.RpcError as error:
            raise from_rpc_error(error, home) from None
        finally:
            await self._leave(home)
        answer.advertise = self._advertise
        return answer

    async def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.WatchResponse, None]:
        """Pass on a rank's Watch, and what the home tells it. Errors as `register_cache`; ends when either side
        does."""
        if request.role != pb.WATCH_ROLE_RANK:
            raise InvalidField("home", request.home, "none: a scheduler's node server is its engine's home")
        home, process = request.home, (request.engine.SerializeToString(), request.rank)
        request.relayed_by = self._advertise
        if ending := self._endings.get(process):
            # The word of a rank's end must not overtake its return.
            await asyncio.wait([ending])
        stub = self._enter(home)
        call = stub.Watch(request)
        left = True
        try:
            async for message in call:
                if message.WhichOneof("event") == "opened":
                    message.opened.advertise = self._advertise
                yield message
            left = False
        except grpc.RpcError as error:
            left = False
            raise from_rpc_error(error, home) from None
        finally:
            # A task of its own: this one has been cancelled where the rank is gone.
            ending = self._endings[process] = asyncio.create_task(self._end_watch(stub, call, request, left=left))
            ending.add_done_callback(partial(self._ended_watch, process))

    async def _end_watch(
        self,
        stub: KVTransferAsyncStub,
        call: grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.WatchResponse],
        request: pb.WatchRequest,
        *,
        left: bool,
    ) -> None:
        """The home learns at once that a rank is gone; if it `left`, that first: a Watch that ends without a word ended
        with its node."""
        said = pb.NotifyRequest(
            sender=request.engine,
            session_secret=request.session_secret,
            notifications=[pb.Notification(rank_left=pb.RankLeft(rank=request.rank))],
        )
        try:
            if left and not self._ending:
                await stub.Notify(said, timeout=LEFT_TIMEOUT)
        except grpc.RpcError as error:
            logger.info("end of rank %d not told: %s", request.rank, from_rpc_error(error, request.home))
        finally:
            call.cancel()
            await self._leave(request.home)

    def _ended_watch(self, process: tuple[bytes, int], ending: asyncio.Task[None]) -> None:
        if self._endings.get(process) is ending:
            del self._endings[process]

    def _enter(self, home: str) -> KVTransferAsyncStub:
        self._check(home)
        if home not in self._channels and len(self._channels) >= HOMES:
            raise LimitReached(
                f"relayed_homes: this node server is connected to {HOMES} homes already",
                retry_after=RETRY_AFTER,
                limit="relayed_homes",
                value=HOMES,
            )
        channel, users = self._channels.get(home) or (connect_async(home, self._tls), 0)
        self._channels[home] = channel, users + 1
        stub: KVTransferAsyncStub = KVTransferStub(channel)  # type: ignore[assignment]
        return stub

    def _check(self, home: str) -> None:
        """Whoever can register names a home, so this server would dial whatever a stranger wants, for him."""
        address = parse_address(home, "home")
        if address.is_unix:
            # Behind a path there can be any service of this host, and a home has an address that others can reach.
            raise InvalidField("home", home, "host:port: a home behind a UNIX socket is its own engines' only")
        if self._patterns:
            if not any(fnmatchcase(home, pattern) for pattern in self._patterns):
                raise InvalidField("home", home, f"an address that this node server may relay to {self._patterns}")
        elif not self._anywhere and not is_loopback(home):
            raise InvalidField(
                "home", home, "an address on this host: this server has neither tls_ca nor relay_homes nor insecure"
            )

    async def _leave(self, home: str) -> None:
        channel, users = self._channels[home]
        if users > 1:
            self._channels[home] = channel, users - 1
        else:
            del self._channels[home]
            await channel.close()
