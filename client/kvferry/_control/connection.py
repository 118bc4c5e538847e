"""The connection to one node server: typed errors, a deadline on every call, and a channel that is made on first use.

It uses synchronous gRPC, because engine processes fork, and `grpc.aio` does not support that.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, cast

import grpc
from google.protobuf.message import Message

from kvferry._clock import now
from kvferry._control.breaker import Breaker
from kvferry._control.channels import CurrentChannel
from kvferry._control.exits import ends_at_exit
from kvferry._threads import guarded, no_thread, start_thread
from kvferry._tracing import call_metadata
from kvferry._wire.channel import Dial, TlsConfig, connect
from kvferry._wire.handshake import Handshaken, put_together
from kvferry._wire.status import from_notification_error, from_rpc_error
from kvferry._wire.version import check_server, introduce
from kvferry.errors import Closed, ContractDiffers, InternalError, KvferryError, Unreachable
from kvferry.stats import CallStats
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferStub

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)
Message_co = TypeVar("Message_co", covariant=True)

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
"""Answers that say what the node server speaks."""

SILENCE = 1.0
"""Seconds of waiting after which a warning says what is being waited for."""

COMPLAIN_EVERY = 60.0
"""Seconds in which the same complaint about a node server is logged once, however many wait for it."""


class Stream(Protocol[Message_co]):
    """A server stream that can be cancelled from another thread."""

    def __iter__(self) -> Iterator[Message_co]: ...
    def cancel(self) -> bool: ...


class _Future(Protocol[Answer_co]):
    """gRPC's future of a unary call."""

    def add_done_callback(self, callback: Callable[[object], None]) -> None: ...
    def cancel(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> Answer_co: ...


@dataclass(slots=True)
class _Complaint:
    """How often something was complained of since it was logged, and when it is logged next."""

    unsaid: int = 0
    next_at: float = 0.0


class Control:
    """The connection to one node server. Thread-safe.

    Every call raises a `KvferryError` if it fails: the server's error, `Unreachable`, or `Closed` after `close`.

    Args:
        address: address of the node server.
        tls: credentials for TCP connections; None: no TLS.
        dial: makes the channel.
    """

    def __init__(self, address: str, tls: TlsConfig | None, dial: Dial = connect) -> None:
        self.address = address
        self._tls = tls
        self._channels = CurrentChannel(address, tls, dial)
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        """Held while a call is started whose end a thread of gRPC handles: the first such call starts that thread."""
        self._threads_short = False
        self._open: weakref.WeakSet[object] = weakref.WeakSet()
        """Streams and futures that somebody holds."""
        ends_at_exit(self)
        self._closed = False
        self._breaker = Breaker(BREAKER_THRESHOLD, BREAKER_FIRST, BREAKER_LAST)
        self._why_unreachable = f"{address} cannot be reached"
        self._answered = False
        """It has answered a call: its address and the TLS settings were right then."""
        self._complaints: dict[str, _Complaint] = {}
        self._calls = self._retried = 0
        self._failed: Counter[str] = Counter()

    @property
    def unreachable_for(self) -> float:
        """Seconds since the first attempt that did not reach the server; 0.0 while it answers."""
        return self._breaker.failing_for(now())

    def stats(self) -> CallStats:
        """Count the calls."""
        failing = self.unreachable_for
        with self._lock:
            return CallStats(self._calls, dict(self._failed), self._retried, 1, int(failing > 0), failing)

    def register_cache(self, request: pb.RegisterCacheRequest, timeout: float) -> pb.RegisterCacheResponse:
        """Register a rank."""
        introduce(request)
        return self._call(lambda stub: stub.RegisterCache(request, timeout=timeout, metadata=call_metadata()))

    def handshake(self, request: pb.HandshakeRequest, timeout: float) -> Handshaken:
        """Fetch the geometry and agents of an engine. Also raises the errors of `put_together`."""
        introduce(request)
        messages = self._start(
            lambda stub: cast(
                "Stream[pb.HandshakeResponse]", stub.Handshake(request, timeout=timeout, metadata=call_metadata())
            )
        )
        try:
            return put_together(self.typed(messages))
        finally:
            messages.cancel()

    def read_checksums(self, request: pb.ReadChecksumsRequest, timeout: float) -> pb.ReadChecksumsResponse:
        """Fetch checksums of blocks."""
        return self._call(lambda stub: stub.ReadChecksums(request, timeout=timeout, metadata=call_metadata()))

    def notify(self, request: pb.NotifyRequest, timeout: float = CALL_TIMEOUT) -> list[pb.NotificationResult]:
        """Send a batch of notifications, and return their results, which may be errors."""
        introduce(request)
        return list(self._call(lambda stub: stub.Notify(request, timeout=timeout, metadata=call_metadata())).results)

    def notify_one(self, request: pb.NotifyRequest, timeout: float = CALL_TIMEOUT) -> pb.NotificationResult:
        """Send a batch of one notification, and return its result; raises the result's error, if it is one."""
        return checked_results(request, self.notify(request, timeout), self.address)[0]

    def decline(self, reference: str, timeout: float) -> None:
        """Say that nobody will read a publication."""
        self.notify_one(
            pb.NotifyRequest(notifications=[pb.Notification(decline=pb.Decline(reference=reference))]), timeout
        )

    def notify_later(
        self,
        request: pb.NotifyRequest,
        timeout: float,
        answered: Callable[[list[pb.NotificationResult] | KvferryError], None],
    ) -> None:
        """Send a batch of notifications without waiting.

        Args:
            request: the batch.
            timeout: seconds.
            answered: called once with the results, on gRPC's thread, or with an error, on that thread or the caller's.
        """

        def take(answer: pb.NotifyResponse | KvferryError) -> None:
            answered(answer if isinstance(answer, KvferryError) else list(answer.results))

        introduce(request)
        self._later(lambda stub: stub.Notify.future(request, timeout=timeout, metadata=call_metadata()), take)

    def read_blocks_later(
        self,
        request: pb.ReadBlocksRequest,
        timeout: float,
        answered: Callable[[pb.ReadBlocksResponse | KvferryError], None],
    ) -> Callable[[], object]:
        """Ask for the blocks of a publication without waiting.

        Args:
            request: the publication, and how long to wait for it.
            timeout: seconds.
            answered: see `notify_later`.

        Returns:
            A function that cancels the call, which then ends with an error. May be called on any thread, at any time.
        """
        introduce(request)
        return self._later(
            lambda stub: stub.ReadBlocks.future(request, timeout=timeout, metadata=call_metadata()), answered
        )

    def watch(self, request: pb.WatchRequest) -> Stream[pb.WatchResponse]:
        """Open a Watch. Its errors are raised while it is read; see `typed`."""
        introduce(request)
        return self._start(lambda stub: cast("Stream[pb.WatchResponse]", stub.Watch(request)))

    def typed(self, stream: Stream[Answer]) -> Iterator[Answer]:
        """Yield the messages of a stream; raises a `KvferryError` if it fails."""
        first = True
        failure: KvferryError | None = None
        try:
            for message in stream:
                self._judge(None)
                if first:
                    self._check(message)
                    first = False
                yield message
        except grpc.RpcError as error:
            self._judge(error)
            failure = self._typed(error)
        if failure is not None:
            # Not above: gRPC's error is the stream itself, which would be kept as the context of this one.
            raise failure

    def complain(self, error: KvferryError, what: str) -> None:
        """Warn that something waits for this node server. Of complaints with errors of the same type only one a minute
        is logged, with the number of the others.

        Args:
            error: why it waits.
            what: what waits.
        """
        time = now()
        with self._lock:
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
        with self._starting, self._lock:
            self._closed = True
            channels = self._channels.drop_all()
        for channel in channels:
            channel.close()

    def end_calls(self) -> None:
        """See `exits.Ending`."""
        self.close()

    def calls(self) -> Iterable[object]:
        """See `exits.Ending`."""
        return tuple(self._open)

    def _later(
        self, call: Callable[[KVTransferStub], _Future[Answer]], answered: Callable[[Answer | KvferryError], None]
    ) -> Callable[[], object]:
        """Make a call without waiting; see `notify_later`. Returns a function that cancels it."""
        try:
            future = self._start(call)
        except KvferryError as error:
            answered(error)
            return _nothing

        def on_done(_: object) -> None:
            answer: Answer | KvferryError
            try:
                failure = future.exception()
                self._judge(failure)
                if failure is None:
                    self._check(answer := future.result())
                else:
                    answer = self._typed(failure)
            except ContractDiffers as error:
                answer = error
            except Exception as error:
                answer = self._typed(error)
            guarded(partial(answered, answer), f"a callback for the answer of {self.address}")

        future.add_done_callback(on_done)
        return future.cancel

    def _start(self, call: Callable[[KVTransferStub], Answer]) -> Answer:
        """Start a call without waiting for its end."""
        with self._starting:
            if self._threads_short:
                start_thread(_nothing, "kvferry-probe")
                self._threads_short = False
            try:
                started = self._call(call)
                self._open.add(started)
                return started
            except (RuntimeError, MemoryError):
                self._abandon()
                raise no_thread(f"a call to {self.address}") from None

    def _call(self, call: Callable[[KVTransferStub], Answer]) -> Answer:
        pause = self._breaker.ask(now())
        if pause > 0:
            self._warn_if_overdue()
        with self._lock:
            if self._closed:
                raise self._typed(None)
            if pause > 0:
                message = f"{self._why_unreachable} (the next attempt is due in {pause:.1f} s)"
                raise Unreachable(message, retry_after=pause, address=self.address)
            shared = self._channels.newest()
            shared.begin()
            self._calls += 1
        try:
            answer = call(shared.stub)
        except BaseException as error:
            shared.end()
            if isinstance(error, grpc.RpcError):
                self._judge(error)
            # gRPC raises ValueError if the channel was closed in the meantime.
            if isinstance(error, grpc.RpcError | ValueError):
                raise self._typed(error) from None
            raise
        shared.end_with(answer)
        if isinstance(answer, Message):
            self._judge(None)
            self._check(answer)
        return answer

    def _check(self, answer: object) -> None:
        """Check that an answer, or the first message of one, is of a node server that this release works with."""
        if isinstance(answer, _WITH_VERSION):
            check_server(answer.version, self.address)

    def _abandon(self) -> None:
        """Abandon a channel for which gRPC could not start its thread; the next call makes another channel.

        No call on it would ever end, not even at its deadline, and closing or freeing the channel would wait for them.
        So this keeps the channel referenced for ever.
        """
        with self._lock:
            channel = self._channels.drop()
        self._threads_short = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))

    def _typed(self, failure: BaseException | None) -> KvferryError:
        if self._closed:
            return Closed(f"the connection to {self.address} is closed")
        if isinstance(failure, grpc.RpcError):
            error = from_rpc_error(failure, self.address, self._tls, answered=self._answered)
            with self._lock:
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
                self._breaker.failed(now())
                self._channels.distrust()
                self._why_unreachable = error.message
                self._warn_if_overdue()

    def _succeeded(self) -> None:
        self._answered = True
        if self._breaker.succeeded():
            logger.info("%s answers again", self.address)

    def _warn_if_overdue(self) -> None:
        """Warn once per outage, so that the engine's log says why its calls wait."""
        if self._breaker.overdue(now(), SILENCE):
            logger.warning("%s (trying again)", self._why_unreachable)


def checked_results(
    request: pb.NotifyRequest, results: list[pb.NotificationResult], address: str
) -> list[pb.NotificationResult]:
    """Return the results of a batch.

    Raises:
        InternalError: there are not as many results as notifications.
        KvferryError: the first error among the results.
    """
    if len(results) != len(request.notifications):
        raise InternalError(
            f"{address} answered {len(request.notifications)} notifications with {len(results)} results",
            address=address,
        )
    for result in results:
        if result.WhichOneof("kind") == "error":
            raise from_notification_error(result.error)
    return results


def _nothing() -> None:
    """Do nothing: the work of a thread that is started as a test, and the cancellation of a call that was not made."""
