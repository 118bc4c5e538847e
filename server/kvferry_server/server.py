"""One node server, put together: listeners, guard, health, reflection, and the home with its servicers.

`kvferryd`, `kvferry.serve()` and the tests all run this. It belongs to the event loop that started it.
"""

from __future__ import annotations

import asyncio
import logging

import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from kvferry.channel import SERVER_OPTIONS, Address, parse_address, server_credentials
from kvferry.errors import InternalError
from kvferry.v1 import introspection_pb2, kv_transfer_pb2
from kvferry_server.clock import BootClock, Clock
from kvferry_server.config import NodeConfig
from kvferry_server.home import Home
from kvferry_server.interceptors import Guard
from kvferry_server.listen import UnixListener, advertised, bind_tcp, check_exposure
from kvferry_server.relays import Relays
from kvferry_server.servicers import add_servicers
from kvferry_server.worker import Worker

logger = logging.getLogger(__name__)

SERVICES = (
    kv_transfer_pb2.DESCRIPTOR.services_by_name["KVTransfer"].full_name,
    introspection_pb2.DESCRIPTOR.services_by_name["Introspection"].full_name,
)
"""The services of the contract."""

STREAMS_END = 0.5
"""Seconds that streams get to say what drain told them, and to end by themselves, before they are ended."""

LEASES_LOOK = 0.05
"""Seconds between looks at whether leases are still live, during a drain."""

LISTEN_LOOK = 2.0
"""Seconds between looks at whether we are listened for at all."""


class NodeServer:
    """A node server. `start` it once, `stop` it once.

    Attributes:
        home: the domain behind the servicers; there once the server has started.
        addresses: what it listens on, UNIX socket first, with real ports.
        advertise: the address that goes into references.
    """

    home: Home
    addresses: tuple[str, ...] = ()
    advertise: str = ""

    def __init__(self, config: NodeConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock if clock is not None else BootClock()
        self._guard = Guard(config.limits)
        self._health = health_aio.HealthServicer()
        self._worker = Worker()
        self._relays: Relays | None = None
        self._unix: UnixListener | None = None
        self._server: grpc.aio.Server | None = None
        self._driver: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind, and serve.

        Raises:
            CannotListen: an address is taken, or cannot be had.
            InvalidField: settings that do not go together, or a file of TLS that cannot be read.
        """
        server = self._server = grpc.aio.server(
            interceptors=[self._guard],
            options=SERVER_OPTIONS,
            # Streams count, too; our own limits come first, and their refusals are typed.
            maximum_concurrent_rpcs=self._config.limits.backstop,
        )
        try:
            # Ports first: what is advertised depends on them. Nobody is served before the last line.
            self._bind(server)
            self.home = Home(self._clock, self._config.times, self.advertise)
            relays = self._relays = Relays(self.advertise, self._config.tls, anywhere=self._config.insecure)
            add_servicers(server, self.home, relays, self._worker)
            add_HealthServicer_to_server(self._health, server)
            reflection.enable_server_reflection((*SERVICES, HEALTH, reflection.SERVICE_NAME), server)
            self._driver = asyncio.create_task(self.home.run(), name="kvferry-home")
            await server.start()
        except BaseException:
            await self.stop(0)
            raise
        for service in ("", *SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def failed(self) -> None:
        """Wait until the server cannot go on.

        Raises:
            InternalError: always. The home's timers have stopped, so that nothing would be released any more; or gRPC
                has stopped serving, as grpcio 1.85 does when a request's path is not UTF-8.
        """
        if self._driver is None:
            raise InternalError("the server was not started")
        refused = asyncio.create_task(self._refused())
        try:
            await asyncio.wait([self._driver, refused], return_when=asyncio.FIRST_COMPLETED)
        finally:
            refused.cancel()
            await asyncio.wait([refused])
        if not self._driver.done():
            raise InternalError("gRPC has stopped serving")
        cause = None if self._driver.cancelled() else self._driver.exception()
        raise InternalError("the home has stopped") from cause

    async def stop(self, grace: float | None = None) -> None:
        """Drain and end, leaving no file. May be called again, to hurry an earlier call that was cancelled.

        Args:
            grace: seconds for leases and calls in progress; None: as configured; 0: at once.
        """
        grace = self._config.drain if grace is None else grace
        if self._server is not None and self._relays is not None:
            self._relays.end()
            # The order matters: load balancers leave, then new work is refused, then our own streams end. A
            # single open stream, even a health Watch, would make gRPC wait for the whole grace.
            await self._health.enter_graceful_shutdown()
            self.home.drain()
            if grace > 0:
                await self._guard.streams_ended(STREAMS_END)
            self._guard.end_streams()
            # Readers still report what they have read, and may; gRPC's stop takes no new call.
            grace = await self._leases_end(grace)
        if self._server is not None:
            await self._server.stop(grace)
        if self._relays is not None:
            await self._relays.close()
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.wait([self._driver])
        self._worker.close()
        if self._unix is not None:
            self._unix.close()

    async def _refused(self) -> None:
        """Wait until nobody listens at our own address any more: gRPC does not tell us when its loop dies."""
        address = parse_address(self.addresses[0])
        while True:
            await asyncio.sleep(LISTEN_LOOK)
            try:
                if address.is_unix:
                    _, writer = await asyncio.open_unix_connection(address.path)
                else:
                    _, writer = await asyncio.open_connection(address.host, address.port)
            except (ConnectionRefusedError, FileNotFoundError):
                return
            except OSError:
                # A shortage of ours, which says nothing.
                continue
            writer.close()

    async def _leases_end(self, grace: float) -> float:
        """Wait until no lease is live, at most `grace` seconds; the seconds that are left."""
        loop = asyncio.get_running_loop()
        until = loop.time() + grace
        # The domain knows no asyncio that could wake us.
        while any(lease.live for lease in self.home.lessor.leases()) and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(LEASES_LOOK)
        return max(0.0, until - loop.time())

    def _bind(self, server: grpc.aio.Server) -> None:
        tcp: Address | None = None
        if self._config.listen_address is not None:
            wanted, tls = self._config.listen_address, self._config.tls
            check_exposure(wanted, tls=tls is not None, insecure=self._config.insecure)
            tcp = bind_tcp(server, wanted, server_credentials(tls) if tls is not None else None)
        if self._config.unix_path is not None:
            self._unix = UnixListener(self._config.unix_path)
            self._unix.bind(server)
        unix = self._unix.address if self._unix is not None else None
        self.advertise = advertised(self._config.advertise, tcp, unix)
        self.addresses = tuple(str(address) for address in (unix, tcp) if address is not None)
