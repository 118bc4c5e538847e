"""The connection to one node server: typed errors, a deadline on every call, and a channel that is made on first use.

It uses synchronous gRPC, because engine processes fork, and `grpc.aio` does not support that. gRPC's threads hand over
to the client's event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar, cast

import grpc

from kvferry._control.breaker import Breaker
from kvferry._control.channels import CurrentChannel, SharedChannel
from kvferry._control.exits import ends_at_exit
from kvferry._logs import Log
from kvferry._loop import Loop
from kvferry._threads import no_thread, start_thread
from kvferry._tracing import call_metadata
from kvferry._wire.channel import Dial, TlsConfig, connect
from kvferry._wire.geometry_codec import Handshaken, put_together
from kvferry._wire.status import from_notification_error, from_rpc_error
from kvferry._wire.version import check_server, introduce
from kvferry.errors import Closed, InternalError, KvferryError, Unreachable
from kvferry.stats import CallStats
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferStub

logger = Log(__name__)

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Message_co = TypeVar("Message_co", covariant=True)
NotificationAnswer: TypeAlias = pb.NotificationResult | KvferryError
"""The result of a notification, or the error with which the home has refused it."""

CALL_TIMEOUT = 5.0
"""Default seconds for a unary call."""

HANDSHAKE_TIMEOUT = 30.0
"""Seconds for a handshake: hundreds of ranks may start together, and each fetches the geometry of hundreds of ranks."""

BREAKER_THRESHOLD = 3
BREAKER_FIRST = 0.1
BREAKER_LAST = 1.0
"""Failures after which calls pause, and the shortest and longest pause in seconds: a node server restarts within
seconds, so that there is at least one attempt per second."""

_WITH_VERSION = (
    pb.RegisterCacheResponse,
    pb.HandshakeResponse,
    pb.ReadBlocksResponse,
    pb.NotifyResponse,
    pb.WatchResponse,
)
"""Answers that contain the node server's version."""

SILENCE = 1.0
"""Seconds of waiting after which a warning is logged."""

MESSAGES_AHEAD = 256
"""Most messages of a stream that wait to be handled; until then, no more are read."""

COMPLAIN_EVERY = 60.0
"""Seconds in which the same complaint about a node server is logged once, however many calls wait."""


class _Stream(Protocol[Message_co]):
    def __iter__(self) -> Iterator[Message_co]: ...
    def cancel(self) -> bool: ...


@dataclass(slots=True)
class _Complaint:
    """A complaint that repeats: how often since it was logged, and when it is logged next."""

    unsaid: int = 0
    next_at: float = 0.0


class Call(Generic[Answer]):
    """A unary call in progress. Belongs to the client's event loop, but for `cancel`. `take` returns the answer of the
    call once it has ended, or raises its error."""

    def __init__(self, loop: Loop, cancel: Callable[[], object], take: Callable[[], Answer]) -> None:
        self.cancel = cancel
        """Cancels the call, which then ends with an error."""
        self._loop = loop
        self._take = take
        self._ended = False
        self._waiting: asyncio.Future[None] | None = None

    def end(self) -> None:
        self._ended = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def answer(self) -> Answer:
        """Wait for the answer. A caller that is cancelled leaves the call as it is, and may wait again.

        Raises:
            KvferryError: the call has failed.
        """
        if not self._ended:
            self._waiting = self._loop.future()
            await self._waiting
        return self._take()


class Control:
    """The connection to one node server. Belongs to a client's event loop; `stats`, `complain` and `unreachable_for`
    may be used on any thread.

    Every call raises a `KvferryError` if it fails: the server's error, `Unreachable`, or `Closed` after `close`.
    """

    def __init__(self, address: str, tls: TlsConfig | None, loop: Loop, dial: Dial = connect) -> None:
        self.address = address
        self._tls = tls
        self._loop = loop
        self._channels = CurrentChannel(address, tls, dial)
        self._threads_short = False
        self._open: weakref.WeakKeyDictionary[object, None] = weakref.WeakKeyDictionary()
        """Streams and futures that are referenced, and the threads that read streams."""
        ends_at_exit(self)
        self._closed = False
        self._breaker = Breaker(BREAKER_THRESHOLD, BREAKER_FIRST, BREAKER_LAST)
        self._why_unreachable = f"{address} cannot be reached"
        self._answered = False
        """The server has answered a call: its address and the TLS settings were right then."""
        self._complaints: dict[str, _Complaint] = {}
        self._calls = self._retried = 0
        self._failed: Counter[str] = Counter()

    @property
    def unreachable_for(self) -> float:
        """Seconds since the first attempt that did not reach the server; 0.0 while it answers."""
        return self._breaker.failing_for(self._loop.now())

    def stats(self) -> CallStats:
        failing = self.unreachable_for
        return CallStats(self._calls, dict(self._failed), self._retried, 1, int(failing > 0), failing)

    async def register_cache(self, request: pb.RegisterCacheRequest, timeout: float) -> pb.RegisterCacheResponse:
        introduce(request)
        return await _finished(self._start(lambda stub: stub.RegisterCache, request, timeout))

    async def handshake(self, request: pb.HandshakeRequest, timeout: float) -> Handshaken:
        """Fetch the geometry and agents of an engine. Also raises the errors of `put_together`."""
        introduce(request)
        shared, stream = self._begin(
            lambda stub: cast(
                "_Stream[pb.HandshakeResponse]",
                stub.Handshake(request, timeout=timeout, metadata=call_metadata()),
            )
        )

        def read() -> Handshaken | grpc.RpcError:
            try:
                return put_together(self._of_this_release(stream))
            except grpc.RpcError as error:
                return error

        try:
            found = await self._loop.on_thread(read, f"kvferry-handshake-{self.address}")
        finally:
            stream.cancel()
            shared.end()
        if isinstance(found, Handshaken):
            self._judge(None)
            return found
        self._judge(found)
        raise self._typed(found)

    async def read_checksums(self, request: pb.ReadChecksumsRequest, timeout: float) -> pb.ReadChecksumsResponse:
        return await _finished(self._start(lambda stub: stub.ReadChecksums, request, timeout))

    async def notify(self, request: pb.NotifyRequest, timeout: float = CALL_TIMEOUT) -> list[NotificationAnswer]:
        """Send a batch of notifications, and return their results; raises as `answers_of`."""
        introduce(request)
        answer = await _finished(self._start(lambda stub: stub.Notify, request, timeout))
        return answers_of(request, answer, self.address)

    async def notify_one(self, request: pb.NotifyRequest, timeout: float = CALL_TIMEOUT) -> pb.NotificationResult:
        """Send a batch of one notification, and return its result; raises the error, if the result is one."""
        (answer,) = await self.notify(request, timeout)
        if isinstance(answer, KvferryError):
            raise answer
        return answer

    async def decline(self, reference: str, timeout: float) -> None:
        """Tell the home that this reader will not read a publication."""
        decline = pb.Notification(decline=pb.Decline(reference=reference))
        await self.notify_one(pb.NotifyRequest(notifications=[decline]), timeout)

    def read_blocks(self, request: pb.ReadBlocksRequest, timeout: float) -> Call[pb.ReadBlocksResponse]:
        """Begin to ask for the blocks of a publication."""
        introduce(request)
        return self._start(lambda stub: stub.ReadBlocks, request, timeout)

    def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.WatchResponse, None]:
        """Open a Watch, and yield its events."""
        introduce(request)
        return self._messages(lambda stub: stub.Watch(request))

    def complain(self, error: KvferryError, what: str) -> None:
        """Warn that `what` waits for this node server because of an error. Of complaints with errors of the same type
        only one a minute is logged, with the number of the others."""
        time = self._loop.now()
        complaint = self._complaints.setdefault(type(error).__name__, _Complaint())
        complaint.unsaid += 1
        if time < complaint.next_at:
            return
        others, complaint.unsaid, complaint.next_at = complaint.unsaid - 1, 0, time + COMPLAIN_EVERY
        more = f" ({others} more like this in the meantime)" if others else ""
        where = "" if self.address in error.message else f" at {self.address}"
        logger.warning("%s%s: %s%s", what, where, error.message, more)

    def close(self) -> None:
        """Close the channel: calls in progress end, and later calls raise `Closed`. Idempotent."""
        self._closed = True
        for channel in self._channels.drop_all():
            channel.close()

    def end_calls(self) -> None:
        """See `exits.Ending`."""
        if not (self._loop.started and self._loop.call(self.close)):
            self.close()

    def calls(self) -> Iterable[object]:
        """See `exits.Ending`."""
        # The references first, which takes one step: the loop may add some at any time.
        return [call for reference in self._open.keyrefs() if (call := reference()) is not None]

    def _start(
        self,
        method: Callable[[KVTransferStub], grpc.UnaryUnaryMultiCallable[Request, Answer]],
        request: Request,
        timeout: float,
    ) -> Call[Answer]:
        shared, future = self._begin(
            lambda stub: method(stub).future(request, timeout=timeout, metadata=call_metadata())
        )

        def take() -> Answer:
            try:
                failure = future.exception()
                self._judge(failure)
                if failure is None:
                    answer = future.result()
                    self._check(answer)
                    return answer
            except KvferryError:
                raise
            except Exception as error:
                failure = error
            raise self._typed(failure)

        made = Call(self._loop, future.cancel, take)

        def end() -> None:
            shared.end()
            made.end()

        def on_done(_: object) -> None:
            self._loop.call(end)

        future.add_done_callback(on_done)
        return made

    async def _messages(self, start: Callable[[KVTransferStub], object]) -> AsyncGenerator[Answer, None]:
        """Yield the messages of a stream, which a thread reads: gRPC has no callback for them."""
        shared, stream = self._begin(lambda stub: cast("_Stream[Answer]", start(stub)))
        arrived: asyncio.Queue[Answer | BaseException | None] = asyncio.Queue(MESSAGES_AHEAD)

        def hand_over(message: Answer | BaseException | None) -> None:
            # A closed client waits for no message.
            with suppress(Closed, CancelledError):
                self._loop.submit(arrived.put(message)).result()

        def read() -> None:
            end: BaseException | None = None
            try:
                for message in self._of_this_release(stream):
                    hand_over(message)
            except (grpc.RpcError, KvferryError) as error:
                end = error
            hand_over(end)

        try:
            self._open[start_thread(read, f"kvferry-stream-{self.address}")] = None
            while (message := await arrived.get()) is not None:
                if isinstance(message, BaseException):
                    self._judge(message)
                    raise message if isinstance(message, KvferryError) else self._typed(message)
                self._judge(None)
                yield message
        finally:
            stream.cancel()
            shared.end()
            while not arrived.empty():
                arrived.get_nowait()

    def _of_this_release(self, stream: Iterable[Answer]) -> Iterator[Answer]:
        """Yield messages, the first of which is of a node server that this release works with."""
        first = True
        for message in stream:
            if first:
                self._check(message)
            first = False
            yield message

    def _begin(self, call: Callable[[KVTransferStub], Answer]) -> tuple[SharedChannel, Answer]:
        """Begin a call, and return gRPC's object for it, with the channel that it uses until `SharedChannel.end`."""
        pause = self._breaker.ask(self._loop.now())
        if pause > 0:
            self._warn_if_overdue()
        if self._closed:
            raise self._typed(None)
        if pause > 0:
            message = f"{self._why_unreachable} (the next attempt is due in {pause:.1f} s)"
            raise Unreachable(message, retry_after=pause, address=self.address)
        if self._threads_short:
            start_thread(_nothing, "kvferry-probe")
            self._threads_short = False
        shared = self._channels.newest()
        self._calls += 1
        try:
            started = call(shared.stub)
        except (grpc.RpcError, ValueError) as error:
            # gRPC raises ValueError if the channel was closed in the meantime.
            self._judge(error)
            raise self._typed(error) from None
        except (RuntimeError, MemoryError):
            self._abandon()
            raise no_thread(f"a call to {self.address}") from None
        shared.begin()
        self._open[started] = None
        return shared, started

    def _check(self, answer: object) -> None:
        """Check that an answer, or the first message of a stream, is of a node server that this release works with."""
        if isinstance(answer, _WITH_VERSION):
            check_server(answer.version, self.address)

    def _abandon(self) -> None:
        """Abandon a channel for which gRPC could not start its thread; the next call makes another channel.

        No call on it would ever end, not even at its deadline, and closing or freeing the channel would wait for them.
        So this keeps the channel referenced for ever.
        """
        channel = self._channels.drop()
        self._threads_short = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))

    def _typed(self, failure: BaseException | None) -> KvferryError:
        if self._closed:
            return Closed(f"the connection to {self.address} is closed")
        if isinstance(failure, grpc.RpcError):
            error = from_rpc_error(failure, self.address, self._tls, answered=self._answered)
            self._failed[type(error).__name__] += 1
            self._retried += error.retryable
            return error
        return InternalError(f"the call to {self.address} failed: {failure!r}", address=self.address)

    def _judge(self, failure: BaseException | None) -> None:
        """Tell the breaker how an attempt ended. An exceeded deadline does not count as a failure: it may have been
        too short."""
        if failure is None:
            self._succeeded()
        elif isinstance(failure, grpc.RpcError) and isinstance(failure, grpc.Call):
            error = from_rpc_error(failure, self.address, self._tls, answered=self._answered)
            if not isinstance(error, Unreachable):
                self._succeeded()
            elif failure.code() is grpc.StatusCode.UNAVAILABLE:
                self._breaker.failed(self._loop.now())
                self._channels.distrust()
                self._why_unreachable = error.message
                self._warn_if_overdue()

    def _succeeded(self) -> None:
        self._answered = True
        if self._breaker.succeeded():
            logger.info("%s answers again", self.address)

    def _warn_if_overdue(self) -> None:
        """Warn once per outage, so that the engine's log has the reason why its calls wait."""
        if self._breaker.overdue(self._loop.now(), SILENCE):
            logger.warning("%s (trying again)", self._why_unreachable)


async def _finished(call: Call[Answer]) -> Answer:
    """Wait for the answer of a call; if the waiting task is cancelled, so is the call."""
    try:
        return await call.answer()
    except asyncio.CancelledError:
        call.cancel()
        raise


def answers_of(request: pb.NotifyRequest, answer: pb.NotifyResponse, address: str) -> list[NotificationAnswer]:
    """Return the results of a batch, errors as such. Raises `InternalError` if there are not as many results as
    notifications."""
    sent, answered = len(request.notifications), len(answer.results)
    if sent != answered:
        raise InternalError(f"{address} answered {sent} notifications with {answered} results", address=address)
    return [from_notification_error(result.error) if result.HasField("error") else result for result in answer.results]


def _nothing() -> None:
    """Do nothing: the work of a thread that is started as a test."""
