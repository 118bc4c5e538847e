"""The admin listener: HTTP for operators, on the node server's event loop.

GET and HEAD only: no request changes anything. A connection has one request, and ends after `CONNECTION_SECONDS` in any
case; if there are too many connections, the oldest ends. So slow or silent clients cost a bounded number of descriptors
for a bounded time.
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
from kvferry.errors import InvalidField, KvferryError
from kvferry.v1 import introspection_pb2 as ipb
from kvferry_server.admin import limits, page
from kvferry_server.admin.metrics import NodeCollector
from kvferry_server.admin.node_state import NodeState, last_reads, overview
from kvferry_server.home.home import Home
from kvferry_server.servicers import introspection

logger = logging.getLogger(__name__)

_silent = logging.getLogger("kvferry_server.admin.http")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False
"""aiohttp logs an error with its stack for each malformed request, so that strangers could fill the log."""

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
"""Headers of every answer. Pages load nothing from other hosts and run only their own script, and no other site may
show or read them."""

ADDRESSES = {"localhost", "localhost.localdomain", "ip6-localhost"}  # Names in the header Host that mean this host
_HOST = re.compile(r"(\[(?P<six>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(:[0-9]*)?", re.ASCII)

Answer = tuple[int, str, bytes]
Query = Mapping[str, str]


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
            max_line_size=limits.MAX_LINE,
            max_field_size=limits.MAX_LINE,
            max_headers=limits.MAX_HEADERS,
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
        timer = asyncio.get_running_loop().call_later(limits.CONNECTION_SECONDS, transport.abort)
        self._open[handler] = transport, timer
        if len(self._open) > limits.MAX_CONNECTIONS:
            next(iter(self._open.values()))[0].abort()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        found = self._open.pop(handler, None)
        if found is not None:
            found[1].cancel()


class AdminService(AdminListener):
    """Shows a node server. With `local`, only requests that name this host, by an IP address or as localhost, are
    answered. Otherwise a web page in an operator's browser could point its own name here, and read what only this host
    may read."""

    def __init__(self, node: NodeState, address: Address, *, local: bool) -> None:
        super().__init__(address, self._answer)
        self._node = node
        self._local = local
        self._collector = NodeCollector(node)
        self._metrics: tuple[float, bytes] = (float("-inf"), b"")
        self._scraping: asyncio.Task[None] | None = None
        self._listing = asyncio.Lock()
        self._listed_until = float("-inf")
        static = files("kvferry_server.admin").joinpath("static")
        css, script = (static.joinpath(name).read_bytes() for name in ("page.css", "page.js"))
        self._paths: dict[str, Callable[[Query], Answer | Awaitable[Answer]]] = {
            **dict.fromkeys(("/", "/ui"), self._in_turn(lambda query: _page(page.front(node, query)))),
            "/page.css": lambda _: (200, "text/css; charset=utf-8", css),
            "/page.js": lambda _: (200, "text/javascript; charset=utf-8", script),
            "/metrics": self._scrape,
            "/healthz": lambda _: _probe(node.why_not_healthy()),
            "/readyz": lambda _: _probe(node.why_not_healthy() or node.why_not_ready()),
            "/statusz": self._in_turn(self._state),
            "/statusz/engines": self._in_turn(_listed(node, introspection.engines, ipb.ListEnginesRequest)),
            "/statusz/requests": self._in_turn(_listed(node, introspection.requests, ipb.ListRequestsRequest)),
            "/statusz/reads": self._in_turn(_listed(node, introspection.transfers, ipb.ListTransfersRequest)),
            "/statusz/last-reads": self._in_turn(lambda _: _json({"reads": last_reads(node)})),
            "/engine": self._in_turn(self._engine),
        }

    async def close(self) -> None:
        await super().close()
        if self._scraping is not None:
            self._scraping.cancel()

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

    async def _scrape(self, _: Query) -> Answer:
        if asyncio.get_running_loop().time() - self._metrics[0] >= limits.METRICS_KEPT:
            if self._scraping is None:
                self._scraping = asyncio.create_task(self._measure())
            # The measurement goes on if this client leaves. Otherwise each of many clients that come and leave would
            # begin another one.
            await asyncio.shield(self._scraping)
        return 200, CONTENT_TYPE_LATEST, self._metrics[1]

    async def _measure(self) -> None:
        try:
            # Counting connections looks at all open files.
            await asyncio.to_thread(self._node.count_connections)
            self._metrics = asyncio.get_running_loop().time(), self._collector.text()
        finally:
            self._scraping = None

    def _in_turn(self, make: Callable[[Query], Answer]) -> Callable[[Query], Awaitable[Answer]]:
        """Make pages and lists one after another, in at most `PAGE_SHARE` of the event loop's time."""

        async def made(query: Query) -> Answer:
            loop = asyncio.get_running_loop()
            async with self._listing:
                await asyncio.sleep(max(0.0, self._listed_until - loop.time()))
                began = loop.time()
                try:
                    return make(query)
                finally:
                    took = loop.time() - began
                    self._listed_until = began + took / limits.PAGE_SHARE

        return made

    def _state(self, query: Query) -> Answer:
        state = overview(self._node)
        return _json(state) if query.get("format") == "json" else _page(page.state_page(state))

    def _engine(self, query: Query) -> Answer:
        first = query.get("first", "0")
        if not re.fullmatch("[0-9]{1,9}", first):
            raise InvalidField("first", first[:64], "a rank")
        with self._node.home.turn():
            return _page(page.engine_page(self._node.home.engines.find_live(query.get("engine_id", "")), int(first)))


def _probe(problem: str) -> Answer:
    return (503, TEXT, f"{problem}\n".encode()) if problem else (200, TEXT, b"ok\n")


def _page(content: str) -> Answer:
    return 200, HTML, content.encode()


def _listed(node: NodeState, listing: Callable[[Home, Any], Message], kind: Any) -> Callable[[Query], Answer]:
    def answer(query: Query) -> Answer:
        asked = kind(page_size=limits.PAGE_SIZE, page_token=query.get("page_token", ""))
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
