"""What the admin listener answers, by path. GET and HEAD only: nothing can be changed here."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from urllib.parse import parse_qsl

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from kvferry.errors import KvferryError, LimitReached
from kvferry_server.admin import page, status
from kvferry_server.admin.limits import METRICS_KEPT, PAGE_SHARE
from kvferry_server.admin.metrics import NodeCollector
from kvferry_server.admin.node_state import NodeState
from kvferry_server.admin.pictures import Pictures

logger = logging.getLogger(__name__)

HTML = "text/html; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
SVG = "image/svg+xml"

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "kvferryd",
}
"""On every answer. Nothing from elsewhere is loaded, no script runs but the page's own, and no other site may show or
read what is here."""

ADDRESSES = {"localhost", "localhost.localdomain", "ip6-localhost"}
"""Names in the header Host that mean this host."""

_HOST = re.compile(r"(\[(?P<six>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(:[0-9]*)?", re.ASCII)

Answer = tuple[int, str, bytes]


class AdminService:
    """Answers the requests of the admin listener. Its owner closes it.

    Args:
        node: the node server.
        local: only requests that name this host, by an IP address or as localhost, are answered. Otherwise a web page
            that an operator opens could have its own name point here, and read what only this host may.
    """

    def __init__(self, node: NodeState, *, local: bool) -> None:
        self._node = node
        self._local = local
        self._collector = NodeCollector(node)
        self._pictures = Pictures(node)
        self._metrics: tuple[float, bytes] = (float("-inf"), b"")
        self._scraping: asyncio.Task[None] | None = None
        self._listing = asyncio.Lock()
        self._listed_until = float("-inf")
        static = files("kvferry_server.admin").joinpath("static")
        self._files = {
            "/page.css": ("text/css; charset=utf-8", static.joinpath("page.css").read_bytes()),
            "/page.js": ("text/javascript; charset=utf-8", static.joinpath("page.js").read_bytes()),
        }
        self._paths: dict[str, Callable[[Mapping[str, str]], Answer | Awaitable[Answer]]] = {
            "/": self._in_turn(self._front),
            "/ui": self._in_turn(self._front),
            "/metrics": self._scrape,
            "/healthz": self._health,
            "/readyz": self._ready,
            "/statusz": self._in_turn(self._state),
            "/statusz/engines": self._in_turn(self._engines),
            "/statusz/requests": self._in_turn(self._requests),
            "/statusz/reads": self._in_turn(self._reads),
            "/statusz/last-reads": self._in_turn(self._last_reads),
            "/engine": self._in_turn(self._engine),
            "/plan": self._plan,
            "/plan.svg": self._picture,
        }

    def close(self) -> None:
        """Stop the thread that draws, and what is being measured."""
        self._pictures.close()
        if self._scraping is not None:
            self._scraping.cancel()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. The connection ends afterwards."""
        code, content_type, body = await self._answered(request)
        response = web.Response(status=code, body=body, headers={**HEADERS, "Content-Type": content_type})
        # Connections are short, so that whoever keeps one open is known to be idle or slow.
        response.force_close()
        return response

    async def _answered(self, request: web.BaseRequest) -> Answer:
        if request.method not in ("GET", "HEAD"):
            return 405, TEXT, b"only GET and HEAD\n"
        if self._local and not _is_this_host(request.headers.get("Host", "")):
            return 421, TEXT, b"name this host by its IP address or as localhost\n"
        static = self._files.get(request.path)
        if static is not None:
            return 200, *static
        handler = self._paths.get(request.path)
        if handler is None:
            return 404, HTML, page.problem_page("There is no such page.").encode()
        try:
            found = handler(dict(parse_qsl(request.query_string, max_num_fields=16, errors="replace")))
            return await found if isinstance(found, Awaitable) else found
        except KvferryError as error:
            code = 503 if isinstance(error, LimitReached) else 404
            return code, HTML, page.problem_page(f"{error.message} ({error.reason})").encode()
        except ValueError:
            return 400, HTML, page.problem_page("The address is malformed.").encode()
        except Exception:
            logger.exception("%s failed", request.path)
            return 500, TEXT, b"internal error; the node server's log has details\n"

    async def _scrape(self, _: Mapping[str, str]) -> Answer:
        if asyncio.get_running_loop().time() - self._metrics[0] >= METRICS_KEPT:
            if self._scraping is None:
                self._scraping = asyncio.create_task(self._measure())
            # It goes on if this client leaves. Otherwise each of many that come and leave would begin another one.
            await asyncio.shield(self._scraping)
        return 200, CONTENT_TYPE_LATEST, self._metrics[1]

    async def _measure(self) -> None:
        try:
            # Counting connections looks at all open files.
            loads = await asyncio.to_thread(self._node.loads)
            self._metrics = asyncio.get_running_loop().time(), self._collector.text(loads)
        finally:
            self._scraping = None

    def _in_turn(self, make: Callable[[Mapping[str, str]], Answer]) -> Callable[[Mapping[str, str]], Awaitable[Answer]]:
        """Make a page or list when it is its turn: together they take at most `PAGE_SHARE` of the event loop."""

        async def made(query: Mapping[str, str]) -> Answer:
            loop = asyncio.get_running_loop()
            async with self._listing:
                await asyncio.sleep(max(0.0, self._listed_until - loop.time()))
                began = loop.time()
                try:
                    return make(query)
                finally:
                    took = loop.time() - began
                    self._listed_until = began + took / PAGE_SHARE

        return made

    def _health(self, _: Mapping[str, str]) -> Answer:
        return _probe(self._node.why_not_healthy())

    def _ready(self, _: Mapping[str, str]) -> Answer:
        return _probe(self._node.why_not_healthy() or self._node.why_not_ready())

    def _state(self, query: Mapping[str, str]) -> Answer:
        state = status.overview(self._node)
        if query.get("format") == "json":
            return _json(state)
        return 200, HTML, page.state_page(state).encode()

    def _engines(self, query: Mapping[str, str]) -> Answer:
        return _listing("engines", *status.engine_rows(self._node, query.get("page_token", "")))

    def _requests(self, query: Mapping[str, str]) -> Answer:
        return _listing("requests", *status.request_rows(self._node, query.get("page_token", "")))

    def _reads(self, query: Mapping[str, str]) -> Answer:
        return _listing("reads", *status.read_rows(self._node, query.get("page_token", "")))

    def _last_reads(self, _: Mapping[str, str]) -> Answer:
        return _json({"reads": status.last_reads(self._node)})

    def _front(self, query: Mapping[str, str]) -> Answer:
        return 200, HTML, page.front(self._node, query).encode()

    def _engine(self, query: Mapping[str, str]) -> Answer:
        first = int(query.get("first", "0"))
        if first < 0:
            raise ValueError(first)
        with self._node.home.turn():
            engine = self._node.home.engines.find_live(query.get("engine_id", ""))
            return 200, HTML, page.engine_page(engine, first).encode()

    def _plan(self, query: Mapping[str, str]) -> Answer:
        return 200, HTML, page.plan_page(query.get("source", ""), query.get("destination", "")).encode()

    async def _picture(self, query: Mapping[str, str]) -> Answer:
        drawn = await self._pictures.draw(query.get("source", ""), query.get("destination", ""))
        return 200, SVG, drawn.encode()


def _probe(problem: str) -> Answer:
    return (503, TEXT, f"{problem}\n".encode()) if problem else (200, TEXT, b"ok\n")


def _listing(name: str, rows: list[status.Row], following: str) -> Answer:
    return _json({name: rows, "next_page_token": following})


def _json(value: object) -> Answer:
    return 200, JSON, json.dumps(value, indent=1).encode() + b"\n"


def _is_this_host(host: str) -> bool:
    """Whether a header Host names an IP address or localhost, with any port."""
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
