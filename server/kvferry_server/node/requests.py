"""How a listener reads and decodes requests, so that no caller fills the memory or holds up the others.

- A method takes no more bytes than the contract allows.
- The decoded size of a request is found before decoding (`decoded_size`), is bounded by the size on the wire, and is
  taken from a budget that hosts share. Of requests that take much memory, each host has one at a time.
- A request holds a slot of its host while it is read, and no longer: a host's renewals must not wait for its heavy
  requests. A call whose peer sends nothing while others wait for a slot fails with `LimitReached` and a retry delay:
  otherwise a few slow request bodies would keep a host's renewals out until its leases are lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary

import grpc.aio

from kvferry._wire.channel import MAX_MESSAGE_BYTES, MAX_NOTIFY_BYTES
from kvferry.errors import InvalidField, KvferryError, LimitReached
from kvferry_server.domain.limits import Budget, check_budget
from kvferry_server.home.time_slices import TimeSlices, Worker
from kvferry_server.node import limits
from kvferry_server.node.decoded_size import Decoded, Shape, shape_of
from kvferry_server.node.limits import REQUEST_TIMEOUT, RETRY_AFTER, SLOW_PEER_TIMEOUT, SLOW_PEERS_TIMEOUT
from kvferry_server.servicers.callers import Context
from kvferry_server.servicers.limits import MAX_INLINE_BYTES

INTROSPECTION = "/kvferry.v1.Introspection/"
KV_TRANSFER = "/kvferry.v1.KVTransfer/"

GEOMETRIES = frozenset({KV_TRANSFER + "RegisterCache", KV_TRANSFER + "Handshake", INTROSPECTION + "PlanRead"})
"""Calls that carry geometries: large, and worked on for seconds. They have request slots of their own."""

MAX_REQUEST_BYTES = {
    **dict.fromkeys(GEOMETRIES, MAX_MESSAGE_BYTES),
    KV_TRANSFER + "ReadChecksums": MAX_MESSAGE_BYTES,
    KV_TRANSFER + "Notify": MAX_NOTIFY_BYTES,
}
"""Bytes of a request by method; `MAX_SMALL_REQUEST` of all other methods."""

Decode: TypeAlias = Any  # The method `FromString` of a message's class


@dataclass(eq=False, slots=True)
class _Reading:
    # A call that has a slot and waits for its request.
    since: float
    task: asyncio.Task[Any]
    why_ended: KvferryError | None = None

    def end(self, why: KvferryError) -> None:
        # Once: another cancellation would stop the sending of the error.
        if self.why_ended is None:
            self.why_ended = why
            self.task.cancel()


class Arrivals:
    """The request slots of one host, and its turn: the lock of its one request with much memory. Of one event loop. One
    timer serves all calls, and keeps this object for the next ones: both cost more than to read a small request."""

    def __init__(self, most: int) -> None:
        self.turn = asyncio.Lock()
        self.slots = asyncio.Semaphore(most)
        self._most = most
        self._waiting = 0  # Calls that wait for a slot
        self._reading: dict[_Reading, None] = {}  # The longest first
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, context: Any) -> Any:
        """Wait for a slot, first come first served, and read a call's next request. Returns the undecoded request, or
        `grpc.aio.EOF`. Raises `LimitReached` if other calls needed the slot before the request came, and `InvalidField`
        if it did not arrive within `REQUEST_TIMEOUT`."""
        loop = asyncio.get_running_loop()
        self._waiting += 1
        try:
            await self.slots.acquire()
        finally:
            self._waiting -= 1
        reading = _Reading(loop.time(), cast("asyncio.Task[Any]", asyncio.current_task()))
        self._reading[reading] = None
        if self._timer is None:
            self._timer = loop.call_later(SLOW_PEER_TIMEOUT, self._end_overdue)
        try:
            return await context.read()
        except asyncio.CancelledError:
            if reading.why_ended is None:
                raise
            raise reading.why_ended from None
        finally:
            self._reading.pop(reading, None)
            self.slots.release()

    def _end_overdue(self) -> None:
        """End calls whose requests are late, and as many slow ones as calls wait for slots; look again while any call
        reads."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        # The more calls wait, the shorter: thousands of slow ones would keep a renewal waiting for a minute.
        slow = min(SLOW_PEER_TIMEOUT, SLOW_PEERS_TIMEOUT * self._most / max(1, self._waiting))
        look_again = now + slow
        for index, reading in enumerate(tuple(self._reading)):
            if now < reading.since + slow:
                look_again = reading.since + slow
                break
            if now >= reading.since + REQUEST_TIMEOUT:
                expected = f"a request that arrives within {REQUEST_TIMEOUT:g} s"
                reading.end(InvalidField("request", "unfinished", expected))
            elif index < self._waiting:
                message = (
                    f"requests: this host has all {self._most} requests that are read at once, others of it wait, and "
                    "this call's peer was slow"
                )
                reading.end(LimitReached(message, retry_after=RETRY_AFTER, limit="requests", value=self._most))
        self._timer = loop.call_at(look_again, self._end_overdue) if self._reading else None


@dataclass(eq=False, slots=True)
class HeldRequest:
    """What a request holds: until it has been worked on, perhaps the turn of its host, and until it is freed `size`
    bytes of the budget `memory` of decoded requests."""

    memory: Budget
    host: str
    size: int = 0
    turn_of: Arrivals | None = None  # Not the lock alone: then the host's next call would find new `Arrivals`

    def count(self, size: int) -> None:
        """Hold `size` bytes in all, if worth counting; raises `LimitReached` if this host's requests hold too many."""
        more = size - self.size
        if more <= 0 or size <= limits.COUNTED_REQUEST:
            return
        check_budget("request_memory", self.memory, self.host, RETRY_AFTER, more)
        self.memory.take(self.host, more)
        self.size = size

    def end_turn(self) -> None:
        arrivals, self.turn_of = self.turn_of, None
        if arrivals is not None:
            arrivals.turn.release()

    def free(self) -> None:
        """To be called once."""
        self.end_turn()
        if self.size:
            self.memory.give(self.host, self.size)


class Requests:
    """The requests of one listener. Belongs to one event loop."""

    def __init__(self, worker: Worker, time_slices: TimeSlices) -> None:
        self.memory = Budget(limits.MAX_REQUEST_MEMORY)  # Of decoded requests
        self.worked_on = 0  # Bytes of all requests so far, refused ones included, but no small ones
        self._worker = worker
        self._time_slices = time_slices
        self._arriving: WeakValueDictionary[tuple[str, bool], Arrivals] = WeakValueDictionary()

    async def read(self, method: str, decode: Decode, context: Context, host: str) -> tuple[Any, HeldRequest]:
        """Read and decode the only request of a call. Raises `InvalidField` if there is none, or if it is too large or
        does not decode, and `LimitReached` if this host's requests take too much memory; see also `Arrivals`."""
        arrivals = self._arrivals(host, geometries=method in GEOMETRIES)
        raw = await self.raw(context, host, arrivals)
        held = HeldRequest(self.memory, host)
        try:
            if raw is grpc.aio.EOF:
                raise InvalidField("request", "nothing", "one message")
            _check_size(raw, MAX_REQUEST_BYTES.get(method, limits.MAX_SMALL_REQUEST))
            return await self._decoded(decode, raw, host, held, arrivals), held
        except BaseException:
            held.free()
            raise

    async def each(self, decode: Decode, context: Context, host: str) -> AsyncGenerator[Any, None]:
        """Yield the decoded requests of a call that may have many. They wait for slots as well, because gRPC keeps as
        much of a request as has arrived, however much the method takes. Raises as `read`."""
        while (raw := await self.raw(context, host)) is not grpc.aio.EOF:
            _check_size(raw, limits.MAX_STREAMED_REQUEST)
            yield _parsed(decode, raw)

    async def raw(self, context: Context, host: str, arrivals: Arrivals | None = None) -> Any:
        """Return the next undecoded request of a call, or `grpc.aio.EOF`. Raises as `read`."""
        raw = await (arrivals or self._arrivals(host, geometries=False)).read(context)
        if raw is not grpc.aio.EOF and len(raw) >= limits.LARGE_MESSAGE:
            self.worked_on += len(raw)
        return raw

    async def _decoded(self, decode: Decode, raw: bytes, host: str, held: HeldRequest, arrivals: Arrivals) -> Any:
        shape = shape_of(decode.__self__.DESCRIPTOR)
        size = int(len(raw) * shape.factor) + shape.size
        if size > limits.COUNTED_REQUEST:
            held.count(len(raw))
            size = await self._measured(raw, shape, host)
        if size > limits.COUNTED_REQUEST:
            self.worked_on += size
        if size <= limits.HEAVY_REQUEST:
            held.count(size)
            return _parsed(decode, raw)
        await arrivals.turn.acquire()
        held.turn_of = arrivals
        held.count(size)
        return await self._worker.run(host, lambda: _parsed(decode, raw))

    async def _measured(self, raw: bytes, shape: Shape, host: str) -> int:
        """Return the decoded size of a request; raises `InvalidField` if it is too large."""
        found = Decoded(raw, shape)
        short = len(raw) <= MAX_INLINE_BYTES
        await self._time_slices.begin(host, short=short)
        for _ in found.walk():
            if self._time_slices.over:
                await self._time_slices.wait(host, short=short)
        if not found.fits:
            allowed = f"{found.most} bytes in {limits.MAX_FIELDS} fields"
            expected = f"{len(raw)} bytes that take at most {allowed} once they are decoded"
            raise InvalidField("request", f"more than {found.size} bytes in {found.fields} fields", expected)
        return found.size

    def _arrivals(self, host: str, *, geometries: bool) -> Arrivals:
        arrivals = self._arriving.get((host, geometries))
        if arrivals is None:
            arrivals = Arrivals(limits.MAX_REQUESTS if host else limits.MAX_LOCAL_REQUESTS)
            self._arriving[host, geometries] = arrivals
        return arrivals


def _check_size(raw: bytes, most: int) -> None:
    if len(raw) > most:
        raise InvalidField("request", f"{len(raw)} bytes", f"at most {most} bytes for this method")


def _parsed(decode: Decode, raw: Any) -> Any:
    try:
        return decode(raw)
    except Exception:
        # Usually protobuf's DecodeError, but its C code raises other errors as well.
        expected = f"an encoded {decode.__self__.__name__}"
    raise InvalidField("request", f"{len(raw)} bytes", expected)
