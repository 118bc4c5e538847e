"""The node server: listeners, guards, health, reflection, and the home with its servicers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

# Imported for its descriptors: with them tools decode the details of errors.
from google.rpc import error_details_pb2  # noqa: F401
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection_pb2_grpc
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import aio as reflection_aio

from kvferry._directory.directory import checked_home
from kvferry._directory.opening import open_directory
from kvferry._wire.channel import MAX_CONNECTIONS, SERVER_OPTIONS
from kvferry.errors import InternalError, InvalidField
from kvferry_server.admin.node_state import CallCounts, NodeState, ShownListener
from kvferry_server.domain.limits import Limits
from kvferry_server.domain.times import BOOT
from kvferry_server.home.home import Home
from kvferry_server.home.time_slices import Worker
from kvferry_server.node.certificates import Certificates
from kvferry_server.node.config import NodeConfig, advertised, is_on_loopback
from kvferry_server.node.connections import ConnectionLimiter, connections_each, count_connections, file_limit
from kvferry_server.node.guard import Guard
from kvferry_server.node.health import Health
from kvferry_server.node.limits import DRAIN_STREAMS, LEASE_POLL
from kvferry_server.node.listen import CannotListen, Listener, TcpListener, UnixListener
from kvferry_server.node.listings import Listings
from kvferry_server.node.loading import read_policy
from kvferry_server.node.memory import give_back, memory_limit
from kvferry_server.node.requests import Requests
from kvferry_server.node.tracing import Tracing, untraced
from kvferry_server.servicers import add_servicers
from kvferry_server.servicers.access import TRUSTED, UNKNOWN_CALLERS, Access, Policy
from kvferry_server.servicers.callers import names_of, nobody
from kvferry_server.servicers.relay import Relays

if TYPE_CHECKING:
    import grpc

    from kvferry_server.admin.service import AdminService

logger = logging.getLogger(__name__)

SERVICES = ("kvferry.v1.KVTransfer", "kvferry.v1.Introspection", "kvferry.v1.Admin")
OFFERED = (*SERVICES, HEALTH, REFLECTION)


class NodeServer:
    """A node server; `start` and `stop` it once each. Not thread-safe: it belongs to the event loop that starts it. The
    UNIX socket and the TCP port have a gRPC server each, with separate limits, so that neither starves the other.
    `failed_handshakes` returns the numbers of failed TLS handshakes by reason; None: they are not counted."""

    home: Home  # Set by `start`
    _driver: asyncio.Task[None]  # Runs the home; set by `start`
    addresses: tuple[str, ...] = ()  # UNIX socket first, with real ports
    advertise: str = ""  # The address that goes into references
    admin: str = ""  # The address of the admin listener; empty: there is none

    def __init__(self, config: NodeConfig, failed_handshakes: Callable[[], Mapping[str, int]] | None = None) -> None:
        self._config = config
        self._failed_handshakes = failed_handshakes
        self._health = Health()
        self._worker = Worker()
        self._relays: Relays | None = None
        self._listeners: list[Listener] = []
        self._guards: list[Guard] = []
        self._policy = Policy()
        self._certificates: Certificates | None = None
        self._listings: Listings | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._admin: AdminService | None = None
        self._tracing: Tracing | None = None

    async def start(self) -> None:
        """Start to serve. Raises `CannotListen`, or `InvalidField` for settings, a TLS file or the policy."""
        try:
            await self._start()
        except BaseException:
            await self.stop(0)
            raise
        for service in ("", *SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def _start(self) -> None:
        config = self._config
        if config.policy is not None:
            self._policy = read_policy(config.policy)
        if config.trace_endpoint:
            self._tracing = Tracing(config.trace_endpoint)
        # The advertised address depends on the ports, and the home on that address. gRPC servers start last.
        connections = self._listen()
        certificates = self._certificates
        if certificates is not None:
            self._begin(certificates.run(), "certificates")
        # What each engine gets, however much others hold, is part of the memory, or a thousand engines would take more.
        floors = config.home_memory // 4
        of_home = Limits(memory=config.home_memory - floors, engine_memory=floors // Limits().engines)
        self.home = Home(BOOT, config.times, self.advertise, of_home)
        relays = self._relays = Relays(
            self.advertise,
            config.tls,
            anywhere=config.insecure,
            patterns=config.relay_patterns,
            content=certificates.content if certificates is not None else None,
            events=self.home.journal.events,
        )
        self._driver = self._begin(self.home.run(), "home")
        freeing = give_back(
            lambda: sum(guard.requests.worked_on for guard in self._guards), lambda: self.home.memory.used
        )
        self._begin(freeing, "memory")
        limits = {"max_calls": config.max_calls, "max_streams": config.max_streams, "max_connections": connections}
        state = NodeState(
            self.home,
            relays,
            certificates=certificates,
            failed_handshakes=self._failed_handshakes,
            settings={**asdict(config.times), "drain": config.drain, **limits},
            addresses=self.addresses,
            memory_limit=memory_limit(),
            calls=CallCounts(self.home.journal.events),
            count_connections=count_connections,
        )
        self._begin(state.measure_lag(), "loop-lag")
        # Before the gRPC servers: operators can see why the node server is not ready yet.
        await self._start_admin(state)
        for listener in self._listeners:
            if not listener.address.is_unix:
                self._begin(ConnectionLimiter(listener.address.port, connections).run(), "connections")
            await self._serve(listener, relays, state, limits)
        if config.directory:
            checked_home(self.advertise)
            directory = open_directory(config.directory)
            self._listings = Listings(directory, self.home, config.labels, config.directory_ttl)

    async def failed(self) -> None:
        """Wait until the server cannot go on because of a bug, then raise `InternalError`: the home's timers have
        stopped, so that nothing would be released, or a gRPC server has ended."""
        servers = [listener.failed for listener in self._listeners]
        running: list[asyncio.Future[Any]] = [self._driver, *servers]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if self._driver.done():
            cause = None if self._driver.cancelled() else self._driver.exception()
            raise InternalError("the home has stopped") from cause
        raise InternalError("gRPC's server has ended") from next(each.result() for each in servers if each.done())

    async def drain(self) -> None:
        """Take no new work from now on; live work goes on, see `Home.drain`. `stop` ends the server. Idempotent."""
        await self._health.enter_graceful_shutdown()
        self.home.drain()

    async def reload(self) -> None:
        """Read the policy and the TLS files again. An unusable file is logged and changes nothing. Calls in progress
        and open connections go on. Not to be called while an earlier call goes on."""
        path = self._config.policy
        if path is not None:
            try:
                self._policy = await asyncio.to_thread(read_policy, path)
            except InvalidField as error:
                logger.error("the policy stays as it was: %s", error.message)
            else:
                logger.info("the policy was read again from %s: %d rules", path, len(self._policy.rules))
        if self._certificates is not None and await asyncio.to_thread(self._certificates.refresh):
            logger.info("the certificate was read again from %s", self._config.tls_cert)

    async def stop(self, grace: float | None = None) -> None:
        """Drain and stop, and remove the socket's files. May be called again, to hurry an earlier call that was
        cancelled. Live leases and calls in progress get `grace` seconds; None: as configured."""
        grace = self._config.drain if grace is None else grace
        loop, unlisting = asyncio.get_running_loop(), None
        if self._guards and self._relays is not None:
            self._relays.stop()
            # The order matters: load balancers leave, then new work is refused, then readers report their reads and
            # sources get the releases, then streams end. Only gRPC's stop refuses reports, and a single open stream,
            # even a health Watch, would make gRPC's stop wait for the whole grace.
            await self._health.enter_graceful_shutdown()
            self.home.drain()
            if self._listings is not None:
                # Concurrently, so that an unreachable directory does not prolong the drain.
                unlisting = asyncio.create_task(self._listings.stop(), name="kvferry-unlisting")
                self._listings = None
            until = loop.time() + grace
            await self._leases_end(until)
            self.home.end_watches()
            if grace > 0:
                await asyncio.gather(*(guard.streams_ended(DRAIN_STREAMS) for guard in self._guards))
            for guard in self._guards:
                guard.end_streams()
            grace = max(0.0, until - loop.time())
        await asyncio.gather(*(listener.stop(grace) for listener in self._listeners))
        if self._relays is not None:
            await self._relays.close()
        if unlisting is not None:
            await asyncio.wait([unlisting])
        for task in self._tasks:
            task.cancel()
            await asyncio.wait([task])
        # Last, so that operators can follow the drain to its end.
        if self._admin is not None:
            await self._admin.close()
        tracing, self._tracing = self._tracing, None
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    def _begin(self, running: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self._tasks.append(asyncio.create_task(running, name=f"kvferry-{name}"))
        return self._tasks[-1]

    async def _leases_end(self, until: float) -> None:
        """Wait until no lease pins blocks, at most until the event loop's time `until`."""
        # Polled, because the domain has no asyncio events to wait for.
        while self.home.records.pinning() and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
            await asyncio.sleep(LEASE_POLL)

    def _listen(self) -> int:
        """Take the addresses. Returns how many connections each of them may have."""
        config, path, address = self._config, self._config.unix_path, self._config.listen_address
        if config.tls is not None:
            self._certificates = Certificates(config.tls)
        connections = connections_each(config.max_connections, (path is not None) + (address is not None), file_limit())
        options = (*SERVER_OPTIONS, (MAX_CONNECTIONS, connections))
        if path is not None:
            self._listeners.append(UnixListener(path, options))
        if address is not None:
            credentials = self._certificates.credentials() if self._certificates is not None else None
            self._listeners.append(TcpListener(address, options, credentials))
        for listener in self._listeners:
            listener.listen()
        bound = {listener.address.is_unix: listener.address for listener in self._listeners}
        self.advertise = advertised(config.advertise, bound.get(False), bound.get(True))
        self.addresses = tuple(str(listener.address) for listener in self._listeners)
        return connections

    async def _start_admin(self, state: NodeState) -> None:
        address = self._config.admin_address
        if address is None:
            return
        # Imported here, because a node server without this listener needs none of its packages.
        from kvferry_server.admin.service import AdminService

        self._admin = AdminService(state, address, local=is_on_loopback(address))
        self._begin(state.measure_connections(), "connections-count")
        try:
            await self._admin.start()
        except OSError as error:
            if "admin" in self._config.model_fields_set:
                raise CannotListen(address, f"{error.strerror or error} (setting admin)") from None
            logger.warning("no metrics and no page: %s is in use, so set another address with --admin", address)
        else:
            self.admin = str(self._admin.address)

    async def _serve(self, listener: Listener, relays: Relays, state: NodeState, limits: Mapping[str, int]) -> None:
        config, on_unix = self._config, listener.address.is_unix
        mutual = not on_unix and config.tls_ca is not None
        access = TRUSTED if on_unix else Access(lambda: self._policy) if mutual else UNKNOWN_CALLERS
        names = nobody if on_unix or config.tls is None else names_of
        requests = Requests(self._worker, self.home.time_slices)
        traced = untraced if self._tracing is None else self._tracing.traced
        guard = Guard(config.max_calls, config.max_streams, access, requests, state.calls, traced)
        self._guards.append(guard)
        # The stubs do not know that a listener is grpc's server, nor the type of the reflection's module.
        server, reflection = cast("grpc.aio.Server", listener), cast("Any", reflection_pb2_grpc)
        add_servicers(server, self.home, relays, self._worker, names, drain=self.drain, call_limits=limits)
        add_HealthServicer_to_server(self._health, server)
        reflection.add_ServerReflectionServicer_to_server(reflection_aio.ReflectionServicer(OFFERED), server)
        listener.offer(guard)
        await listener.start()
        state.listeners.append(ShownListener(listener.address, guard.budgets, limits["max_connections"]))
