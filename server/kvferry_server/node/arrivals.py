"""Arrivals: how many requests of one host are read at once, and which calls make room when others of that host wait.

A request holds a slot while it is read. If others had to wait for a slow one, a few slow request bodies would keep a
host's renewals out until its leases are lost. So a call whose peer neither sends nor takes data, while others wait for
a slot, fails with `LimitReached` and a retry delay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import grpc.aio

from kvferry.errors import InvalidField, KvferryError, LimitReached
from kvferry_server.node.limits import LARGE_MESSAGE
from kvferry_server.node.times import REQUEST_TIMEOUT, RETRY_AFTER, SLOW_PEER_TIMEOUT


@dataclass(eq=False, slots=True)
class _Idle:
    """A call that has a slot and waits for its peer; `reads` if it waits for its request."""

    since: float
    task: asyncio.Task[Any]
    reads: bool
    why_ended: Callable[[], KvferryError] | None = None


class Arrivals:
    """The slots of one host. Belongs to one event loop.

    One timer serves all calls: a timer for each call would cost more than everything else here.

    Args:
        most: how many slots there are.

    Attributes:
        turn: held by the one request of this host that takes much memory.
    """

    def __init__(self, most: int) -> None:
        self.turn = asyncio.Lock()
        self._most = most
        self._slots = asyncio.Semaphore(most)
        self._wanted = 0
        # Calls that were ended and have not freed their slots yet.
        self._ending = 0
        # In the order in which they began to wait.
        self._idle: dict[_Idle, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    async def read(self, context: Any) -> tuple[Any, bool]:
        """Wait for a slot, first come first served, and read a call's next request.

        Returns:
            The undecoded request, or `grpc.aio.EOF`; and whether it is large: then the caller still has the slot, to
            `give_back`.

        Raises:
            InvalidField: the request did not arrive within `REQUEST_TIMEOUT`.
            LimitReached: others needed the slot meanwhile.
        """
        self._wanted += 1
        try:
            if self._slots.locked():
                self._schedule()
            await self._slots.acquire()
        finally:
            self._wanted -= 1
        large = False
        try:
            raw = await self.wait_for_peer(context.read(), reads=True)
            large = raw is not grpc.aio.EOF and len(raw) >= LARGE_MESSAGE
        finally:
            if not large:
                self._slots.release()
        return raw, large

    async def wait_for_peer(self, what: Awaitable[Any], *, reads: bool = False) -> Any:
        """Wait for what depends on a call's peer, while the call has a slot, and return its result.

        Args:
            what: what to wait for.
            reads: it is the call's request, which has to arrive within `REQUEST_TIMEOUT`.

        Raises:
            InvalidField: the request did not arrive in time.
            LimitReached: others needed the slot meanwhile.
        """
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        idle = _Idle(asyncio.get_running_loop().time(), task, reads)
        self._idle[idle] = None
        if self._timer is None or self._wanted:
            self._schedule()
        try:
            return await what
        except asyncio.CancelledError:
            if idle.why_ended is None:
                raise
            raise idle.why_ended() from None
        finally:
            self._idle.pop(idle, None)
            self._ending -= idle.why_ended is not None

    def give_back(self) -> None:
        """Free one slot."""
        self._slots.release()

    @property
    def _crowded(self) -> int:
        """How many calls wait for a slot for which no other call was ended yet."""
        return max(0, self._wanted - self._ending) if self._slots.locked() else 0

    def _schedule(self) -> None:
        """Set the timer for the next call that may be ended. There are no more of them than slots."""
        first = next((idle for idle in self._idle if idle.reads or self._crowded), None)
        if first is None:
            return
        at = first.since + (SLOW_PEER_TIMEOUT if self._crowded else REQUEST_TIMEOUT)
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_at(at, self._end_overdue)

    def _end_overdue(self) -> None:
        """End requests that are late, and as many calls that have waited too long for their peers as other calls wait
        for slots."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        for idle in tuple(self._idle):
            waited = now - idle.since
            if idle.reads and waited >= REQUEST_TIMEOUT:
                self._end(idle, _late_request)
            elif self._crowded and waited >= SLOW_PEER_TIMEOUT:
                self._end(idle, self._slow_peer)
        self._schedule()

    def _end(self, idle: _Idle, why: Callable[[], KvferryError]) -> None:
        idle.why_ended = why
        del self._idle[idle]
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
