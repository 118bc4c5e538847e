"""Requests: how those of one listener are read and decoded, so that no caller fills the memory or holds up the others.

- A method takes no more bytes than the contract allows.
- What a request takes once it is decoded is found before that (`decoded_size`), is bounded by its size, and is shared
  out over hosts.
- Of requests that take much, each host has one at a time. They are decoded by the worker thread.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import grpc.aio

from kvferry._wire.channel import MAX_MESSAGE_BYTES, MAX_NOTIFY_BYTES
from kvferry.errors import InvalidField
from kvferry_server.domain.budgets import Budget, check_budget
from kvferry_server.home.time_slices import TimeSlices
from kvferry_server.node.arrivals import Arrivals
from kvferry_server.node.decoded_size import Decoded, Shape, shape_of
from kvferry_server.node.limits import (
    COUNTED_REQUEST,
    HEAVY_REQUEST,
    MAX_DECODED_QUERIES,
    MAX_FIELDS,
    MAX_LOCAL_REQUESTS,
    MAX_REQUEST_MEMORY,
    MAX_REQUESTS,
    MAX_SMALL_REQUEST,
    MAX_STREAMED_REQUEST,
)
from kvferry_server.node.times import RETRY_AFTER
from kvferry_server.servicers.callers import Context
from kvferry_server.servicers.limits import MAX_INLINE_BYTES
from kvferry_server.servicers.worker import Worker

INTROSPECTION = "/kvferry.v1.Introspection/"

KV_TRANSFER = "/kvferry.v1.KVTransfer/"

GEOMETRIES = frozenset({KV_TRANSFER + "RegisterCache", KV_TRANSFER + "Handshake", INTROSPECTION + "PlanRead"})
"""Calls that carry geometries: large, and worked on for seconds. They have request slots of their own, so that only
they wait for one another."""

MAX_REQUEST_BYTES = {
    **dict.fromkeys(GEOMETRIES, MAX_MESSAGE_BYTES),
    KV_TRANSFER + "ReadChecksums": MAX_MESSAGE_BYTES,
    KV_TRANSFER + "Notify": MAX_NOTIFY_BYTES,
}
"""Bytes of a request by method; `MAX_SMALL_REQUEST` of all other methods."""

MAX_DECODED = {KV_TRANSFER + "ReadChecksums": MAX_DECODED_QUERIES}
"""Bytes that a request may take once it is decoded, of methods whose lists hold less than their bytes could."""

Decode: TypeAlias = Callable[[bytes], Any]


class HeldRequest:
    """What a request holds until it has been worked on. Free it once."""

    def __init__(self, memory: Budget, host: str, arrivals: Arrivals, *, has_slot: bool) -> None:
        self._memory = memory
        self._host = host
        self._arrivals = arrivals
        self._has_slot = has_slot
        self._size = 0
        self._has_turn = False

    def count(self, size: int) -> None:
        """Hold so many bytes of memory in all, if they are worth counting; raises `LimitReached` if this host's
        requests hold too many."""
        more = size - self._size
        if more <= 0 or size <= COUNTED_REQUEST:
            return
        check_budget("request_memory", self._memory, self._host, RETRY_AFTER, more)
        self._memory.take(self._host, more)
        self._size = size

    async def wait_for_turn(self) -> None:
        """Hold the turn of the caller's host."""
        await self._arrivals.turn.acquire()
        self._has_turn = True

    async def wait_for_peer(self, what: Awaitable[Any]) -> None:
        """Do as `Arrivals.wait_for_peer`, if the request holds a slot."""
        await (self._arrivals.wait_for_peer(what) if self._has_slot else what)

    def free(self) -> None:
        """Give all of it to the next request."""
        if self._has_turn:
            self._arrivals.turn.release()
        if self._size:
            self._memory.give(self._host, self._size)
        if self._has_slot:
            self._arrivals.give_back()


class Requests:
    """The requests of one listener. Belongs to one event loop.

    Args:
        worker: decodes those that take much.
        time_slices: for what is worked out of others, on the event loop.

    Attributes:
        memory: the budget of decoded requests.
        worked_on: bytes of all requests so far, also of those that were refused, but for small ones.
    """

    def __init__(self, worker: Worker, time_slices: TimeSlices) -> None:
        self.memory = Budget(MAX_REQUEST_MEMORY)
        self.worked_on = 0
        self._worker = worker
        self._time_slices = time_slices
        self._arriving: WeakValueDictionary[tuple[str, bool], Arrivals] = WeakValueDictionary()

    async def read(self, method: str, decode: Decode | None, context: Context, host: str) -> tuple[Any, HeldRequest]:
        """Read and decode the one request of a call.

        Args:
            method: the path of the method.
            decode: decodes a request; None: it stays as it is.
            context: the call.
            host: the host that the call comes from.

        Returns:
            The request, and what it holds.

        Raises:
            InvalidField: there is no request, it is too large, or it does not decode.
            LimitReached: this host's requests take too much; see also `Arrivals`.
        """
        arrivals = self._arrivals(host, geometries=method in GEOMETRIES)
        raw, large = await arrivals.read(context)
        held = HeldRequest(self.memory, host, arrivals, has_slot=large)
        self.worked_on += len(raw) if large else 0
        try:
            if raw is grpc.aio.EOF:
                raise InvalidField("request", "nothing", "one message")
            if decode is not None:
                _check_size(raw, MAX_REQUEST_BYTES.get(method, MAX_SMALL_REQUEST))
            return await self._decoded(decode, raw, host, held, MAX_DECODED.get(method, sys.maxsize)), held
        except BaseException:
            held.free()
            raise

    async def each(self, decode: Decode | None, context: Context, host: str) -> AsyncGenerator[Any, None]:
        """Yield the requests of a call that may have many, decoded; raises as `read`. gRPC keeps as much of a request
        as has arrived, however much a method takes, so that these wait for slots as well."""
        while True:
            arrivals = self._arrivals(host, geometries=False)
            raw, large = await arrivals.read(context)
            if large:
                self.worked_on += len(raw)
                arrivals.give_back()
            if raw is grpc.aio.EOF:
                return
            _check_size(raw, MAX_STREAMED_REQUEST)
            yield _parsed(decode, raw)

    async def _decoded(self, decode: Decode | None, raw: bytes, host: str, held: HeldRequest, most: int) -> Any:
        shape = _shape(decode)
        if shape is None:
            return _parsed(decode, raw)
        size = int(len(raw) * shape.factor) + shape.size
        if size > COUNTED_REQUEST:
            held.count(len(raw))
            size = await self._measured(raw, shape, host, most)
        if size > COUNTED_REQUEST:
            self.worked_on += size
        if size <= HEAVY_REQUEST:
            held.count(size)
            return _parsed(decode, raw)
        await held.wait_for_turn()
        held.count(size)
        return await self._worker.run(host, len(raw), lambda: _parsed(decode, raw))

    async def _measured(self, raw: bytes, shape: Shape, host: str, most: int) -> int:
        """Return what a request takes once it is decoded; raises `InvalidField` if that is too much."""
        found = Decoded(raw, shape, most)
        short = len(raw) <= MAX_INLINE_BYTES
        await self._time_slices.begin(host, short=short)
        for _ in found.walk():
            if self._time_slices.over:
                await self._time_slices.wait(host, short=short)
        if not found.fits:
            expected = (
                f"{len(raw)} bytes that take at most {found.most} bytes in {MAX_FIELDS} fields once they are decoded"
            )
            raise InvalidField("request", f"more than {found.size} bytes in {found.fields} fields", expected)
        return found.size

    def _arrivals(self, host: str, *, geometries: bool) -> Arrivals:
        arrivals = self._arriving.get((host, geometries))
        if arrivals is None:
            arrivals = Arrivals(MAX_REQUESTS if host else MAX_LOCAL_REQUESTS)
            self._arriving[host, geometries] = arrivals
        return arrivals


def _check_size(raw: bytes, most: int) -> None:
    if len(raw) > most:
        raise InvalidField("request", f"{len(raw)} bytes", f"at most {most} bytes for this method")


def _shape(decode: Decode | None) -> Shape | None:
    """Return the shape of what a function decodes: that of a message, whose class it belongs to."""
    kind = getattr(decode, "__self__", None)
    return None if kind is None else shape_of(kind.DESCRIPTOR)


def _parsed(decode: Decode | None, raw: Any) -> Any:
    if decode is None:
        return raw
    try:
        return decode(raw)
    except Exception:
        # Usually protobuf's DecodeError, but its C code raises other errors as well.
        name = getattr(getattr(decode, "__self__", None), "__name__", "message")
    raise InvalidField("request", f"{len(raw)} bytes", f"an encoded {name}")
