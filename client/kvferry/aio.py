"""The asyncio client, for services, tools and tests.

This client wraps the synchronous client: calls that would wait run on threads. It does not use `grpc.aio`, so that its
process may still fork. The reads of both clients can be awaited. Methods have the arguments, results and errors of
their namesakes in the synchronous client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from kvferry._arguments import seconds, takes
from kvferry._cache import OPEN_TIMEOUT, Cache
from kvferry._client import Client
from kvferry._control.home_session import HomeSession
from kvferry._directory.directory import Directory
from kvferry._engine_spec import EngineSpec
from kvferry._forks import Closing, OneProcess
from kvferry._loop import News
from kvferry._session import LOOK_EVERY, EngineCalls, EngineSession, home_session_of
from kvferry._threads import start_thread
from kvferry.engine.scheduler import MAX_WAITING, SchedulerCalls, SchedulerPort

Sync = TypeVar("Sync", bound=Closing)
Given = ParamSpec("Given")
Result = TypeVar("Result")
Wrapped = TypeVar("Wrapped")
Made = TypeVar("Made", bound="_Async[Any]")


class _Async(OneProcess, Generic[Sync]):
    """Wraps an object of the synchronous client (`sync`). As a context manager, the object is closed at the end."""

    def __init__(self, sync: Sync) -> None:
        self.sync = sync

    async def __aenter__(self: Made) -> Made:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.sync.close)


def _direct(method: Callable[Concatenate[Sync, Given], Result]) -> Callable[Concatenate[_Async[Sync], Given], Result]:
    """Make a method that calls a method which returns at once."""

    @wraps(method)
    def call(self: _Async[Sync], /, *given: Given.args, **options: Given.kwargs) -> Result:
        return method(self.sync, *given, **options)

    return call


def _on_thread(
    method: Callable[Concatenate[Sync, Given], Result],
) -> Callable[Concatenate[_Async[Sync], Given], Coroutine[Any, Any, Result]]:
    """Make a method that calls a waiting method on a thread."""

    @wraps(method)
    async def call(self: _Async[Sync], /, *given: Given.args, **options: Given.kwargs) -> Result:
        return await asyncio.to_thread(method, self.sync, *given, **options)

    return call


async def _made(make: Callable[[], Sync]) -> Sync:
    """Make an object on a thread. If the caller is cancelled meanwhile, the object, which nobody will have, is
    closed."""
    # No task: the end of `asyncio.run` would cancel that as well.
    making = asyncio.get_running_loop().run_in_executor(None, copy_context().run, make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_made)
        raise


def _close_made(making: asyncio.Future[Any]) -> None:
    if not making.cancelled() and making.exception() is None:
        start_thread(making.result().close, "kvferry-close")


def _making(
    method: Callable[Concatenate[Client, Given], Sync], made: Callable[[Sync], Wrapped]
) -> Callable[Concatenate[AsyncClient, Given], Coroutine[Any, Any, Wrapped]]:
    """Make a method that makes and wraps an object."""

    @wraps(method)
    async def call(self: AsyncClient, /, *given: Given.args, **options: Given.kwargs) -> Wrapped:
        return made(await _made(partial(method, self.sync, *given, **options)))

    return call


def _awaited(
    method: Callable[Concatenate[Sync, Given], Future[Result]],
) -> Callable[Concatenate[_Async[Sync], Given], Coroutine[Any, Any, Result]]:
    """Make a method that awaits the future of another method."""

    @wraps(method)
    async def call(self: _Async[Sync], /, *given: Given.args, **options: Given.kwargs) -> Result:
        return await asyncio.wrap_future(method(self.sync, *given, **options))

    return call


def _arriving(
    method: Callable[[EngineSession], list[Result]], news: Callable[[HomeSession], News]
) -> Callable[..., Coroutine[Any, Any, list[Result]]]:
    """Make a method that awaits what a waiting method returns. Not on a thread, which would go on after the call was
    cancelled: what it takes would be lost."""

    @wraps(method)
    async def call(self: AsyncSession, timeout: float = 0.0) -> list[Result]:
        loop, session = asyncio.get_running_loop(), self._session
        until = loop.time() + seconds("timeout", timeout, zero=True)
        while not (found := method(self.sync)) and not session.closed and (left := until - loop.time()) > 0:
            await news(session).arrive(min(LOOK_EVERY, left))
        return found

    return call


class AsyncSession(EngineCalls, _Async[EngineSession]):
    """`EngineSession` for an event loop. Made by `AsyncClient.open_engine`; `AsyncCache.session` returns one too.

    `publish`, `publish_more`, `abort`, `released`, `questions`, `unreleased` and `close` are awaited; `releases` is
    iterated with ``async for``; `miss` returns at once.

    Attributes:
        sync: the synchronous session.
        spec: the engine.
    """

    def __init__(self, session: EngineSession) -> None:
        super().__init__(home_session_of(session))
        self.sync = session

    publish = _on_thread(EngineSession.publish)
    publish_more = _on_thread(EngineSession.publish_more)
    abort = _on_thread(EngineSession.abort)
    released = _arriving(EngineSession.released, lambda session: session.news)
    releases = _direct(EngineSession.releases)
    questions = _arriving(EngineSession.questions, lambda session: session.asked)
    unreleased = _on_thread(EngineSession.unreleased)
    close = _on_thread(EngineSession.close)


class AsyncCache(_Async[Cache]):
    """`Cache` for an event loop. Made by `AsyncClient.register_cache`.

    `checksum`, `warm` and `close` are awaited; `read`, `fetch`, `prepare` and `gauges` return at once, and the reads
    that the first two return are awaited.

    Attributes:
        sync: the synchronous cache.
        spec, rank, reuse_after: see `Cache`.
    """

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self.spec, self.rank, self.reuse_after = cache.spec, cache.rank, cache.reuse_after

    @property
    def session(self) -> AsyncSession:
        """The engine's session; raises `WrongState` if another process has it."""
        return AsyncSession(self.sync.session)

    @property
    def engine_reference(self) -> str:
        """The engine's reference, for readers to warm up with. See `Cache.engine_reference`."""
        return self.sync.engine_reference

    read = _direct(Cache.read)
    fetch = _direct(Cache.fetch)
    checksum = _awaited(Cache.checksum)
    prepare = _direct(Cache.prepare)
    warm = _awaited(Cache.warm)
    gauges = _direct(Cache.gauges)
    close = _on_thread(Cache.close)


class AsyncClient(_Async[Client]):
    """`kvferry.Client` for an event loop. Arguments and errors are the same.

    `open_engine`, `register_cache`, `decline` and `close` are awaited; `stats` returns at once.

    Threading: make and use it on one event loop. Its methods never block the loop.

    Attributes:
        sync: the synchronous client.
    """

    @takes(Client)
    def __init__(self, sync: Client) -> None:
        super().__init__(sync)

    @property
    def directory(self) -> Directory | None:
        """The directory that the client was given. See `Client.directory`."""
        return self.sync.directory

    stats = _direct(Client.stats)
    open_engine = _making(Client.open_engine, AsyncSession)
    register_cache = _making(Client.register_cache, AsyncCache)

    decline = _on_thread(Client.decline)
    close = _on_thread(Client.close)


class AsyncSchedulerPort(SchedulerCalls, _Async[SchedulerPort]):
    """`SchedulerPort` for an event loop, with the same calls, of which `close` and `until_news` are awaited. Made by
    `open`. Workers use `WorkerPort`, whose calls during an engine's run return at once.

    Attributes:
        sync: the synchronous port.
        spec: the engine.
    """

    def __init__(self, port: SchedulerPort) -> None:
        super().__init__(port._session, port._holder, port._reads)
        self.sync = port

    @classmethod
    async def open(
        cls,
        client: AsyncClient,
        spec: EngineSpec,
        *,
        hold_until_quiet: bool = False,
        max_waiting: int = MAX_WAITING,
        timeout: float = OPEN_TIMEOUT,
    ) -> AsyncSchedulerPort:
        """Open an engine's session, and return the port of its scheduler. Arguments and errors: see `SchedulerPort`."""
        make = partial(SchedulerPort, hold_until_quiet=hold_until_quiet, max_waiting=max_waiting, timeout=timeout)
        return cls(await _made(partial(make, client.sync, spec)))

    close = _on_thread(SchedulerPort.close)
