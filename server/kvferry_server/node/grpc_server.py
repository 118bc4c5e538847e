"""grpcio's asyncio server, with a workaround for a bug by which any client can end it, and a shorter way for each call.

grpcio 1.84 and 1.85 decode a call's path in the task that accepts all calls. A path that is not UTF-8 raises there, and
the server shuts down with all its connections. The paths of registered methods are not decoded. So all methods of this
server are registered, and a task here accepts calls with any other path and refuses them as not offered, without
decoding or naming the path.

Tasks here also accept the calls of registered methods. grpcio waits for the next call of all methods together, anew for
each call, and each time looks up the handler and runs the interceptors.

Only this file uses private parts of grpcio. Versions 1.80 to 1.82 do not have the bug and need no workaround, but all
their methods share one queue. `kvferry_server.node.listen` replaces a server that ends nevertheless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc
from grpc.aio import _server as aio_server

from kvferry._wire.channel import ONE_QUEUE_OPTIONS
from kvferry_server.node.guard import UNKNOWN_METHOD, Guard, Handler, is_gone

logger = logging.getLogger(__name__)

_NEEDED = ("_schedule_rpc_coro", "_handle_stream_unary_rpc", "_handle_stream_stream_rpc")
_CAN_MEND = hasattr(cygrpc.AioServer, "_make_request_call_future") and all(hasattr(cygrpc, name) for name in _NEEDED)
"""Whether this version of grpcio has the parts that the workaround replaces."""


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    """grpcio's server. Given guarded `handlers` by path, and a handler of `unknown` methods, it accepts all calls
    itself: one task for each method, and one for unknown methods. The future `ended` gets the reason if the server ends
    without being stopped."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interceptors: tuple[Any, ...],
        options: Any,
        handlers: Mapping[str, Handler] | None,
        unknown: Handler | None,
    ) -> None:
        super().__init__(loop, None, (), interceptors, options, None)
        self.ended: asyncio.Future[BaseException] = loop.create_future()
        # Kept here because grpcio's own attributes cannot be read from Python.
        self._known = (loop, handlers or {}, unknown)
        self._calls: set[asyncio.Task[None]] = set()

    def _make_request_call_future(self, method: bytes | None) -> Any:
        loop, handlers, unknown = self._known
        if unknown is None:
            return super()._make_request_call_future(method)
        if method is None:
            return loop.create_task(self._accept(self._request_call, UNKNOWN_METHOD, unknown))
        path = method.decode()
        return loop.create_task(self._accept(partial(self._request_registered_call, method), path, handlers[path]))

    async def _accept(self, next_call: Callable[[], Awaitable[Any]], path: str, handler: Handler) -> None:
        """Accept calls of one method until the server stops. Ends with the error of grpcio's task for one call."""
        loop, *_ = self._known
        handle = cygrpc._handle_stream_stream_rpc if handler.response_streaming else cygrpc._handle_stream_unary_rpc
        while True:
            state = await next_call()
            handling = _quietly(handle(handler, state, loop))
            call = loop.create_task(cygrpc._schedule_rpc_coro(handling, state, loop, path))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    def _serving_task_crash_handler(self, task: asyncio.Task[None]) -> None:
        super()._serving_task_crash_handler(task)
        # `wait_for_termination` does not return while calls go on.
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.ended.done():
            self.ended.set_result(error)


class Server(aio_server.Server):
    """`grpc.aio.Server` around `_AioServer`."""

    def __init__(
        self,
        interceptors: tuple[grpc.aio.ServerInterceptor, ...],
        options: Sequence[tuple[str, Any]],
        handlers: Mapping[str, Handler] | None = None,
        unknown: Handler | None = None,
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _AioServer(self._loop, interceptors, tuple(options), handlers, unknown)
        if handlers:
            self._server.add_registered_method_handlers(handlers)

    async def stop(self, grace: float | None) -> None:
        """Stop as `grpc.aio.Server.stop` does, also after the server has ended without a stop."""
        try:
            await super().stop(grace)
        except Exception:
            # After such an end the first stop raises the reason before it has finished: stop again.
            if not self._server.ended.done():
                raise
            await super().stop(grace)

    async def ended(self) -> BaseException:
        """Wait until the server ends without a stop. Returns the reason."""
        error: BaseException = await asyncio.shield(self._server.ended)
        return error


class _Collected:
    """Collects handlers by path: stands in for a server in the generated `add_…_to_server`."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    def add_generic_rpc_handlers(self, services: Sequence[Any]) -> None:
        for service in services:
            self.handlers |= service._method_handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Ignore the same handlers, which newer generators pass a second time."""


async def _quietly(handling: Awaitable[None]) -> None:
    """Handle a call whose client may leave while its answer is sent: gRPC would log an error for each such call."""
    try:
        await handling
    except grpc.aio.BaseError as error:
        if is_gone(error):
            raise asyncio.CancelledError("the call has ended") from None
        raise


def make_server(guard: Guard, options: Sequence[tuple[str, Any]], add: Callable[[Any], None]) -> Server:
    """Make a server for the running event loop, without an address yet.

    The guard wraps every call, also of unknown methods. `options` are gRPC channel arguments. `add` passes its argument
    to the generated ``add_…_to_server`` functions.
    """
    if not _CAN_MEND:
        server = Server((guard,), tuple({**dict(options), **dict(ONE_QUEUE_OPTIONS)}.items()))
        add(server)
        return server
    collected = _Collected()
    add(collected)
    handlers = {path: guard.guarded(path, handler) for path, handler in collected.handlers.items()}
    return Server((), options, handlers, guard.guarded(UNKNOWN_METHOD, None))
