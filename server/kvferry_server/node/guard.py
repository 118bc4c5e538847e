"""What stands around every handler of a node server.

`Guard` is the only way that an error gets out: typed errors as their status, anything else as INTERNAL with
an id that is also in the log, and nothing of its text. It requires deadlines; it bounds how many calls run at
once, and shares them out among hosts; and it knows the open streams, which must be ended before a server can
stop, since a single one would hold up its whole grace.

It reads and decodes requests itself. So a call is refused before its request was read; bytes that are no message
of ours end in a typed error too; and only so many requests of one host are in memory at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary

import grpc
import grpc.aio

from kvferry._wire.status import to_status
from kvferry.errors import (
    DeadlineRequired,
    InternalError,
    InvalidField,
    KvferryError,
    LimitReached,
    NotImplementedHere,
    ServerDraining,
)
from kvferry_server.domain.hosts import host_of
from kvferry_server.domain.shares import Shares as Room
from kvferry_server.domain.shares import check_share
from kvferry_server.node.arrivals import ArrivalPlace, Arrivals
from kvferry_server.node.connections import end_connection

logger = logging.getLogger(__name__)

INTROSPECTION = "/kvferry.v1.Introspection/"

OUR_SERVICE = "/kvferry.v1.KVTransfer/"
"""The calls that need a deadline. Introspection never waits, and operators' tools (`buf curl`, `grpcurl`) send none."""

WITHOUT_DEADLINE = frozenset({"/kvferry.v1.KVTransfer/Watch"})
"""Calls of ours that last as long as a process does."""

NO_NAME = "a method of another name"
"""What a call is called whose method nobody offers: its path is not looked at."""

RETRY_AFTER = 0.25
"""Seconds after which a call refused by a limit is worth repeating."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = Callable[[Any, Any], Any]
Decode: TypeAlias = Callable[[bytes], Any]
Encode: TypeAlias = Callable[[Any], bytes]


GEOMETRIES = frozenset({OUR_SERVICE + "RegisterCache", OUR_SERVICE + "Handshake", INTROSPECTION + "PlanRead"})
"""Calls that carry geometries: large, and worked on for seconds. They wait for one another, and nothing else does."""

REQUESTS = 16
"""Requests of one host that are being read, or worked on if they are large: so many with geometries, and so many
others. At most 4 MiB each."""

LOCAL_REQUESTS = 64
"""The same for all callers of the UNIX socket together: gRPC does not tell one from another."""

LARGE = 256 * 1024
"""Bytes from which a request counts as large."""

STREAM_REQUEST = 64 * 1024
"""Bytes that the request of a stream may have. It may be kept for as long as the stream is open."""

LARGE_REQUESTS = frozenset({OUR_SERVICE + "Handshake"})
"""Streams that spread one answer over several messages: their requests are as large as those of calls."""

WAITING = frozenset({OUR_SERVICE + "PollBlocks"})
"""Calls that wait for news as streams do: they count as streams, and end with them. Their handlers yield the answer."""

ANSWER_TIMEOUT = 10.0
"""Seconds that an answer, a page of one, or a status may take to be taken."""

ANSWERS = 64 << 20
"""Bytes of large answers that wait to be taken; no host gets more than are left."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How many calls run at once. Streams are counted apart: readers that wait must not keep renewals and
    reports out."""

    calls: int = 1024
    """Unary calls."""
    streams: int = 8192
    """ReadBlocks, PollBlocks, Watch, and the streams of health and reflection."""


class CallShares:
    """Room for so many calls. A host gets another one as long as it has fewer than are left: one host alone gets half,
    each of two a third, and there is always one left for a host that has none. Callers on the UNIX socket, which all
    look alike, have all of it."""

    def __init__(self, limit: str, most: int) -> None:
        self._limit, self._most = limit, most
        self._hosts: Counter[str] = Counter()
        self._all = 0

    @contextlib.contextmanager
    def one(self, host: str) -> Iterator[None]:
        """Have room for a call, or raise `LimitReached`."""
        mine, left = self._hosts[host], self._most - self._all
        if left <= 0 or (host and mine >= left):
            who = f"{mine} of them by {host}" if host else "over the UNIX socket"
            raise LimitReached(
                f"{self._limit}: {self._all} of {self._most} are running at once, {who}",
                retry_after=RETRY_AFTER,
                limit=self._limit,
                value=self._most,
            )
        self._hosts[host] += 1
        self._all += 1
        try:
            yield
        finally:
            self._all -= 1
            self._hosts[host] -= 1
            if not self._hosts[host]:
                del self._hosts[host]


class Guard(grpc.aio.ServerInterceptor):
    """Wraps every handler. Belongs to one event loop."""

    def __init__(self, limits: CallLimits) -> None:
        self._calls = CallShares("max_calls", limits.calls)
        self._room = CallShares("max_streams", limits.streams)
        self._answers = Room(ANSWERS, 0)
        self._arriving: WeakValueDictionary[tuple[str, bool], Arrivals] = WeakValueDictionary()
        self._streams: set[asyncio.Task[Any]] = set()
        self._ending = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Called by gRPC for each call, before its request is read."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        # Handlers of streams all of them: gRPC reads the request of any other before it calls.
        if handler is not None:
            decode, encode = handler.request_deserializer, partial(_encoded, handler.response_serializer)
            if handler.stream_stream is not None:
                guarded = self._guarded_stream(method, handler.stream_stream, decode, one_request=False)
                return grpc.stream_stream_rpc_method_handler(guarded, None, encode)
            if handler.unary_stream is not None:
                guarded = self._guarded_stream(method, handler.unary_stream, decode, one_request=True)
                return grpc.stream_stream_rpc_method_handler(guarded, None, encode)
            if handler.unary_unary is not None and method in WAITING:
                guarded = self._guarded_stream(method, handler.unary_unary, decode, one_request=True)
                return grpc.stream_stream_rpc_method_handler(guarded, None, encode)
            if handler.unary_unary is not None:
                guarded = self._guarded_call(method, handler.unary_unary, decode, encode)
                return grpc.stream_stream_rpc_method_handler(guarded, None, None)
        refusing = self._guarded_call(method, _not_offered(method), None, partial(_encoded, None))
        return grpc.stream_stream_rpc_method_handler(refusing, None, None)

    @property
    def open_streams(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    def end_streams(self) -> None:
        """End all streams, and every later one, with DRAINING."""
        self._ending = True
        for task in tuple(self._streams):
            task.cancel()

    async def streams_ended(self, timeout: float) -> bool:
        """Wait until no stream is open; whether that was so within `timeout` seconds."""
        if self._streams:
            await asyncio.wait(tuple(self._streams), timeout=timeout)
        return not self._streams

    def _guarded_call(self, method: str, behaviour: Behaviour, decode: Decode | None, encode: Encode) -> Behaviour:
        async def call(_: object, context: Context) -> None:
            try:
                host = host_of(context.peer())
                with self._calls.one(host):
                    _check_deadline(method, context)
                    async with self._request(host, method, context) as (raw, _):
                        request = _decoded(decode, raw)
                        del raw
                        answer = encode(await behaviour(request, context))
                with self._answering(host, len(answer)):
                    # Not for gRPC to send, after us: it would keep what is never taken, for anybody who asks.
                    await _taken(context, context.write(answer))
            except Exception as error:
                await _abort(context, method, error)

        return call

    @contextlib.contextmanager
    def _answering(self, host: str, size: int) -> Iterator[None]:
        """Room for an answer until it is taken. Small ones are not counted."""
        if size < LARGE:
            yield
            return
        check_share("answers", self._answers, host, RETRY_AFTER, size)
        self._answers.take(host, size)
        try:
            yield
        finally:
            self._answers.give(host, size)

    def _guarded_stream(
        self, method: str, behaviour: Behaviour, decode: Decode | None, *, one_request: bool
    ) -> Behaviour:
        async def stream(raws: AsyncIterable[bytes], context: Context) -> None:
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            self._streams.add(task)
            try:
                if self._ending:
                    raise _draining()
                host = host_of(context.peer())
                with self._room.one(host):
                    _check_deadline(method, context)
                    request: Any = _decoded_each(decode, raws)
                    if method in LARGE_REQUESTS:
                        async with self._request(host, method, context) as (raw, place):
                            request = _decoded(decode, raw)
                            del raw
                            await _drive(behaviour(request, context), partial(_write_page, context, place))
                        return
                    if one_request:
                        async with self._request(host, method, context) as (raw, _):
                            request = _decoded(decode, _short(raw))
                    write = partial(_write_answer, context) if method in WAITING else context.write
                    await _drive(behaviour(request, context), write)
            except asyncio.CancelledError:
                # Either the client left, and nobody is there to hear of it, or we end our own streams.
                if not self._ending:
                    raise
                await _abort(context, method, _draining())
            except Exception as error:
                await _abort(context, method, error)
            finally:
                self._streams.discard(task)

        return stream

    @contextlib.asynccontextmanager
    async def _request(self, host: str, method: str, context: Context) -> AsyncIterator[tuple[bytes, ArrivalPlace]]:
        """The bytes of a call's one request, and its place. A small one is let go of at once, for the next of the same
        host to be read; a large one when it was worked on."""
        key = host, method in GEOMETRIES
        arrivals = self._arriving.get(key)
        if arrivals is None:
            arrivals = self._arriving[key] = Arrivals(REQUESTS if host else LOCAL_REQUESTS)
        async with arrivals.place() as place:
            raw = await place.read(context)
            if raw is grpc.aio.EOF:
                raise InvalidField("request", "nothing", "one message")
            if len(raw) < LARGE:
                place.free()
            yield raw, place


def _check_deadline(method: str, context: Context) -> None:
    needed = method.startswith(OUR_SERVICE) and method not in WITHOUT_DEADLINE
    if needed and context.time_remaining() is None:
        raise DeadlineRequired(f"{method} needs a deadline: set a timeout on the call")


def _draining() -> ServerDraining:
    return ServerDraining("the node server is draining")


def _short(raw: bytes) -> bytes:
    if len(raw) > STREAM_REQUEST:
        raise InvalidField("request", f"{len(raw)} bytes", f"at most {STREAM_REQUEST} for a stream's request")
    return raw


async def _drive(answer: AsyncGenerator[Any, None] | Awaitable[None], write: Callable[[Any], Awaitable[None]]) -> None:
    """Run a streaming handler of either kind: one that yields, or one that writes by itself."""
    if isinstance(answer, Awaitable):
        await answer
        return
    async with contextlib.aclosing(answer) as messages:
        async for message in messages:
            await write(message)


async def _write_page(context: Context, place: ArrivalPlace, page: Any) -> None:
    with place.waits_for_peer():
        await _taken(context, context.write(page))


async def _write_answer(context: Context, answer: Any) -> None:
    await _taken(context, context.write(answer))


async def _taken(context: Context, sending: Awaitable[None]) -> None:
    """Wait until gRPC has sent something. A client that takes nothing for `ANSWER_TIMEOUT` loses its connection: there
    is no other way to give a call up whose bytes wait, and until then gRPC keeps them."""
    timer = asyncio.get_running_loop().call_later(ANSWER_TIMEOUT, end_connection, context.peer())
    try:
        await sending
    finally:
        timer.cancel()


def _decoded(decode: Decode | None, raw: Any) -> Any:
    if decode is None:
        return raw
    try:
        return decode(raw)
    except Exception as error:
        # protobuf's own DecodeError, or whatever else its C code makes of garbage.
        name = getattr(getattr(decode, "__self__", None), "__name__", "message")
        raise InvalidField("request", f"{len(raw)} bytes", f"an encoded {name}") from error


def _encoded(encode: Encode | None, message: Any) -> bytes:
    """What is encoded already, because many are told the same, goes as it is."""
    encoded: bytes = message if isinstance(message, bytes) or encode is None else encode(message)
    return encoded


async def _decoded_each(decode: Decode | None, raws: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    async for raw in raws:
        yield _decoded(decode, raw)


async def _abort(context: Context, method: str, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        # The handler has aborted the call by itself (health does).
        raise error
    if _is_gone(error):
        raise _left() from None
    if isinstance(error, NotImplementedError):
        # What the base class of a servicer raises for a call it does not have.
        error = NotImplementedHere(f"this node server does not offer {method}", what=method)
    if not isinstance(error, KvferryError) or not error.reason:
        error_id = secrets.token_hex(8)
        logger.error("%s failed, error_id %s", method, error_id, exc_info=error)
        error = InternalError(f"the node server failed; its log has more under {error_id}", error_id=error_id)
    status = to_status(error)
    try:
        # It waits behind what was written before it.
        await _taken(context, context.abort(status.code, status.message, status.metadata))
    except grpc.aio.BaseError as failed:
        # AbortError among them: that is how it goes well.
        if _is_gone(failed):
            raise _left() from None
        raise


def _is_gone(error: Exception) -> bool:
    """Whether the client has left, or gRPC's server has stopped."""
    wrong_use = grpc.aio.AbortError | grpc.aio.UsageError
    return isinstance(error, grpc.aio.BaseError) and not isinstance(error, wrong_use)


def _left() -> asyncio.CancelledError:
    """Nobody is there to answer any more, which gRPC calls an error: whoever wants to fills a log with it."""
    return asyncio.CancelledError("the call has ended")


def _not_offered(method: str) -> Behaviour:
    async def refuse(_: Any, __: Context) -> None:
        raise NotImplementedHere(f"this node server does not offer {method}", what=method)

    return refuse
