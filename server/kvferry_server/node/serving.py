"""A gRPC server on one address, replaced by a new server whenever it ends without being stopped.

grpcio's server ends when something in it raises (see `kvferry_server.node.grpc_server`). The home keeps its
state: the calls of the ended server fail, which clients treat as a lost connection, and the next server listens at the
same address within a fraction of a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvferry_server.node.grpc_server import Server
from kvferry_server.node.listen import CannotListen, Listener
from kvferry_server.node.times import RESTART_LOG_PAUSE, RESTART_PAUSE

logger = logging.getLogger(__name__)


class Serving:
    """Serves one address until `stop`, which also closes the listener. `make` makes a gRPC server with all its
    services, without an address. Belongs to one event loop."""

    replacing: asyncio.Task[None] | None = None
    """Replaces the server. Ends only with `stop`, or by a bug."""

    def __init__(self, listener: Listener, make: Callable[[], Server]) -> None:
        self.listener = listener
        self._make = make
        self._server: Server | None = None
        self._problems, self._logged = 0, float("-inf")

    async def start(self) -> None:
        """Start to serve; raises `CannotListen`."""
        self._server = await self._started()
        self.replacing = asyncio.create_task(self._replace(), name=f"kvferry-serving-{self.listener.address}")

    @property
    def is_serving(self) -> bool:
        """False while a new gRPC server replaces another."""
        return self._server is not None

    async def stop(self, grace: float) -> None:
        """Stop the server after at most `grace` seconds for calls in progress, and close the listener. May be called
        again, to hurry an earlier call."""
        if self.replacing is not None:
            self.replacing.cancel()
            await asyncio.wait([self.replacing])
        if self._server is not None:
            await self._server.stop(grace)
        self.listener.close()

    async def _started(self) -> Server:
        server = self._make()
        try:
            self.listener.bind(server)
            await server.start()
        except BaseException:
            # A server that has bound keeps the address, even if it has not started.
            await server.stop(0)
            raise
        return server

    async def _replace(self) -> None:
        loop = asyncio.get_running_loop()
        while self._server is not None:
            began = loop.time()
            why = await self._server.ended()
            # After this the ended server does not keep the next one from listening.
            await self._server.stop(0)
            self._server = None
            await asyncio.sleep(max(0.0, began + RESTART_PAUSE - loop.time()))
            self._log(f"gRPC's server has ended ({why!r}); a new server replaces it, and no state is lost")
            while self._server is None:
                try:
                    self._server = await self._started()
                except CannotListen as error:
                    self._log(f"{error}; trying again")
                    await asyncio.sleep(RESTART_PAUSE)

    def _log(self, problem: str) -> None:
        self._problems += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged >= RESTART_LOG_PAUSE:
            self._logged = now
            logger.error("%s: %s [%d problems since the start]", self.listener.address, problem, self._problems)
