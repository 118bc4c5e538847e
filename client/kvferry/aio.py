"""The asyncio client, for services, tools and tests.

This client wraps the synchronous client: calls that would wait run on threads. It does not use `grpc.aio`, so that its
process may still fork. The reads of both clients can be awaited. Methods have the arguments, results and errors of
their namesakes in the synchronous client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from kvferry._arguments import takes
from kvferry._cache import OPEN_TIMEOUT, Cache
from kvferry._client import Client
from kvferry._directory.directory import Directory
from kvferry._engine_spec import EngineSpec
from kvferry._forks import Closing, OneProcess
from kvferry._session import EngineSession
from kvferry._wire.token import EngineToken
from kvferry.engine.scheduler import MAX_WAITING, SchedulerPort

Sync = TypeVar("Sync", bound=Closing)
Given = ParamSpec("Given")
Result = TypeVar("Result")
Wrapped = TypeVar("Wrapped")
Made = TypeVar("Made", bound="_Async[Any]")
Engine = TypeVar("Engine", bound="EngineSession | SchedulerPort")


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


def _wrapped(
    method: Callable[Concatenate[_Async[Sync], Given], Coroutine[Any, Any, Result]], made: Callable[[Result], Wrapped]
) -> Callable[Concatenate[_Async[Sync], Given], Coroutine[Any, Any, Wrapped]]:
    """Make a method that wraps the result of another method."""

    @wraps(method)
    async def call(self: _Async[Sync], /, *given: Given.args, **options: Given.kwargs) -> Wrapped:
        return made(await method(self, *given, **options))

    return call


def _awaited(
    method: Callable[Concatenate[Sync, Given], Future[Result]],
) -> Callable[Concatenate[_Async[Sync], Given], Coroutine[Any, Any, Result]]:
    """Make a method that awaits the future of another method."""

    @wraps(method)
    async def call(self: _Async[Sync], /, *given: Given.args, **options: Given.kwargs) -> Result:
        return await asyncio.wrap_future(method(self.sync, *given, **options))

    return call


class _AsyncEngine(_Async[Engine]):
    """Wraps the session or the scheduler's port of an engine."""

    def __init__(self, sync: Engine) -> None:
        super().__init__(sync)
        self.spec = sync.spec

    @property
    def token(self) -> EngineToken:
        """The token with which the engine's other processes join it. Secret."""
        return self.sync.token

    @property
    def engine_reference(self) -> str:
        """The engine's reference, which routers give to readers for warming up. A capability."""
        return self.sync.engine_reference


class AsyncSession(_AsyncEngine[EngineSession]):
    """`EngineSession` for an event loop. Made by `AsyncClient.open_engine`; `AsyncCache.session` returns one too.

    Attributes:
        sync: the synchronous session.
        spec: the engine.
    """

    publish = _on_thread(EngineSession.publish)
    """Publish a request's blocks. See `EngineSession.publish`."""
    publish_more = _on_thread(EngineSession.publish_more)
    """Publish the next blocks of a publication. See `EngineSession.publish_more`."""
    abort = _on_thread(EngineSession.abort)
    """Withdraw a publication. See `EngineSession.abort`."""
    released = _on_thread(EngineSession.released)
    """Return the publications released since the last call. See `EngineSession.released`."""
    releases = _direct(EngineSession.releases)
    """Yield releases as they come. See `EngineSession.releases`."""
    questions = _on_thread(EngineSession.questions)
    """Return the questions of other engines since the last call. See `EngineSession.questions`."""
    miss = _direct(EngineSession.miss)
    """Answer a question with nothing. See `EngineSession.miss`."""
    unreleased = _on_thread(EngineSession.unreleased)
    """Return the publications whose blocks are still pinned. See `EngineSession.unreleased`."""
    close = _on_thread(EngineSession.close)
    """End the session. See `EngineSession.close`."""


class AsyncCache(_Async[Cache]):
    """`Cache` for an event loop. Made by `AsyncClient.register_cache`.

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
    """Start to read a publication; await the read that this returns. See `Cache.read`."""
    fetch = _direct(Cache.fetch)
    """Ask an engine for a prefix, and read it; await the read that this returns. See `Cache.fetch`."""
    checksum = _awaited(Cache.checksum)
    """Send checksums of published blocks to the home; the number of sums sent. See `Cache.checksum`."""
    prepare = _direct(Cache.prepare)
    """Make the NIXL agents for reading now. Returns at once. See `Cache.prepare`."""
    warm = _awaited(Cache.warm)
    """Connect to a source engine ahead of the first read; the source ranks to connect to. See `Cache.warm`."""
    gauges = _direct(Cache.gauges)
    """Return the current state of this rank's data plane."""
    close = _on_thread(Cache.close)
    """Cancel the reads and end the NIXL agents. See `Cache.close`."""


class AsyncClient(_Async[Client]):
    """`kvferry.Client` for an event loop. Arguments and errors are the same.

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
    """Return the counts and measurements of this client. See `Client.stats`."""
    open_engine = _wrapped(_on_thread(Client.open_engine), AsyncSession)
    """Start a new incarnation of an engine, and open its session. See `Client.open_engine`."""
    register_cache = _wrapped(_on_thread(Client.register_cache), AsyncCache)
    """Register a rank's cache with NIXL and at the node server. See `Client.register_cache`."""

    decline = _on_thread(Client.decline)
    """Decline a publication at its home. See `Client.decline`."""
    close = _on_thread(Client.close)
    """Cancel the reads, and end NIXL agents, sessions and connections. See `Client.close`."""


class AsyncSchedulerPort(_AsyncEngine[SchedulerPort]):
    """`SchedulerPort` for an event loop. Made by `open`. Workers use `WorkerPort`, whose calls during an engine's run
    return at once.

    Attributes:
        sync: the synchronous port.
        spec: the engine.
    """

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
        return cls(await asyncio.to_thread(make, client.sync, spec))

    publish = _direct(SchedulerPort.publish)
    """Publish a request's blocks. See `SchedulerPort.publish`."""
    publish_more = _direct(SchedulerPort.publish_more)
    """Publish the next blocks of a publication. See `SchedulerPort.publish_more`."""
    abort = _direct(SchedulerPort.abort)
    """Withdraw a publication. See `SchedulerPort.abort`."""
    released = _direct(SchedulerPort.released)
    """Return the publications released since the last call. See `SchedulerPort.released`."""
    acquire = _direct(SchedulerPort.acquire)
    """Start to acquire a publication. See `SchedulerPort.acquire`."""
    granted = _direct(SchedulerPort.granted)
    """Return the source's blocks for a request once its lease is granted. See `SchedulerPort.granted`."""
    ask = _direct(SchedulerPort.ask)
    """Ask an engine for what it has cached of a prompt. See `SchedulerPort.ask`."""
    questions = _direct(SchedulerPort.questions)
    """Return the questions of other engines since the last call. See `SchedulerPort.questions`."""
    miss = _direct(SchedulerPort.miss)
    """Answer a question with nothing. See `SchedulerPort.miss`."""
    news = _direct(SchedulerPort.news)
    """Return the requests for which `granted` has a new result. See `SchedulerPort.news`."""
    attach = _direct(SchedulerPort.attach)
    """Give a granted request the blocks to read into. See `SchedulerPort.attach`."""
    grant_steps = _direct(SchedulerPort.grant_steps)
    """Return the blocks that sources have published since. See `SchedulerPort.grant_steps`."""
    decline = _direct(SchedulerPort.decline)
    """Decline a publication at its home. See `SchedulerPort.decline`."""
    cancel = _direct(SchedulerPort.cancel)
    """Cancel the read of a request. See `SchedulerPort.cancel`."""
    collect = _direct(SchedulerPort.collect)
    """Take the report of a worker. See `SchedulerPort.collect`."""
    cancels = _direct(SchedulerPort.cancels)
    """Return the read_ids to cancel on every worker. See `SchedulerPort.cancels`."""
    finished = _direct(SchedulerPort.finished)
    """Return the reads that have ended on all ranks. See `SchedulerPort.finished`."""
    stats = _direct(SchedulerPort.stats)
    """Return the counts of this engine's publications and reads. See `SchedulerPort.stats`."""
    close = _on_thread(SchedulerPort.close)
    """End the engine's session. See `SchedulerPort.close`."""

    async def until_news(self, timeout: float) -> bool:
        """Wait until there may be news. See `SchedulerPort.wait_news`."""
        return await self.sync.until_news(timeout)
