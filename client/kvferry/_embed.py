"""Runs a node server inside this process: for trying kvferry, for tests, and for a node whose engine is one process.

The server is the same that `kvferryd` runs, on a separate thread with its own event loop. The home of its engines ends
with this process, which must not fork afterwards: once `grpc.aio` has run, a forked child that uses gRPC hangs or
crashes. If your process forks workers (most engines do), fork first, or run `kvferryd` as a separate process.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from kvferry._forks import Closing
from kvferry._logs import Log
from kvferry.errors import KvferryError

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    from typing_extensions import Unpack

if TYPE_CHECKING:
    from kvferry_server.node.config import NodeConfig
    from kvferry_server.node.server import NodeServer

logger = Log(__name__)

EXTRA = {"aiohttp", "cryptography", "grpc_health", "grpc_reflection", "prometheus_client", "pydantic"}
EXTRA |= {"pydantic_settings", "uvloop"}
"""Top-level packages of the extra ``server``."""


class ServerSettings(TypedDict, total=False):
    """The settings of a node server that `serve` takes by keyword; each may be left out.

    They are the settings of `kvferryd`, with the same names, types and defaults, which ``kvferryd --help`` explains;
    only ``admin`` is empty by default. ``log_level`` and ``log_format`` are missing: your process configures logging.
    """

    advertise: str
    """``host`` or ``host:port`` at which other nodes reach this node. It goes into references."""
    tls_cert: Path | None
    """PEM file of the server's certificate chain. Turns on TLS for TCP."""
    tls_key: Path | None
    """PEM file of the certificate's private key."""
    tls_ca: Path | None
    """PEM file of authorities. Clients must show a certificate of one of them (mTLS)."""
    policy: Path | None
    """TOML file with the roles of identities in client certificates. Read once."""
    admin: str
    """TCP address for metrics, health and a page, over HTTP. Empty, as by default: none."""
    admin_insecure: bool
    """Whether ``admin`` may be an address other than loopback."""
    insecure: bool
    """Whether to listen on an address other than loopback without TLS."""
    anonymous_tls: bool
    """Whether to listen on an address other than loopback with TLS but without client certificates."""
    relay_homes: str
    """The homes that ranks may name here: shell patterns of ``host:port``, separated by commas."""
    directory: str
    """URL of the etcd in which the server and its engines are listed."""
    directory_ttl: float
    """Seconds for which the directory keeps listings without a renewal."""
    directory_labels: str
    """Labels of the server's engines in the directory: ``role=prefill,rack=a7``."""
    ttl: float
    """Seconds that a lease lasts from its acceptance or renewal."""
    max_ttl: float
    """The most seconds that any lease may last without a renewal."""
    engine_ttl: float
    """Seconds from the loss of an engine's Watch until the engine counts as dead."""
    hold: float
    """Seconds for which a publication without a reader is held."""
    final: float
    """Seconds from a publication until its blocks are released in any case."""
    max_wait: float
    """The most seconds that a reader may wait for a publication that has not come yet."""
    retire: float
    """Seconds for which messages of an engine's former incarnation are recognised and refused."""
    drain: float
    """Seconds for which a stopping server waits for live leases and calls in progress."""
    max_calls: int
    """Calls that may run at once over TCP, and as many over the UNIX socket."""
    max_streams: int
    """Streams that may be open at once over TCP, and as many over the UNIX socket."""
    max_connections: int
    """TCP connections that may be open, and as many to the UNIX socket."""
    memory: int | str
    """Bytes that the home keeps of engines and their requests, or ``"512MiB"``. 0: half of what the process may have,
    at most 1 GiB."""
    trace_endpoint: str
    """URL of an OpenTelemetry collector that gets a span for each call that belongs to a trace; empty: none."""


def serve(listen: str = "127.0.0.1:0", *, unix: str = "", **settings: Unpack[ServerSettings]) -> EmbeddedServer:
    """Run a node server in this process.

    Args:
        listen: TCP address; port 0: a free port; empty: no TCP.
        unix: path of a UNIX socket; empty: none.
        settings: see `ServerSettings`: ``ttl=5.0``, ``advertise="node7"``. The environment and files are not read.

    Returns:
        The running server. Close it, or use it as a context manager; the end of the process closes it, too.

    Raises:
        ImportError: the extra ``server`` is not installed.
        KvferryError: a setting is wrong, or an address cannot be used.
    """
    try:
        import uvloop

        from kvferry_server.node.loading import configure
        from kvferry_server.node.server import NodeServer
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        raise ImportError(
            f"kvferry.serve() needs {error.name}. Install the server with: pip install 'kvferry[server]'",
            name=error.name,
        ) from error
    # Programs start several servers, and have their own metrics, so these must be requested.
    settings.setdefault("admin", "")
    config = configure(listen=listen, unix=unix, **settings)
    return EmbeddedServer(NodeServer, uvloop.new_event_loop(), config)


class EmbeddedServer(Closing):
    """A node server on a thread of this process. Any thread may call its methods.

    Attributes:
        address: for engines of this host: the UNIX socket if there is one, else ``host:port``.
        addresses: all listening addresses.
        advertise: the address that goes into references.
    """

    def __init__(self, server_type: type[NodeServer], loop: asyncio.AbstractEventLoop, config: NodeConfig) -> None:
        self._loop = loop
        self._closing: asyncio.Future[None] = loop.create_future()
        """Cancelled by `close`."""
        self._started: Future[NodeServer] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(server_type, config), name="kvferry-server", daemon=True
        )
        self._thread.start()
        try:
            server = self._started.result()
        except BaseException:
            self._thread.join()
            raise
        self.addresses = server.addresses
        self.address = server.addresses[0]
        self.advertise = server.advertise
        # The end of the process stops a daemon thread anywhere; the sockets have to be removed before.
        atexit.register(self.close)

    def close(self, timeout: float = 30.0) -> None:
        """Drain and stop the server, and remove its files. Idempotent. The setting ``drain`` bounds the drain itself.
        Raises `KvferryError` if the server did not stop within `timeout` seconds."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._closing.cancel)
        self._thread.join(timeout)
        atexit.unregister(self.close)
        if self._thread.is_alive():
            raise KvferryError(f"the node server did not stop within {timeout:g} s", timeout=timeout)

    def _run(self, server_type: type[NodeServer], config: NodeConfig) -> None:
        try:
            self._loop.run_until_complete(self._serve(server_type, config))
        except BaseException as error:
            if self._started.done():
                logger.critical("the embedded node server ended", exc_info=error)
            else:
                self._started.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self, server_type: type[NodeServer], config: NodeConfig) -> None:
        server = server_type(config)
        await server.start()
        self._started.set_result(server)
        failed = asyncio.ensure_future(server.failed())
        await asyncio.wait([self._closing, failed], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            await server.stop(0)
            failed.result()
        failed.cancel()
        await asyncio.wait([failed])
        await server.stop()
