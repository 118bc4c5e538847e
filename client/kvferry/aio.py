"""The asyncio client, for services, tools and tests.

This client wraps the synchronous client: calls that would wait run on threads. It does not use `grpc.aio`, so that its
process may still fork. The reads of both clients can be awaited. Methods have the arguments, results and errors of
their namesakes in the synchronous client. A `Cache` and the ports of an engine need no such class: but for `close`,
their calls return at once, reads are awaited, and `until_news` of a port waits on any event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from kvferry._arguments import takes
from kvferry._cache import OPEN_TIMEOUT
from kvferry._client import Client
from kvferry._directory.directory import Directory
from kvferry._engine_spec import EngineSpec
from kvferry._forks import Closing, OneProcess
from kvferry._session import EngineSession
from kvferry._wire.token import EngineToken

Sync = TypeVar("Sync", bound=Closing)
Given = ParamSpec("Given")
Result = TypeVar("Result")
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


class AsyncSession(_Async[EngineSession]):
    """`EngineSession` for an event loop. Made by `AsyncClient.open_engine`, or of the session of a cache:
    ``AsyncSession(cache.session)``.

    Attributes:
        sync: the synchronous session.
        spec: the engine.
    """

    def __init__(self, session: EngineSession) -> None:
        super().__init__(session)
        self.spec = session.spec

    @property
    def token(self) -> EngineToken:
        """The token with which the engine's other processes join it. Secret."""
        return self.sync.token

    @property
    def engine_reference(self) -> str:
        """The engine's reference, which routers give to readers for warming up. A capability."""
        return self.sync.engine_reference

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
    register_cache = _on_thread(Client.register_cache)
    """Register a rank's cache with NIXL and at the node server. See `Client.register_cache`."""

    async def open_engine(self, spec: EngineSpec, *, timeout: float = OPEN_TIMEOUT) -> AsyncSession:
        """Start a new incarnation of an engine, and open its session. See `Client.open_engine`."""
        return AsyncSession(await asyncio.to_thread(self.sync.open_engine, spec, timeout=timeout))

    decline = _on_thread(Client.decline)
    """Decline a publication at its home. See `Client.decline`."""
    close = _on_thread(Client.close)
    """Cancel the reads, and end NIXL agents, sessions and connections. See `Client.close`."""
