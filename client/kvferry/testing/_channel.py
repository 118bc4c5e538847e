"""A gRPC channel to a home in this process, without a socket: the part of the interface that
`kvferry._control.connection` uses.

Requests and responses are encoded and decoded as on a network. Deadlines, cancellation, statuses and their details
behave as in gRPC. There is no flow control: unread messages are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from queue import Queue
from typing import Any, NamedTuple, TypeAlias

import grpc

from kvferry._wire.channel import MAX_MESSAGE_BYTES

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

LEFT = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Statuses after which the caller no longer waits: messages that have already arrived are dropped."""


class _End(NamedTuple):
    """The end of a call. `cancelled`: by the caller, not by the home, nor at the end of the channel."""

    code: grpc.StatusCode
    details: str
    trailing: Metadata
    cancelled: bool


class InProcessCall(grpc.RpcError):
    """A call; as in gRPC, a failed call is also the exception that is raised. Thread-safe. `request` is encoded;
    `deadline` is on the fabric's clock."""

    def __init__(self, method: str, request: bytes, decode: Callable[[bytes], Any], deadline: float | None) -> None:
        super().__init__()
        self.method = method
        self.request = request
        self.deadline = deadline
        self._decode = decode
        self._messages: Queue[bytes | None] = Queue()
        """The response; None: its end."""
        self._ended: Future[_End] = Future()

    # The home calls these.

    def answered(self, message: bytes) -> None:
        """Append a message to the response."""
        if not self.refuse_large(message) and not self.done():
            self._put(message)

    def end(self, code: grpc.StatusCode, details: str, trailing: Metadata = (), *, cancelled: bool = False) -> None:
        """End the call. Idempotent."""
        ended: Future[_End] = Future()
        ended.set_result(_End(code, details, trailing, cancelled))
        with suppress(InvalidStateError):
            self._ended.set_result(ended.result())
            # A future keeps its callbacks, which refer to the call: without them, the call needs no garbage collector.
            self._ended = ended
            self._put(None)

    def refuse_large(self, message: bytes) -> bool:
        """End the call at a message over gRPC's limit, as gRPC does; returns whether the message is too large."""
        size = len(message)
        if size > MAX_MESSAGE_BYTES:
            details = f"Received message larger than max ({size} vs. {MAX_MESSAGE_BYTES})"
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        return size > MAX_MESSAGE_BYTES

    # The client calls these: methods of grpc.Call and grpc.Future.

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._next(self._messages.get(), StopIteration)

    def result(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._decode(self._messages.queue[0])

    def exception(self, timeout: float | None = None) -> Exception | None:
        try:
            end = self._ended.result(timeout)
        except FutureTimeoutError:
            raise grpc.FutureTimeoutError from None
        if end.cancelled:
            raise grpc.FutureCancelledError
        return None if end.code is grpc.StatusCode.OK else self

    def add_done_callback(self, callback: Callable[[InProcessCall], object]) -> None:
        """Call `callback` at the end of the call, at once if the call has ended, on any thread. It must not block."""
        self._ended.add_done_callback(lambda _: callback(self))

    def cancel(self) -> bool:
        self.end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", cancelled=True)
        return self.cancelled()

    def cancelled(self) -> bool:
        return self.done() and self._ended.result().cancelled

    def is_active(self) -> bool:
        return not self.done()

    def done(self) -> bool:
        return self._ended.done()

    # As in gRPC, these wait for the end of the call.

    def code(self) -> grpc.StatusCode:
        return self._ended.result().code

    def details(self) -> str:
        return self._ended.result().details

    def trailing_metadata(self) -> Metadata:  # type: ignore[override]  # Its type is private to gRPC's stubs.
        return self._ended.result().trailing

    def __str__(self) -> str:
        return f"{self.method}: {self._ended.result()[:2] if self.done() else None}"

    def _put(self, message: bytes | None) -> None:
        self._messages.put(message)

    def _next(self, message: bytes | None, stop: type[Exception]) -> Any:
        """Decode a message of the response, or raise: `stop` at its end, else the failed call itself."""
        if message is not None and not (self.done() and self.code() in LEFT):
            return self._decode(message)
        # For the next call of this method.
        self._put(None)
        raise stop if self.code() is grpc.StatusCode.OK else self


class InProcessAioCall(InProcessCall):
    """A call by a home of another home, as one of `grpc.aio`. Used on the event loop of the fabric only."""

    def __init__(self, method: str, request: bytes, decode: Callable[[bytes], Any], deadline: float | None) -> None:
        super().__init__(method, request, decode, deadline)
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return self._next(await self._arrived.get(), StopAsyncIteration)

    def __await__(self) -> Generator[Any, None, Any]:
        return self.__anext__().__await__()

    def _put(self, message: bytes | None) -> None:
        self._arrived.put_nowait(message)


# Code of gRPC's users asks whether an error is a call.
grpc.Call.register(InProcessCall)


class InProcessChannel:
    """The channel of one client. `begin` hands a call to the home, or ends it; it is called on any thread, and returns
    at once. `clock` is the fabric's. `kind`: of its calls."""

    def __init__(
        self,
        begin: Callable[[InProcessCall], None],
        clock: Callable[[], float],
        kind: type[InProcessCall] = InProcessCall,
    ) -> None:
        self._kind = kind
        self._begin = begin
        self._clock = clock
        self._calls: set[InProcessCall] = set()
        """Single steps change it, so no lock guards it."""
        self._closed = False

    def call(self, method: str, request: bytes, decode: Callable[[bytes], Any], timeout: float | None) -> InProcessCall:
        """Start a call. Raises `ValueError` once the channel is closed, as gRPC does."""
        deadline = None if timeout is None else self._clock() + timeout
        call = self._kind(method, request, decode, deadline)
        # Added first: `close` ends the calls that it finds, and a later call finds the channel closed.
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        if self._closed:
            call.cancel()
            raise ValueError("Cannot invoke RPC on closed channel!")
        if not call.refuse_large(request):
            self._begin(call)
        return call

    def cut(self) -> None:
        """Fail every call as if the connection was lost."""
        self._end(grpc.StatusCode.UNAVAILABLE, "the connection was cut")

    def close(self) -> None:
        """Close the channel and cancel its calls, as `grpc.Channel.close` does."""
        self._closed = True
        self._end(grpc.StatusCode.CANCELLED, "Channel closed!")

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object
    ) -> _UnaryUnary:
        return _UnaryUnary(self, method, request_serializer, response_deserializer)

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object
    ) -> _UnaryStream:
        return _UnaryStream(self, method, request_serializer, response_deserializer)

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        for call in tuple(self._calls):
            call.end(code, details)


@dataclass(frozen=True)
class _UnaryStream:
    """A method that streams its response: gRPC's multicallable. Ignores all options of a call but the timeout."""

    channel: InProcessChannel
    method: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]

    def __call__(self, request: Any, timeout: float | None = None, *_: object, **__: object) -> Any:
        return self.channel.call(self.method, self.encode(request), self.decode, timeout)


class _UnaryUnary(_UnaryStream):
    """A method with a single response."""

    future = _UnaryStream.__call__

    def __call__(self, request: Any, timeout: float | None = None, *_: object, **__: object) -> Any:
        return self.future(request, timeout).result()


class InProcessAioChannel:
    """The channel of one home to another, as one of `grpc.aio`: its single answers are awaited, too."""

    def __init__(self, begin: Callable[[InProcessCall], None], clock: Callable[[], float]) -> None:
        self._calls = InProcessChannel(begin, clock, InProcessAioCall)
        self.unary_unary = self.unary_stream = self._calls.unary_stream

    async def close(self) -> None:
        self._calls.close()
