"""Relays: calls of ranks here whose engine's home is another node server (PROTOCOL, Watch, liveness, relays).

A relay keeps no state. It passes a rank's registration and its Watch on to the home, marked with this server's address,
and passes the home's answers back. After a restart of either server the rank's own Watch ends and is opened again, and
its first messages say whether the home needs the registration again. The Watch at the home ends when the rank's does,
or when this server does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kvferry._tracing import call_metadata
from kvferry._wire.channel import (
    Address,
    TlsConfig,
    TlsContent,
    connect_async,
    is_loopback,
    parse_address,
    same_address,
)
from kvferry._wire.status import error_of_peer, from_rpc_error
from kvferry._wire.version import OURS_AS_RELAY, OURS_ENCODED, check_server
from kvferry.errors import InvalidField, KvferryError, RelayLoop, Unreachable
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferStub
from kvferry_server.domain.journal import EventLog
from kvferry_server.domain.limits import Budget, check_budget
from kvferry_server.domain.values import Names
from kvferry_server.servicers import checks
from kvferry_server.servicers.limits import MAX_RELAYED_CALLS, MAX_RELAYED_DECLINES

if TYPE_CHECKING:
    from kvferry.v1.kv_transfer_pb2_grpc import KVTransferAsyncStub

# Timeouts of calls to a home, in seconds. A rank repeats its registration and its Watch: it need not wait for a dead
# home, and a silent home must not keep a connection. A home that misses the notice that a rank has left assumes that
# this node is lost.
REGISTER_TIMEOUT = 5.0
OPEN_TIMEOUT = 5.0
RANK_LEFT_TIMEOUT = 1.0

RELAY_RETRY_AFTER = 1.0  # Retry delay, in seconds, when too many calls are relayed


@dataclass(frozen=True, slots=True)
class Caller:
    """Who has made a call."""

    host: str  # empty: this host
    names: Names  # in the caller's certificate

    @property
    def holder(self) -> str:
        """The holder in budgets: the identity if there is one, else the host."""
        return ", ".join(sorted(repr(name.decode(errors="backslashreplace")) for name in self.names)) or self.host


class Relays:
    """Calls to the homes of ranks that run here. Not thread-safe: it belongs to the event loop that runs it.

    Args:
        advertise: the address at which others reach this server.
        tls: TLS files for connections to homes. With a CA (`tls.ca`) any home may be dialled, since only homes with a
            certificate of that CA are accepted.
        anywhere: any home may be dialled also without a CA; otherwise only homes on this host.
        patterns: shell patterns of ``host:port``; if there are any, they alone decide which homes may be dialled.
        content: returns the present content of the TLS files. None: `tls` is read for each call.
        events: the log of why a home cannot be reached, which callers do not get; None: no log.
        dial: makes a channel to a home.
    """

    def __init__(
        self,
        advertise: str,
        tls: TlsConfig | None,
        *,
        anywhere: bool,
        patterns: Sequence[str] = (),
        content: Callable[[], TlsContent] | None = None,
        events: EventLog | None = None,
        dial: Callable[[str, TlsConfig | TlsContent | None], grpc.aio.Channel] = connect_async,
    ) -> None:
        self._dial = dial
        self._advertise = advertise
        self._own_address = parse_address(advertise)
        self._tls = tls
        self._anywhere = anywhere or (tls is not None and tls.ca is not None)
        self._patterns = tuple(patterns)
        self._content = content
        self._events = events
        self._calls: Counter[Address] = Counter()  # in progress, by home
        self._of_ranks, self._of_declines = Budget(MAX_RELAYED_CALLS), Budget(MAX_RELAYED_DECLINES)
        self._endings: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._stopping = False

    @property
    def num_homes(self) -> int:
        return len(self._calls)

    def stop(self) -> None:
        """Note that this node server stops: from now on the end of a Watch is not reported as a rank that has left."""
        self._stopping = True

    async def close(self) -> None:
        """Wait until every relayed Watch has ended at its home."""
        if self._endings:
            await asyncio.wait(tuple(self._endings.values()))

    def applies(self, home: str, relayed_by: str) -> bool:
        """Whether a call is for another home and must be relayed. Raises `RelayLoop` if it is, but another node server
        has relayed it to this one; `InvalidField` for a malformed address."""
        checks.text("home", home, least=0)
        checks.text("relayed_by", relayed_by, least=0)
        if not home or same_address(parse_address(home, "home"), self._own_address):
            return False
        if relayed_by:
            raise RelayLoop(
                f"{relayed_by} relayed a call for home {home} to {self._advertise}, which is another home",
                relayed_by=relayed_by,
            )
        return True

    async def register_cache(self, request: pb.RegisterCacheRequest, caller: Caller) -> pb.RegisterCacheResponse:
        """Relay a registration to its home and return the home's answer, or raise its error. Raises `Unreachable` if
        the home does not answer as a node server, without details: strangers name homes, and must not learn which ports
        of other hosts are open; `LimitReached` if too many calls are relayed; `InvalidField` if this server may not
        dial the home."""
        home = request.home
        request.relayed_by = self._advertise
        request.version.relay.CopyFrom(OURS_AS_RELAY)
        async with self._called(home, self._of_ranks, caller) as stub:
            answer = await stub.RegisterCache(request, timeout=REGISTER_TIMEOUT, metadata=call_metadata())
        _check_home(answer.version, home)
        answer.advertise = self._advertise
        return answer

    async def decline(
        self, home: str, declines: Sequence[pb.Decline], timeout: float, caller: Caller
    ) -> Sequence[pb.NotificationResult]:
        """Send declines on to the home that their references name, marked, so that the home does not send them on
        again. Returns its results, in order. `timeout` is in seconds. Raises as `register_cache`."""
        notifications = [pb.Notification(decline=decline) for decline in declines]
        for sent in notifications:
            sent.decline.relayed_by = self._advertise
        request = pb.NotifyRequest(notifications=notifications, version=OURS_ENCODED)
        async with self._called(home, self._of_declines, caller) as stub:
            answer = await stub.Notify(request, timeout=timeout, metadata=call_metadata())
        check_server(answer.version, home, "this relay")
        if len(answer.results) != len(declines):
            raise self.unreachable(home, f"it gave {len(answer.results)} answers to {len(declines)} declines")
        return answer.results

    async def watch(self, request: pb.WatchRequest, caller: Caller) -> AsyncGenerator[pb.WatchResponse, None]:
        """Relay a rank's Watch and yield the home's messages, until either side ends. Raises as `register_cache`, also
        if the home does not open the Watch within `OPEN_TIMEOUT`."""
        if request.role != pb.WATCH_ROLE_RANK:
            raise InvalidField("home", request.home, "empty: a scheduler's node server is its engine's home")
        home, process = request.home, (request.engine.SerializeToString(), request.rank)
        request.relayed_by = self._advertise
        request.version.relay.CopyFrom(OURS_AS_RELAY)
        if ending := self._endings.get(process):
            # The home must learn that the rank left before it learns that the rank is back.
            await asyncio.wait([ending])
        connection = AsyncExitStack()
        stub = await connection.enter_async_context(self._called(home, self._of_ranks, caller))
        call = stub.Watch(request)
        left = False

        async def end() -> None:
            async with connection:
                if left and not self._stopping:
                    # Otherwise the home assumes that the whole node is lost.
                    notice = pb.NotifyRequest(
                        version=OURS_ENCODED,
                        sender=request.engine,
                        session_secret=request.session_secret,
                        notifications=[pb.Notification(rank_left=pb.RankLeft(rank=request.rank))],
                    )
                    with suppress(grpc.RpcError):
                        await stub.Notify(notice, timeout=RANK_LEFT_TIMEOUT)
                call.cancel()

        try:
            messages = aiter(call)
            opened = await asyncio.wait_for(anext(messages), OPEN_TIMEOUT)
            if opened.WhichOneof("event") != "opened":
                raise self.unreachable(home, "it began a Watch with another event than opened")
            _check_home(opened.version, home)
            opened.opened.advertise = self._advertise
            # From now on, if the Watch ends here and not at the home, the rank has left.
            left = True
            yield opened
            async for message in messages:
                yield message
            left = False
        except grpc.RpcError as error:
            left = False
            raise self._failed(error, home) from None
        except (asyncio.TimeoutError, StopAsyncIteration):
            raise self.unreachable(home, f"it did not open a Watch within {OPEN_TIMEOUT:g} s") from None
        finally:
            # In a separate task: this task is cancelled if the rank is gone.
            ending = self._endings[process] = asyncio.create_task(end())
            ending.add_done_callback(partial(self._ended_watch, process))

    def _ended_watch(self, process: tuple[bytes, int], ending: asyncio.Task[None]) -> None:
        if self._endings.get(process) is ending:
            del self._endings[process]

    def unreachable(self, home: str, problem: str) -> Unreachable:
        """Return the error for a home that does not answer as a node server, and write the problem to the log."""
        if self._events is not None:
            self._events.write(logging.WARNING, "home_unreachable", {"home": home, "problem": problem})
        return Unreachable(
            f"{home} does not answer as a node server; the log of {self._advertise} says why", address=home
        )

    def _failed(self, error: grpc.RpcError, home: str) -> KvferryError:
        found = error_of_peer(error)
        if found is None:
            return self.unreachable(home, from_rpc_error(error, home, self._tls).message)
        # An unknown reason, from a home of a later release, is not passed on.
        found.reason = found.reason or "UNSPECIFIED"
        return found

    @asynccontextmanager
    async def _called(self, home: str, budget: Budget, caller: Caller) -> AsyncIterator[KVTransferAsyncStub]:
        """Give a stub of a home for one call within the context, whose failure becomes a typed error. The call counts
        in a budget, so that silent homes named by one caller take no room from others."""
        address, holder = self._checked(home), caller.holder
        check_budget("relayed_calls", budget, holder, RELAY_RETRY_AFTER)
        channel = self._dial(str(address), self._tls if self._content is None else self._content())
        budget.take(holder)
        self._calls[address] += 1
        try:
            stub: KVTransferAsyncStub = KVTransferStub(channel)  # type: ignore[assignment]
            yield stub
        except grpc.RpcError as error:
            raise self._failed(error, home) from None
        finally:
            budget.give(holder)
            self._calls -= Counter((address,))
            await channel.close()

    def _checked(self, home: str) -> Address:
        """Return the address of a home; raise `InvalidField` unless this server may dial it. Every caller that can
        register names a home, so without this check strangers could make this server dial any address."""
        address = parse_address(home, "home")
        if address.is_unix:
            # Any service of this host may listen at a path, and other nodes cannot reach a home there.
            raise InvalidField("home", home, "host:port: another node server cannot reach a home at a UNIX socket")
        if self._patterns:
            if not any(fnmatchcase(str(address), pattern.lower()) for pattern in self._patterns):
                allowed = ", ".join(self._patterns)
                raise InvalidField("home", home, f"an address that this node server may relay to: {allowed}")
        elif not self._anywhere and not is_loopback(str(address)):
            raise InvalidField(
                "home",
                home,
                "an address on this host, because the node server has none of tls_ca, relay_homes and insecure set",
            )
        return address


def _check_home(version: pb.Version, home: str) -> None:
    """Check the version in a home's answer, and add this relay's version to it, for the rank."""
    check_server(version, home, "this relay")
    version.relay.CopyFrom(OURS_AS_RELAY)
