"""What stands around every handler of a node server.

`Guard` is the only way that an error gets out: typed errors as their status, anything else as INTERNAL with
an id that is also in the log, and nothing of its text. It decodes requests itself, so that bytes which are no
message of ours end in a typed error too; it requires deadlines; it bounds how many calls run at once; and it
knows the open streams, which must be ended before a server can stop, since a single one would hold up its
whole grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from kvferry.errors import (
    DeadlineRequired,
    InternalError,
    InvalidField,
    KvferryError,
    LimitReached,
    NotImplementedHere,
    ServerDraining,
)
from kvferry.status import to_status

logger = logging.getLogger(__name__)

OUR_SERVICE = "/kvferry.v1.KVTransfer/"
"""The calls that need a deadline. Introspection never waits, and operators' tools (`buf curl`, `grpcurl`) send none."""

WITHOUT_DEADLINE = frozenset({"/kvferry.v1.KVTransfer/Watch"})
"""Calls of ours that last as long as a process does."""

RETRY_AFTER = 0.25
"""Seconds after which a call refused by a limit is worth repeating."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = Callable[[Any, Any], Any]
Decode: TypeAlias = Callable[[bytes], Any]
Encode: TypeAlias = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How many calls run at once. Streams are counted apart: readers that wait must not keep renewals and
    reports out."""

    calls: int = 1024
    """Unary calls."""
    streams: int = 8192
    """ReadBlocks, Watch, and the streams of health and reflection."""

    @property
    def backstop(self) -> int:
        """What gRPC itself lets in. Above ours, whose refusals are typed."""
        return 2 * (self.calls + self.streams)


class Guard(grpc.aio.ServerInterceptor):
    """Wraps every handler. Belongs to one event loop."""

    def __init__(self, limits: CallLimits) -> None:
        self._limits = limits
        self._calls = 0
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
        if handler is None:
            return _unary(self._guarded_call(method, _not_offered(method), None))
        decode, encode = handler.request_deserializer, partial(_encoded, handler.response_serializer)
        if handler.stream_stream is not None:
            guarded = self._guarded_stream(method, handler.stream_stream, partial(_decoded_each, decode))
            return grpc.stream_stream_rpc_method_handler(guarded, None, encode)
        if handler.unary_stream is not None:
            guarded = self._guarded_stream(method, handler.unary_stream, partial(_decoded, decode))
            return grpc.unary_stream_rpc_method_handler(guarded, None, encode)
        if handler.unary_unary is not None:
            guarded = self._guarded_call(method, handler.unary_unary, decode)
            return grpc.unary_unary_rpc_method_handler(guarded, None, encode)
        return _unary(self._guarded_call(method, _not_offered(method), None))

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

    def _guarded_call(self, method: str, behaviour: Behaviour, decode: Decode | None) -> Behaviour:
        async def call(raw: bytes, context: Context) -> Any:
            self._calls += 1
            try:
                self._check(method, context, "calls", self._calls, self._limits.calls)
                return await behaviour(_decoded(decode, raw), context)
            except Exception as error:
                await _abort(context, method, error)
            finally:
                self._calls -= 1

        return call

    def _guarded_stream(self, method: str, behaviour: Behaviour, decode: Decode) -> Behaviour:
        async def stream(raw: Any, context: Context) -> None:
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            self._streams.add(task)
            try:
                self._check(method, context, "streams", len(self._streams), self._limits.streams)
                await _drive(behaviour(decode(raw), context), context)
            except asyncio.CancelledError:
                # Either the client left, and nobody is there to hear of it, or we end our own streams.
                if not self._ending:
                    raise
                await _abort(context, method, ServerDraining("the node server is draining"))
            except Exception as error:
                await _abort(context, method, error)
            finally:
                self._streams.discard(task)

        return stream

    def _check(self, method: str, context: Context, limit: str, running: int, most: int) -> None:
        if self._ending and limit == "streams":
            raise ServerDraining("the node server is draining")
        if running > most:
            raise LimitReached(
                f"{most} {limit} are running at once, which is this server's limit",
                retry_after=RETRY_AFTER,
                limit=f"max_{limit}",
                value=most,
            )
        needs_deadline = method.startswith(OUR_SERVICE) and method not in WITHOUT_DEADLINE
        if needs_deadline and context.time_remaining() is None:
            raise DeadlineRequired(f"{method} needs a deadline: set a timeout on the call")


async def _drive(answer: AsyncGenerator[Any, None] | Awaitable[None], context: Context) -> None:
    """Run a streaming handler of either kind: one that yields, or one that writes."""
    if isinstance(answer, Awaitable):
        await answer
        return
    async with contextlib.aclosing(answer) as messages:
        async for message in messages:
            await context.write(message)


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
    if isinstance(error, NotImplementedError):
        # What the base class of a servicer raises for a call it does not have.
        error = NotImplementedHere(f"this node server does not offer {method}", what=method)
    if not isinstance(error, KvferryError) or not error.reason:
        error_id = secrets.token_hex(8)
        logger.error("%s failed, error_id %s", method, error_id, exc_info=error)
        error = InternalError(f"the node server failed; its log has more under {error_id}", error_id=error_id)
    status = to_status(error)
    await context.abort(status.code, status.message, status.metadata)


def _not_offered(method: str) -> Behaviour:
    async def refuse(_: Any, __: Context) -> None:
        raise NotImplementedHere(f"this node server does not offer {method}", what=method)

    return refuse


def _unary(behaviour: Behaviour) -> Handler:
    return grpc.unary_unary_rpc_method_handler(behaviour, None, None)
