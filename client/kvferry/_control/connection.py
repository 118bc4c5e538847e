"""Calls to one node server, synchronous and thread-safe: typed errors, a deadline on every call, the channel made on
first use.

Synchronous on purpose: an engine process forks, and `grpc.aio` does not survive that.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar, cast

import grpc
from google.protobuf.message import Message

from kvferry._clock import now
from kvferry._control.backoff import Backoff
from kvferry._control.breaker import Breaker
from kvferry._threads import no_thread, start_thread
from kvferry._wire.channel import Dial, TlsConfig, connect
from kvferry._wire.handshake import Handshaken, put_together
from kvferry._wire.status import from_notification_error, from_rpc_error
from kvferry.errors import Closed, InternalError, KvferryError, Unreachable
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferStub

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)
Message_co = TypeVar("Message_co", covariant=True)

CALL_TIMEOUT = 5.0
"""Seconds for a unary call to a node server that is alive."""

HANDSHAKE_TIMEOUT = 30.0
"""Seconds for a handshake: hundreds of ranks that start together each get an engine of hundreds of ranks."""

BREAKER_THRESHOLD = 3
BREAKER_FIRST = 0.1
BREAKER_LAST = 1.0
"""A node server that restarts is back within seconds, so attempts to reach it never get rarer than one a second."""

SILENCE = 1.0
"""Seconds after which somebody who waits is told what for."""


class Stream(Protocol[Message_co]):
    """A server stream that can be cancelled from another thread."""

    def __iter__(self) -> Iterator[Message_co]: ...
    def cancel(self) -> bool: ...


class _Future(Protocol[Answer_co]):
    """A call that nobody waits for."""

    def add_done_callback(self, callback: Callable[[object], None]) -> None: ...
    def cancel(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> Answer_co: ...


class Control:
    """One node server."""

    def __init__(self, address: str, tls: TlsConfig | None, dial: Dial = connect) -> None:
        self.address = address
        self._tls = tls
        self._dial = dial
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        """For calls that a thread of gRPC's ends, which the first of them starts: one is started at a time."""
        self._threads_short = False
        self._closed = False
        self._channel: grpc.Channel | None = None
        self._stub: KVTransferStub | None = None
        self._breaker = Breaker(BREAKER_THRESHOLD, BREAKER_FIRST, BREAKER_LAST)
        self._why_unreachable = f"{address} cannot be reached"

    @property
    def unreachable_for(self) -> float:
        """Seconds for which no attempt has reached it; 0.0 while it answers."""
        return self._breaker.failing_for(now())

    def register_cache(self, request: pb.RegisterCacheRequest, timeout: float) -> pb.RegisterCacheResponse:
        """Register a rank."""
        return self._call(lambda stub: stub.RegisterCache(request, timeout=timeout))

    def handshake(self, request: pb.HandshakeRequest, timeout: float) -> Handshaken:
        """Ask for an engine; raises also what `put_together` does."""
        messages = self._start(
            lambda stub: cast("Stream[pb.HandshakeResponse]", stub.Handshake(request, timeout=timeout))
        )
        try:
            return put_together(self.typed(messages))
        finally:
            messages.cancel()

    def read_checksums(self, request: pb.ReadChecksumsRequest, timeout: float) -> pb.ReadChecksumsResponse:
        """Ask for sums of blocks."""
        return self._call(lambda stub: stub.ReadChecksums(request, timeout=timeout))

    def notify(self, request: pb.NotifyRequest, timeout: float = CALL_TIMEOUT) -> list[pb.NotificationResult]:
        """Send a batch; results may be errors."""
        return list(self._call(lambda stub: stub.Notify(request, timeout=timeout)).results)

    def notify_one(self, request: pb.NotifyRequest, timeout: float = CALL_TIMEOUT) -> pb.NotificationResult:
        """Send a batch of one; raises if its result is an error."""
        return checked_results(request, self.notify(request, timeout), self.address)[0]

    def notify_later(
        self,
        request: pb.NotifyRequest,
        timeout: float,
        answered: Callable[[list[pb.NotificationResult] | KvferryError], None],
    ) -> None:
        """Send a batch without waiting; `answered` is called once, on gRPC's thread with the results, or, also on the
        caller's, with why the call failed."""

        def take(answer: pb.NotifyResponse | KvferryError) -> None:
            answered(answer if isinstance(answer, KvferryError) else list(answer.results))

        self._later(lambda stub: stub.Notify.future(request, timeout=timeout), take)

    def poll_blocks_later(
        self,
        request: pb.PollBlocksRequest,
        timeout: float,
        answered: Callable[[pb.PollBlocksResponse | KvferryError], None],
    ) -> Callable[[], object]:
        """Ask for blocks without waiting; `answered` as in `notify_later`.

        Returns:
            Cancels the call, which then ends with an error, from any thread and at any time.
        """
        return self._later(lambda stub: stub.PollBlocks.future(request, timeout=timeout), answered)

    def watch(self, request: pb.WatchRequest) -> Stream[pb.WatchResponse]:
        """Open a Watch; errors come while it is read, see `typed`."""
        return self._start(lambda stub: cast("Stream[pb.WatchResponse]", stub.Watch(request)))

    def typed(self, stream: Stream[Answer]) -> Iterator[Answer]:
        """The messages of a stream, its failure as a `KvferryError`."""
        try:
            for message in stream:
                self._judge(None)
                yield message
        except grpc.RpcError as error:
            self._judge(error)
            raise self._typed(error) from None

    def close(self) -> None:
        """Close the channel: what is under way ends, and later calls raise `Closed`. Idempotent."""
        with self._starting, self._lock:
            self._closed = True
            channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()

    def _later(
        self, call: Callable[[KVTransferStub], _Future[Answer]], answered: Callable[[Answer | KvferryError], None]
    ) -> Callable[[], object]:
        """Make a call without waiting; `answered` is called once, see `notify_later`. Returns what cancels it."""
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
                answer = self._typed(failure) if failure is not None else future.result()
            except Exception as error:
                answer = self._typed(error)
            try:
                answered(answer)
            except Exception:
                logger.exception("what %s answered was not taken", self.address)

        future.add_done_callback(on_done)
        return future.cancel

    def _start(self, call: Callable[[KVTransferStub], Answer]) -> Answer:
        """Start a call that does not wait for its end."""
        with self._starting:
            if self._threads_short:
                start_thread(_nothing, "kvferry-probe")
                self._threads_short = False
            try:
                return self._call(call)
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
                message = f"{self._why_unreachable}; the next attempt is due in {pause:.1f} s"
                raise Unreachable(message, retry_after=pause, address=self.address)
            if self._stub is None:
                self._channel = self._dial(self.address, self._tls)
                self._stub = KVTransferStub(self._channel)
            stub = self._stub
        try:
            answer = call(stub)
        except grpc.RpcError as error:
            self._judge(error)
            raise self._typed(error) from None
        except ValueError as error:
            # What gRPC raises for a channel that was closed since.
            raise self._typed(error) from None
        if isinstance(answer, Message):
            self._judge(None)
        return answer

    def _abandon(self) -> None:
        """gRPC got no thread for the calls of this channel, and counts on having it: none of them would ever end, not
        even by its deadline, and who closes the channel, or frees it, would wait for them. So it is kept for ever, and
        the next call makes another."""
        with self._lock:
            channel, self._channel, self._stub = self._channel, None, None
        self._threads_short = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))

    def _typed(self, failure: BaseException | None) -> KvferryError:
        if self._closed:
            return Closed(f"the connection to {self.address} is closed")
        if isinstance(failure, grpc.RpcError):
            return from_rpc_error(failure, self.address)
        return InternalError(f"the call to {self.address} failed: {failure!r}", address=self.address)

    def _judge(self, failure: BaseException | None) -> None:
        """Tell the breaker how an attempt ended. A deadline that passed proves nothing: it may have been short."""
        if failure is None:
            self._succeeded()
        elif isinstance(failure, grpc.RpcError) and isinstance(failure, grpc.Call):
            error = from_rpc_error(failure, self.address)
            if not isinstance(error, Unreachable):
                self._succeeded()
            elif failure.code() is grpc.StatusCode.UNAVAILABLE:
                self._breaker.failed(now())
                self._why_unreachable = error.message
                self._warn_if_overdue()

    def _succeeded(self) -> None:
        if self._breaker.succeeded():
            logger.info("%s answers again", self.address)

    def _warn_if_overdue(self) -> None:
        """Once per outage; whoever waits for an answer may wait for seconds, and the engine's log is to say why."""
        if self._breaker.overdue(now(), SILENCE):
            logger.warning("%s; it is tried again and again. Is kvferryd running there?", self._why_unreachable)


def checked_results(
    request: pb.NotifyRequest, results: list[pb.NotificationResult], address: str
) -> list[pb.NotificationResult]:
    """The results of a batch; raises the first error among them, and `InternalError` if there are not as many as there
    were notifications."""
    if len(results) != len(request.notifications):
        raise InternalError(
            f"{address} answered {len(request.notifications)} notifications with {len(results)} results",
            address=address,
        )
    for result in results:
        if result.WhichOneof("kind") == "error":
            raise from_notification_error(result.error)
    return results


def retrying(
    call: Callable[[float], Answer],
    deadline: float,
    wait: Callable[[float], object] = time.sleep,
    most: float = CALL_TIMEOUT,
    *,
    what: str = "",
) -> Answer:
    """Repeat a call while its error says that repeating can help.

    Args:
        call: takes the seconds it may use.
        deadline: on `kvferry._clock`; the last error is raised once it has passed.
        wait: how to wait between attempts, e.g. an event's `wait`.
        most: seconds that one call may use.
        what: is being waited for. Given, a warning says so, once, when it takes longer than `SILENCE`. Without it, an
            error that still comes after `SILENCE` is logged, once; `Control` itself warns of a node server that is
            unreachable.
    """
    backoff = Backoff(jitter=0.5)
    silent_until = now() + SILENCE
    with announced(what) as waiting:
        while True:
            left = deadline - now()
            try:
                return call(max(0.001, min(most, left)))
            except KvferryError as error:
                pause = backoff.next(error.retry_after)
                if not error.retryable or now() + pause >= deadline:
                    raise
                waiting.reason = error.message
                if not what and not isinstance(error, Unreachable) and now() >= silent_until:
                    logger.warning("tried again and again for %.0f s: %s", SILENCE, error.message)
                    silent_until = math.inf
            wait(pause)


class _Waiting:
    """Something that is waited for.

    Attributes:
        reason: why it is not there yet; empty: nothing was answered.
    """

    def __init__(self, what: str) -> None:
        self.reason = ""
        self._what = what

    def say(self) -> None:
        """Warn."""
        logger.warning("still waiting for %s: %s", self._what, self.reason or "there is no answer yet")


def _nothing() -> None:
    """What a thread does that only shows that there can be one, and what cancels a call that was not made."""


@contextmanager
def announced(what: str) -> Iterator[_Waiting]:
    """Warn once if the block takes longer than `SILENCE`; never where nothing is said to be waited for."""
    waiting = _Waiting(what)
    timer = threading.Timer(SILENCE, waiting.say)
    timer.daemon = True
    if what:
        # A warning is not worth failing for where no thread can be had.
        with suppress(RuntimeError):
            timer.start()
    try:
        yield waiting
    finally:
        timer.cancel()
