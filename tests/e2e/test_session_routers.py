"""The routers of the examples that move sessions: their clients see one stream, whatever engines it comes from."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.streaming_engine import HALF, SOURCE, StreamingEngine, following, text_of
from tests.support.node_servers import free_port
from tests.support.repository import ROOT
from tests.support.waiting import until

PROMPT = [3, 1, 4, 1]
ASKED: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 12, "return_token_ids": True}
MOST_MOVES = 4


class Stream:
    """A stream of a router, as its client reads it."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self._response = urllib.request.urlopen(f"{url}/v1/completions", json.dumps(body).encode(), timeout=60)
        self.chunks: list[dict[str, Any]] = []
        self.ended = False

    def read(self, tokens: int = 1_000_000) -> Stream:
        """Read so many tokens more, at most to the end."""
        while tokens and (line := self._response.readline()):
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                self.ended = True
            elif data:
                self.chunks.append(json.loads(data))
                tokens -= bool(self.chunks[-1].get("choices"))
        return self

    def said(self, name: str) -> list[Any]:
        """What the chunks have in a field of their choices."""
        return [choice[name] for chunk in self.chunks for choice in chunk["choices"]]

    @property
    def tokens(self) -> list[int]:
        return [token for tokens in self.said("token_ids") for token in tokens]

    def close(self) -> None:
        self._response.close()


class Router:
    """A router of the examples, of some engines."""

    def __init__(self, command: list[str], engines: list[StreamingEngine]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [*command, str(port), ",".join(each.url for each in engines)], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"listening\n"
        self._calls = ThreadPoolExecutor(8)

    def stream(self, **body: Any) -> Stream:
        """Begin a stream."""
        return Stream(self.url, {**ASKED, **body})

    def fill(self, engine: StreamingEngine) -> None:
        urllib.request.urlopen(f"{self.url}/fill", engine.url.encode(), timeout=60).close()

    def empty(self, url: str) -> Future[bytes]:
        """Begin to empty an engine, and return what the router says when it is empty."""
        response = urllib.request.urlopen(f"{self.url}/empty", url.encode(), timeout=60)

        def rest() -> bytes:
            with response:
                return bytes(response.read())

        return self._calls.submit(rest)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._calls.shutdown()
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture(params=["session_router.py", pytest.param("sessions.ts", marks=pytest.mark.slow)])
def router(request: pytest.FixtureRequest) -> Iterator[Callable[..., Router]]:
    """Start a router of some engines, in each language."""
    if request.param.endswith(".py"):
        command = [sys.executable, str(ROOT / "examples" / request.param)]
    else:
        compiled: Path = request.getfixturevalue("compiled")
        command = ["node", str(compiled / "sessions.js")]
    made: list[Any] = []

    def make(*engines: StreamingEngine) -> Router:
        made.extend(engines)
        started = Router(command, list(engines))
        made.append(started)
        return started

    yield make
    for each in reversed(made):
        each.close()


def test_emptied_engine_gives_its_sessions_to_another_one(router: Callable[..., Router]) -> None:
    first, second = StreamingEngine(turns=3), StreamingEngine(turns=0)
    routed = router(first, second)
    with closing(routed.stream(seed=5, min_tokens=6, kv_transfer_params={SOURCE: "a client's"})) as stream:
        stream.read(3)
        emptied = routed.empty(first.url)
        first.go(1)
        until(lambda: len(second.asked) == 1)
        # Its blocks may be being read.
        assert not emptied.done()
        second.go()
        assert emptied.result(30) == b"empty\n"
        stream.read()
    assert stream.ended
    assert stream.tokens == following(PROMPT, 12)
    assert stream.said("finish_reason") == [None] * 11 + ["length"]
    assert stream.said("prompt_token_ids") == [PROMPT] + [None] * 11
    assert len({chunk["id"] for chunk in stream.chunks}) == 1
    usage = {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    assert stream.chunks[-1]["usage"] == usage
    ((begun_with,), (asked,)) = first.asked, second.asked
    assert begun_with["kv_transfer_params"] == {SOURCE: None}
    # The router may hear that the engine is emptied as soon as its client has the third token.
    done = len(asked["prompt"]) - len(PROMPT)
    assert done in (3, 4)
    assert asked["prompt"] == [*PROMPT, *following(PROMPT, done)]
    assert (asked["max_tokens"], asked["min_tokens"], asked["seed"]) == (12 - done, 6 - done, 5 + done)
    assert asked["kv_transfer_params"] == {SOURCE: first.reference}
    # The first engine is told that nobody reads its stream any more.
    first.go()
    assert first.closed.acquire(timeout=30)
    # It gets nothing, until it is there again.
    for count in (1, 2):
        with closing(routed.stream()) as again:
            assert again.read().tokens == following(PROMPT, 12)
        assert len(first.asked) == count
        routed.fill(first)


@pytest.mark.parametrize("how", ["abort", "error", "break", "nonsense"])
def test_session_that_its_engine_ends_goes_on_at_one_that_takes_it(router: Callable[..., Router], how: str) -> None:
    first, refusing, last = StreamingEngine(ends=(how, 5)), StreamingEngine(ends=("refuse", 0)), StreamingEngine()
    with closing(router(first, refusing, last).stream()) as stream:
        stream.read()
    assert (stream.tokens, stream.ended) == (following(PROMPT, 12), True)
    assert stream.said("finish_reason") == [None] * 11 + ["length"]
    for engine in (refusing, last):
        assert [asked["prompt"][4:] for asked in engine.asked] == [following(PROMPT, 5)]
        assert [asked["kv_transfer_params"] for asked in engine.asked] == [{SOURCE: first.reference}]


def test_older_hint_is_kept_if_there_is_no_newer_one(router: Callable[..., Router]) -> None:
    first, last = StreamingEngine(ends=("abort", 5)), StreamingEngine()
    dying = StreamingEngine(turns=0, ends=("break", 3))
    dying.reference = None
    with closing(router(first, dying, last).stream()) as stream:
        until(lambda: bool(dying.asked))
        first.ends = ("refuse", 0)
        dying.go()
        assert stream.read().tokens == following(PROMPT, 12)
    (asked,) = last.asked
    assert asked["prompt"] == [*PROMPT, *following(PROMPT, 8)]
    assert asked["kv_transfer_params"] == {SOURCE: first.reference}


@pytest.mark.parametrize("emptied", [False, True])
def test_a_request_that_no_engine_takes_is_refused(router: Callable[..., Router], emptied: bool) -> None:
    engine = StreamingEngine(ends=None if emptied else ("refuse", 0))
    routed = router(engine)
    if emptied:
        routed.empty(engine.url)
    with pytest.raises(urllib.error.HTTPError) as caught:
        routed.stream()
    caught.value.close()
    assert caught.value.code == 502


def test_a_request_that_is_not_valid_is_not_sent_to_other_engines(router: Callable[..., Router]) -> None:
    other = StreamingEngine()
    routed = router(StreamingEngine(ends=("invalid", 0)), other)
    with pytest.raises(urllib.error.HTTPError) as caught:
        routed.stream(min_tokens=13)
    caught.value.close()
    assert (caught.value.code, other.asked) == (400, [])


def test_a_session_without_another_engine_ends_with_an_error(router: Callable[..., Router]) -> None:
    with closing(router(StreamingEngine(ends=("break", 5))).stream()) as stream:
        stream.read()
    assert stream.chunks.pop()["error"]["code"] == 502
    assert stream.tokens == following(PROMPT, 5)


def test_session_goes_back_to_an_emptied_engine_if_no_other_one_takes_it(router: Callable[..., Router]) -> None:
    first, refusing = StreamingEngine(turns=1), StreamingEngine(ends=("refuse", 0))
    routed = router(first, refusing)
    with closing(routed.stream()) as stream:
        stream.read(1)
        emptied = routed.empty(first.url)
        first.go()
        assert stream.read().tokens == following(PROMPT, 12)
    emptied.result(30)
    assert len(refusing.asked) == 1


@pytest.mark.parametrize("reads_tokens", [False, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_text_is_whole_where_a_session_moves_in_the_middle_of_a_character(
    router: Callable[..., Router], reads_tokens: bool, tokens: int
) -> None:
    """A tokenizer says nothing of a character before its last token, and of a prompt that ends there, it says all."""
    first, second = StreamingEngine(tokens=tokens), StreamingEngine()
    routed = router(first, second)
    whole = text_of([*PROMPT, *following(PROMPT, 12)]).removeprefix(text_of(PROMPT)).rstrip(HALF)
    halves = 0
    for count in range(1, 12):
        first.ends = ("break", count)
        with closing(routed.stream(return_token_ids=reads_tokens)) as stream:
            stream.read()
        assert "".join(stream.said("text")) == whole
        assert stream.chunks[-1]["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
        moved = second.asked.pop()["prompt"]
        halves += text_of(moved).endswith(HALF)
        if reads_tokens:
            assert stream.tokens == following(PROMPT, 12)
            assert moved == [*PROMPT, *following(PROMPT, count)]
        else:
            assert {*stream.chunks[0]["choices"][0]} == {"index", "text", "finish_reason"}
    assert halves


STAYING = [
    *({"n": 2}, {"stop": ["x"]}, {"prompt": [PROMPT, [3, 1]]}, {"logprobs": 0}, {"bad_words": ["a b"]}),
    *({"truncate_prompt_tokens": 4}, {"prompt_embeds": "AAAA"}, {"suffix": "x"}, {"repetition_detection": {}}),
    *({"seed": "5"}, {"of_a_later_vllm": 1}),
]


@pytest.mark.parametrize("fields", STAYING, ids=lambda fields: "-".join(fields))
def test_session_that_is_more_than_its_tokens_stays(router: Callable[..., Router], fields: dict[str, Any]) -> None:
    first, second = StreamingEngine(turns=1), StreamingEngine()
    routed = router(first, second)
    prompts = fields.get("prompt", [PROMPT])
    with closing(routed.stream(**fields)) as stream:
        stream.read(1)
        emptied = routed.empty(first.url)
        first.go()
        stream.read()
    assert stream.tokens == [token for prompt in prompts for token in following(prompt, 12)]
    assert [prompt for prompt in stream.said("prompt_token_ids") if prompt] == prompts
    before = sum(map(len, prompts))
    usage = {"prompt_tokens": before, "completion_tokens": 12 * len(prompts)}
    assert stream.chunks[-1]["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": before}}
    emptied.result(30)
    assert second.asked == []


def test_session_moves_whose_other_fields_ask_for_nothing(router: Callable[..., Router]) -> None:
    nothing: dict[str, Any] = {"n": None, "stop": [], "echo": False, "logprobs": None, "presence_penalty": 0.0}
    with closing(router(StreamingEngine(ends=("break", 5)), StreamingEngine()).stream(**nothing)) as stream:
        assert stream.read().tokens == following(PROMPT, 12)


def test_few_sessions_move_at_once(router: Callable[..., Router]) -> None:
    """The engine holds a share of its blocks for them; the others are answered by it meanwhile."""
    first, second = StreamingEngine(turns=1), StreamingEngine(turns=0)
    routed = router(first, second)
    routed.empty(second.url)
    streams = [routed.stream(prompt=[*PROMPT, seed]) for seed in range(MOST_MOVES + 2)]
    routed.fill(second)
    emptied = routed.empty(first.url)
    first.go()
    until(lambda: len(second.asked) == MOST_MOVES)
    left = {asked["prompt"][4] for asked in second.asked}
    for seed, stream in enumerate(streams):
        if seed not in left:
            stream.read()
    assert len(second.asked) == MOST_MOVES
    second.go()
    for seed, stream in enumerate(streams):
        assert stream.read().tokens == following([*PROMPT, seed], 12)
        stream.close()
    emptied.result(30)


@pytest.mark.parametrize("url", ["http://other", "http://\u6f22\u5b57"])
def test_an_unknown_engine_is_not_emptied(router: Callable[..., Router], url: str) -> None:
    routed = router(StreamingEngine())
    with pytest.raises(urllib.error.HTTPError) as caught:
        routed.empty(url)
    caught.value.close()
    assert caught.value.code == 400
