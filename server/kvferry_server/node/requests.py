"""How a listener reads and decodes requests, so that no caller fills the memory or holds up the others.

- A method takes no more bytes than the contract allows.
- The decoded size of a request is found before decoding (`decoded_size`), is bounded by the size on the wire, and is
  taken from a budget that hosts share.
- Of requests that take much memory, each host has one at a time. The worker thread decodes them.
- A request holds a slot of its host while it is read, a large request until it has been worked on. If requests had to
  wait for slow ones, a few slow request bodies would keep a host's renewals out until its leases are lost. So a call
  whose peer neither sends nor takes data, while others wait for a slot, fails with `LimitReached` and a retry delay.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary

import grpc.aio

from kvferry._wire.channel import MAX_MESSAGE_BYTES, MAX_NOTIFY_BYTES
from kvferry.errors import InvalidField, KvferryError, LimitReached
from kvferry_server.domain.limits import Budget, check_budget
from kvferry_server.home.time_slices import TimeSlices
from kvferry_server.node import limits
from kvferry_server.node.decoded_size import Decoded, Shape, shape_of
from kvferry_server.node.limits import REQUEST_TIMEOUT, RETRY_AFTER, SLOW_PEER_TIMEOUT
from kvferry_server.servicers.callers import Context
from kvferry_server.servicers.limits import MAX_INLINE_BYTES
from kvferry_server.servicers.worker import Worker

INTROSPECTION = "/kvferry.v1.Introspection/"
KV_TRANSFER = "/kvferry.v1.KVTransfer/"

GEOMETRIES = frozenset({KV_TRANSFER + "RegisterCache", KV_TRANSFER + "Handshake", INTROSPECTION + "PlanRead"})
"""Calls that carry geometries: large, and worked on for seconds. They have separate request slots, so that no other
calls wait for them."""

MAX_REQUEST_BYTES = {
    **dict.fromkeys(GEOMETRIES, MAX_MESSAGE_BYTES),
    KV_TRANSFER + "ReadChecksums": MAX_MESSAGE_BYTES,
    KV_TRANSFER + "Notify": MAX_NOTIFY_BYTES,
}
"""Bytes of a request by method; `MAX_SMALL_REQUEST` of all other methods."""

MAX_DECODED = {KV_TRANSFER + "ReadChecksums": limits.MAX_DECODED_QUERIES}
"""Decoded bytes of a request, for methods whose lists hold less than their bytes could."""

Decode: TypeAlias = Any  # The method `FromString` of a message's class


@dataclass(eq=False, slots=True)
class _Idle:
    # A call that has a slot and waits for its peer.
    since: float
    task: asyncio.Task[Any]
    why_ended: KvferryError | None = None


class Arrivals:
    """The request slots of one host, and its turn: the lock of its one request with much memory. Of one event loop."""

    def __init__(self, most: int) -> None:
        self.turn = asyncio.Lock()
        self.slots = asyncio.Semaphore(most)
        self._most = most
        self._wanted = 0
        # Calls that were ended and have not freed their slots yet.
        self._ending = 0
        # In the order in which the calls began to wait.
        self._idle: dict[_Idle, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, context: Any) -> tuple[Any, bool]:
        """Wait for a slot, first come first served, and read a call's next request. Returns the undecoded request, or
        `grpc.aio.EOF`, and whether it is large: then the caller still has the slot and must release it. Raises as
        `wait_for_peer`."""
        self._wanted += 1
        try:
            self._make_room()
            await self.slots.acquire()
        finally:
            self._wanted -= 1
        large = False
        try:
            raw = await self.wait_for_peer(context.read(), reads=True)
            large = raw is not grpc.aio.EOF and len(raw) >= limits.LARGE_MESSAGE
        finally:
            if not large:
                self.slots.release()
        return raw, large

    async def wait_for_peer(self, coming: Awaitable[Any], *, reads: bool = False) -> Any:
        """Await something that depends on the call's peer, while the call has a slot, and return the result. Raises
        `LimitReached` if other calls needed the slot meanwhile, and `InvalidField` if the call `reads` a request that
        did not arrive within `REQUEST_TIMEOUT`."""
        loop = asyncio.get_running_loop()
        idle = _Idle(loop.time(), cast("asyncio.Task[Any]", asyncio.current_task()))
        self._idle[idle] = None
        late = loop.call_later(REQUEST_TIMEOUT, self._end, idle, _late_request) if reads else None
        self._make_room()
        try:
            return await coming
        except asyncio.CancelledError:
            if idle.why_ended is None:
                raise
            raise idle.why_ended from None
        finally:
            if late is not None:
                late.cancel()
            self._idle.pop(idle, None)
            self._ending -= idle.why_ended is not None

    def _make_room(self) -> None:
        """End calls that have waited too long for their peers, as many as other calls wait for slots, now and later."""
        if self._timer is not None or not self._wanted:
            return
        loop = asyncio.get_running_loop()
        for idle in tuple(self._idle):
            if not self.slots.locked() or self._wanted <= self._ending:
                return
            if loop.time() < idle.since + SLOW_PEER_TIMEOUT:
                self._timer = loop.call_at(idle.since + SLOW_PEER_TIMEOUT, self._look_again)
                return
            self._end(idle, self._slow_peer)

    def _look_again(self) -> None:
        self._timer = None
        self._make_room()

    def _end(self, idle: _Idle, why: Callable[[], KvferryError]) -> None:
        if idle in self._idle:
            del self._idle[idle]
            idle.why_ended = why()
            self._ending += 1
            idle.task.cancel()

    def _slow_peer(self) -> KvferryError:
        return LimitReached(
            f"requests: this host has all {self._most} requests that are read at once, others of it wait, and this "
            "call's peer was slow",
            retry_after=RETRY_AFTER,
            limit="requests",
            value=self._most,
        )


def _late_request() -> KvferryError:
    return InvalidField("request", "unfinished", f"a request that arrives within {REQUEST_TIMEOUT:g} s")


@dataclass(eq=False, slots=True)
class HeldRequest:
    """What a request holds until it has been worked on: `size` bytes of the budget `memory` of decoded requests, and
    perhaps a slot and the turn of its host. Free it once."""

    memory: Budget
    host: str
    arrivals: Arrivals
    has_slot: bool
    size: int = 0
    has_turn: bool = False

    def count(self, size: int) -> None:
        """Hold `size` bytes in all, if worth counting; raises `LimitReached` if this host's requests hold too many."""
        more = size - self.size
        if more <= 0 or size <= limits.COUNTED_REQUEST:
            return
        check_budget("request_memory", self.memory, self.host, RETRY_AFTER, more)
        self.memory.take(self.host, more)
        self.size = size

    async def wait_for_peer(self, coming: Awaitable[Any]) -> None:
        """Await as `Arrivals.wait_for_peer` if the request holds a slot, else without a limit."""
        await (self.arrivals.wait_for_peer(coming) if self.has_slot else coming)

    def free(self) -> None:
        if self.has_turn:
            self.arrivals.turn.release()
        if self.size:
            self.memory.give(self.host, self.size)
        if self.has_slot:
            self.arrivals.slots.release()


class Requests:
    """The requests of one listener. Belongs to one event loop.

    `memory` is the budget of decoded requests; `worked_on` counts the bytes of all requests so far, refused ones
    included, but no small ones.
    """

    def __init__(self, worker: Worker, time_slices: TimeSlices) -> None:
        self.memory = Budget(limits.MAX_REQUEST_MEMORY)
        self.worked_on = 0
        self._worker = worker
        self._time_slices = time_slices
        self._arriving: WeakValueDictionary[tuple[str, bool], Arrivals] = WeakValueDictionary()

    async def read(self, method: str, decode: Decode, context: Context, host: str) -> tuple[Any, HeldRequest]:
        """Read and decode the only request of a call. Raises `InvalidField` if there is none, or if it is too large or
        does not decode, and `LimitReached` if this host's requests take too much memory; see also `Arrivals`."""
        arrivals = self._arrivals(host, geometries=method in GEOMETRIES)
        raw, large = await arrivals.read(context)
        held = HeldRequest(self.memory, host, arrivals, large)
        self.worked_on += len(raw) if large else 0
        try:
            if raw is grpc.aio.EOF:
                raise InvalidField("request", "nothing", "one message")
            _check_size(raw, MAX_REQUEST_BYTES.get(method, limits.MAX_SMALL_REQUEST))
            return await self._decoded(decode, raw, host, held, MAX_DECODED.get(method, sys.maxsize)), held
        except BaseException:
            held.free()
            raise

    async def each(self, decode: Decode, context: Context, host: str) -> AsyncGenerator[Any, None]:
        """Yield the decoded requests of a call that may have many. They wait for slots as well, because gRPC keeps as
        much of a request as has arrived, however much the method takes. Raises as `read`."""
        while (raw := await self.raw(context, host)) is not grpc.aio.EOF:
            _check_size(raw, limits.MAX_STREAMED_REQUEST)
            yield _parsed(decode, raw)

    async def raw(self, context: Context, host: str) -> Any:
        """Return the next undecoded request of a call, or `grpc.aio.EOF`. Raises as `read`."""
        arrivals = self._arrivals(host, geometries=False)
        raw, large = await arrivals.read(context)
        if large:
            self.worked_on += len(raw)
            arrivals.slots.release()
        return raw

    async def _decoded(self, decode: Decode, raw: bytes, host: str, held: HeldRequest, most: int) -> Any:
        shape = shape_of(decode.__self__.DESCRIPTOR)
        size = int(len(raw) * shape.factor) + shape.size
        if size > limits.COUNTED_REQUEST:
            held.count(len(raw))
            size = await self._measured(raw, shape, host, most)
        if size > limits.COUNTED_REQUEST:
            self.worked_on += size
        if size <= limits.HEAVY_REQUEST:
            held.count(size)
            return _parsed(decode, raw)
        await held.arrivals.turn.acquire()
        held.has_turn = True
        held.count(size)
        return await self._worker.run(host, lambda: _parsed(decode, raw))

    async def _measured(self, raw: bytes, shape: Shape, host: str, most: int) -> int:
        """Return the decoded size of a request; raises `InvalidField` if it is too large."""
        found = Decoded(raw, shape, most)
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
