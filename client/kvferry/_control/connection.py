"""The connection to one node server: typed errors, a deadline on every call, and a channel that is made on first use.

It uses synchronous gRPC, because engine processes fork, and `grpc.aio` does not support that. gRPC's threads hand over
to the client's event loop.

Calls end before the interpreter does. At its end Python freezes daemon threads wherever they are, also while they hold
the lock of a call of gRPC; the call's finaliser then waits for that lock for ever.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TypeAlias, TypeVar

import grpc

from kvferry._control.backoff import CALL_TIMEOUT, SILENCE, Breaker
from kvferry._logs import Log
from kvferry._loop import Loop
from kvferry._threads import guarded, no_thread, start_thread
from kvferry._tracing import call_metadata
from kvferry._wire.channel import Dial, TlsConfig, TlsContent, connect
from kvferry._wire.geometry_codec import Handshaken, put_together
from kvferry._wire.status import from_notification_error, from_rpc_error
from kvferry._wire.tls_files import tls_files
from kvferry._wire.version import check_server, introduce
from kvferry.errors import Closed, InternalError, KvferryError, Unreachable
from kvferry.stats import CallStats
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferStub

logger = Log(__name__)

Request = TypeVar("Request")
Answer = TypeVar("Answer")
NotificationAnswer: TypeAlias = pb.NotificationResult | KvferryError
"""The result of a notification, or the error with which the home has refused it."""

HANDSHAKE_TIMEOUT = 30.0
"""Seconds for a handshake: hundreds of ranks may start together, and each fetches the geometry of hundreds of ranks."""

BREAKER_THRESHOLD = 3
BREAKER_FIRST = 0.1
BREAKER_LAST = 1.0
"""Failures after which calls pause, and the shortest and longest pause in seconds: a node server restarts within
seconds, so that there is at least one attempt per second."""

MESSAGES_AHEAD = 256
"""Most messages of a stream that wait to be handled; until then, no more are read."""

COMPLAIN_EVERY = 60.0
"""Seconds in which the same complaint about a node server is logged once, however many calls wait."""

EXIT_PATIENCE = 2.0
EXIT_POLL = 0.005
"""Seconds at the interpreter's end for all calls and threads to end, and between two checks."""


class Control:
    """The connection to one node server. Belongs to a client's event loop; `stats`, `complain` and `unreachable_for`
    may be used on any thread. Every call raises a `KvferryError` if it fails: the server's error, `Unreachable`, or
    `Closed` after `close`."""

    def __init__(self, address: str, tls: TlsConfig | None, loop: Loop, dial: Dial = connect) -> None:
        self.address = address
        self._tls = tls
        self._loop = loop
        self._dial = dial
        self._files = None if tls is None or address.startswith("unix:") else tls_files(tls)
        self._shown: TlsContent | None = None
        """The contents of the TLS files when the channel was made."""
        self._channel: grpc.Channel | None = None
        """The channel of the next call. Calls in progress keep theirs."""
        self._stub: KVTransferStub | None = None
        self._threads_short = False
        self._open: weakref.WeakKeyDictionary[object, None] = weakref.WeakKeyDictionary()
        """Streams and futures that are referenced, and the threads that read streams."""
        _living[self] = None
        self._closed = False
        self._breaker = Breaker(BREAKER_THRESHOLD, BREAKER_FIRST, BREAKER_LAST)
        self._why_unreachable = f"{address} cannot be reached"
        self._answered = self._warned = False
        """The server has answered a call: its address and the TLS settings were right then."""
        self._complaints: dict[str, float] = {}
        """By the name of its error: when each is logged again, at the earliest."""
        self._calls = self._retried = 0
        self._failures: Counter[str] = Counter()

    @property
    def unreachable_for(self) -> float:
        """Seconds since the first attempt that did not reach the server; 0.0 while it answers."""
        return self._breaker.failing_for(self._loop.now())

    def stats(self) -> CallStats:
        failing = self.unreachable_for
        return CallStats(self._calls, dict(self._failures), self._retried, 1, int(failing > 0), failing)

    async def register_cache(self, request: pb.RegisterCacheRequest, timeout: float) -> pb.RegisterCacheResponse:
        introduce(request)
        return await self._start(lambda stub: stub.RegisterCache, request, timeout)

    async def handshake(self, request: pb.HandshakeRequest, timeout: float) -> Handshaken:
        """Fetch the geometry and agents of an engine. Also raises the errors of `put_together`."""
        introduce(request)
        stream = self._begin(lambda stub: stub.Handshake(request, timeout=timeout, metadata=call_metadata()))

        def read() -> Handshaken | grpc.RpcError:
            try:
                return put_together(self._of_this_release(stream))
            except grpc.RpcError as error:
                return error

        try:
            found = await self._loop.on_thread(read, f"kvferry-handshake-{self.address}")
        finally:
            stream.cancel()
        if isinstance(found, Handshaken):
            self._succeeded()
            return found
        raise self._failed(found)

    async def read_checksums(self, request: pb.ReadChecksumsRequest, timeout: float) -> pb.ReadChecksumsResponse:
        return await self._start(lambda stub: stub.ReadChecksums, request, timeout)

    async def notify(self, request: pb.NotifyRequest, timeout: float = CALL_TIMEOUT) -> list[NotificationAnswer]:
        """Send a batch of notifications, and return their results; raises as `answers_of`."""
        introduce(request)
        answer = await self._start(lambda stub: stub.Notify, request, timeout)
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

    def read_blocks(self, request: pb.ReadBlocksRequest, timeout: float) -> asyncio.Future[pb.ReadBlocksResponse]:
        """Begin to ask for the blocks of a publication. Cancelling the future cancels the call."""
        introduce(request)
        return self._start(lambda stub: stub.ReadBlocks, request, timeout)

    async def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.WatchResponse, None]:
        """Open a Watch, and yield its events, which a thread reads: gRPC has no callback for them."""
        introduce(request)
        stream = self._begin(lambda stub: stub.Watch(request))
        arrived: asyncio.Queue[pb.WatchResponse | BaseException | None] = asyncio.Queue(MESSAGES_AHEAD)

        def hand_over(message: pb.WatchResponse | BaseException | None) -> None:
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
                    raise self._failed(message)
                self._succeeded()
                yield message
        finally:
            stream.cancel()
            while not arrived.empty():
                arrived.get_nowait()

    def complain(self, error: KvferryError, what: str) -> None:
        """Warn that `what` waits for this node server because of an error. Of complaints with errors of the same type
        only one a minute is logged."""
        kind, now = type(error).__name__, self._loop.now()
        if now >= self._complaints.get(kind, 0.0):
            self._complaints[kind] = now + COMPLAIN_EVERY
            where = "" if self.address in error.message else f" at {self.address}"
            logger.warning("%s%s: %s", what, where, error.message)

    def close(self) -> None:
        """Close the channel: calls in progress end, and later calls raise `Closed`. Idempotent."""
        self._closed = True
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()
        # Those of earlier channels.
        for call in self.calls():
            if isinstance(call, grpc.Call):
                call.cancel()

    def end_calls(self) -> None:
        """Close, on any thread, without a wait."""
        if not (self._loop.started and self._loop.call(self.close)):
            self.close()

    def calls(self) -> Iterable[object]:
        """Return the calls that are referenced, and the threads that read streams. Takes none of their locks."""
        # The references first, which takes one step: the loop may add some at any time.
        return [call for reference in self._open.keyrefs() if (call := reference()) is not None]

    def _start(
        self,
        method: Callable[[KVTransferStub], grpc.UnaryUnaryMultiCallable[Request, Answer]],
        request: Request,
        timeout: float,
    ) -> asyncio.Future[Answer]:
        """Begin a call with one answer. Cancelling the future cancels the call."""
        started = self._begin(lambda stub: method(stub).future(request, timeout=timeout, metadata=call_metadata()))
        answer: asyncio.Future[Answer] = self._loop.future()

        def end() -> None:
            if answer.done():
                return
            try:
                answer.set_result(self._answer_of(started))
            except KvferryError as error:
                # The traceback would keep the call.
                answer.set_exception(error.with_traceback(None))
                # Retrieved: asyncio logs the errors that nobody has waited for.
                answer.exception()

        def on_end(_: object) -> None:
            self._loop.call(end)

        started.add_done_callback(on_end)
        # Nothing happens to a call that has ended.
        answer.add_done_callback(lambda _: started.cancel())
        return answer

    def _answer_of(self, ended: grpc.Future[Answer]) -> Answer:
        """Return the answer of a call that has ended, or raise its error."""
        try:
            failure = ended.exception()
        except Exception as error:
            failure = error
        if failure is not None:
            raise self._failed(failure)
        answer = ended.result()
        self._succeeded()
        self._check(answer)
        return answer

    def _of_this_release(self, stream: Iterable[Answer]) -> Iterator[Answer]:
        """Yield messages, the first of which is of a node server that this release works with."""
        for count, message in enumerate(stream):
            if not count:
                self._check(message)
            yield message

    def _begin(self, call: Callable[[KVTransferStub], Answer]) -> Answer:
        pause = self._breaker.ask(self._loop.now())
        if pause > 0:
            self._warn_if_overdue()
        if self._closed:
            raise Closed(f"the connection to {self.address} is closed")
        if pause > 0:
            message = f"{self._why_unreachable} (the next attempt is due in {pause:.1f} s)"
            raise Unreachable(message, retry_after=pause, address=self.address)
        if self._threads_short:
            start_thread(lambda: None, "kvferry-probe")
            self._threads_short = False
        stub = self._newest()
        self._calls += 1
        try:
            started = call(stub)
        except (grpc.RpcError, ValueError) as error:
            # gRPC raises ValueError if the channel was closed in the meantime.
            raise self._failed(error) from None
        except (RuntimeError, MemoryError):
            self._abandon()
            raise no_thread(f"a call to {self.address}") from None
        self._open[started] = None
        return started

    def _newest(self) -> KVTransferStub:
        """Return the stub for the next call, on a channel with the TLS files as they are now. gRPC closes an earlier
        channel after its last call. Raises `InvalidField` for a malformed address, or TLS files that never worked."""
        tls = None if self._files is None else self._files.content()
        if self._stub is None or tls is not self._shown:
            self._channel, self._shown = self._dial(self.address, tls), tls
            self._stub = KVTransferStub(self._channel)
        return self._stub

    def _check(self, answer: object) -> None:
        """Check that a message is of a node server that this release works with."""
        version: pb.Version | None = getattr(answer, "version", None)
        if version is not None:
            check_server(version, self.address)

    def _abandon(self) -> None:
        """Abandon a channel for which gRPC could not start its thread; the next call makes another channel. No call on
        it would ever end, not even at its deadline, and closing or freeing the channel would wait for them. So this
        keeps the channel referenced for ever."""
        channel, self._channel, self._stub = self._channel, None, None
        self._threads_short = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))

    def _failed(self, failure: BaseException) -> KvferryError:
        """Tell the breaker that an attempt has failed, and return its typed error. An exceeded deadline does not count
        as a failure: it may have been too short."""
        if isinstance(failure, KvferryError):
            return failure
        error: KvferryError = InternalError(f"the call to {self.address} failed: {failure!r}", address=self.address)
        if isinstance(failure, grpc.RpcError):
            error = from_rpc_error(failure, self.address, self._tls, answered=self._answered)
        if isinstance(failure, grpc.Call):
            if not isinstance(error, Unreachable):
                self._succeeded()
            elif failure.code() is grpc.StatusCode.UNAVAILABLE:
                self._breaker.failed(self._loop.now())
                self._why_unreachable = error.message
                self._warn_if_overdue()
                if self._files is not None:
                    self._files.look_soon()
        if self._closed:
            return Closed(f"the connection to {self.address} is closed")
        if isinstance(failure, grpc.RpcError):
            self._failures[type(error).__name__] += 1
            self._retried += error.retryable
        return error

    def _succeeded(self) -> None:
        self._answered = True
        self._breaker.succeeded()
        if self._warned:
            self._warned = False
            logger.info("%s answers again", self.address)

    def _warn_if_overdue(self) -> None:
        """Warn once per outage, so that the engine's log has the reason why its calls wait."""
        if not self._warned and self.unreachable_for >= SILENCE:
            self._warned = True
            logger.warning("%s (trying again)", self._why_unreachable)


def answers_of(request: pb.NotifyRequest, answer: pb.NotifyResponse, address: str) -> list[NotificationAnswer]:
    """Return the results of a batch, errors as such. Raises `InternalError` if there are not as many results as
    notifications."""
    sent, answered = len(request.notifications), len(answer.results)
    if sent != answered:
        raise InternalError(f"{address} answered {sent} notifications with {answered} results", address=address)
    return [from_notification_error(result.error) if result.HasField("error") else result for result in answer.results]


_living: weakref.WeakKeyDictionary[Control, None] = weakref.WeakKeyDictionary()


def _all() -> list[Control]:
    # The references first, which takes one step: other threads may add some at any time.
    return [control for reference in _living.keyrefs() if (control := reference()) is not None]


def _end_all() -> None:
    until = time.monotonic() + EXIT_PATIENCE
    for control in (mine := _all()):
        guarded(control.end_calls, "the end of calls")
    for control in mine:
        while any(map(_goes_on, control.calls())) and time.monotonic() < until:
            time.sleep(EXIT_POLL)


def _goes_on(call: object) -> bool:
    return call.is_alive() if isinstance(call, threading.Thread) else bool(getattr(call, "is_active", bool)())


def _leave_all() -> None:
    """Keep the parent's calls for ever, in a child: the threads that held their locks do not exist there."""
    for control in _all():
        for call in control.calls():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))
    _living.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_leave_all)
