"""Relays: calls of ranks here whose engine's home is another node server (PROTOCOL, Watch, liveness, relays).

A relay keeps no state. It passes a rank's registration and its Watch on to the home, marked with this server's address,
and passes the home's answers back. After a restart of either server the rank's own Watch ends and is opened again, and
its first messages say whether the home needs the registration again. The Watch at the home ends when the rank's does,
or when this server does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kvferry._tracing import call_metadata
from kvferry._wire.channel import TlsConfig, TlsContent, connect_async, is_loopback, parse_address
from kvferry._wire.status import from_rpc_error
from kvferry.errors import InvalidField, LimitReached, RelayLoop, Unreachable
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferStub
from kvferry_server.domain.budgets import Budget, check_budget
from kvferry_server.servicers import checks
from kvferry_server.servicers.limits import MAX_DECLINE_HOMES, MAX_HOMES
from kvferry_server.servicers.times import RANK_LEFT_TIMEOUT, REGISTER_TIMEOUT, RELAY_RETRY_AFTER

if TYPE_CHECKING:
    from kvferry.v1.kv_transfer_pb2_grpc import KVTransferAsyncStub

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _HomeChannel:
    """A channel to a home, the TLS files that it was made with, the number of calls that use it, and the host whose
    decline it was made for; None: a rank's."""

    channel: grpc.aio.Channel
    tls: TlsConfig | TlsContent | None
    opened_by: str | None
    users: int = 0


class Relays:
    """Connections to the homes of ranks that run here. Not thread-safe: it belongs to the event loop that runs it.

    Args:
        advertise: the address at which others reach this server.
        tls: TLS files for connections to homes. With a CA (`tls.ca`) any home may be dialled, since only homes with a
            certificate of that CA are accepted.
        anywhere: whether any home may be dialled also without that; otherwise only homes on this host.
        patterns: shell patterns of ``host:port``; if there are any, they alone decide which homes may be dialled.
        content: returns what the TLS files hold now: later calls use it, and those in progress keep their connections.
            None: `tls` is read for each connection.
    """

    def __init__(
        self,
        advertise: str,
        tls: TlsConfig | None,
        *,
        anywhere: bool,
        patterns: Sequence[str] = (),
        content: Callable[[], TlsContent] | None = None,
    ) -> None:
        self._advertise = advertise
        self._tls = tls
        self._anywhere = anywhere or (tls is not None and tls.ca is not None)
        self._patterns = tuple(patterns)
        self._content = content
        self._connections: dict[str, _HomeChannel] = {}
        self._opened = Budget(MAX_DECLINE_HOMES)
        """Connections that declines have opened, by the caller's host: homes that do not answer must not take all that
        there are from the declines of others."""
        self._endings: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._stopping = False

    @property
    def num_homes(self) -> int:
        """How many homes it is connected to."""
        return len(self._connections)

    def stop(self) -> None:
        """Note that this node server stops: no home is told that a rank has left when its Watch ends from now on."""
        self._stopping = True

    async def close(self) -> None:
        """Wait until every relayed Watch has ended at its home."""
        if self._endings:
            await asyncio.wait(tuple(self._endings.values()))

    def applies(self, home: str, relayed_by: str) -> bool:
        """Whether a call must be relayed, because it is for another home.

        Raises:
            RelayLoop: it is for another home, but another node server has relayed it to this one.
            InvalidField: an address is too long.
        """
        checks.text("home", home, least=0)
        checks.text("relayed_by", relayed_by, least=0)
        if not home or home == self._advertise:
            return False
        if relayed_by:
            raise RelayLoop(
                f"{relayed_by} relayed a call for home {home} to {self._advertise}, which is another home",
                relayed_by=relayed_by,
            )
        return True

    async def register_cache(self, request: pb.RegisterCacheRequest) -> pb.RegisterCacheResponse:
        """Relay a registration to its home and return the home's answer.

        Raises:
            Unreachable: the home does not answer.
            LimitReached: too many homes are connected to.
            InvalidField: this server may not dial the home.
            KvferryError: whatever the home answers.
        """
        home = request.home
        request.relayed_by = self._advertise
        stub, connection = self._enter(home)
        try:
            answer = await stub.RegisterCache(request, timeout=REGISTER_TIMEOUT, metadata=call_metadata())
        except grpc.RpcError as error:
            raise from_rpc_error(error, home, self._tls) from None
        finally:
            await self._leave(home, connection)
        answer.advertise = self._advertise
        return answer

    async def decline(
        self, home: str, declines: Sequence[pb.Decline], timeout: float, host: str
    ) -> Sequence[pb.NotificationResult]:
        """Send declines on to the home that their references name, marked, so that it does not send them on again.
        Returns its results, in order.

        Args:
            home: the home.
            declines: what it is told.
            timeout: seconds that it may take.
            host: where the call came from, as `remote_host` returns it.

        Raises: as `register_cache`.
        """
        marked = [pb.Decline(reference=decline.reference, relayed_by=self._advertise) for decline in declines]
        request = pb.NotifyRequest(notifications=[pb.Notification(decline=decline) for decline in marked])
        stub, connection = self._enter(home, MAX_DECLINE_HOMES, host)
        try:
            answer = await stub.Notify(request, timeout=timeout, metadata=call_metadata())
        except grpc.RpcError as error:
            raise from_rpc_error(error, home, self._tls) from None
        finally:
            await self._leave(home, connection)
        if len(answer.results) != len(declines):
            raise Unreachable(f"{home} gave {len(answer.results)} answers to {len(declines)} declines", address=home)
        return answer.results

    async def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.WatchResponse, None]:
        """Relay a rank's Watch and yield the home's messages, until either side ends. Raises as `register_cache`."""
        if request.role != pb.WATCH_ROLE_RANK:
            raise InvalidField("home", request.home, "empty: a scheduler's node server is its engine's home")
        home, process = request.home, (request.engine.SerializeToString(), request.rank)
        request.relayed_by = self._advertise
        if ending := self._endings.get(process):
            # The home must hear that the rank left before it hears that it is back.
            await asyncio.wait([ending])
        stub, connection = self._enter(home)
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
            raise from_rpc_error(error, home, self._tls) from None
        finally:
            # In a task of its own: this one is cancelled if the rank is gone.
            ending = self._endings[process] = asyncio.create_task(
                self._end_watch(stub, connection, call, request, left=left)
            )
            ending.add_done_callback(partial(self._ended_watch, process))

    async def _end_watch(
        self,
        stub: KVTransferAsyncStub,
        connection: _HomeChannel,
        call: grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.WatchResponse],
        request: pb.WatchRequest,
        *,
        left: bool,
    ) -> None:
        """End a rank's Watch at the home. If the rank `left`, tell the home so first: otherwise it assumes that the
        whole node is lost."""
        notice = pb.NotifyRequest(
            sender=request.engine,
            session_secret=request.session_secret,
            notifications=[pb.Notification(rank_left=pb.RankLeft(rank=request.rank))],
        )
        try:
            if left and not self._stopping:
                await stub.Notify(notice, timeout=RANK_LEFT_TIMEOUT)
        except grpc.RpcError as error:
            problem = from_rpc_error(error, request.home, self._tls)
            logger.info("could not tell home %s that rank %d has left: %s", request.home, request.rank, problem)
        finally:
            call.cancel()
            await self._leave(request.home, connection)

    def _ended_watch(self, process: tuple[bytes, int], ending: asyncio.Task[None]) -> None:
        if self._endings.get(process) is ending:
            del self._endings[process]

    def _enter(
        self, home: str, most: int = MAX_HOMES, host: str | None = None
    ) -> tuple[KVTransferAsyncStub, _HomeChannel]:
        self._check(home)
        if home not in self._connections and len(self._connections) >= most:
            raise LimitReached(
                f"relayed_homes: this node server is already connected to {most} homes",
                retry_after=RELAY_RETRY_AFTER,
                limit="relayed_homes",
                value=most,
            )
        tls = self._tls if self._content is None else self._content()
        connection = self._connections.get(home)
        if connection is None and host is not None:
            check_budget("relayed_homes", self._opened, host, RELAY_RETRY_AFTER)
        if connection is None or connection.tls != tls:
            # Calls that use an older one keep it until they end.
            connection = self._connections[home] = _HomeChannel(connect_async(home, tls), tls, host)
            if host is not None:
                self._opened.take(host)
        connection.users += 1
        stub: KVTransferAsyncStub = KVTransferStub(connection.channel)  # type: ignore[assignment]
        return stub, connection

    def _check(self, home: str) -> None:
        """Raise `InvalidField` unless this server may dial a home. Every caller that can register names one, so without
        this check strangers could make this server dial any address."""
        address = parse_address(home, "home")
        if address.is_unix:
            # Any service of this host may listen at a path, and other nodes cannot reach a home there.
            raise InvalidField("home", home, "host:port: another node server cannot reach a home at a UNIX socket")
        if self._patterns:
            if not any(fnmatchcase(home, pattern) for pattern in self._patterns):
                allowed = ", ".join(self._patterns)
                raise InvalidField("home", home, f"an address that this node server may relay to: {allowed}")
        elif not self._anywhere and not is_loopback(home):
            raise InvalidField(
                "home",
                home,
                "an address on this host, because the node server has none of tls_ca, relay_homes and insecure set",
            )

    async def _leave(self, home: str, connection: _HomeChannel) -> None:
        connection.users -= 1
        if not connection.users:
            if self._connections.get(home) is connection:
                del self._connections[home]
            if connection.opened_by is not None:
                self._opened.give(connection.opened_by)
            await connection.channel.close()
