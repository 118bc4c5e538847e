"""A node server without sockets: the home, the servicers and the guard of production, on the event loop of a fabric."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio

from kvferry._wire.channel import TlsConfig, TlsContent
from kvferry.testing._channel import InProcessCall
from kvferry_server.domain.times import Clock, Times
from kvferry_server.home.home import Home
from kvferry_server.node.guard import Guard
from kvferry_server.node.requests import Requests
from kvferry_server.servicers import add_servicers
from kvferry_server.servicers.access import TRUSTED
from kvferry_server.servicers.relay import Relays
from kvferry_server.servicers.worker import Worker

PEER = "unix:"
"""Address of every caller: that of gRPC's callers on a UNIX socket."""


class InProcessHome:
    """A node server from one start to its stop, used on the event loop of its fabric. References have `address`; `dial`
    makes its channels to other homes."""

    def __init__(
        self,
        address: str,
        times: Times,
        clock: Clock,
        dial: Callable[[str, TlsConfig | TlsContent | None], grpc.aio.Channel],
    ) -> None:
        self._clock = clock
        self._home = Home(clock, times, address)
        self._worker = Worker()
        self._guard = Guard(1024, 8192, TRUSTED, Requests(self._worker, self._home.time_slices))
        self._calls: dict[InProcessCall, asyncio.Task[None]] = {}
        self._generic: list[grpc.GenericRpcHandler] = []
        self._relays = Relays(address, None, anywhere=True, dial=dial)
        add_servicers(cast("grpc.aio.Server", self), self._home, self._relays, self._worker)
        self._driver = asyncio.get_running_loop().create_task(self._home.run(), name="kvferry-fabric-home")

    @property
    def waiting(self) -> int:
        """Number of reads that wait for a publication under a router's key."""
        return sum(len(engine.router_keys.who_waits()) for engine in self._home.records.engines.values())

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add handlers of methods. The generated code calls this, as on a `grpc.aio.Server`."""
        self._generic.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Ignore these: newer generated code passes the same handlers a second time."""

    def begin(self, call: InProcessCall) -> None:
        task = self._calls[call] = asyncio.get_running_loop().create_task(self._answer(call))
        task.add_done_callback(lambda _: self._calls.pop(call, None))

    def leave(self, call: InProcessCall) -> None:
        """Stop answering a call that has ended at its client."""
        task = self._calls.get(call)
        if task is not None:
            task.cancel()

    async def stop(self) -> None:
        """Stop at once, as if the process was killed: no more messages are sent, and all records are lost."""
        self._relays.stop()
        tasks = (self._driver, *self._calls.values())
        for call in tuple(self._calls):
            call.end(grpc.StatusCode.UNAVAILABLE, "the home was stopped")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        # A closed fabric leaves no thread.
        self._worker.join()

    async def _answer(self, call: InProcessCall) -> None:
        # The part of `grpc.HandlerCallDetails` that the guard uses.
        called = SimpleNamespace(method=call.method, invocation_metadata=())
        handler = await self._guard.intercept_service(self._handler, cast(grpc.HandlerCallDetails, called))
        context = _Context(call, handler.response_serializer, self._clock)
        try:
            # The guard reads every request from the context, and returns a single answer as bytes.
            if handler.response_streaming:
                await cast(Any, handler.stream_stream)(None, context)
            else:
                call.answered(await cast(Any, handler.stream_unary)(None, context))
        except grpc.aio.AbortError:
            code, details, trailing = context.status
            call.end(code, details, trailing)
        except asyncio.CancelledError:
            call.end(grpc.StatusCode.CANCELLED, "the call was cancelled")
        except Exception as error:
            call.end(grpc.StatusCode.UNKNOWN, f"the handler failed: {error!r}")
        else:
            call.end(grpc.StatusCode.OK, "")
        finally:
            context.end()

    async def _handler(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        found = (generic.service(details) for generic in self._generic)
        return next((handler for handler in found if handler is not None), None)


class _Context:
    """The part of gRPC's servicer context that the guard and the servicers use."""

    def __init__(self, call: InProcessCall, encode: Callable[[Any], bytes] | None, clock: Clock) -> None:
        self._call = call
        self._clock = clock
        self._encode = encode
        self._read = False
        self._at_end: list[Callable[[object], None]] = []
        self.status: tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]] = (grpc.StatusCode.OK, "", ())

    def peer(self) -> str:
        return PEER

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        # As with mutual TLS: an engine may be asked by its name.
        return {"x509_common_name": (b"fabric",)}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float | None:
        return None if self._call.deadline is None else max(0.0, self._call.deadline - self._clock.now())

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self._at_end.append(callback)

    def end(self) -> None:
        for callback in self._at_end:
            callback(self)

    async def read(self) -> object:
        read, self._read = self._read, True
        return grpc.aio.EOF if read else self._call.request

    async def write(self, message: Any) -> None:
        self._call.answered(message if self._encode is None else self._encode(message))
        # Let other tasks run, as they do while gRPC sends.
        await asyncio.sleep(0)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing: tuple[tuple[str, str | bytes], ...] = ()
    ) -> None:
        self.status = code, details, trailing
        raise grpc.aio.AbortError("the call was aborted")
