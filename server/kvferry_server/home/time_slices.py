"""Whose turn it is on the event loop, and on the one worker thread beside it.

Time slices: how long calls work on the event loop before everything else on it has its turn, and which call is next.

A thousand heavy notifications take tenths of a second, and a host may send many such calls at once. In each pass of the
event loop, calls work for one time slice together. Calls that find it used up wait, and get one slice each: hosts in
turns, so that the calls of one host, however many and large, delay another host's by one slice. Short calls (renewals,
mostly) and long calls have rotations of their own, which alternate: neither waits for all of the other.

The worker thread decodes, compares and encodes geometries of many planes. There is one thread, not several, because it
competes with the event loop for the interpreter, and renewals must stay fast. It serves hosts in rotation as well.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvferry.errors import LimitReached

TIME_SLICE = 0.002
"""Seconds of work in one pass of the event loop. A short call takes about five passes from its arrival to its answer,
and waits for a slice of others in each."""


class Rotation:
    """Callers, by host, that wait for something that only one of them has at a time. Hosts come in turns, so that a
    host that asks for much delays only itself. Belongs to one event loop. `pass_on` is called when a caller was woken
    but has left."""

    def __init__(self, pass_on: Callable[[], None]) -> None:
        self._pass_on = pass_on
        # By host, in order of their turns; only hosts that have callers.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._last = ""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def wait(self, host: str) -> None:
        """Wait for this caller's turn. The callers of one host come in the order in which they began to wait."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._pass_on()
            raise

    def wake(self) -> bool:
        """Wake the first caller of the host that has waited longest. Returns whether there was one."""
        if again := self._waiting.pop(self._last, None):
            # Behind hosts that began to wait during the last host's turn.
            self._waiting[self._last] = again
        while self._waiting:
            self._last, turns = next(iter(self._waiting.items()))
            turn = turns.popleft()
            if not turns:
                del self._waiting[self._last]
            if not turn.done():
                turn.set_result(None)
                return True
        return False


class TimeSlices:
    """The time slices of one event loop, which belong to its home."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = math.inf  # End of the slice of this pass of the loop; infinity: none has begun
        self._given = False  # A call that waited has the next slice, and has not begun it
        self._short, self._long = Rotation(self._next), Rotation(self._next)
        self._short_first = True

    @property
    def over(self) -> bool:
        """Whether the slice of this pass is used up."""
        return self._clock() > self._until

    async def begin(self, host: str, *, short: bool) -> None:
        """Begin to work: at once if the slice of this pass has time left, otherwise at this host's turn."""
        if self._given or self._short or self._long or self.over:
            await self.wait(host, short=short)
        elif math.isinf(self._until):
            self._start()

    async def wait(self, host: str, *, short: bool) -> None:
        """Let other calls work, and begin this host's next slice. To be called when a slice is over."""
        await (self._short if short else self._long).wait(host)
        self._given = False
        self._start()

    def _start(self) -> None:
        self._until = self._clock() + TIME_SLICE
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Give a slice to a waiting call; without one, the next call to come begins a slice."""
        first, second = (self._short, self._long) if self._short_first else (self._long, self._short)
        self._given = first.wake() or second.wake()
        self._short_first = not self._short_first
        if not self._given:
            self._until, self._short_first = math.inf, True


Result = TypeVar("Result")


class Worker:
    """The worker thread of one event loop: a new one for each call, in 0.2 ms, so that without work there is none."""

    def __init__(self) -> None:
        self._busy = False
        self._waiting = Rotation(self._pass_on)
        self._last: ThreadPoolExecutor | None = None

    async def run(self, host: str, call: Callable[[], Result]) -> Result:
        """Run a call, which must not touch the home, on the thread and return its result. Calls of one host run in
        order; one that is cancelled while it waits is not run. Raises `LimitReached` if the system refuses a thread."""
        if self._busy:
            await self._waiting.wait(host)
        self._busy, executor = True, ThreadPoolExecutor(1, "kvferry-worker")
        try:
            running = asyncio.wrap_future(executor.submit(call))
        except RuntimeError as error:
            self._pass_on()
            threads = threading.active_count()
            raise LimitReached(f"the worker: {error}", retry_after=0.25, limit="threads", value=threads) from None
        executor.shutdown(wait=False)  # The thread ends with the call.
        self._last = executor
        running.add_done_callback(lambda _: self._pass_on())
        # A caller that leaves does not end the call, and the next call waits for its end: so there is one thread.
        return await asyncio.shield(running)

    def join(self) -> None:
        if self._last is not None:
            self._last.shutdown()

    def _pass_on(self) -> None:
        self._busy = self._waiting.wake()
