"""The admin listener: HTTP for operators, on the node server's event loop.

A connection has one request, and ends after `CONNECTION_SECONDS` in any case; if there are too many connections, the
oldest ends. So slow or silent clients cost a bounded number of descriptors for a bounded time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvferry._wire.channel import Address
from kvferry_server.admin.limits import CONNECTION_SECONDS, MAX_CONNECTIONS, MAX_HEADERS, MAX_LINE

_silent = logging.getLogger("kvferry_server.admin.http")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False
"""aiohttp logs an error with its stack for each malformed request, so that strangers could fill the log."""


class AdminListener(web.Server):
    """Serves HTTP on one address until `close`: aiohttp's server of connections, with limits on their number and
    duration. `address` may have port 0, and has its real port once `start` has returned. Belongs to the event loop that
    makes it."""

    def __init__(self, address: Address, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        super().__init__(
            answer,
            logger=_silent,
            access_log=None,
            keepalive_timeout=0,
            lingering_time=0,
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            max_headers=MAX_HEADERS,
            handler_cancellation=True,
        )
        self.address = address
        self._listening: asyncio.Server | None = None
        # The oldest connection first.
        self._open: dict[web.RequestHandler, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}

    async def start(self) -> None:
        """Listen; raises `OSError` if the address cannot be used."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self, self.address.host, self.address.port)
        port: int = self._listening.sockets[0].getsockname()[1]
        self.address = Address(host=self.address.host, port=port)

    async def close(self) -> None:
        """End all connections and release the address. Idempotent."""
        if self._listening is not None:
            self._listening.close()
        await self.shutdown(0)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        timer = asyncio.get_running_loop().call_later(CONNECTION_SECONDS, transport.abort)
        self._open[handler] = transport, timer
        if len(self._open) > MAX_CONNECTIONS:
            next(iter(self._open.values()))[0].abort()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        found = self._open.pop(handler, None)
        if found is not None:
            found[1].cancel()
