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
from urllib.error import HTTPError

PREFIX_SOURCE = "kvferry_prefix_source"
"""The field of `kv_transfer_params` that names an engine which may have the prompt's beginning in its cache."""

ANSWER_TIMEOUT = 120.0
"""Seconds for an engine's next token."""

REFERENCE_TIMEOUT = 2.0
"""Seconds for an engine's reference, which is asked for while the client waits."""

MOST_MOVES = 4
"""Sessions that move away from an engine at once: it holds a share of its blocks for those who read, and no more."""

MOVES = {
    *("model", "prompt", "stream", "stream_options", "stream_interval", "user", "priority", "request_id", "session_id"),
    *("max_tokens", "min_tokens", "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
    *("stop_token_ids", "allowed_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
    *("add_special_tokens", "return_token_ids", "cache_salt", "kv_transfer_params"),
}
"""Fields of requests whose meaning for the next token follows from the tokens before it, or is changed by `asked`."""

UNUSED = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""Values of other fields that ask for nothing, as null, false and an empty list do. A session with anything else, which
vLLM may answer from more than the tokens, such as stop strings or log-probabilities, stays where it began."""

HALF = "\ufffd"
"""The text of half a character."""

TAIL = 32
"""Tokens that are looked at for the text of a character which lies on both sides of a move."""

Body: TypeAlias = "dict[str, Any]"


def post(url: str, body: Body, timeout: float, path: str = "/v1/completions") -> Any:
    """An engine's response. Raises `OSError` if it refuses."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
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


def text_of(url: str, model: str, tokens: list[int]) -> str:
    """The text of tokens; half a character at their end is U+FFFD. Raises `OSError`."""
    try:
        with post(url, {"model": model, "tokens": tokens}, ANSWER_TIMEOUT, "/detokenize") as response:
            return str(json.load(response)["prompt"])
    except HTTPException as error:
        raise OSError(f"{url} did not answer with text: {error!r}") from error


class NoEngine(Exception):
    """No engine goes on with a request."""


class Session:
    """A request, and what was generated of it."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.model = str(body["model"])
        prompt = body["prompt"]
        # Several prompts are several sequences of tokens.
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        others = (
            value is False or value in (None, [], UNUSED.get(name)) for name, value in body.items() if name not in MOVES
        )
        # vLLM takes a number in quotes, too.
        numbers = (isinstance(body.get(name), int | None) for name in ("max_tokens", "min_tokens", "seed"))
        self.movable = not several and all(others) and all(numbers)
        self.finished = False
        self.generated: list[int] = []
        self._prompt: list[int] = []
        self._id: str | None = None
        self._moved_at = 0
        """Number of generated tokens in the prompt of the engine that is asked."""
        self._text_checked = False

    @property
    def started(self) -> bool:
        """Whether the client has a part of the answer."""
        return self._id is not None

    def asked(self, source: str | None) -> Body:
        """What an engine is asked; `source` is the engine reference of the one that has generated."""
        # References come from this router alone.
        asked = {**self.body, "stream": True, "return_token_ids": True, "kv_transfer_params": {PREFIX_SOURCE: source}}
        self._moved_at = done = len(self.generated)
        self._text_checked = not done
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

    def take(self, url: str, chunk: Body) -> bool:
        """Note what a chunk of an engine adds, and make it one of the whole session's; return whether its engine goes
        on. Raises `OSError`."""
        reads_tokens, goes_on = bool(self.body.get("return_token_ids")), True
        for choice in chunk["choices"]:
            tokens, prompt = choice["token_ids"], choice.get("prompt_token_ids")
            if choice["text"] and not self._text_checked:
                choice["text"], self._text_checked = self._text(url, choice), True
            if not self.started:
                self._prompt = prompt or []
            if prompt and self._moved_at:
                # The client has them.
                choice["prompt_token_ids"] = None
            if not reads_tokens:
                choice.pop("prompt_token_ids", None)
                del choice["token_ids"]
            self.generated += tokens
            if choice["finish_reason"] == "abort":
                # Not the end of the answer. The chunk may have tokens.
                choice["finish_reason"], goes_on = None, False
            self.finished = choice["finish_reason"] is not None
        self._id = chunk["id"] = self._id or chunk["id"]
        if chunk.get("usage") and self._moved_at:
            before, done = len(self._prompt), len(self.generated)
            chunk["usage"] = {"prompt_tokens": before, "completion_tokens": done, "total_tokens": before + done}
        return goes_on

    def _text(self, url: str, choice: Body) -> str:
        """The text of the first choice with text after a move. If its prompt ends in the middle of a character, vLLM
        says the whole prompt's text again, or loses the character."""
        tokens = [*self._prompt, *self.generated[: self._moved_at]][-TAIL:]
        told = text_of(url, self.model, tokens)
        if not told.endswith(HALF):
            return str(choice["text"])
        # Of a token that ends the answer, there is no text.
        added = choice["token_ids"][: -1 if choice["finish_reason"] == "stop" else None]
        now = text_of(url, self.model, [*tokens, *self.generated[self._moved_at :], *added])
        return now[len(told.rstrip(HALF)) :].rstrip(HALF)


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
        """The chunks of a request's answer. Raises `NoEngine`; `ValueError`: an engine says that it is not valid."""
        session, source, moves_from = Session(body), None, ""
        tried, failure = set[str](), Exception("there is none")
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
                            goes_on = session.take(engine, chunk)
                            yield chunk
                            if not goes_on:
                                raise OSError(f"{engine} has aborted a request")
                            if not stays and self._begin_move(engine, session):
                                moves_from = engine
                                break
                except (OSError, LookupError, TypeError, ValueError) as error:
                    # It does not answer, or not as vLLM does.
                    failure = error
                    if isinstance(error, HTTPError) and error.code == 400 and not session.started:
                        raise ValueError(error.read().decode(errors="replace")) from error
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
                self.send_error(400, explain=repr(error))
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
                    self.send_error(502, explain=str(error))
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
