"""A router that asks prefill and decode at once: it makes the reference itself, so that decode's request needs no
answer of prefill. Decode asks the node server for the blocks while prefill still computes, and waits there.

Each attempt has a reference of its own. If prefill refuses, the reference is declined: decode hears it at once, and the
request goes to the next prefill engine under a new one. If no decode engine takes the request, it is declined as well.

    python examples/dispatch_router.py PORT PREFILL[,...] DECODE_URL[,...] NODE_SERVER

PREFILL is URL#ENGINE_ID@HOME: where its HTTP server is, its engine_id, and the address of the node server that is its
home, as other hosts reach it. DECODE_URL is the URL of a vLLM, or sglang+URL of an SGLang.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias, TypeVar

import kvferry

ANSWER_TIMEOUT = 120.0
"""Seconds for one engine's answer."""

SGLANG = "sglang+"

Body: TypeAlias = "dict[str, Any]"
T = TypeVar("T")


@dataclass(frozen=True)
class Prefill:
    """A prefill engine: its HTTP server, and what a reference says of it."""

    url: str
    engine_id: str
    home: str

    @classmethod
    def of(cls, text: str) -> Prefill:
        """Parse URL#ENGINE_ID@HOME."""
        url, _, engine = text.partition("#")
        engine_id, _, home = engine.rpartition("@")
        if not (url and engine_id and home):
            raise argparse.ArgumentTypeError(f"{text} is not URL#ENGINE_ID@HOME")
        return cls(url, engine_id, home)


def ask(url: str, body: Body) -> Body:
    """An engine's answer. Raises `OSError` if it refuses, or answers something else."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT) as response:
            found: Body = json.load(response)
            return found
    except (HTTPException, ValueError) as error:
        raise OSError(f"{url} did not answer with JSON: {error!r}") from error


def to_decode(body: Body, url: str, reference: str) -> tuple[str, Body]:
    """Where a decode engine is asked, and what: each make has a field of its own for the reference."""
    if url.startswith(SGLANG):
        # In the place of a prefill instance of its own make. A room names one attempt, as a reference does.
        room = 1 + secrets.randbits(62)
        fields = {"bootstrap_host": reference, "bootstrap_port": 1, "bootstrap_room": room}
        return url.removeprefix(SGLANG), {**body, "stream": False, **fields}
    params = {"do_remote_decode": False, "do_remote_prefill": True, "kvferry_reference": reference}
    return url, {**body, "stream": False, "kv_transfer_params": params}


def first_of(urls: Sequence[str], body: Body, reference: str) -> Body:
    """The first answer of those decode engines that take it. Raises `OSError` if none does."""
    failure = OSError("there is no engine")
    for url in urls:
        try:
            return ask(*to_decode(body, url, reference))
        except OSError as error:
            failure = error
    raise failure


class Router:
    """Sends each request to one engine of each kind, in turn. Thread-safe."""

    def __init__(self, client: kvferry.Client, prefill: Sequence[Prefill], decode: Sequence[str]) -> None:
        self._client = client
        self._prefill, self._decode = prefill, decode
        self._turn = itertools.count()
        self._calls = ThreadPoolExecutor(64)

    def complete(self, body: Body) -> Body:
        """A request's answer. Raises `OSError` if no engine takes it."""
        turn = next(self._turn)
        failure = OSError("there is no engine")
        for source in rotated(self._prefill, turn):
            answer, failure, again = self._attempt(source, body, turn)
            if answer is not None:
                return answer
            if not again:
                break
        raise failure

    def _attempt(self, source: Prefill, body: Body, turn: int) -> tuple[Body | None, OSError, bool]:
        """One prefill engine and one decode engine, at once. Returns the answer; else the error, and whether another
        prefill engine may do."""
        reference = kvferry.router_reference(source.home, source.engine_id)
        here = {"do_remote_decode": True, "do_remote_prefill": False, "kvferry_reference": reference}
        first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": here}
        prefilled = self._calls.submit(ask, source.url, first)
        # Decode would wait for its time: tell it as soon as prefill has refused.
        prefilled.add_done_callback(partial(self._prefilled, reference))
        try:
            urls = tuple(rotated(self._decode, turn))
            return first_of(urls, body, reference), OSError(), False
        except OSError as error:
            self._decline(reference)
            # If it has not refused by now, it is not why decode has no answer.
            refusal = prefilled.exception() if prefilled.done() else None
            return None, refusal if isinstance(refusal, OSError) else error, refusal is not None

    def _prefilled(self, reference: str, answer: Future[Body]) -> None:
        if answer.exception() is not None:
            self._decline(reference)

    def _decline(self, reference: str) -> None:
        """Nobody will read it, or nobody will publish it: whoever waits for it need not any more."""
        try:
            self._client.decline(reference)
        except kvferry.KvferryError as error:
            # Waits and holds end by their time all the same.
            print(f"decline: {error}", file=sys.stderr)


def rotated(engines: Sequence[T], turn: int) -> Iterator[T]:
    """All engines, beginning with another one at each turn."""
    return (engines[(turn + index) % len(engines)] for index in range(len(engines)))


def serve(port: int, router: Router) -> None:
    """Answer every POST, for ever."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                body = dict(json.loads(self.rfile.read(int(self.headers.get("content-length", 0)))))
                status, answer = 200, json.dumps(router.complete(body))
            except (OSError, ValueError, TypeError) as error:
                status, answer = 502, str(error)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing: a reference is a secret."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        print("listening", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("prefill", type=lambda text: [Prefill.of(one) for one in text.split(",")])
    parser.add_argument("decode", type=lambda text: text.split(","))
    parser.add_argument("node_server")
    given = parser.parse_args()
    # It declines at any home in a reference that it made itself.
    homes = [one.home for one in given.prefill]
    with kvferry.Client(given.node_server, allowed_homes=homes) as client:
        serve(given.port, Router(client, given.prefill, given.decode))
