"""A gRPC channel to a home in this process, without a socket: the part of the interface that
`kvferry._control.connection` uses.

Requests and responses are encoded and decoded as on a network. Deadlines, cancellation, statuses and their details
behave as in gRPC. There is no flow control: unread messages are kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc

from kvferry._wire.channel import MAX_MESSAGE_BYTES

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

LEFT = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Statuses after which the caller no longer waits: messages that have already arrived are dropped."""


class InProcessCall(grpc.RpcError):
    """A call; as in gRPC, a failed call is also the exception that is raised. Thread-safe. `request` is encoded;
    `deadline` is on the fabric's clock."""

    def __init__(self, method: str, request: bytes, decode: Callable[[bytes], Any], deadline: float | None) -> None:
        super().__init__()
        self.method = method
        self.request = request
        self.deadline = deadline
        self._decode = decode
        self._changed = threading.Condition()
        self._messages: deque[bytes] = deque()
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._trailing: Metadata = ()
        self._cancelled = False
        """The caller has cancelled the call, not the home, nor the end of the channel."""
        self._on_end: list[Callable[[InProcessCall], object]] = []

    # The home calls these.

    def answered(self, message: bytes) -> None:
        """Append a message to the response."""
        if self.refuse_large(message):
            return
        with self._changed:
            if self._status is None:
                self._messages.append(message)
                self._changed.notify_all()

    def end(self, code: grpc.StatusCode, details: str, trailing: Metadata = (), *, cancelled: bool = False) -> None:
        """End the call. Idempotent."""
        with self._changed:
            if self._status is not None:
                return
            self._status, self._trailing, self._cancelled = (code, details), trailing, cancelled
            if code in LEFT:
                self._messages.clear()
            callbacks, self._on_end = self._on_end, []
            self._changed.notify_all()
        for callback in callbacks:
            callback(self)

    def refuse_large(self, message: bytes) -> bool:
        """End the call at a message over gRPC's limit, as gRPC does; returns whether the message is too large."""
        size = len(message)
        if size > MAX_MESSAGE_BYTES:
            details = f"Received message larger than max ({size} vs. {MAX_MESSAGE_BYTES})"
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        return size > MAX_MESSAGE_BYTES

    def at_end(self, callback: Callable[[InProcessCall], object]) -> None:
        """Call `callback` at the end of the call, at once if the call has ended, on any thread. It must not block."""
        with self._changed:
            if self._status is None:
                self._on_end.append(callback)
                return
        callback(self)

    # The client calls these: methods of grpc.Call and grpc.Future.

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._status is not None)
            if self._messages:
                return self._decode(self._messages.popleft())
        if self.code() is grpc.StatusCode.OK:
            raise StopIteration
        raise self

    def result(self, timeout: float | None = None) -> Any:
        error = self._failure(timeout)
        if self._cancelled:
            raise grpc.FutureCancelledError
        if error is not None:
            raise error
        with self._changed:
            return self._decode(self._messages[0])

    def exception(self, timeout: float | None = None) -> Exception | None:
        error = self._failure(timeout)
        if self._cancelled:
            raise grpc.FutureCancelledError
        return error

    def _failure(self, timeout: float | None) -> Exception | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._status is not None, timeout):
                raise grpc.FutureTimeoutError
        return None if self.code() is grpc.StatusCode.OK else self

    def add_done_callback(self, callback: Callable[[InProcessCall], object]) -> None:
        self.at_end(callback)

    def cancel(self) -> bool:
        self.end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", cancelled=True)
        return self._cancelled

    def cancelled(self) -> bool:
        return self._cancelled

    def is_active(self) -> bool:
        return self._status is None

    def done(self) -> bool:
        return self._status is not None

    def code(self) -> grpc.StatusCode:
        return self._ended()[0]

    def details(self) -> str:
        return self._ended()[1]

    def trailing_metadata(self) -> Metadata:  # type: ignore[override]  # Its type is private to gRPC's stubs.
        self._ended()
        return self._trailing

    def __str__(self) -> str:
        return f"{self.method}: {self._status}"

    def _ended(self) -> tuple[grpc.StatusCode, str]:
        """Wait for the end of the call, as gRPC does, and return its status."""
        with self._changed:
            while self._status is None:
                self._changed.wait()
            return self._status


# Code of gRPC's users asks whether an error is a call.
grpc.Call.register(InProcessCall)


class InProcessChannel:
    """The channel of one client. `begin` hands a call to the home, or ends it; it is called on any thread, and returns
    at once. `clock` is the fabric's."""

    def __init__(self, begin: Callable[[InProcessCall], None], clock: Callable[[], float]) -> None:
        self._begin = begin
        self._clock = clock
        self._calls: set[InProcessCall] = set()
        """Single steps change it, so no lock guards it."""
        self._closed = False

    def call(self, method: str, request: bytes, decode: Callable[[bytes], Any], timeout: float | None) -> InProcessCall:
        """Start a call. Raises `ValueError` once the channel is closed, as gRPC does."""
        deadline = None if timeout is None else self._clock() + timeout
        call = InProcessCall(method, request, decode, deadline)
        # Added first: `close` ends the calls that it finds, and a later call finds the channel closed.
        self._calls.add(call)
        call.at_end(self._calls.discard)
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


class _UnaryStream:
    """A method that streams its response: gRPC's multicallable. Ignores all options of a call but the timeout."""

    def __init__(
        self, channel: InProcessChannel, method: str, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]
    ) -> None:
        self._channel = channel
        self._method = method
        self._encode = encode
        self._decode = decode

    def __call__(self, request: Any, timeout: float | None = None, *_: object, **__: object) -> Any:
        return self._channel.call(self._method, self._encode(request), self._decode, timeout)


class _UnaryUnary(_UnaryStream):
    """A method with a single response."""

    future = _UnaryStream.__call__

    def __call__(self, request: Any, timeout: float | None = None, *_: object, **__: object) -> Any:
        return self.future(request, timeout).result()

    def with_call(self, request: Any, timeout: float | None = None, *_: object, **__: object) -> tuple[Any, Any]:
        call = self.future(request, timeout)
        return call.result(), call
