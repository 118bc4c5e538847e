"""The event loop of a client: one thread, on which all of its control runs as coroutines; and what wakes who waits.

The loop has no sockets: gRPC's and NIXL's threads hand over their results, and callers their requests. So its clock can
be one that also counts the time in which the host is suspended, since leases run on; uvloop has a clock of its own.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from kvferry._clock import now
from kvferry._logs import Log
from kvferry._threads import guarded, settle, start_thread
from kvferry.errors import Closed, LimitReached, WrongState

logger = Log(__name__)

Result = TypeVar("Result")

LONGEST_SLEEP = 1.0
"""Seconds after which the loop checks its timers again: a thread that sleeps does not notice that its host was
suspended."""

RESTART_AFTER = 0.02
"""Seconds after which the loop goes on when an exception has stopped it, such as `SystemExit` in a logging handler."""

FIRST_PAUSE, LAST_PAUSE = 0.02, 1.0
"""Shortest and longest pause in seconds after a turn that has failed."""

END_PATIENCE = 0.5
"""Seconds for which the end of the loop waits for coroutines that were cancelled, in each of `END_ROUNDS`."""

END_ROUNDS = 3
"""Rounds of cancelling at the end of the loop: cancelled coroutines may have begun others."""


def check_may_wait() -> None:
    """Raise `WrongState` on the thread of a loop: a call that waits there would stop what it waits for."""
    if isinstance(asyncio._get_running_loop(), _Events):
        problem = "was made by a logging handler, a tracing hook or another callback on kvferry's own loop"
        raise WrongState(f"this call waits, and {problem}")


class Loop:
    """One event loop and its thread, which starts with the first work. `clock` is the time of all timers, in seconds.

    Threading: `call`, `submit`, `run`, `answer` and `close` may be called from any thread, everything else on the loop
    only. The first three and `on_thread` raise `LimitReached` if the system refuses the thread.
    """

    def __init__(self, name: str = "kvferry-loop", clock: Callable[[], float] = now) -> None:
        self.now = clock
        self._name = name
        self._events = _Events(clock)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def here(self) -> bool:
        """Whether this runs on the loop's thread."""
        return self._thread is threading.current_thread()

    @property
    def started(self) -> bool:
        """Whether there was work for it."""
        return self._thread is not None

    def call(self, work: Callable[[], object]) -> bool:
        """Do work on the loop soon; return whether it will be done: not after `close`. An exception of the work is
        logged."""
        if self.here:
            self.soon(work)
            return True
        with self._lock:
            if self._runs():
                self._events.call_soon_threadsafe(guarded, work, "work of the event loop")
            return not self._closed

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the loop. Its result is that of the future; cancelling the future cancels the coroutine.
        Raises `Closed`: the loop has ended."""
        try:
            with self._lock:
                if self._runs():
                    return asyncio.run_coroutine_threadsafe(coroutine, self._events)
            raise Closed("the client is closed")
        except BaseException:
            coroutine.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop, and wait for its result. Raises the errors of `submit` and of the coroutine, and
        as `check_may_wait`."""
        try:
            check_may_wait()
        except WrongState:
            coroutine.close()
            raise
        running = self.submit(coroutine)
        try:
            return running.result()
        except CancelledError:
            raise Closed("the client is closed") from None
        except BaseException:
            running.cancel()
            raise

    def answer(self, coroutine: Coroutine[Any, Any, Result], closed: str) -> Future[Result]:
        """Run a coroutine for a caller, who cannot cancel the future. The future's callbacks are the caller's, and may
        wait, so a thread of their own runs them. A coroutine that is cancelled ends as `Closed`, with the text
        `closed`. Raises the errors of `submit`."""
        done: Future[Result] = Future()
        # From now on it cannot be cancelled.
        done.set_running_or_notify_cancel()

        def end(ended: Future[Result]) -> None:
            error = Closed(closed) if ended.cancelled() else ended.exception()
            result = ended.result() if error is None else error
            try:
                start_thread(partial(settle, done, result), "kvferry-callbacks")
            except LimitReached:
                settle(done, result)

        self.submit(coroutine).add_done_callback(end)
        return done

    def spawn(self, coroutine: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Start a coroutine beside the running one. An exception is logged under the name `what`. A coroutine that is
        cancelled before its first step does not run at all."""
        task = self._events.create_task(coroutine, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def spawn_turns(self, turn: Callable[[], Awaitable[bool]], what: str) -> asyncio.Task[None]:
        """Take turns beside the running coroutine, until a turn returns False. Any exception of a turn is logged under
        the name `what`; the next turn begins after a pause."""

        async def take_turns() -> None:
            more, pause = True, FIRST_PAUSE
            while more:
                try:
                    more = await turn()
                    pause = FIRST_PAUSE
                except (asyncio.CancelledError, GeneratorExit):
                    raise
                except BaseException as error:
                    logger.error("a turn of %s failed", what, exc_info=error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LAST_PAUSE)

        return self.spawn(take_turns(), what)

    async def on_thread(self, work: Callable[[], Result], name: str) -> Result:
        """Run work that waits or computes for long on a thread of its own. If the caller is cancelled, the thread goes
        on, and the result is dropped."""
        done: Future[Result] = Future()
        # From now on it cannot be cancelled.
        done.set_running_or_notify_cancel()
        context = copy_context()

        def run() -> None:
            try:
                done.set_result(context.run(work))
            except BaseException as error:
                done.set_exception(error)

        start_thread(run, name)
        return await asyncio.wrap_future(done, loop=self._events)

    def at(self, when: float, work: Callable[[], object]) -> asyncio.TimerHandle:
        """Do work at a time of the loop's clock. What the work raises is logged."""
        return self._events.call_at(when, guarded, work, "work of the event loop")

    def soon(self, work: Callable[[], object]) -> None:
        """Do work after the work that is already due. An exception of the work is logged."""
        self._events.call_soon(guarded, work, "work of the event loop")

    def future(self) -> asyncio.Future[Any]:
        return self._events.create_future()

    def close(self, timeout: float = 5.0) -> None:
        """Cancel all coroutines, and end the thread. Waits at most `timeout` seconds for the thread; on the thread
        itself it does not wait. Idempotent."""
        with self._lock:
            # In this order: a thread that stops looks whether it is to begin again.
            first, self._closed = not self._closed, True
            if first and self._thread is not None:
                # It may have stopped by itself, after what is no `Exception`, and have ended by now.
                with suppress(RuntimeError):
                    self._events.call_soon_threadsafe(self._events.stop)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)

    def _runs(self) -> bool:
        """Start the thread with the first work; returns whether the loop is open. Called with the lock held."""
        if self._thread is None and not self._closed:
            self._thread = start_thread(self._run, self._name)
        return not self._closed

    def _run(self) -> None:
        while not self._closed:
            if not guarded(self._events.run_forever, f"thread {self._name}"):
                time.sleep(RESTART_AFTER)
        for _ in range(END_ROUNDS):
            guarded(lambda: self._events.run_until_complete(_end_others()), f"the end of thread {self._name}")
        self._events.close()


class Signal:
    """Wakes the one coroutine that waits. `set` may be called from any thread."""

    __slots__ = ("_loop", "_set", "_waiting")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._set = False
        self._waiting: asyncio.Future[None] | None = None

    def set(self) -> None:
        """End the wait, or the next one."""
        if not self._set:
            self._set = True
            if self._loop.here:
                self._wake()
            else:
                self._loop.call(self._wake)

    async def wait(self, until: float) -> None:
        """Wait for `set`, at most until this time on the loop's clock."""
        if not self._set and until > self._loop.now():
            waiting = self._waiting = self._loop.future()
            timer = None if until == math.inf else self._loop.at(until, self._wake)
            try:
                await waiting
            finally:
                self._waiting = None
                if timer is not None:
                    timer.cancel()
        self._set = False

    def _wake(self) -> None:
        if self._waiting is not None:
            _settle(self._waiting, None)


class News:
    """A flag that is set with each event, and cleared by a wait. Thread-safe. A woken thread or coroutine fetches the
    new events after the wait, so that none is lost."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._ended = False
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}

    def tell(self) -> None:
        """Set the flag, and end all waits."""
        self._told.set()
        for waiting, loop in tuple(self._waiting.items()):
            try:
                loop.call_soon_threadsafe(_settle, waiting, None)
            except RuntimeError:
                # The loop was closed in the meantime, and nobody will ever wait there again.
                self._waiting.pop(waiting, None)

    def end(self) -> None:
        """There is nothing new any more: nobody waits from now on, however many do."""
        self._ended = True
        self.tell()

    def wait(self, timeout: float) -> bool:
        """Wait on a thread, at most `timeout` seconds; returns whether there may be news. Raises `WrongState`."""
        if timeout > 0:
            check_may_wait()
        self._told.wait(timeout)
        return self._take()

    async def arrive(self, timeout: float) -> bool:
        """Wait in asyncio, on any event loop, at most `timeout` seconds; returns whether there may be news."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        self._waiting[waiting] = loop
        timer = loop.call_later(timeout, _settle, waiting, None)
        try:
            if not self._told.is_set():
                await waiting
        finally:
            timer.cancel()
            self._waiting.pop(waiting, None)
        return self._take()

    def _take(self) -> bool:
        found = self._told.is_set()
        if found:
            self._told.clear()
            if self._ended:
                self._told.set()
        return found


class _Events(asyncio.BaseEventLoop):
    """An event loop that waits only for its timers and for other threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        # Debugging logs what a slow callback was called with, which may be a secret.
        self.set_debug(False)
        self._now = clock
        self._selector = self
        self._woken = threading.Lock()
        self._woken.acquire()

    def time(self) -> float:
        return self._now()

    def select(self, timeout: float | None) -> tuple[()]:
        """Wait like a selector without files; called by the base class."""
        self._woken.acquire(timeout=-1 if timeout is None else max(0.0, min(timeout, LONGEST_SLEEP)))
        return ()

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        logger.error("the event loop: %s", context.get("message"), exc_info=context.get("exception"))

    def _process_events(self, _: tuple[()]) -> None: ...

    def _write_to_self(self) -> None:
        # Released already: the loop is about to wake.
        with suppress(RuntimeError):
            self._woken.release()

    def __del__(self) -> None:
        """Close nothing: the loop has no files."""


def _settle(future: asyncio.Future[Any], result: object) -> None:
    """End a future, unless it was cancelled."""
    if not future.done():
        future.set_result(result)


async def _end_others() -> None:
    """Cancel all other coroutines of the loop, and wait for their ends: other threads may wait for these."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=END_PATIENCE)
    # For the callbacks of the ended coroutines.
    await asyncio.sleep(0)
