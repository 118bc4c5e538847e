"""Requests that arrive: how many of a host are read at once, and who makes room when others of that host wait.

A request that does not come holds its place. If others had to wait for that, a few slow bodies would keep a host's
renewals out until its leases are lost. So whoever keeps others waiting, because his peer neither sends nor takes, is
told to come back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from kvferry.errors import InvalidField, KvferryError, LimitReached

REQUEST_TIMEOUT = 10.0
"""Seconds that a request may take to arrive."""

PATIENCE = 0.25
"""The same while others of its host wait to be read."""

RETRY_AFTER = 0.25
"""Seconds after which a call that made room is worth repeating."""


@dataclass(eq=False, slots=True)
class _Idle:
    """A call that has a place and waits for its peer."""

    since: float
    task: asyncio.Task[Any]
    ended: bool = False


class Arrivals:
    """The places of one host. Belongs to one event loop.

    Args:
        most: places.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places = asyncio.Semaphore(most)
        self._wanted = 0
        # Whoever began to wait first is first.
        self._idle: dict[_Idle, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[ArrivalPlace]:
        """Have a place, in the order of asking; it is free again at the end, or after `ArrivalPlace.free`."""
        self._wanted += 1
        try:
            self._hurry()
            await self._places.acquire()
        finally:
            self._wanted -= 1
        place = ArrivalPlace(self)
        try:
            yield place
        finally:
            place.free()

    @contextlib.contextmanager
    def waits_for_peer(self) -> Iterator[None]:
        """What waits for the peer, with a place in hand; raises `LimitReached` if others needed the place."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        idle = _Idle(asyncio.get_running_loop().time(), task)
        self._idle[idle] = None
        self._hurry()
        try:
            yield
        except asyncio.CancelledError:
            if not idle.ended:
                raise
            raise LimitReached(
                f"requests: all {self._most} places of this host are taken, others wait, and this call's peer was slow",
                retry_after=RETRY_AFTER,
                limit="requests",
                value=self._most,
            ) from None
        finally:
            self._idle.pop(idle, None)

    def give_back(self) -> None:
        """One place is free."""
        self._places.release()

    def _hurry(self) -> None:
        """Somebody waits for a place, or for his peer: look when patience is over."""
        if self._timer is None and self._wanted and self._places.locked():
            oldest = next(iter(self._idle), None)
            if oldest is not None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_at(oldest.since + PATIENCE, self._make_room)

    def _make_room(self) -> None:
        self._timer = None
        overdue = asyncio.get_running_loop().time() - PATIENCE
        for idle in tuple(self._idle)[: self._wanted]:
            if idle.since <= overdue:
                idle.ended = True
                del self._idle[idle]
                idle.task.cancel()
        self._hurry()


class ArrivalPlace:
    """A place among the requests of a host that are read, or worked on if they are large."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals: Arrivals | None = arrivals

    def free(self) -> None:
        """Give it to the next one. Idempotent."""
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            arrivals.give_back()

    def waits_for_peer(self) -> contextlib.AbstractContextManager[None]:
        """See `Arrivals`; nothing, once it is free."""
        return contextlib.nullcontext() if self._arrivals is None else self._arrivals.waits_for_peer()

    async def read(self, context: Any) -> Any:
        """A call's next message.

        Raises:
            InvalidField: it does not come.
            LimitReached: others needed the place meanwhile.
        """
        with self.waits_for_peer():
            return await within(REQUEST_TIMEOUT, context.read(), _not_sent)


def _not_sent() -> KvferryError:
    return InvalidField("request", "unfinished", f"all of it within {REQUEST_TIMEOUT:g} s")


async def within(seconds: float, what: Awaitable[Any], late_error: Callable[[], KvferryError]) -> Any:
    """Wait for something at most so long; raises `late_error` after that."""
    # A timer instead of `asyncio.wait_for`, whose task would be a sixth of what a call costs.
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
