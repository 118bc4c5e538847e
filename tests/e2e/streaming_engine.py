"""An engine of whose answers vLLM's streams are made: the next token is a function of all tokens before it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SOURCE = "kvferry_prefix_source"
ALL = 10_000
HALF = "\ufffd"
"""The text of half a character."""
PATIENCE = 30.0
"""Seconds for which a stream waits for its next token."""


def following(tokens: Sequence[int], count: int) -> list[int]:
    """The next tokens of a sequence."""
    found = list(tokens)
    for _ in range(count):
        found.append((7 * sum(found) + len(found)) % 997)
    return found[len(tokens) :]


def text_of(tokens: Sequence[int]) -> str:
    """The text of tokens: an odd one ends a character, and an even one begins one."""
    text, half = "", ""
    for token in tokens:
        if token % 2:
            text, half = f"{text}<{half}{token}>", ""
        else:
            text, half = text + (HALF if half else ""), f"{token},"
    return text + (HALF if half else "")


class Text:
    """What vLLM's detokenizer says (`DecodeStream` of the tokenizers package, which is given the prompt)."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = list(prompt)
        # The text of a prompt that ends in the middle of a character is said with the rest of that.
        self._said = "" if text_of(prompt).endswith(HALF) else text_of(prompt)

    def of(self, token: int) -> str:
        self._tokens.append(token)
        text = text_of(self._tokens)
        if text.endswith(HALF):
            return ""
        said, self._said = self._said, text
        return text.removeprefix(said)


class StreamingEngine:
    """An HTTP server that streams completions.

    Attributes:
        url: where it is.
        reference: its engine reference; None: it gives none.
        asked: the bodies of the streams that it was asked for.
        ends: how its streams end instead, after a number of tokens: "abort", "error", "break", "nonsense"; "refuse" and
            "invalid": none begins.
        closed: how many streams their clients have cut.
    """

    def __init__(self, *, turns: int = ALL, ends: tuple[str, int] | None = None, tokens: int = 1) -> None:
        """`turns`: how many tokens each stream says before `go`; `tokens`: how many there are in a chunk."""
        self.asked: list[dict[str, Any]] = []
        self.tokens = tokens
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
                if self.path == "/detokenize":
                    how = ""
                refused = {"refuse": 503, "invalid": 400}.get(how)
                self.send_response(refused or 200)
                self.end_headers()
                if refused:
                    return
                if self.path == "/detokenize":
                    self.wfile.write(json.dumps({"prompt": text_of(body["tokens"])}).encode())
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
        prompts, most = body["prompt"], body["max_tokens"]
        if not isinstance(prompts[0], list):
            prompts = [prompts]
        for index, prompt in enumerate(prompts):
            said, text = following(prompt, most), Text(prompt)
            end = min(count, most) if how else most
            for first in range(0, end, self.tokens):
                chunk = said[first : min(end, first + self.tokens)]
                self._wait_for(first + len(chunk) - 1)
                last = first + self.tokens >= end
                choice = {
                    "index": index,
                    "text": "".join(map(text.of, chunk)),
                    "token_ids": chunk,
                    "finish_reason": ("abort" if how == "abort" else None if how else "length") if last else None,
                    "prompt_token_ids": None if first else prompt,
                }
                yield {"id": f"{self.url}-{len(self.asked)}", "choices": [choice]}
            if how == "error":
                yield {"error": {"message": "it has failed"}}
            if how == "nonsense":
                yield {"choices": [{"text": None}]}
        before, done = sum(map(len, prompts)), most * len(prompts)
        usage = {"prompt_tokens": before, "completion_tokens": done, "prompt_tokens_details": {"cached_tokens": before}}
        yield {"id": "usage", "choices": [], "usage": usage}

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
