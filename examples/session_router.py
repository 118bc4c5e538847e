"""A router that moves sessions: an engine can be emptied before it is stopped, and its streams go on at others.

    python examples/session_router.py PORT ENGINE_URL,ENGINE_URL[,...]

It streams the answer to each POST to /v1/completions from one vLLM. A POST to /empty with an engine's URL sends nothing
more there and moves its sessions away; its answer ends, with "empty", when none is left. /fill takes it in again.

A session also goes on elsewhere if its engine ends it (`finish_reason` "abort"), fails, or cannot be reached any more.
The next engine gets the prompt and what was generated, as token ids, and the engine reference of the one before: it
reads their KV cache there, and computes what it cannot read.
"""

from __future__ import annotations

import argparse
import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

PREFIX_SOURCE = "kvferry_prefix_source"
"""The field of `kv_transfer_params` that names an engine which may have the prompt's beginning in its cache."""

ANSWER_TIMEOUT = 120.0
"""Seconds for an engine's next token."""

REFERENCE_TIMEOUT = 2.0
"""Seconds for an engine's reference, which is asked for while the client waits."""

MOST_MOVES = 4
"""Sessions that move away from an engine at once: it holds a share of its blocks for those who read, and no more."""

STAYS = ("echo", "stop", "response_format", "structured_outputs", "presence_penalty", "frequency_penalty", "logprobs")
"""Fields of requests that vLLM answers from more than the tokens. Their sessions stay where they began."""

Body: TypeAlias = "dict[str, Any]"


def post(url: str, body: Body, timeout: float) -> Any:
    """An engine's response. Raises `OSError` if it refuses."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=timeout)


def chunks(url: str, body: Body) -> Generator[Body, None, None]:
    """The chunks of an engine's stream; the engine aborts the request when they are closed. Raises `OSError` if it
    refuses, or the stream does not come to its end."""
    try:
        with post(url, body, ANSWER_TIMEOUT) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data:
                    chunk = dict(json.loads(data))
                    if "error" in chunk:
                        break
                    yield chunk
    except (HTTPException, ValueError) as error:
        raise OSError(f"{url} did not answer with a stream: {error!r}") from error
    raise OSError(f"{url} ended a stream before its end")


def reference_of(url: str, model: str) -> str | None:
    """The engine reference of an engine, which answers a request with it; None: it gives none, or does not answer."""
    body = {"model": model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {PREFIX_SOURCE: None}}
    try:
        with post(url, body, REFERENCE_TIMEOUT) as response:
            params = json.load(response).get("kv_transfer_params") or {}
    except (OSError, HTTPException, ValueError):
        return None
    found: str | None = params.get(PREFIX_SOURCE)
    return found


class NoEngine(Exception):
    """No engine goes on with a request."""


class Session:
    """A request, and what was generated of it."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.model = str(body["model"])
        prompt = body["prompt"]
        # Several prompts, or samples of one, are several sequences of tokens.
        several = body.get("n") not in (None, 1) or (isinstance(prompt, list) and not isinstance(prompt[0], int))
        self.movable = not several and not any(body.get(name) for name in STAYS)
        self.finished = False
        self.generated: list[int] = []
        self._prompt: list[int] = []
        self._id: str | None = None
        self._untold: list[int] = []
        """The last tokens, of whose text the client has nothing yet: half a character. They are generated again."""

    @property
    def started(self) -> bool:
        """Whether the client has a part of the answer."""
        return self._id is not None

    def asked(self, source: str | None) -> Body:
        """What an engine is asked; `source` is the engine reference of the one that has generated."""
        # References come from this router alone.
        asked = {**self.body, "stream": True, "return_token_ids": True, "kv_transfer_params": {PREFIX_SOURCE: source}}
        self._untold = []
        done = len(self.generated)
        if done:
            asked["prompt"] = [*self._prompt, *self.generated]
            # vLLM's own default is 16; null is up to the model's length.
            if (most := self.body.get("max_tokens", 16)) is not None:
                asked["max_tokens"] = most - done
            asked["min_tokens"] = max(0, (self.body.get("min_tokens") or 0) - done)
            if self.body.get("seed") is not None:
                # With the same seed, vLLM would draw the numbers again that it has drawn for the first tokens.
                asked["seed"] = self.body["seed"] + done
        return asked

    def take(self, chunk: Body) -> bool:
        """Note what a chunk adds, and make it one of the whole session's; return whether its engine goes on."""
        reads_tokens, goes_on = bool(self.body.get("return_token_ids")), True
        for choice in chunk["choices"]:
            prompt = choice.pop("prompt_token_ids", None)
            if not self.started:
                self._prompt = prompt or []
            if prompt and reads_tokens:
                choice["prompt_token_ids"] = self._prompt
            self._untold += choice["token_ids"] if reads_tokens else choice.pop("token_ids")
            if choice["text"] or reads_tokens:
                self.generated += self._untold
                self._untold = []
            if choice["finish_reason"] == "abort":
                # Not the end of the answer. The chunk may have tokens.
                choice["finish_reason"], goes_on = None, False
            self.finished = choice["finish_reason"] is not None
        self._id = chunk["id"] = self._id or chunk["id"]
        if usage := chunk.get("usage"):
            done = len(self.generated) + len(self._untold)
            usage |= {"prompt_tokens": len(self._prompt), "completion_tokens": done}
            usage["total_tokens"] = len(self._prompt) + done
        return goes_on


class Router:
    """Sends each session to an engine, in turn, and moves it if it has to. Thread-safe."""

    def __init__(self, engines: Sequence[str]) -> None:
        self._engines = list(engines)
        self._changed = threading.Condition()
        self._emptied: set[str] = set()
        self._streams, self._moves = Counter[str](), Counter[str]()

    def empty(self, engine: str) -> None:
        """Send nothing more to an engine, and move its sessions away, from now on. Raises `ValueError` if it is none of
        this router's."""
        if engine not in self._engines:
            raise ValueError(f"{engine} is none of {self._engines}")
        with self._changed:
            self._emptied.add(engine)

    def fill(self, engine: str) -> None:
        """Send sessions to an engine again."""
        with self._changed:
            self._emptied.discard(engine)

    def wait_until_empty(self, engine: str) -> None:
        """Wait until an engine has no session, and none that moves away reads from it any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._streams[engine] + self._moves[engine])

    def stream(self, body: Body) -> Generator[Body, None, None]:
        """The chunks of a request's answer. Raises `NoEngine`."""
        session, source, moves_from = Session(body), None, ""
        tried, failure = set[str](), OSError("there is none")
        try:
            while not session.finished:
                engine, stays = self._begin(session, tried)
                if engine is None:
                    raise NoEngine(f"no engine goes on: {failure}") from failure
                had = len(session.generated)
                tried.add(engine)
                try:
                    with closing(chunks(engine, session.asked(source))) as answer:
                        for chunk in answer:
                            # Its first token says that it has read what it could.
                            moves_from = self._end_move(moves_from)
                            goes_on = session.take(chunk)
                            yield chunk
                            if not goes_on:
                                raise OSError(f"{engine} has aborted a request")
                            if not stays and self._begin_move(engine, session):
                                moves_from = engine
                                break
                except OSError as error:
                    failure = error
                    if session.started and not session.movable:
                        raise NoEngine(f"a session that does not move has ended: {error}") from error
                finally:
                    self._end(engine)
                if len(session.generated) > had and not session.finished:
                    # If no other engine takes it, it goes back to one that still works.
                    tried = set() if moves_from else {engine}
                    source = reference_of(engine, session.model) or source
        finally:
            self._end_move(moves_from)

    # Internal.

    def _begin(self, session: Session, tried: set[str]) -> tuple[str | None, bool]:
        """Count a session at the engine with the fewest of those that were not tried; None: there is none. And whether
        that one is being emptied, which is better than to end a session."""
        with self._changed:
            free = [each for each in self._engines if each not in tried]
            if not session.started:
                free = [each for each in free if each not in self._emptied]
            engine = min(free, key=lambda each: (each in self._emptied, self._streams[each]), default=None)
            if engine is not None:
                self._streams[engine] += 1
            return engine, engine in self._emptied

    def _end(self, engine: str) -> None:
        with self._changed:
            self._streams[engine] -= 1
            self._changed.notify_all()

    def _begin_move(self, engine: str, session: Session) -> bool:
        """Whether a session of an engine moves away now; `_end_move` follows."""
        if session.finished or not session.movable:
            return False
        with self._changed:
            others = not self._emptied.issuperset(self._engines)
            moves = engine in self._emptied and others and self._moves[engine] < MOST_MOVES
            self._moves[engine] += moves
            return moves

    def _end_move(self, engine: str) -> str:
        if engine:
            with self._changed:
                self._moves[engine] -= 1
                self._changed.notify_all()
        return ""


def serve(port: int, router: Router) -> None:
    """Answer every POST, for ever."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            try:
                if self.path in ("/empty", "/fill"):
                    self._operate(body.decode())
                    return
                with closing(router.stream(dict(json.loads(body)))) as answer:
                    self._answer(answer)
            except (LookupError, ValueError, TypeError) as error:
                self.send_error(400, repr(error))
            except OSError:
                # The client has gone: with the stream, its request ends.
                self.close_connection = True

        def _operate(self, engine: str) -> None:
            empties = self.path == "/empty"
            (router.empty if empties else router.fill)(engine)
            self._begin("text/plain")
            if empties:
                router.wait_until_empty(engine)
                self.wfile.write(b"empty\n")

        def _answer(self, answer: Iterator[Body]) -> None:
            begun = False
            try:
                for chunk in answer:
                    if not begun:
                        self._begin("text/event-stream")
                        begun = True
                    self._say(json.dumps(chunk))
            except NoEngine as error:
                if not begun:
                    self.send_error(502, str(error))
                    return
                self._say(json.dumps({"error": {"message": str(error), "type": "ServiceUnavailable", "code": 502}}))
            self._say("[DONE]")

        def _begin(self, kind: str) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()

        def _say(self, data: str) -> None:
            self.wfile.write(f"data: {data}\n\n".encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        print("listening", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("engines", type=lambda text: text.split(","))
    given = parser.parse_args()
    serve(given.port, Router(given.engines))
