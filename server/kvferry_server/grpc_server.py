"""grpcio's asyncio server, without the flaw by which a stranger ends it.

grpcio (1.81 to 1.85 at least) decodes a request's path on the task that accepts all calls. A path that is not UTF-8
raises there, and the server shuts down with all its connections. It decodes nothing for methods that were registered
beforehand. So all methods that we offer are registered, and calls of any other path are taken by a task of ours,
which never looks at it: they are refused as not offered, without their name.

This is the one file that reaches into grpcio's private parts. Where they are not what they were, its server is used
as it is; `kvferry_server.serving` replaces one that ended.
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

from kvferry_server.interceptors import NO_NAME

logger = logging.getLogger(__name__)

_PRIVATE = ("_schedule_rpc_coro", "_handle_rpc")
_CAN_MEND = hasattr(cygrpc.AioServer, "_make_request_call_future") and all(hasattr(cygrpc, name) for name in _PRIVATE)


class _Unregistered:
    """Finds no method."""

    def resolve_handler(self, _: object) -> None:
        return None


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    """Takes calls of methods that nobody registered by itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interceptors: tuple[Any, ...], options: Any) -> None:
        # grpcio's own __init__ makes the server that this belongs to; __cinit__ takes whatever arguments.
        super().__init__(loop, None, (), interceptors, options, None)
        self._ours = (loop, interceptors)
        self._calls: set[asyncio.Task[None]] = set()

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is not None:
            return super()._make_request_call_future(method)
        return self._ours[0].create_task(self._take_unregistered())

    async def _take_unregistered(self) -> None:
        """Ends as grpcio's own would that takes one call: by its error when the server stops."""
        loop, interceptors = self._ours
        while True:
            state = await self._request_call()
            handling = cygrpc._handle_rpc(NO_NAME, _Unregistered(), interceptors, state, loop, False)
            call = loop.create_task(cygrpc._schedule_rpc_coro(handling, state, loop, NO_NAME))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)


class _Server(aio_server.Server):
    """`grpc.aio.Server` around the one above."""

    def __init__(self, interceptor: grpc.aio.ServerInterceptor, options: Sequence[tuple[str, Any]]) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _AioServer(self._loop, (interceptor,), tuple(options))


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
) -> grpc.aio.Server:
    """A server for the running loop, without an address yet.

    Args:
        interceptor: stands around every call, those of methods that are not offered included.
        options: gRPC's.
        services: full names of all services that `add` adds.
        add: calls the generated ``add_…_to_server`` with what it is given.
        mended: False: grpcio's server as it is, for tests of what happens when it ends.
    """
    if not (mended and _CAN_MEND):
        server = grpc.aio.server(interceptors=[interceptor], options=options)
        add(server)
        return server
    collected = _Collected()
    add(collected)
    mending: grpc.aio.Server = _Server(interceptor, options)
    for service in services:
        found = {}
        for method in descriptor_pool.Default().FindServiceByName(service).methods:
            path: Any = _Details(f"/{service}/{method.name}")
            handlers = [handler for generic in collected.generic if (handler := generic.service(path)) is not None]
            found.update({method.name: handler for handler in handlers})
        mending.add_registered_method_handlers(service, found)
    return mending
