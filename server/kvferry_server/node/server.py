"""The node server: puts listeners, guards, health, reflection, and the home with its servicers together.

`kvferryd`, `kvferry.serve()` and the tests all run a `NodeServer`.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import aio as reflection_aio
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from kvferry._wire.channel import MAX_CONNECTIONS, SERVER_OPTIONS, server_credentials
from kvferry.errors import InternalError
from kvferry.v1 import introspection_pb2, kv_transfer_pb2
from kvferry_server.domain.clock import BootClock, Clock
from kvferry_server.home.home import Home
from kvferry_server.node.config import NodeConfig
from kvferry_server.node.connections import ConnectionLimiter, connections_each, file_limit
from kvferry_server.node.grpc_server import make_server
from kvferry_server.node.guard import Guard
from kvferry_server.node.listen import Listener, TcpListener, UnixListener, advertised, check_exposure
from kvferry_server.node.serving import Serving
from kvferry_server.node.times import DRAIN_STREAMS, LEASE_POLL
from kvferry_server.node.tracing import Tracing, untraced
from kvferry_server.servicers import add_servicers
from kvferry_server.servicers.callers import NamesOf, names_of, nobody
from kvferry_server.servicers.relay import Relays
from kvferry_server.servicers.worker import Worker

logger = logging.getLogger(__name__)

SERVICES = (
    kv_transfer_pb2.DESCRIPTOR.services_by_name["KVTransfer"].full_name,
    introspection_pb2.DESCRIPTOR.services_by_name["Introspection"].full_name,
)
"""The services of the contract."""

OFFERED = (*SERVICES, HEALTH, REFLECTION)
"""All services, with health and reflection."""


class NodeServer:
    """A node server. `start` it once, `stop` it once. Not thread-safe: it belongs to the event loop that starts it.

    The UNIX socket and the TCP port have a gRPC server each, each with its own limits, so that neither starves the
    other.

    Args:
        config: the settings.
        clock: where the home takes its time from; None: CLOCK_BOOTTIME.

    Attributes:
        home: the home behind the servicers; set by `start`.
        addresses: the addresses that it listens on, UNIX socket first, with real ports.
        advertise: the address that goes into references.
    """

    home: Home
    addresses: tuple[str, ...] = ()
    advertise: str = ""

    def __init__(self, config: NodeConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock if clock is not None else BootClock()
        self._health = health_aio.HealthServicer()
        self._worker = Worker()
        self._relays: Relays | None = None
        self._listeners: list[Listener] = []
        self._guards: list[Guard] = []
        self._servings: list[Serving] = []
        self._driver: asyncio.Task[None] | None = None
        self._limiter: asyncio.Task[None] | None = None
        self._tracing: Tracing | None = None

    async def start(self) -> None:
        """Reserve the addresses and start to serve.

        Raises:
            CannotListen: it cannot listen on an address.
            InvalidField: settings contradict each other, or a TLS file cannot be read.
        """
        try:
            # The advertised address depends on the ports, and the home on it. gRPC servers come last.
            if self._config.trace_endpoint:
                self._tracing = Tracing(self._config.trace_endpoint)
            tcp = self._hold()
            self.home = Home(self._clock, self._config.times, self.advertise)
            self._relays = Relays(
                self.advertise,
                self._config.tls,
                anywhere=self._config.insecure,
                patterns=self._config.relay_patterns,
            )
            self._driver = asyncio.create_task(self.home.run(), name="kvferry-home")
            connections = connections_each(self._config.max_connections, len(self._listeners), file_limit())
            if tcp is not None:
                limiter = ConnectionLimiter(tcp.address.port, connections)
                self._limiter = asyncio.create_task(limiter.run(), name="kvferry-connections")
            for listener in self._listeners:
                await self._serve(listener, connections)
        except BaseException:
            await self.stop(0)
            raise
        for service in ("", *SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def failed(self) -> None:
        """Wait until the server cannot go on because of a bug, and raise it.

        Raises:
            InternalError: the home's timers have stopped, so that nothing would be released any more, or gRPC servers
                are not replaced any more. Also if the server was not started.
        """
        if self._driver is None:
            raise InternalError("the server was not started")
        waited = [asyncio.create_task(serving.failed()) for serving in self._servings]
        try:
            await asyncio.wait([self._driver, *waited], return_when=asyncio.FIRST_COMPLETED)
            ended = self._driver if self._driver.done() else next(task for task in waited if task.done())
            what = "the home" if ended is self._driver else "gRPC"
            cause = None if ended.cancelled() else ended.exception()
        finally:
            for task in waited:
                task.cancel()
            if waited:
                await asyncio.wait(waited)
        raise InternalError(f"{what} has stopped") from cause

    async def stop(self, grace: float | None = None) -> None:
        """Drain and stop; removes the socket's files. May be called again, to hurry an earlier call that was cancelled.

        Args:
            grace: seconds for live leases and calls in progress; None: as configured; 0: none.
        """
        grace = self._config.drain if grace is None else grace
        if self._servings and self._relays is not None:
            self._relays.stop()
            # The order matters: load balancers leave, then new work is refused, then streams end. A single open stream,
            # even a health Watch, would make gRPC wait for the whole grace.
            await self._health.enter_graceful_shutdown()
            self.home.drain()
            if grace > 0:
                await asyncio.gather(*(guard.streams_ended(DRAIN_STREAMS) for guard in self._guards))
            for guard in self._guards:
                guard.end_streams()
            # Readers can still report what they have read: only gRPC's stop refuses new calls.
            grace = await self._leases_end(grace)
        await asyncio.gather(*(serving.stop(grace) for serving in self._servings))
        if self._relays is not None:
            await self._relays.close()
        for task in (self._driver, self._limiter):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        for listener in self._listeners:
            listener.close()
        self._worker.close()
        tracing, self._tracing = self._tracing, None
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    async def _leases_end(self, grace: float) -> float:
        """Wait until no lease is live, at most `grace` seconds. Returns the seconds that are left."""
        loop = asyncio.get_running_loop()
        until = loop.time() + grace
        # Polled, because the domain has no asyncio events to wait for.
        while any(lease.live for lease in self.home.records.leases()) and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(LEASE_POLL)
        return max(0.0, until - loop.time())

    def _hold(self) -> TcpListener | None:
        """Reserve all addresses. Returns the TCP listener; None: no TCP."""
        config = self._config
        unix: UnixListener | None = None
        tcp: TcpListener | None = None
        if config.listen_address is not None:
            wanted, tls = config.listen_address, config.tls
            check_exposure(wanted, tls, insecure=config.insecure, anonymous_tls=config.anonymous_tls)
            tcp = TcpListener(wanted, server_credentials(tls) if tls is not None else None)
        if config.unix_path is not None:
            unix = UnixListener(config.unix_path)
        for listener in (unix, tcp):
            if listener is not None:
                self._listeners.append(listener)
                listener.hold()
        self.advertise = advertised(
            config.advertise, tcp.address if tcp is not None else None, unix.address if unix is not None else None
        )
        self.addresses = tuple(str(listener.address) for listener in self._listeners)
        return tcp

    async def _serve(self, listener: Listener, connections: int) -> None:
        guard = Guard(self._config.call_limits, untraced if self._tracing is None else self._tracing.traced)
        options = (*SERVER_OPTIONS, (MAX_CONNECTIONS, connections))
        with_tls = isinstance(listener, TcpListener) and self._config.tls is not None
        add_services = partial(self._add_services, names_of if with_tls else nobody)
        serving = Serving(listener, lambda: make_server(guard, options, OFFERED, add_services))
        self._guards.append(guard)
        self._servings.append(serving)
        await serving.start()

    def _add_services(self, names_of: NamesOf, server: Any) -> None:
        if self._relays is None:
            raise InternalError("the server was not started")
        add_servicers(server, self.home, self._relays, self._worker, names_of)
        add_HealthServicer_to_server(self._health, server)
        # grpc_reflection ships no types.
        add_reflection: Any = add_ServerReflectionServicer_to_server
        add_reflection(reflection_aio.ReflectionServicer(OFFERED), server)
