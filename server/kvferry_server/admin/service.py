"""The admin listener: HTTP for operators, on the node server's event loop.

GET and HEAD only: no request changes anything. A connection has one request, and ends after `CONNECTION_SECONDS`; if
there are too many, the oldest ends. So slow or silent clients cost a bounded number of descriptors for a bounded time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web
from google.protobuf.message import Message
from prometheus_client import CONTENT_TYPE_LATEST

from kvferry._summaries import as_dict
from kvferry._wire.channel import Address
from kvferry.errors import KvferryError
from kvferry.v1 import introspection_pb2 as ipb
from kvferry_server.admin import page
from kvferry_server.admin.metrics import NodeCollector
from kvferry_server.admin.node_state import NodeState, last_reads, overview
from kvferry_server.home.home import Home
from kvferry_server.servicers import introspection

logger = logging.getLogger(__name__)

_silent = logging.getLogger("kvferry_server.admin.http")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False
"""aiohttp logs an error with its stack for each malformed request, so that strangers could fill the log."""

# The limits of what clients can make the node server do. Durations are in seconds.
MAX_CONNECTIONS = 64  # A further one ends the oldest, so that silent clients keep no others out
CONNECTION_SECONDS = 10.0  # From a connection's start until its answer is taken. Each has one request
MAX_LINE = 4096  # Bytes of a request line, and of a header
MAX_HEADERS = 64
SHARE = 0.1
"""Fraction of the event loop's time that metrics may take, and as much again for pages and lists, however many are
requested: after each comes a pause, in which the next ones wait."""
METRICS_KEPT = 0.5  # How long the same metrics are answered again: clients that scrape without pause delay no others

HTML = "text/html; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "kvferryd",
}
"""Of every answer. Pages load only from here and run only their own script, and no other site may show or read them."""

ADDRESSES = {"localhost", "localhost.localdomain", "ip6-localhost"}  # Names in the header Host that mean this host
_HOST = re.compile(r"(\[(?P<six>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(:[0-9]*)?", re.ASCII)

Answer = tuple[int, str, bytes]
Query = Mapping[str, str]


class Share:
    """A share of the event loop's time, of which answers are made: one after another, with pauses."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._until = float("-inf")

    def of(self, make: Callable[[Query], Answer], kept: float = 0.0) -> Callable[[Query], Awaitable[Answer]]:
        """Return a function that makes answers in turn. For `kept` seconds it gives the same one again."""
        last: Answer = 0, "", b""
        fresh_until = float("-inf")

        async def made(query: Query) -> Answer:
            nonlocal last, fresh_until
            loop = asyncio.get_running_loop()
            async with self._turn:
                if loop.time() < fresh_until:
                    return last
                await asyncio.sleep(max(0.0, self._until - loop.time()))
                began = loop.time()
                try:
                    last = make(query)
                    fresh_until = loop.time() + kept
                    return last
                finally:
                    took = loop.time() - began
                    self._until = began + took / SHARE

        return made


class AdminService(web.Server):
    """Shows a node server on one address until `close`: aiohttp's server of connections, with limits on their number
    and duration. `address` has its real port once `start` has returned. Belongs to the event loop that makes it.

    With `local`, only requests that name this host, by an IP address or as localhost, are answered. Otherwise a web
    page in an operator's browser could point its own name here, and read what only this host may read."""

    def __init__(self, node: NodeState, address: Address, *, local: bool) -> None:
        super().__init__(
            self._answer,
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
        self._local = local
        collector, pages, metrics = NodeCollector(node), Share(), Share()
        static = files("kvferry_server.admin").joinpath("static")
        css, script = (static.joinpath(name).read_bytes() for name in ("page.css", "page.js"))
        self._paths: dict[str, Callable[[Query], Answer | Awaitable[Answer]]] = {
            "/": pages.of(lambda query: (200, HTML, page.front(node, query).encode())),
            "/page.css": lambda _: (200, "text/css; charset=utf-8", css),
            "/page.js": lambda _: (200, "text/javascript; charset=utf-8", script),
            "/metrics": metrics.of(lambda _: (200, CONTENT_TYPE_LATEST, collector.text()), METRICS_KEPT),
            "/healthz": lambda _: _probe(node.why_not_healthy()),
            "/readyz": lambda _: _probe(node.why_not_healthy() or node.why_not_ready()),
            "/statusz": pages.of(lambda _: _json(overview(node))),
            "/statusz/engines": pages.of(_listed(node, introspection.engines, ipb.ListEnginesRequest)),
            "/statusz/requests": pages.of(_listed(node, introspection.requests, ipb.ListRequestsRequest)),
            "/statusz/reads": pages.of(_listed(node, introspection.transfers, ipb.ListTransfersRequest)),
            "/statusz/last-reads": pages.of(lambda _: _json({"reads": last_reads(node)})),
        }

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

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        code, content_type, body = await self._answered(request)
        response = web.Response(status=code, body=body, headers={**HEADERS, "Content-Type": content_type})
        # Connections are short, so that an open one is known to be idle or slow.
        response.force_close()
        return response

    async def _answered(self, request: web.BaseRequest) -> Answer:
        if request.method not in ("GET", "HEAD"):
            return 405, TEXT, b"only GET and HEAD\n"
        if self._local and not _is_this_host(request.headers.get("Host", "")):
            return 421, TEXT, b"name this host by its IP address or as localhost\n"
        handler = self._paths.get(request.path)
        if handler is None:
            return 404, HTML, page.problem_page("There is no such page.").encode()
        try:
            query = dict(parse_qsl(request.query_string, max_num_fields=16, errors="replace"))
        except ValueError:
            return 400, HTML, page.problem_page("The address is malformed.").encode()
        try:
            found = handler(query)
            return await found if isinstance(found, Awaitable) else found
        except KvferryError as error:
            return 404, HTML, page.problem_page(f"{error.message} ({error.reason})").encode()
        except Exception:
            logger.exception("%s failed", request.path)
            return 500, TEXT, b"internal error; the node server's log has details\n"


def _probe(problem: str) -> Answer:
    return (503, TEXT, f"{problem}\n".encode()) if problem else (200, TEXT, b"ok\n")


def _listed(node: NodeState, listing: Callable[[Home, Any], Message], kind: Any) -> Callable[[Query], Answer]:
    def answer(query: Query) -> Answer:
        asked = kind(page_size=page.PAGE_SIZE, page_token=query.get("page_token", ""))
        return _json(as_dict(listing(node.home, asked)))

    return answer


def _json(value: object) -> Answer:
    return 200, JSON, json.dumps(value, indent=1).encode() + b"\n"


def _is_this_host(host: str) -> bool:
    """Whether a Host header names an IP address or localhost, with any port."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found["six"] or found["name"]
    if name.lower() in ADDRESSES:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
