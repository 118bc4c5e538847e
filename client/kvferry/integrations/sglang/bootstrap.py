"""How decode learns who a prefill instance is: the instance's bootstrap server says its engine_id and its home.

A request names prefill by ``bootstrap_host`` and ``bootstrap_port``, as SGLang's routers write them, and itself by
``bootstrap_room``. From these both sides make the same reference, without talking about the request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvferry import parse_address, router_reference
from kvferry.errors import KvferryError

logger = logging.getLogger(__name__)

PATH = "/kvferry"
ASK_TIMEOUT = 5.0
"""Seconds for one question; as long again until it is connected."""
AGAIN = 0.5
"""Seconds until a question that failed is repeated."""
REFERENCE = "kvf1."
"""What references begin with."""
MAX_BODY = 4096
MAX_RID = 128
"""Characters of SGLang's id of a request that are shown."""
MAX_DIGITS = 10
MAX_CONNECTIONS = 64
"""Connections to a bootstrap server, each of which has a thread; a further one ends the oldest."""
MAX_KNOWN = 4096
"""Prefill instances that are remembered, and addresses that are being asked: requests name them."""
ASKING = 16
"""Questions at once: some addresses may answer nothing."""


@dataclass(frozen=True, slots=True)
class Source:
    """A prefill instance.

    Attributes:
        engine_id: its engine_id.
        home: address of its home.
    """

    engine_id: str
    home: str


def room_is_usable(room: int | None) -> bool:
    """Return whether SGLang can hand over a request's room: a larger one ends its scheduler, and 0 is none to it."""
    return room is not None and 0 < room < 1 << 63


def room_reference(source: Source, room: int) -> str:
    """Return the reference of a request, which prefill publishes with and decode reads with.

    It is as secret as the room: who knows the room, and who the source is, can make it. SGLang's routers draw rooms at
    random, of 63 bits.
    """
    key = hashlib.sha256(f"kvferry sglang key\0{source.engine_id}\0{room}".encode()).digest()[:16]
    return router_reference(source.home, source.engine_id, router_key=room_name(room), key=key)


def room_name(room: int) -> str:
    """Return the name of a request, which may be logged: the room itself is as good as the reference."""
    return "room-" + hashlib.sha256(f"kvferry sglang name\0{room}".encode()).hexdigest()[:16]


def request_name(room: int, rid: str) -> str:
    """Return the name of a request at one of its sides, with the id that it has there, which a client may choose."""
    return f"{room_name(room)} {ascii(rid)[1:-1][:MAX_RID]}"


class Given(NamedTuple):
    """What a request carries in place of a ``bootstrap_host`` if another make of engine prefills it.

    Attributes:
        reference: reference of the publication.
        first_token: the token that prefill has sampled; None: the publication's payload says it.
    """

    reference: str
    first_token: int | None


def given_reference(bootstrap_addr: str) -> Given | None:
    """Return what an address holds that is a reference, or a reference, ``+`` and the first token; None: it names a
    host."""
    host = bootstrap_addr.rpartition(":")[0]
    if not host.startswith(REFERENCE):
        return None
    reference, _, token = host.partition("+")
    return Given(reference, int(token) if token.isdecimal() and len(token) <= MAX_DIGITS else None)


class KvferryBootstrapServer(ThreadingHTTPServer):
    """The bootstrap server of a prefill instance: an HTTP server on threads of SGLang's first process.

    ``GET /kvferry`` answers engine_id and home, ``GET /health`` whether they are known. Rank 0, on the same host, puts
    them there; nobody else may.

    Attributes:
        source: this instance, once rank 0 has registered it.
    """

    daemon_threads = True
    # Each decode instance asks, all at once after a restart.
    request_queue_size = MAX_CONNECTIONS
    source: Source | None = None

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._lock = threading.Lock()
        self._connections: dict[Any, None] = {}
        super().__init__((host, port), _Handler)
        threading.Thread(target=self.serve_forever, name="kvferry-bootstrap", daemon=True).start()

    @property
    def port(self) -> int:
        """The port that it serves at."""
        return int(self.server_address[1])

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own; of slow peers, the oldest gives way."""
        with self._lock:
            self._connections[request] = None
            if len(self._connections) > MAX_CONNECTIONS:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                _cut(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log as the rest does: peers that go away are nothing that SGLang's log must show."""
        logger.debug("bootstrap server: a connection has failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    # Ends the thread of a peer that says nothing.
    timeout = 10.0
    server: KvferryBootstrapServer

    def do_GET(self) -> None:
        """Say who this instance is."""
        source = self.server.source
        if self.path.partition("?")[0] not in (PATH, "/health"):
            self._answer(404, {})
        elif source is None:
            self._answer(503, {"error": "rank 0 has not registered yet"})
        else:
            self._answer(200, asdict(source))

    def do_PUT(self) -> None:
        """Take from rank 0 who this instance is."""
        here = self.connection.getsockname()[0]
        peer = self.client_address[0]
        length = self.headers.get("Content-Length", "")
        if self.path != PATH or not (peer == here or ip_address(peer.partition("%")[0]).is_loopback):
            self._answer(403, {"error": "only this host's rank 0 may register"})
        elif not _is_length(length) or (found := _source(self.rfile.read(int(length)))) is None:
            self._answer(400, {"error": "engine_id and home, as JSON strings"})
        else:
            self.server.source = found
            self._answer(200, {})

    def log_message(self, format: str, *args: Any) -> None:
        """Log as the rest does, and not to stderr."""
        logger.debug("bootstrap server: " + format, *args)

    def _answer(self, status: int, said: Mapping[str, str]) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _is_length(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_DIGITS and int(text) <= MAX_BODY


def _source(body: bytes) -> Source | None:
    """Decode a source of which references can be made; None for anything else. Requests name who answers this."""
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
    """Tell the bootstrap server of this instance who it is, on a thread: it starts when it starts."""
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
    """The prefill instances that a decode instance has asked for, by the address of their bootstrap servers.

    Asking happens on threads, so that no step waits (R11).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Source] = {}
        self._asked: dict[str, tuple[Future[Source], float]] = {}
        self._threads = ThreadPoolExecutor(ASKING, "kvferry-sources")

    def get(self, address: str) -> tuple[Source | None, str]:
        """Return the instance, or None and why it is not known yet: empty while the answer is awaited."""
        with self._lock:
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
                if len(self._known) >= MAX_KNOWN:
                    del self._known[next(iter(self._known))]
                self._known[address] = asked.result()
                return self._known[address], ""
            if time.monotonic() - since >= AGAIN:
                del self._asked[address]
            return None, f"{type(error).__name__}: {error}"

    def forget(self, address: str) -> None:
        """Ask again for an instance: a read from it has failed, and another may serve at its address now."""
        with self._lock:
            self._known.pop(address, None)


def _ask(address: str) -> Source:
    found = _source(_exchange(address, "GET"))
    if found is None:
        raise ValueError(f"{address} is not the bootstrap server of an instance with kvferry's backend")
    return found


def _exchange(address: str, method: str, body: bytes | None = None) -> bytes:
    """Call a bootstrap server. It is in the cluster: the environment's proxies are not used."""
    connection = HTTPConnection(address, timeout=ASK_TIMEOUT)
    connection.connect()
    # The timeout of the connection begins again with each byte.
    ends = threading.Timer(ASK_TIMEOUT, _cut, (connection.sock,))
    ends.daemon = True
    ends.start()
    try:
        connection.request(method, PATH, body)
        answer = connection.getresponse()
        received = answer.read(MAX_BODY)
    finally:
        ends.cancel()
        connection.close()
    if answer.status != 200:
        raise ConnectionError(f"HTTP {answer.status} {answer.reason}")
    return received


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
