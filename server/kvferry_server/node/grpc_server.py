"""grpcio's asyncio server, without the flaw by which a stranger ends it.

grpcio (1.84 and 1.85) decodes a request's path on the task that accepts all calls. A path that is not UTF-8
raises there, and the server shuts down with all its connections. It decodes nothing for methods that were registered
beforehand. So all methods that we offer are registered, and calls of any other path are taken by a task of ours,
which never looks at it: they are refused as not offered, without their name.

This is the one file that reaches into grpcio's private parts. Where it does not decode (1.80 to 1.82) there is nothing
to mend, but all methods share one queue. `kvferry_server.node.serving` replaces a server that ended all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from grpc._cython import cygrpc
from grpc.aio import _server as aio_server

from kvferry._wire.channel import ONE_QUEUE_OPTIONS
from kvferry_server.node.guard import NO_NAME

logger = logging.getLogger(__name__)

_NEEDED = ("_schedule_rpc_coro", "_handle_rpc")
_CAN_MEND = hasattr(cygrpc.AioServer, "_make_request_call_future") and all(hasattr(cygrpc, name) for name in _NEEDED)


class _Unregistered:
    """Finds no method."""

    def resolve_handler(self, _: object) -> None:
        return None


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    """Takes calls of methods that nobody registered by itself, if `mended`; says when it has ended by itself."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, interceptors: tuple[Any, ...], options: Any, *, mended: bool
    ) -> None:
        super().__init__(loop, None, (), interceptors, options, None)
        self.ended: asyncio.Future[BaseException] = loop.create_future()
        # grpcio's own attributes are not to be had from Python.
        self._known = (loop, interceptors, mended)
        self._calls: set[asyncio.Task[None]] = set()

    def _make_request_call_future(self, method: bytes | None) -> Any:
        loop, _, mended = self._known
        if method is not None or not mended:
            return super()._make_request_call_future(method)
        return loop.create_task(self._take_unregistered())

    async def _take_unregistered(self) -> None:
        """Ends as grpcio's own would that takes one call: by its error when the server stops."""
        loop, interceptors, _ = self._known
        while True:
            state = await self._request_call()
            handling = cygrpc._handle_rpc(NO_NAME, _Unregistered(), interceptors, state, loop, False)
            call = loop.create_task(cygrpc._schedule_rpc_coro(handling, state, loop, NO_NAME))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    def _serving_task_crash_handler(self, task: asyncio.Task[None]) -> None:
        super()._serving_task_crash_handler(task)
        # With calls that go on, grpcio's `wait_for_termination` would not say so.
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.ended.done():
            self.ended.set_result(error)


class Server(aio_server.Server):
    """`grpc.aio.Server` around the one above."""

    def __init__(self, interceptor: grpc.aio.ServerInterceptor, options: Sequence[tuple[str, Any]], *, mended: bool):
        self._loop = cygrpc.get_working_loop()
        self._server = _AioServer(self._loop, (interceptor,), tuple(options), mended=mended)

    async def stop(self, grace: float | None) -> None:
        """As of `grpc.aio.Server`."""
        try:
            await super().stop(grace)
        except Exception:
            # Why it ended by itself, told to whoever stops it first and in the middle of that. The rest is to be done.
            if not self._server.ended.done():
                raise
            await super().stop(grace)

    async def ended(self) -> BaseException:
        """Wait until it has ended by itself; why."""
        error: BaseException = await asyncio.shield(self._server.ended)
        return error


class _Collected:
    """What the generated `add_…_to_server` takes for a server."""

    def __init__(self) -> None:
        self.generic: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self.generic.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """The same again, from newer generators."""


class _Details:
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


def make_server(
    interceptor: grpc.aio.ServerInterceptor,
    options: Sequence[tuple[str, Any]],
    services: Sequence[str],
    add: Callable[[Any], None],
    *,
    mended: bool = True,
) -> Server:
    """A server for the running loop, without an address yet.

    Args:
        interceptor: stands around every call, those of methods that are not offered included.
        options: gRPC's.
        services: full names of all services that `add` adds.
        add: calls the generated ``add_…_to_server`` with what it is given.
        mended: False: grpcio's server as it is, for tests of what happens when it ends.
    """
    if not _CAN_MEND:
        options = tuple({**dict(options), **dict(ONE_QUEUE_OPTIONS)}.items())
    mended = mended and _CAN_MEND
    server = Server(interceptor, options, mended=mended)
    if not mended:
        add(server)
        return server
    collected = _Collected()
    add(collected)
    for service in services:
        found: dict[str, Any] = {}
        for method in descriptor_pool.Default().FindServiceByName(service).methods:
            path: Any = _Details(f"/{service}/{method.name}")
            for generic in collected.generic:
                handler = generic.service(path)
                if handler is not None:
                    found[method.name] = handler
        server.add_registered_method_handlers(service, found)
    return server
