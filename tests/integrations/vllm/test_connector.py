"""Prefill and decode in real vLLM engines: what decode says after reading prefill's cache is what one engine says."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.node_servers import NodeServerProcess
from tests.support.vllm_engines import Node, kvferry, make_model, prompt, request
from tests.support.vllm_requests import alone, computed_as_another, offered, pinned, ready, said
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
LENGTHS = (2, 31, 32, 33, 64, 100, 257)
BLOCK = 32


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeServerProcess]:
    with NodeServerProcess(tmp_path_factory.mktemp("home"), tcp=True, ttl=6, max_ttl=6, hold=20) as server:
        yield server


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """The folder of a model of so many KV heads, and of a window or none."""
    folder, made = tmp_path_factory.mktemp("models"), dict[tuple[int, int], Path]()

    def model(kv_heads: int, window: int) -> Path:
        key = kv_heads, window
        if key not in made:
            made[key] = make_model(folder / f"{kv_heads}-heads-{window}", kv_heads=kv_heads, window=window)
        return made[key]

    return model


@pytest.fixture(scope="module")
def node(
    home: NodeServerProcess, models: Callable[[int, int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Node]]:
    """Start engines; each once, and side by side: call `ready` on it before it is used."""
    folder, made = tmp_path_factory.mktemp("nodes"), dict[Any, Node]()

    def make(
        role: str, tp: int = 1, kv_heads: int = 4, *, window: int = 0, again: bool = False, **settings: Any
    ) -> Node:
        key = (role, tp, kv_heads, window, tuple(sorted(settings.items())))
        if again:
            made.pop(key).close()
        if key not in made:
            if role == "producer":
                # Few at a time: two cores. A pair's producer is made first.
                for old in [old for old in made if len(made) > 2 and old[1:] != (1, 4, 0, ())]:
                    made.pop(old).close()
            policy = settings.pop("policy", "recompute")
            connector = kvferry(f"kv_{role}", home.address, kv_load_failure_policy=policy)
            log = folder / f"{len(list(folder.iterdir()))}.log"
            made[key] = Node(models(kv_heads, window), log, tp=tp, connector=connector, **settings)
        return made[key]

    yield make
    for each in made.values():
        each.close()


@pytest.fixture
def pair(node: Callable[..., Node]) -> tuple[Node, Node]:
    """One rank on either side."""
    prefill, decode = node("producer"), node("consumer")
    return ready(prefill), ready(decode)


@pytest.mark.parametrize(
    ("tp", "decode_tp", "kv_heads"),
    [
        pytest.param(1, 1, 4, id="1-to-1"),
        pytest.param(2, 1, 4, id="2-to-1"),
        pytest.param(1, 2, 4, id="1-to-2"),
        # vLLM's own connector asserts on this one.
        pytest.param(2, 1, 1, id="2-to-1-replicated-head"),
    ],
)
def test_decode_generates_the_same_tokens_as_one_engine(
    home: NodeServerProcess, node: Callable[..., Node], tp: int, decode_tp: int, kv_heads: int
) -> None:
    prefill, decode = node("producer", tp, kv_heads), node("consumer", decode_tp, kv_heads)
    ready(prefill), ready(decode)
    prompts = [prompt(1000 * tp + 100 * decode_tp + 10 * kv_heads + length, length) for length in LENGTHS]
    expected = alone(prefill, prompts)
    params = offered(prefill, prompts)
    # Small, and nothing of where the blocks are.
    assert all(set(some) <= {"do_remote_prefill", "do_remote_decode", "kvferry_reference", CACHED} for some in params)
    assert all(len(some["kvferry_reference"]) < 300 for some in params)
    # All at once.
    answers = decode.generate(*(request(tokens, 12, some) for tokens, some in zip(prompts, params, strict=True)))
    assert said(answers) == expected
    assert [answer["cached"] for answer in answers] == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    until(lambda: pinned(home) == 0)
    # The engines have been told so, by all of their workers: they go on.
    assert alone(prefill, prompts[:1]) == expected[:1]
    assert alone(decode, prompts[:1]) == expected[:1]


CACHED = "remote_prefill_cached_tokens"
"""Added by vLLM itself."""


def test_decode_uses_the_cache_of_prefill(pair: tuple[Node, Node]) -> None:
    """And not what it would compute of the prompt: prefill takes the prompt for another one."""
    prefill, decode = pair
    tokens = prompt(1)
    params, other = computed_as_another(prefill, tokens)
    assert said(decode.generate(request(tokens, 12, params))) == alone(prefill, [other])


def test_blocks_that_decode_has_are_not_read(home: NodeServerProcess, pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    whole = prompt(3, 150)
    expected = alone(prefill, [whole])
    decode.generate(request(whole[:64], 1))
    [params] = offered(prefill, [whole])
    assert said(decode.generate(request(whole, 12, params))) == expected
    # Now it has all but the last token, or all: the second time nothing is read, and the source is told.
    [params] = offered(prefill, [whole[:128]])
    assert said(decode.generate(request(whole[:128], 12, params))) == alone(prefill, [whole[:128]])
    until(lambda: pinned(home) == 0)


def test_layers_with_a_sliding_window_are_read(home: NodeServerProcess, node: Callable[..., Node]) -> None:
    """Two groups: of the windowed one only what is still seen is read. A failed read of several groups is computed
    again as a whole."""
    settings = {"window": 64, "disable_hybrid_kv_cache_manager": False}
    prefill, decode = node("producer", **settings), node("consumer", **settings)
    ready(prefill), ready(decode)
    assert "kv cache group sizes" in decode.tail(100000)
    prompts = [prompt(30 + length, length) for length in (20, 64, 65, 100, 300)]
    expected = alone(prefill, prompts)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    params = offered(prefill, prompts)
    answers = decode.generate(*(request(tokens, 12, some) for tokens, some in zip(prompts, params, strict=True)))
    assert said(answers) == expected
    tokens = prompt(31, 300)
    params, other = computed_as_another(prefill, tokens)
    assert said(decode.generate(request(tokens, 12, params))) == alone(prefill, [other])
    until(lambda: pinned(home) == 0)
    fresh = prompt(32, 200)
    [last], wanted = offered(prefill, [fresh]), alone(prefill, [fresh])
    prefill.close(signal.SIGKILL)
    assert said(decode.generate(request(fresh, 12, last))) == wanted


def test_prompts_in_chunks_and_preempted_requests_are_read(node: Callable[..., Node]) -> None:
    """Prefill computes 64 tokens at a time; decode has room for few of its requests, and preempts."""
    prefill = node("producer", max_num_batched_tokens=64)
    decode = node("consumer", kv_cache_memory_bytes=2 << 20, max_model_len=320)
    ready(prefill), ready(decode)
    prompts = [prompt(40 + index, 200) for index in range(8)]
    expected = [answer["tokens"] for answer in prefill.generate(*(request(tokens, 90) for tokens in prompts))]
    params = offered(prefill, prompts)
    answers = decode.generate(*(request(tokens, 90, some) for tokens, some in zip(prompts, params, strict=True)))
    assert said(answers) == expected
    assert decode.call("metric", "vllm:num_preemptions") > 0


def test_counts_are_metrics_of_vllm(home: NodeServerProcess, pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    before = [prefill.call("metric", "vllm:kvferry_published"), decode.call("metric", "vllm:kvferry_read")]
    prompts = [prompt(110 + index, 64) for index in range(3)]
    params = offered(prefill, prompts)
    decode.generate(*(request(tokens, 4, some) for tokens, some in zip(prompts, params, strict=True)))
    after = [prefill.call("metric", "vllm:kvferry_published"), decode.call("metric", "vllm:kvferry_read")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [3, 3]


def test_request_can_be_aborted_before_during_and_after_its_read(
    home: NodeServerProcess, pair: tuple[Node, Node]
) -> None:
    prefill, decode = pair
    for steps in (0, 1, 2, 4, 8, 64):
        tokens = prompt(60 + steps, 300)
        expected = alone(prefill, [tokens])
        [params] = offered(prefill, [tokens])
        decode.call("abort", request(tokens, 12, params), steps)
        # The blocks of the aborted request can be used again: the next answer is right.
        [params] = offered(prefill, [tokens])
        assert said(decode.generate(request(tokens, 12, params))) == expected
    until(lambda: pinned(home) == 0)


def test_block_sizes_that_cannot_be_cut_are_refused(home: NodeServerProcess, node: Callable[..., Node]) -> None:
    """vLLM's CPU pages hold K column by column: half a page is not the page of half as many tokens."""
    prefill, decode = node("producer"), node("consumer", block=64)
    ready(prefill), ready(decode)
    tokens = prompt(70)
    [params] = offered(prefill, [tokens])
    answers = decode.generate(request(tokens, 12, params))
    assert said(answers) == alone(prefill, [tokens])
    assert "Incompatible" in decode.tail(20000)
    assert (
        "layers.0.self_attn.attn/key: token_granule is 32 at the source (rank 0), 64 at the destination"
        in decode.tail(20000)
    )
    # Prefill does not wait for a reader that will not come.
    until(lambda: pinned(home) == 0)


def test_prefill_can_be_killed_and_started_again(home: NodeServerProcess, node: Callable[..., Node]) -> None:
    prefill, decode = ready(node("producer")), ready(node("consumer"))
    prompts = [prompt(80 + index, 120) for index in range(4)]
    expected = alone(prefill, prompts)
    before = offered(prefill, prompts)
    prefill.close(signal.SIGKILL)
    requests = [request(tokens, 12, some) for tokens, some in zip(prompts, before, strict=True)]
    # Read or computed again, none is wrong.
    assert said(decode.generate(*requests)) == expected
    prefill = ready(node("producer", again=True))
    after = offered(prefill, prompts)
    assert said(decode.generate(request(prompts[0], 12, after[0]))) == expected[:1]


def test_decode_can_be_killed_and_started_again(home: NodeServerProcess, node: Callable[..., Node]) -> None:
    prefill, decode = ready(node("producer")), ready(node("consumer"))
    prompts = [prompt(95 + index, 120) for index in range(4)]
    expected = alone(prefill, prompts)
    params = offered(prefill, prompts)
    requests = [request(tokens, 12, some) for tokens, some in zip(prompts, params, strict=True)]
    decode.send("generate", *requests)
    decode.close(signal.SIGKILL)
    decode = ready(node("consumer", again=True))
    # Publications that the dead engine was reading are released in time; all others are still there.
    until(lambda: pinned(home) == 0)
    params = offered(prefill, prompts)
    requests = [request(tokens, 12, some) for tokens, some in zip(prompts, params, strict=True)]
    assert said(decode.generate(*requests)) == expected
    assert alone(prefill, prompts) == expected


def test_request_fails_if_vllm_is_configured_to_fail_it(node: Callable[..., Node]) -> None:
    prefill = ready(node("producer"))
    decode = ready(node("consumer", policy="fail"))
    tokens = prompt(90)
    [params] = offered(prefill, [tokens])
    expected = alone(prefill, [tokens])
    broken = {**params, "kvferry_reference": params["kvferry_reference"][:-6] + "AAAAAA"}
    answers = decode.generate(request(tokens, 12, broken), request(tokens, 12, params))
    assert [answer["finish"] for answer in answers] == ["error", "length"]
    assert answers[1]["tokens"] == expected[0]
