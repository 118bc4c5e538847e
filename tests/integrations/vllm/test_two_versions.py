"""Two versions of vLLM in turn, as in an upgrade: each reads from the other, and a pair is replaced under load.

Run by ``make test-vllm OTHER=0.31.0``. What decode says is compared with what one engine of decode's version computes.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kvferry import router_reference
from tests.support.node_servers import NodeServerProcess, free_port
from tests.support.streams import Stream
from tests.support.vllm_engines import PREFILL, Node, Server, kvferry, make_model, prompt, request
from tests.support.vllm_requests import alone, computed_as_another, offered, pinned, ready, said
from tests.support.vllm_versions import OTHER, other_vllm
from tests.support.waiting import until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not OTHER, reason="KVFERRY_OTHER_VLLM names no other vLLM: make test-vllm OTHER=0.31.0"),
]
LENGTHS = (2, 31, 32, 33, 64, 100, 257)
STEP = 64
"""Tokens that prefill computes in a step."""
PACE = 0.5
"""Seconds between the requests of each of three clients."""


@pytest.fixture(scope="module")
def pythons() -> dict[str, str]:
    """The interpreters of both versions, by version."""
    other, older = other_vllm()
    found = {version("vllm"): sys.executable, older: other}
    assert len(found) == 2, f"{OTHER} has this version, too"
    return {number.partition("+")[0]: python for number, python in found.items()}


@pytest.fixture
def node(home: NodeServerProcess, tmp_path: Path, pythons: dict[str, str]) -> Iterator[Callable[..., Node]]:
    """Start an engine of a version, which publishes and reads."""
    made: list[Node] = []

    def make(model: Path, number: str, **settings: Any) -> Node:
        connector = kvferry("kv_both", home.address, engine_id=f"vllm-{number}", kv_load_failure_policy="fail")
        log = tmp_path / f"{number}.log"
        made.append(Node(model, log, connector=connector, python=pythons[number], **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("window", [0, 64], ids=["full", "windows"])
def test_each_version_reads_from_the_other(
    home: NodeServerProcess, node: Callable[..., Node], pythons: dict[str, str], tmp_path: Path, window: int
) -> None:
    model = make_model(tmp_path / "model", kv_heads=4, window=window)
    settings: dict[str, Any] = {"max_num_batched_tokens": STEP}
    if window:
        settings["disable_hybrid_kv_cache_manager"] = False
    engines = {number: node(model, number, **settings) for number in pythons}
    for engine in engines.values():
        ready(engine)
    both = list(pythons)
    for turn, (mine, theirs) in enumerate([both, both[::-1]]):
        prefill, decode = engines[mine], engines[theirs]
        # Prompts that neither has computed yet.
        prompts = [prompt(1000 * turn + length, length) for length in LENGTHS]
        offers = zip(prompts, offered(prefill, prompts), strict=True)
        answers = said(decode.generate(*(request(tokens, 12, params) for tokens, params in offers)))
        # Decode reads while prefill computes.
        together = [prompt(5000 + 1000 * turn + length, length) for length in (100, 257)]
        references = [{"kvferry_reference": router_reference(home.address, f"vllm-{mine}")} for _ in together]
        asked = [*zip(together, references, strict=True)]
        decode.send("generate", *(request(tokens, 12, {"do_remote_prefill": True, **name}) for tokens, name in asked))
        prefill.generate(*(request(tokens, 1, {**PREFILL, **name}) for tokens, name in asked))
        answers += said(decode.answer())
        # It is prefill's cache that decode has used: prefill takes this prompt for another one.
        mistaken = prompt(9000 + turn)
        params, other = computed_as_another(prefill, mistaken)
        answers += said(decode.generate(request(mistaken, 12, params)))
        assert decode.call("metric", "vllm:kvferry_read") == len(answers)
        until(lambda: pinned(home) == 0)
        assert decode.call("reset_prefix_cache")
        assert answers == alone(decode, [*prompts, *together, other])


@dataclass(frozen=True)
class Answered:
    """What was said to a request, and by which version of decode."""

    tokens: list[int]
    version: str


class Router:
    """Sends each request to the pair that it has at the time, and counts what each server has under way."""

    def __init__(self, model: Path, prefill: tuple[str, Server], decode: tuple[str, Server]) -> None:
        self.prefill, self.decode = prefill, decode
        self._model = model
        self._lock = threading.Lock()
        self._under_way = Counter[Server]()

    def body(self, tokens: list[int], **more: Any) -> dict[str, Any]:
        return {
            "model": str(self._model),
            "prompt": tokens,
            "temperature": 0,
            "max_tokens": 12,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }

    def publish(self, tokens: list[int]) -> dict[str, Any]:
        """Ask prefill; what decode is given."""
        with self._lock:
            _, server = self.prefill
            self._under_way[server] += 1
        answer = self._ask(server, self.body(tokens, max_tokens=1, kv_transfer_params=PREFILL))
        return dict(answer["kv_transfer_params"])

    def read(self, tokens: list[int], params: dict[str, Any]) -> Answered:
        """Ask decode."""
        with self._lock:
            number, server = self.decode
            self._under_way[server] += 1
        answer = self._ask(server, self.body(tokens, kv_transfer_params=params))
        return Answered(answer["choices"][0]["token_ids"], number)

    def send(self, number: int) -> Answered:
        """Send a request of the stream, a moment after the one before: a server that starts needs the processor."""
        threading.Event().wait(PACE)
        tokens = streamed(number)
        return self.read(tokens, self.publish(tokens))

    def under_way(self, server: Server) -> int:
        """How many requests a server has not answered."""
        with self._lock:
            return self._under_way[server]

    def _ask(self, server: Server, body: dict[str, Any]) -> Any:
        try:
            return server.complete(body)
        finally:
            with self._lock:
                self._under_way[server] -= 1


def test_pair_is_replaced_under_load(home: NodeServerProcess, pythons: dict[str, str], tmp_path: Path) -> None:
    """First prefill, then decode. Each is told to end while something is still wanted of it: prefill when decode has a
    publication to read, decode when it generates."""
    model = make_model(tmp_path / "model", kv_heads=4)
    older, newer = sorted(pythons)
    made: list[Server] = []

    def server(role: str, number: str) -> tuple[str, Server]:
        connector = kvferry(role, home.address, engine_id=f"{role}-{number}", kv_load_failure_policy="fail")
        log, python = tmp_path / f"{role}-{number}.log", pythons[number]
        made.append(Server(model, log, free_port(), connector, "--shutdown-timeout", "60", python=python))
        return number, made[-1]

    try:
        router = Router(model, server("kv_producer", older), server("kv_consumer", older))
        (_, old_prefill), (_, old_decode) = router.prefill, router.decode
        old_prefill.ready(), old_decode.ready()
        with ThreadPoolExecutor(1) as others, Stream(router.send, 3) as stream:
            stream.allow(math.inf)
            stream.ended(20)
            new_prefill, new_decode = server("kv_producer", newer), server("kv_consumer", newer)
            new_prefill[1].ready(), new_decode[1].ready()
            params = router.publish(UNREAD)
            router.prefill = new_prefill
            until(lambda: not router.under_way(old_prefill))
            old_prefill.process.terminate()
            stream.more(10)
            assert old_prefill.process.poll() is None
            stream.answers[-1] = router.read(UNREAD, params)
            old_prefill.process.wait(60)
            stream.more(20)
            asked = router.body(LONG, kv_transfer_params=router.publish(LONG), max_tokens=LONGEST)
            router.decode = new_decode
            until(lambda: not router.under_way(old_decode))
            running = others.submit(old_decode.complete, asked)
            until(lambda: old_decode.metric("vllm:num_requests_running") == 1)
            old_decode.process.terminate()
            stream.answers[-2] = Answered(running.result()["choices"][0]["token_ids"], older)
            old_decode.process.wait(60)
            stream.more(20)
        assert stream.failures == {}
        until(lambda: pinned(home) == 0)
        assert new_decode[1].metric("vllm:kvferry_read_total") > 20
        assert new_decode[1].metric("vllm:kvferry_failed_total") == 0
    finally:
        for each in made:
            each.close()
    # For docs/vllm.md: pytest -s.
    print(f"{len(stream.answers)} requests")
    engines = {number: Node(model, tmp_path / f"{number}.log", python=python) for number, python in pythons.items()}
    try:
        for number, engine in engines.items():
            answers = {key: answer.tokens for key, answer in stream.answers.items() if answer.version == number}
            assert len(answers) > 20
            assert answers == computed(ready(engine), [*answers])
    finally:
        for engine in engines.values():
            engine.close()


UNREAD, LONG, LONGEST = prompt(1), prompt(2), 600


def streamed(number: int) -> list[int]:
    """The prompt of a request of the stream; -1 and -2: those that are sent beside it."""
    return {-1: UNREAD, -2: LONG}.get(number) or prompt(20000 + number, 40 + 21 * (number % 6))


def computed(engine: Node, wanted: Sequence[int]) -> dict[int, list[int]]:
    """What an engine without a connector says to requests of the stream."""
    found: dict[int, list[int]] = {}
    for first in range(0, len(wanted), 100):
        numbers = wanted[first : first + 100]
        asked = [request(streamed(number), LONGEST if number == -2 else 12) for number in numbers]
        found.update(zip(numbers, said(engine.generate(*asked)), strict=True))
    return found
