"""Arrivals: how many requests of one host are read at once, and which calls make room when others of that host wait.

A request holds a slot while it is read. If others had to wait for a slow one, a few slow request bodies would keep a
host's renewals out until its leases are lost. So a call whose peer neither sends nor takes data, while others wait for
a slot, fails with `LimitReached` and a retry delay.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from kvferry.errors import InvalidField, KvferryError, LimitReached
from kvferry_server.node.times import REQUEST_TIMEOUT, RETRY_AFTER, SLOW_PEER_TIMEOUT


@dataclass(eq=False, slots=True)
class _Idle:
    """A call that has a slot and waits for its peer."""

    since: float
    task: asyncio.Task[Any]
    ended: bool = False


class Arrivals:
    """The slots of one host. Belongs to one event loop.

    Args:
        most: how many slots there are.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._slots = asyncio.Semaphore(most)
        self._wanted = 0
        # In the order in which they began to wait.
        self._idle: dict[_Idle, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[RequestSlot]:
        """Wait for a slot, first come first served. It is free again when the context ends, or after
        `RequestSlot.free`."""
        self._wanted += 1
        try:
            self._schedule()
            await self._slots.acquire()
        finally:
            self._wanted -= 1
        slot = RequestSlot(self)
        try:
            yield slot
        finally:
            slot.free()

    @contextlib.contextmanager
    def waits_for_peer(self) -> Iterator[None]:
        """Mark the current task as waiting for its peer while it has a slot; raises `LimitReached` if others needed the
        slot meanwhile."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        idle = _Idle(asyncio.get_running_loop().time(), task)
        self._idle[idle] = None
        self._schedule()
        try:
            yield
        except asyncio.CancelledError:
            if not idle.ended:
                raise
            raise LimitReached(
                f"requests: this host has all {self._most} requests that are read at once, others of it wait, and this "
                "call's peer was slow",
                retry_after=RETRY_AFTER,
                limit="requests",
                value=self._most,
            ) from None
        finally:
            self._idle.pop(idle, None)

    def give_back(self) -> None:
        """Free one slot."""
        self._slots.release()

    def _schedule(self) -> None:
        """Set the timer that makes room, if calls wait for slots."""
        if self._timer is None and self._wanted and self._slots.locked():
            oldest = next(iter(self._idle), None)
            if oldest is not None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_at(oldest.since + SLOW_PEER_TIMEOUT, self._make_room)

    def _make_room(self) -> None:
        """End as many calls that have waited too long for their peers as other calls wait for slots."""
        self._timer = None
        overdue = asyncio.get_running_loop().time() - SLOW_PEER_TIMEOUT
        for idle in tuple(self._idle)[: self._wanted]:
            if idle.since <= overdue:
                idle.ended = True
                del self._idle[idle]
                idle.task.cancel()
        self._schedule()


class RequestSlot:
    """A slot among the requests of one host that are read, or worked on if they are large."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals: Arrivals | None = arrivals

    def free(self) -> None:
        """Free the slot for the next request. Idempotent."""
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            arrivals.give_back()

    def waits_for_peer(self) -> contextlib.AbstractContextManager[None]:
        """Do as `Arrivals.waits_for_peer`; nothing, once the slot is free."""
        return contextlib.nullcontext() if self._arrivals is None else self._arrivals.waits_for_peer()

    async def read(self, context: Any) -> Any:
        """Return a call's next message, undecoded.

        Raises:
            InvalidField: it did not arrive within `REQUEST_TIMEOUT`.
            LimitReached: others needed the slot meanwhile.
        """
        with self.waits_for_peer():
            return await within(REQUEST_TIMEOUT, context.read(), _late_request)


def _late_request() -> KvferryError:
    return InvalidField("request", "unfinished", f"a request that arrives within {REQUEST_TIMEOUT:g} s")


async def within(seconds: float, what: Awaitable[Any], late_error: Callable[[], KvferryError]) -> Any:
    """Wait for `what` at most `seconds`, and return its result; after that, raise the error that `late_error` makes."""
    # A timer instead of `asyncio.wait_for`, whose extra task would make a call cost a sixth more.
    loop, task, late = asyncio.get_running_loop(), cast("asyncio.Task[Any]", asyncio.current_task()), False

    def end() -> None:
        nonlocal late
        late = True
        task.cancel()

    timer = loop.call_later(seconds, end)
    try:
        return await what
    except asyncio.CancelledError:
        if not late:
            raise
        raise late_error() from None
    finally:
        timer.cancel()
