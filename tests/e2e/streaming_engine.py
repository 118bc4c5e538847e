"""An engine of whose answers vLLM's streams are made: the next token is a function of all tokens before it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SOURCE = "kvferry_prefix_source"
ALL = 10_000
PATIENCE = 30.0
"""Seconds for which a stream waits for its next token."""


def following(tokens: Sequence[int], count: int) -> list[int]:
    """The next tokens of a sequence."""
    found = list(tokens)
    for _ in range(count):
        found.append((7 * sum(found) + len(found)) % 997)
    return found[len(tokens) :]


def text_of(tokens: Sequence[int], generated: int) -> str:
    """The text that the last of so many generated tokens ends: two tokens are a character."""
    return "" if len(tokens) % 2 else f"<{','.join(map(str, tokens[-min(2, generated) :]))}>"


class StreamingEngine:
    """An HTTP server that streams completions.

    Attributes:
        url: where it is.
        reference: its engine reference; None: it gives none.
        asked: the bodies of the streams that it was asked for.
        ends: how its streams end instead, after a number of tokens: "abort", "error", "break"; "refuse": none begins.
        closed: how many streams their clients have cut.
    """

    def __init__(self, *, turns: int = ALL, ends: tuple[str, int] | None = None) -> None:
        """`turns`: how many tokens each stream says before `go`."""
        self.asked: list[dict[str, Any]] = []
        self._turns, self._going = turns, threading.Condition()
        self.ends = ends
        self.closed = threading.Semaphore(0)
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if body.get("stream"):
                    engine.asked.append(body)
                how, count = engine.ends or ("", 0)
                self.send_response(503 if how == "refuse" else 200)
                self.end_headers()
                if how == "refuse":
                    return
                if not body.get("stream"):
                    self.wfile.write(json.dumps({"kv_transfer_params": {SOURCE: engine.reference}}).encode())
                    return
                try:
                    for chunk in engine.chunks(body, how, count):
                        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                    if how != "break":
                        self.wfile.write(b"data: [DONE]\n\n")
                except OSError:
                    engine.closed.release()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.reference: str | None = f"kvf1e.{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.02])
        self._thread.start()

    def chunks(self, body: dict[str, Any], how: str, count: int) -> Iterator[dict[str, Any]]:
        """The stream of a request, which ends otherwise after `count` tokens if `how` says so."""
        prompt, most = body["prompt"], body["max_tokens"]
        if isinstance(prompt[0], list):
            prompt = prompt[0]
        said = following(prompt, most)
        for index, token in enumerate(said):
            self._wait_for(index)
            last = index + 1 == (count if how else most)
            finish = "length" if last and not how else "abort" if last and how == "abort" else None
            choice = {
                "index": 0,
                "text": text_of([*prompt, *said[: index + 1]], index + 1),
                "token_ids": [token],
                "finish_reason": finish,
                "prompt_token_ids": None if index else prompt,
            }
            yield {"id": f"{self.url}-{len(self.asked)}", "choices": [choice]}
            if last and how == "error":
                yield {"error": {"message": "it has failed"}}
            if last:
                break
        yield {"id": "usage", "choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": most}}

    def go(self, turns: int = ALL) -> None:
        """Let each stream say so many tokens more."""
        with self._going:
            self._turns += turns
            self._going.notify_all()

    def _wait_for(self, index: int) -> None:
        with self._going:
            assert self._going.wait_for(lambda: index < self._turns, PATIENCE)

    def close(self) -> None:
        """End it, and its streams."""
        self.go()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
