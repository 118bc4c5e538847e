"""Runs a node server inside this process: for trying kvferry, for tests, and for a node whose engine is one process.

It is the server of `kvferryd`, on a thread with its own event loop. The home of its engines ends with this process,
which must not fork afterwards: once `grpc.aio` has run, a forked child that uses gRPC hangs or crashes. If your process
forks workers (most engines do), fork first, or run `kvferryd` as a separate process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
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
    from kvferry_server.node.server import NodeServer

logger = Log(__name__)


class ServerSettings(TypedDict, total=False):
    """The settings of a node server that `serve` takes by keyword; each may be left out.

    They are the settings of `kvferryd`, with the same names, types and defaults, which ``kvferryd --help`` explains;
    only ``admin`` is empty by default, and ``policy`` is read once. Durations are in seconds. ``log_level`` and
    ``log_format`` are missing: your process configures logging.
    """

    advertise: str
    tls_cert: Path | None
    tls_key: Path | None
    tls_ca: Path | None
    policy: Path | None
    admin: str
    admin_insecure: bool
    insecure: bool
    anonymous_tls: bool
    relay_homes: str
    directory: str
    directory_ttl: float
    directory_labels: str
    ttl: float
    max_ttl: float
    engine_ttl: float
    hold: float
    final: float
    max_wait: float
    retire: float
    drain: float
    max_calls: int
    max_streams: int
    max_connections: int
    memory: int | str
    trace_endpoint: str


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
        if error.name is None or error.name.startswith("kvferry"):
            raise
        raise ImportError(
            f"kvferry.serve() needs {error.name}. Install the server with: pip install 'kvferry[server]'",
            name=error.name,
        ) from error
    # Programs start several servers, and have their own metrics, so these must be requested.
    settings.setdefault("admin", "")
    config = configure(listen=listen, unix=unix, **settings)
    return EmbeddedServer(NodeServer(config), uvloop.new_event_loop())


class EmbeddedServer(Closing):
    """A node server on a thread of this process. Any thread may call its methods.

    Attributes:
        address: for engines of this host: the UNIX socket if there is one, else ``host:port``.
        addresses: all listening addresses.
        advertise: the address that goes into references.
    """

    def __init__(self, server: NodeServer, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._closing: asyncio.Future[None] = loop.create_future()  # Cancelled by `close`
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(server,), name="kvferry-server", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            # Interrupted, or not started; then the loop may be closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._closing.cancel)
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

    def _run(self, server: NodeServer) -> None:
        try:
            self._loop.run_until_complete(self._serve(server))
        except BaseException as error:
            if self._started.done():
                logger.critical("the embedded node server ended", exc_info=error)
            else:
                self._started.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self, server: NodeServer) -> None:
        await server.start()
        self._started.set_result(None)
        failed = asyncio.ensure_future(server.failed())
        await asyncio.wait([self._closing, failed], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            await server.stop(0)
            failed.result()
        failed.cancel()
        await asyncio.wait([failed])
        await server.stop()
