"""Decode finds a prefill instance through the instance's bootstrap server, which answers its engine_id and its home.

A request names prefill by ``bootstrap_host`` and ``bootstrap_port``, as SGLang's routers write them, and itself by
``bootstrap_room``. From these both sides make the same reference, without a message about the request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from kvferry import parse_address, router_reference
from kvferry.errors import KvferryError
from kvferry.integrations.remembered import remember

logger = logging.getLogger(__name__)

PATH = "/kvferry"
ASK_TIMEOUT = 5.0
"""Seconds for one question, after as many for its connection."""
AGAIN = 0.5
"""Seconds until a failed question is repeated."""
REFERENCE = "kvf1."
"""Prefix of references."""
MAX_BODY = 4096
MAX_RID = 128
"""Characters of SGLang's request id that are shown."""
QUEUE = 64
"""Connections that may wait to be accepted: all decode instances ask at once after a restart."""
MAX_KNOWN = 4096
"""Prefill instances that are remembered, and open questions: requests may name any number of addresses."""
ASKING = 16
"""Questions at once: some addresses may never answer."""


@dataclass(frozen=True, slots=True)
class Source:
    """A prefill instance: its engine_id, and the address of its home."""

    engine_id: str
    home: str


def room_is_usable(room: int | None) -> bool:
    """Return whether SGLang can hand over a request's room: a larger room ends its scheduler, and 0 means no room."""
    return room is not None and 0 < room < 1 << 63


def room_reference(source: Source, room: int) -> str:
    """Return the reference of a request, with which prefill publishes and decode reads. It is as secret as the room:
    anyone who knows room and source can make it. SGLang's routers draw random rooms of 63 bits."""
    key = hashlib.sha256(f"kvferry sglang key\0{source.engine_id}\0{room}".encode()).digest()[:16]
    return router_reference(source.home, source.engine_id, router_key=room_name(room), key=key)


def room_name(room: int) -> str:
    """Return the name of a request for logs: the room itself is as secret as the reference."""
    return "room-" + hashlib.sha256(f"kvferry sglang name\0{room}".encode()).hexdigest()[:16]


def request_name(room: int, rid: str) -> str:
    """Return the name of a request at one side, with that side's request id, which a client may choose."""
    return f"{room_name(room)} {ascii(rid)[1:-1][:MAX_RID]}"


def given_reference(bootstrap_addr: str) -> str:
    """Return the reference that a request has in place of ``bootstrap_host`` if another make of engine prefills it;
    empty: the address names a host."""
    host = bootstrap_addr.rpartition(":")[0]
    return host if host.startswith(REFERENCE) else ""


class KvferryBootstrapServer(ThreadingHTTPServer):
    """The bootstrap server of a prefill instance: an HTTP server on threads of SGLang's first process.

    ``GET /kvferry`` answers engine_id and home, ``GET /health`` whether they are known. Only rank 0, on the same host,
    may put them there.
    """

    daemon_threads = True
    request_queue_size = QUEUE
    source: Source | None = None  # this instance; None: rank 0 has not registered it yet

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        threading.Thread(target=self.serve_forever, name="kvferry-bootstrap", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log with kvferry's logger, for debugging only: a peer that goes away is no problem of SGLang."""
        logger.debug("bootstrap server: a connection has failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    # Ends the thread of a silent peer.
    timeout = 10.0
    server: KvferryBootstrapServer

    def do_GET(self) -> None:
        source = self.server.source
        if self.path.partition("?")[0] not in (PATH, "/health"):
            self._answer(404, {})
        elif source is None:
            self._answer(503, {"error": "rank 0 has not registered yet"})
        else:
            self._answer(200, asdict(source))

    def do_PUT(self) -> None:
        """Take engine_id and home of this instance from rank 0."""
        here = self.connection.getsockname()[0]
        peer = self.client_address[0]
        length = self.headers.get("Content-Length", "")
        if self.path != PATH or not (peer == here or ip_address(peer.partition("%")[0]).is_loopback):
            self._answer(403, {"error": "only this host's rank 0 may register"})
        elif not re.fullmatch("[0-9]{1,4}", length) or (found := _source(self.rfile.read(int(length)))) is None:
            self._answer(400, {"error": "engine_id and home, as JSON strings"})
        else:
            self.server.source = found
            self._answer(200, {})

    def log_message(self, format: str, *args: Any) -> None:
        """Log with kvferry's logger instead of to stderr."""
        logger.debug("bootstrap server: " + format, *args)

    def _answer(self, status: int, said: Mapping[str, str]) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _source(body: bytes) -> Source | None:
    """Decode a source; None for anything of which no reference can be made. The answer is untrusted: it comes from an
    address that a request has named."""
    try:
        found = json.loads(body)
        source = Source(found["engine_id"], found["home"])
        if source.home:
            parse_address(source.home)
        room_reference(source, 1)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, KvferryError):
        return None
    return source


def register_source(url: str, source: Source) -> None:
    """Put this instance into its bootstrap server, on a thread: the server may start later."""
    body = json.dumps(asdict(source)).encode()

    def put() -> None:
        for attempt in range(600):
            try:
                _exchange(urlsplit(url).netloc, "PUT", body)
                return
            except (OSError, HTTPException) as error:
                if attempt % 20 == 19:
                    logger.warning("the bootstrap server at %s does not answer yet: %s", url, error)
                time.sleep(AGAIN)
        logger.error("the bootstrap server at %s does not answer: decode cannot find this instance", url)

    threading.Thread(target=put, name="kvferry-register-source", daemon=True).start()


class Sources:
    """The prefill instances that a decode instance has asked for, by the addresses of their bootstrap servers. Threads
    ask, so that no step waits (R11); they touch none of this state, which belongs to SGLang's scheduler thread."""

    def __init__(self) -> None:
        self._known: dict[str, Source] = {}
        self._asked: dict[str, tuple[Future[Source], float]] = {}
        self._threads = ThreadPoolExecutor(ASKING, "kvferry-sources")

    def get(self, address: str) -> tuple[Source | None, str]:
        """Return the instance, or None and the problem; empty while the question is open."""
        known = self._known.get(address)
        if known is not None:
            return known, ""
        asked, since = self._asked.get(address, (None, 0.0))
        if asked is None:
            if len(self._asked) >= MAX_KNOWN:
                self._asked = {name: each for name, each in self._asked.items() if not each[0].done()}
            if len(self._asked) >= MAX_KNOWN:
                return None, f"{MAX_KNOWN} others are being asked"
            self._asked[address] = (self._threads.submit(_ask, address), time.monotonic())
            return None, ""
        if not asked.done():
            return None, ""
        error = asked.exception()
        if error is None:
            del self._asked[address]
            remember(self._known, address, asked.result(), MAX_KNOWN)
            return asked.result(), ""
        if time.monotonic() - since >= AGAIN:
            del self._asked[address]
        return None, f"{type(error).__name__}: {error}"

    def forget(self, address: str) -> None:
        """Ask for an instance again at the next `get`: another one may serve at the address since a read has failed."""
        self._known.pop(address, None)


def _ask(address: str) -> Source:
    found = _source(_exchange(address, "GET"))
    if found is None:
        raise ValueError(f"{address} is not the bootstrap server of an instance with kvferry's backend")
    return found


def _exchange(address: str, method: str, body: bytes | None = None) -> bytes:
    """Call a bootstrap server, without the environment's proxies: the server is in the cluster."""
    with closing(HTTPConnection(address, timeout=ASK_TIMEOUT)) as connection:
        connection.connect()
        # The connection's own timeout begins again with each byte, and few threads ask.
        ends = threading.Timer(ASK_TIMEOUT, _cut, (connection.sock,))
        ends.daemon = True
        ends.start()
        try:
            connection.request(method, PATH, body)
            answer = connection.getresponse()
            received = answer.read(MAX_BODY)
        finally:
            ends.cancel()
    if answer.status != 200:
        raise ConnectionError(f"HTTP {answer.status} {answer.reason}")
    return received


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
