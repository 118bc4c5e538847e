"""A gRPC server on one address, and another one in its place whenever it ends by itself.

What engines have at a home must not depend on grpcio's server: it ends when something in it raises (see
`kvferry_server.node.grpc_server` for what did). Then its calls are cut, which clients take as a lost connection, and
the next one listens at the same address within milliseconds. The home knows nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvferry_server.node.grpc_server import Server
from kvferry_server.node.listen import CannotListen, Listener

logger = logging.getLogger(__name__)

AGAIN = 0.1
"""Seconds from one server's start to the next one's, at least: whoever can end them can do so at once again."""

LOG_EVERY = 10.0
"""Seconds between lines in the log about servers that ended."""


class Serving:
    """Serves one address until `stop`. Belongs to one event loop.

    Args:
        listener: holds the address, and is given up by `stop`.
        make: makes a gRPC server with all its services, without an address.
    """

    def __init__(self, listener: Listener, make: Callable[[], Server]) -> None:
        self.listener = listener
        self._make = make
        self._server: Server | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._ended, self._logged = 0, float("-inf")

    async def start(self) -> None:
        """Serve.

        Raises:
            CannotListen: the address cannot be had.
        """
        self._server = await self._started()
        self._replacing = asyncio.create_task(self._replace(), name=f"kvferry-serving-{self.listener.address}")

    async def failed(self) -> None:
        """Wait until the replacing itself fails, which is a bug; its exception is raised."""
        if self._replacing is not None:
            await asyncio.shield(self._replacing)

    async def stop(self, grace: float) -> None:
        """End the server, give calls in progress `grace` seconds, and give the address up. May be called again, to
        hurry an earlier call."""
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait([self._replacing])
        if self._server is not None:
            await self._server.stop(grace)
        self.listener.close()

    async def _started(self) -> Server:
        server = self._make()
        try:
            self.listener.bind(server)
            await server.start()
        except BaseException:
            # A server that has bound holds the address, also when it has not started.
            await server.stop(0)
            raise
        return server

    async def _replace(self) -> None:
        loop = asyncio.get_running_loop()
        while self._server is not None:
            began = loop.time()
            why = await self._server.ended()
            # It has ended when this returns, and nothing of it is in the way of the next.
            await self._server.stop(0)
            self._server = None
            await asyncio.sleep(max(0.0, began + AGAIN - loop.time()))
            self._tell(f"gRPC's server ended by itself ({why!r}); another one takes its place, and nothing is lost")
            while self._server is None:
                try:
                    self._server = await self._started()
                except CannotListen as error:
                    self._tell(f"{error}; it is tried again")
                    await asyncio.sleep(AGAIN)

    def _tell(self, what: str) -> None:
        self._ended += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged >= LOG_EVERY:
            self._logged = now
            logger.error("%s: %s [%d times since the start]", self.listener.address, what, self._ended)
