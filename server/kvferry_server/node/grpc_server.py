"""grpcio's asyncio server, without a bug by which any client can end it, and with a shorter way for each call.

grpcio decodes a call's path in the task that accepts all calls. A path that is not UTF-8 raises there, and the server
shuts down with all its connections. The paths of registered methods are not decoded. So all methods of this server are
registered, and a task here refuses calls with any other path, without decoding or naming it. Tasks here also accept the
calls of registered methods: grpcio would each time look up the handler and run the interceptors.

Only this file uses private parts of grpcio, so pyproject.toml allows the versions that it was tried with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import grpc.aio
from grpc._cython import cygrpc
from grpc.aio import _server as aio_server

from kvferry_server.node.guard import UNKNOWN_METHOD, Guard, Handler, is_gone


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    """grpcio's server, which accepts all calls itself: one task for each method of `handlers`, by path, and one for
    `unknown` methods."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: Sequence[tuple[str, Any]]) -> None:
        super().__init__(loop, None, (), (), tuple(options), None)
        self.failed: asyncio.Future[BaseException] = loop.create_future()
        self.handlers: dict[str, Handler] = {}
        self.unknown: Handler | None = None
        # Kept here because grpcio's own attribute cannot be read from Python.
        self._event_loop = loop
        self._calls: set[asyncio.Task[None]] = set()

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is None:
            accepting = self._accept(self._request_call, UNKNOWN_METHOD, self.unknown)
        else:
            path = method.decode()
            accepting = self._accept(partial(self._request_registered_call, method), path, self.handlers[path])
        return self._event_loop.create_task(accepting)

    async def _accept(self, next_call: Callable[[], Awaitable[Any]], path: str, handler: Any) -> None:
        """Accept calls of one method until the server stops. Ends with the error of grpcio's task for one call."""
        loop = self._event_loop
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
        if error is not None and not self.failed.done():
            self.failed.set_result(error)


class Server(aio_server.Server):
    """`grpc.aio.Server` around `_AioServer`, for the running event loop, without addresses and services yet. `options`
    are gRPC channel arguments. `failed` gets the reason if the server ends without a stop."""

    def __init__(self, options: Sequence[tuple[str, Any]]) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _AioServer(self._loop, options)
        self.failed: asyncio.Future[BaseException] = self._server.failed
        self._offered: dict[str, Handler] = {}

    def add_generic_rpc_handlers(self, services: Sequence[Any]) -> None:
        """Collect the handlers of services, for `offer`: the generated ``add_…_to_server`` functions call this."""
        for service in services:
            self._offered |= service._method_handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Ignore the same handlers, which newer generators pass a second time."""

    def offer(self, guard: Guard) -> None:
        """Offer the services, once, before the start. The guard wraps every call, also of unknown methods."""
        self._server.handlers = {path: guard.guarded(path, handler) for path, handler in self._offered.items()}
        self._server.unknown = guard.guarded(UNKNOWN_METHOD, None)
        self._server.add_registered_method_handlers(self._server.handlers)

    async def stop(self, grace: float | None) -> None:
        """Stop as `grpc.aio.Server.stop` does, also after the server has ended without a stop."""
        try:
            await super().stop(grace)
        except Exception:
            # After such an end the first stop raises the reason before it has finished: stop again.
            if not self.failed.done():
                raise
            await super().stop(grace)


async def _quietly(handling: Awaitable[None]) -> None:
    """Handle a call whose client may leave while its answer is sent: gRPC would log an error for each such call."""
    try:
        await handling
    except grpc.aio.BaseError as error:
        if is_gone(error):
            raise asyncio.CancelledError("the call has ended") from None
        raise
