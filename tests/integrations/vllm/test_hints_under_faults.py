"""500 requests with hints between two ``vllm serve``, while all that they depend on fails in turn: each is answered
with the tokens that an engine computes by itself, none fails, and nothing is left of any."""

from __future__ import annotations

import http.client
import json
import secrets
import signal
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvferry import EngineToken
from kvferry.integrations.vllm.requests import PREFIX_SOURCE
from tests.support.admin_listeners import Scraped
from tests.support.node_servers import NodeServerProcess, free_port
from tests.support.streams import Stream
from tests.support.vllm_engines import ANSWER_TIMEOUT, Server, kvferry, make_model, prompt
from tests.support.vllm_requests import pinned
from tests.support.vllm_versions import MINOR
from tests.support.waiting import until

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(MINOR < 32, reason="not run with this vLLM yet"),
]
REQUESTS = 500
BLOCK = 32
NAME = "model"
"""Each server calls its model so, also the one that has another."""
MEMORY = 6 << 20
"""47 blocks: those of eight beginnings. A source computes so many at once."""
WARM_TIMEOUT = 5.0
"""Seconds for a source to compute a beginning; it may be stopped, or dead."""
SOURCE, ANOTHER_MODEL, NOBODY, ITSELF, BEFORE = "source", "another model", "nobody", "itself", "before its restart"
HINTS = {3: NOBODY, 5: ANOTHER_MODEL, 7: ITSELF, 9: BEFORE}
"""The engines of the hints of every tenth request; of the others the source."""


def beginning(number: int) -> list[int]:
    """The beginning of a request, which a source may have: 4 to 7 blocks."""
    return prompt(number, BLOCK * (4 + number % 4))


def whole(number: int) -> list[int]:
    """A request: its beginning, and an end of its own."""
    return [*beginning(number), *prompt(10000 + number, 1 + number * 7 % 60)]


def body(tokens: list[int], most: int, **more: Any) -> dict[str, Any]:
    return {
        "model": NAME,
        "prompt": tokens,
        "temperature": 0,
        "max_tokens": most,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def said(server: Server, asked: dict[str, Any]) -> list[int]:
    """The tokens of an answer."""
    tokens: list[int] = server.complete(asked)["choices"][0]["token_ids"]
    return tokens


def told(server: Server, tokens: list[int]) -> str:
    """Let a server compute a beginning; return its engine reference."""
    asked = body(tokens, 1, kv_transfer_params={PREFIX_SOURCE: None})
    return str(server.complete(asked, timeout=WARM_TIMEOUT)["kv_transfer_params"][PREFIX_SOURCE])


def leave(server: Server, asked: dict[str, Any], *, halfway: bool) -> None:
    """Ask, and go away: at once, or after the first token."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.url).netloc, timeout=ANSWER_TIMEOUT)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps({**asked, "stream": True}), headers)
        if halfway:
            assert connection.getresponse().readline().startswith(b"data: ")
    finally:
        connection.close()


class Hints:
    """Sends requests with hints to a reader; before each, the hint's engine computes the beginning, if it can.

    `servers` and `references` are of engines by the names of `HINTS`, the reader among them.

    Attributes:
        left: requests that went away, beside those of the stream.
        source_runs: whether the source can compute anything now.
    """

    def __init__(self, servers: dict[str, Server], references: dict[str, str]) -> None:
        self.servers = servers
        self.references = references
        self.left = 0
        self.source_runs = True

    def send(self, number: int) -> list[int]:
        """Send a request of the stream; what was said. Before every seventh another one goes away."""
        reader = self.servers[ITSELF]
        if number % 7 == 0:
            self.left += 1
            leave(reader, self._asked(REQUESTS + number, SOURCE), halfway=bool(number % 2))
        return said(reader, self._asked(number, HINTS.get(number % 10, SOURCE)))

    def _asked(self, number: int, engine: str) -> dict[str, Any]:
        if engine == ANOTHER_MODEL or (engine == SOURCE and self.source_runs):
            with suppress(OSError, http.client.HTTPException):
                self.references[engine] = told(self.servers[engine], beginning(number))
        return body(whole(number), 12, kv_transfer_params={PREFIX_SOURCE: self.references[engine]})


@pytest.fixture
def admin() -> str:
    """The address of the home's metrics."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def home(tmp_path: Path, admin: str) -> Iterator[NodeServerProcess]:
    with NodeServerProcess(tmp_path / "home", tcp=True, ttl=6, max_ttl=6, hold=20, admin=admin) as server:
        yield server


@pytest.fixture
def serve(home: NodeServerProcess, tmp_path: Path) -> Iterator[Callable[[str, Path], Server]]:
    """Start an engine, which has its name in references and its log."""
    with ExitStack() as stack:

        def make(name: str, model: Path) -> Server:
            connector = kvferry("kv_both", home.address, engine_id=name, kv_load_failure_policy="fail")
            # These two cores are not quick.
            connector["kv_connector_extra_config"] |= {"prefix_wait": 2.0, "prefix_share": 0.5}
            more = ["--served-model-name", NAME, "--max-model-len", "512", "--kv-cache-memory-bytes", str(MEMORY)]
            server = Server(model, tmp_path / f"{name}.log", free_port(), connector, *more)
            stack.callback(server.close)
            return server

        yield make


def test_every_answer_is_right_whatever_fails(
    home: NodeServerProcess, admin: str, serve: Callable[[str, Path], Server], tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", kv_heads=4)
    other = make_model(tmp_path / "another", kv_heads=4, layers=2)
    servers = {SOURCE: serve("source", model), ITSELF: serve("reader", model), ANOTHER_MODEL: serve("another", other)}
    references = {name: told(server.ready(), beginning(-1)) for name, server in servers.items()}
    references[BEFORE] = references[SOURCE]
    references[NOBODY] = EngineToken("nobody", secrets.token_bytes(32), home.address).engine_reference
    hints, reader = Hints(servers, references), servers[ITSELF]

    def paused() -> None:
        hints.source_runs = False
        servers[SOURCE].kill(signal.SIGSTOP)
        stream.more(20)
        servers[SOURCE].kill(signal.SIGCONT)
        hints.source_runs = True

    def killed() -> None:
        hints.source_runs = False
        servers[SOURCE].close(signal.SIGKILL)
        servers[SOURCE] = serve("source", model)
        stream.more(30)
        servers[SOURCE].ready()
        hints.source_runs = True

    def home_restarted(how: signal.Signals) -> None:
        home.stop(how)
        stream.more(5)
        home.start()

    faults: list[Callable[[], None]] = [
        lambda: None,
        paused,
        killed,
        lambda: home_restarted(signal.SIGKILL),
        paused,
        lambda: home_restarted(signal.SIGTERM),
        killed,
        lambda: None,
    ]
    with Stream(hints.send, 6) as stream:
        for number, fault in enumerate(faults, 1):
            most = REQUESTS * number // len(faults)
            stream.allow(most)
            stream.more(10)
            fault()
            stream.ended(most)
            # For the table in tests/faults/RESULTS.md: pytest -s.
            print(f"after {most}: {counted(reader)}, {hints.left} left")
    assert stream.failures == {}
    # The salt keeps what was read out of what is computed now.
    asked = {number: body(whole(number), 12, cache_salt="alone") for number in stream.answers}
    with Stream(lambda number: said(reader, asked[number]), 6) as computed:
        computed.allow(REQUESTS)
        computed.ended(REQUESTS)
    assert stream.answers == computed.answers
    # Every question has ended, in a read or in a computed prompt.
    until(lambda: pinned(home) == 0)
    counts = counted(reader)
    ended = sum(counts.values()) - counts["prefixes_asked"]
    assert ended <= counts["prefixes_asked"] <= ended + hints.left
    assert counts["read"] > REQUESTS / 4
    # Nothing is held at any engine, nor at the home.
    for server in servers.values():
        until(partial(holds_nothing, server))
    metrics = Scraped(admin)
    assert (metrics("kvferry_publications"), metrics("kvferry_router_waits")) == (0, 0)


def holds_nothing(server: Server) -> bool:
    """Whether no block of a server is used. It frees what was released when a request comes."""
    said(server, body(prompt(99999, 3), 2))
    return server.metric("vllm:kv_cache_usage_perc") == 0


def counted(reader: Server) -> dict[str, float]:
    names = ("prefixes_asked", "prefixes_missed", "read", "failed", "not_granted", "cancelled")
    return {name: reader.metric(f"vllm:kvferry_{name}_total") for name in names}
