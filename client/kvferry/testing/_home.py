"""gRPC and a node server without sockets: channels with the part of gRPC's interface that `kvferry._control.connection`
uses; and the home, the servicers and the guard of production, on the event loop of a fabric.

Requests and responses are encoded and decoded as on a network. Deadlines, cancellation, statuses and their details
behave as in gRPC. There is no flow control: unread messages are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, cast

import grpc
import grpc.aio

from kvferry._loop import Loop
from kvferry._wire.channel import MAX_MESSAGE_BYTES
from kvferry_server.domain.times import Times
from kvferry_server.home.home import Home
from kvferry_server.home.time_slices import Worker
from kvferry_server.node.guard import Guard
from kvferry_server.node.requests import Requests
from kvferry_server.servicers import add_servicers
from kvferry_server.servicers.access import TRUSTED
from kvferry_server.servicers.relay import Relays

Messages: TypeAlias = "Queue[bytes | None] | asyncio.Queue[bytes | None]"
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
    """A call; as in gRPC, a failed call is also the exception that is raised. Thread-safe, but for a call as one of
    `grpc.aio`, with a queue of asyncio: it is used on the event loop of the fabric only. `request` is encoded;
    `deadline` is on the fabric's clock."""

    def __init__(
        self, method: str, request: bytes, decode: Callable[[bytes], Any], deadline: float | None, messages: Messages
    ) -> None:
        super().__init__()
        self.method = method
        self.request = request
        self.deadline = deadline
        self._decode = decode
        self._messages: Any = messages
        """The response; None: its end."""
        self._ended: Future[_End] = Future()

    # The home calls these.

    def answered(self, message: bytes) -> None:
        """Append a message to the response."""
        if not self.refuse_large(message) and not self.done():
            self._messages.put_nowait(message)

    def end(self, code: grpc.StatusCode, details: str, trailing: Metadata = (), *, cancelled: bool = False) -> None:
        """End the call. Idempotent."""
        ended: Future[_End] = Future()
        ended.set_result(_End(code, details, trailing, cancelled))
        with suppress(InvalidStateError):
            self._ended.set_result(ended.result())
            # A future keeps its callbacks, which refer to the call: without them, the call needs no garbage collector.
            self._ended = ended
            self._messages.put_nowait(None)

    def refuse_large(self, message: bytes) -> bool:
        """End the call at a message over gRPC's limit, as gRPC does; returns whether the message is too large."""
        too_large = len(message) > MAX_MESSAGE_BYTES
        if too_large:
            details = f"Received message larger than max ({len(message)} vs. {MAX_MESSAGE_BYTES})"
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        return too_large

    # The client calls these: methods of grpc.Call and grpc.Future.

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._next(self._messages.get(), StopIteration)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return self._next(await self._messages.get(), StopAsyncIteration)

    def __await__(self) -> Generator[Any, None, Any]:
        return self.__anext__().__await__()

    def result(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._decode(self._messages.queue[0])

    def exception(self, timeout: float | None = None) -> Exception | None:
        end = self._ended.result(timeout)
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

    def _next(self, message: bytes | None, stop: type[Exception]) -> Any:
        """Decode a message of the response, or raise: `stop` at its end, else the failed call itself."""
        if message is not None and not (self.done() and self.code() in LEFT):
            return self._decode(message)
        # For the next call of this method.
        self._messages.put_nowait(None)
        raise stop if self.code() is grpc.StatusCode.OK else self


# Code of gRPC's users asks whether an error is a call.
grpc.Call.register(InProcessCall)


@dataclass(eq=False)
class InProcessChannel:
    """The channel of one client. `begin` hands a call to the home, or ends it; it is called on any thread, and returns
    at once. `clock` is the fabric's. `queue` makes the queue of each call."""

    begin: Callable[[InProcessCall], None]
    clock: Callable[[], float]
    queue: Callable[[], Messages] = Queue
    calls: set[InProcessCall] = field(default_factory=set, init=False)
    """Those that have not ended. Single steps change it, so no lock guards it."""
    closed: bool = field(default=False, init=False)

    def cut(self) -> None:
        """Fail every call as if the connection was lost."""
        self._end(grpc.StatusCode.UNAVAILABLE, "the connection was cut")

    def close(self) -> None:
        """Close the channel and cancel its calls, as `grpc.Channel.close` does."""
        self.closed = True
        self._end(grpc.StatusCode.CANCELLED, "Channel closed!")

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object
    ) -> Callable[..., Any]:
        """Return gRPC's multicallable, which raises `ValueError` once the channel is closed. It ignores all options of
        a call but the timeout."""

        def call(request: Any, timeout: float | None = None, *_: object, **__: object) -> InProcessCall:
            deadline, encoded = None if timeout is None else self.clock() + timeout, request_serializer(request)
            made = InProcessCall(method, encoded, response_deserializer, deadline, self.queue())
            # Added first: `close` ends the calls that it finds, and a later call finds the channel closed.
            self.calls.add(made)
            made.add_done_callback(self.calls.discard)
            if self.closed:
                made.cancel()
                raise ValueError("Cannot invoke RPC on closed channel!")
            if not made.refuse_large(encoded):
                self.begin(made)
            return made

        return call

    def unary_unary(self, *method: Any, **options: Any) -> _UnaryUnary:
        return _UnaryUnary(self.unary_stream(*method, **options))

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        for call in tuple(self.calls):
            call.end(code, details)


@dataclass(frozen=True)
class _UnaryUnary:
    """gRPC's multicallable of a method with a single response."""

    future: Callable[..., Any]

    def __call__(self, request: Any, timeout: float | None = None, *_: object, **__: object) -> Any:
        return self.future(request, timeout).result()


class InProcessAioChannel:
    """The channel of one home to another, as one of `grpc.aio`: its single answers are awaited, too."""

    def __init__(self, begin: Callable[[InProcessCall], None], clock: Callable[[], float]) -> None:
        self._calls = InProcessChannel(begin, clock, asyncio.Queue)
        self.unary_unary = self.unary_stream = self._calls.unary_stream

    async def close(self) -> None:
        self._calls.close()


class InProcessHome:
    """A node server from one start to its stop, used on the event loop of its fabric. References have `address`; `dial`
    makes its channels to other homes."""

    def __init__(self, address: str, times: Times, loop: Loop, dial: Callable[[str, object], grpc.aio.Channel]) -> None:
        self._loop = loop
        self._home = Home(loop, times, address)
        self._worker = Worker()
        self._guard = Guard(1024, 8192, TRUSTED, Requests(self._worker, self._home.time_slices))
        self._calls: dict[InProcessCall, asyncio.Task[None]] = {}
        self._generic: list[grpc.GenericRpcHandler] = []
        self._relays = Relays(address, None, anywhere=True, dial=dial)
        add_servicers(cast("grpc.aio.Server", self), self._home, self._relays, self._worker)
        self._driver = asyncio.get_running_loop().create_task(self._home.run(), name="kvferry-fabric-home")

    @property
    def waiting(self) -> int:
        """Number of reads that wait for a publication under a router's key."""
        return self._home.journal.waiting

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add handlers of methods. The generated code calls this, as on a `grpc.aio.Server`."""
        self._generic.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Ignore these: newer generated code passes the same handlers a second time."""

    def begin(self, call: InProcessCall) -> None:
        """Answer a call, until it ends at its client, or at its deadline."""
        task = self._calls[call] = asyncio.get_running_loop().create_task(self._answer(call))
        task.add_done_callback(lambda _: self._calls.pop(call, None))
        call.add_done_callback(lambda _: self._loop.call(task.cancel))
        if call.deadline is not None:
            late = partial(call.end, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            timer = self._loop.at(call.deadline, late)
            task.add_done_callback(lambda _: timer.cancel())

    async def stop(self) -> None:
        """Stop at once, as if the process was killed: no more messages are sent, and all records are lost."""
        self._relays.stop()
        tasks = (self._driver, *self._calls.values())
        for call in tuple(self._calls):
            call.end(grpc.StatusCode.UNAVAILABLE, "the home was stopped")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        # A closed fabric leaves no thread.
        self._worker.join()

    async def _answer(self, call: InProcessCall) -> None:
        called = cast(grpc.HandlerCallDetails, SimpleNamespace(method=call.method))
        found = (generic.service(called) for generic in self._generic)
        handler = self._guard.guarded(call.method, next((each for each in found if each is not None), None))
        context = _Context(call, handler.response_serializer, self._loop.now)
        try:
            # The guard reads every request from the context, and returns a single answer as bytes.
            if handler.response_streaming:
                await cast(Any, handler.stream_stream)(None, context)
            else:
                call.answered(await cast(Any, handler.stream_unary)(None, context))
        except asyncio.CancelledError:
            call.end(grpc.StatusCode.CANCELLED, "the call was cancelled")
        except Exception as error:
            # After an abort, the call has ended already.
            call.end(grpc.StatusCode.UNKNOWN, f"the handler failed: {error!r}")
        else:
            call.end(grpc.StatusCode.OK, "")
        finally:
            for callback in context.at_end:
                callback(context)


@dataclass(eq=False)
class _Context:
    """The part of gRPC's servicer context that the guard and the servicers use."""

    call: InProcessCall
    encode: Callable[[Any], bytes] | None
    clock: Callable[[], float]
    at_end: list[Callable[[object], None]] = field(default_factory=list)
    was_read: bool = False

    def peer(self) -> str:
        # As of gRPC's callers on a UNIX socket.
        return "unix:"

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        # As with mutual TLS: an engine may be asked by its name.
        return {"x509_common_name": (b"fabric",)}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float | None:
        return None if self.call.deadline is None else max(0.0, self.call.deadline - self.clock())

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self.at_end.append(callback)

    async def read(self) -> object:
        read, self.was_read = self.was_read, True
        return grpc.aio.EOF if read else self.call.request

    async def write(self, message: Any) -> None:
        self.call.answered(message if self.encode is None else self.encode(message))
        # Let other tasks run, as they do while gRPC sends.
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        self.call.end(code, details, trailing)
        raise grpc.aio.AbortError("the call was aborted")
