"""A router sends each request to prefill and decode at the same time, under a reference that it has made: decode reads
while prefill computes, and says what one engine says."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry import router_reference
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.node_servers import NodeServerProcess
from tests.support.vllm_engines import Node, kvferry, make_model, prompt, request
from tests.support.vllm_models import make_hybrid_model
from tests.support.vllm_requests import alone, computed_as_another, pinned, ready, said
from tests.support.vllm_versions import convolves_float32
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
LENGTHS = (2, 31, 32, 33, 64, 100, 257)
STEP = 64
"""Tokens that prefill computes in a step."""


class Router:
    """Makes a reference for each request to a prefill engine."""

    def __init__(self, home: NodeServerProcess) -> None:
        self.home = home

    def request(self, prefill: str, tokens: list[int], **sampling: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """What prefill and decode are asked."""
        reference = router_reference(self.home.address, prefill)
        sides = [
            {"do_remote_decode": True, "do_remote_prefill": False, "kvferry_reference": reference},
            {"do_remote_decode": False, "do_remote_prefill": True, "kvferry_reference": reference},
        ]
        return request(tokens, 1, sides[0], **sampling), request(tokens, 12, sides[1], **sampling)

    def leases(self) -> int:
        """Leases on publications of which more will come."""
        with grpc.insecure_channel(self.home.address) as channel:
            answer = IntrospectionStub(channel).ListRequests(ipb.ListRequestsRequest(), timeout=5)
        return sum(each.leases for each in answer.requests if each.state == ipb.REQUEST_STATE_PUBLISHING)


@pytest.fixture(scope="module")
def router(home: NodeServerProcess) -> Router:
    return Router(home)


@pytest.fixture(scope="module")
def node(home: NodeServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Node]]:
    """Start engines, each once, and few at a time. An engine is called by its name."""
    folder = tmp_path_factory.mktemp("nodes")
    made: dict[str, Node] = {}
    models: dict[Any, Path] = {}

    def model(window: int) -> Path:
        if window not in models:
            models[window] = make_model(folder / f"model-{window}", kv_heads=4, window=window)
        return models[window]

    def make(
        name: str, *, window: int = 0, path: Path | None = None, keep: tuple[str, ...] = (), **settings: Any
    ) -> Node:
        if name not in made:
            for old in [old for old in made if old not in (*keep, "prefill", "decode")]:
                made.pop(old).close()
            role = "kv_consumer" if "decode" in name else "kv_producer"
            connector = kvferry(role, home.address, kv_load_failure_policy="recompute", engine_id=name)
            made[name] = Node(path or model(window), folder / f"{name}.log", connector=connector, **settings)
        return made[name]

    yield make
    for each in made.values():
        each.close()


@pytest.fixture
def pair(node: Callable[..., Node]) -> tuple[Node, Node]:
    """Prefill computes 64 tokens at a time."""
    prefill, decode = node("prefill", max_num_batched_tokens=STEP), node("decode")
    return ready(prefill), ready(decode)


def concurrently(
    prefill: Node, decode: Node, asked: list[tuple[dict[str, Any], dict[str, Any]]], *others: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return decode's answers to requests that both get at the same time; prefill gets `others` first."""
    decode.send("generate", *(theirs for _, theirs in asked))
    prefill.generate(*others, *(mine for mine, _ in asked))
    answers: list[dict[str, Any]] = decode.answer()
    assert isinstance(answers, list), answers
    return answers


def read(decode: Node) -> float:
    return float(decode.call("metric", "vllm:kvferry_read"))


def freed(home: NodeServerProcess, prefill: Node) -> None:
    """Wait until nothing is pinned, and let prefill see that: it holds no block any more."""
    until(lambda: pinned(home) == 0)
    prefill.generate(request(prompt(99999, 3), 2))
    assert prefill.call("metric", "vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("tp", [1, 2], ids=["1-to-1", "2-to-1"])
def test_decode_generates_the_same_tokens_as_one_engine(
    router: Router, pair: tuple[Node, Node], node: Callable[..., Node], tp: int
) -> None:
    whole, decode = pair
    prefill = ready(node("prefill-2", tp=2, max_num_batched_tokens=STEP)) if tp == 2 else whole
    name = "prefill-2" if tp == 2 else "prefill"
    prompts = [prompt(1000 * tp + length, length) for length in LENGTHS]
    before = read(decode)
    answers = concurrently(prefill, decode, [router.request(name, tokens) for tokens in prompts])
    assert said(answers) == alone(whole, prompts)
    assert read(decode) == before + len(prompts)
    freed(router.home, prefill)


def test_prefill_may_end_before_decode_asks(router: Router, pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    tokens = prompt(1, 200)
    mine, theirs = router.request("prefill", tokens)
    _, other = computed_as_another(prefill, tokens, mine)
    # Decode has read prefill's cache.
    assert said(decode.generate(theirs)) == alone(prefill, [other])


def test_decode_reads_before_prefill_has_computed_the_prompt(router: Router, pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    tokens = prompt(3, 257)
    mine, theirs = router.request("prefill", tokens)
    decode.send("generate", theirs)
    prefill.call("begin", mine, 3)
    until(lambda: router.leases() == 1)
    prefill.call("end_begun")
    assert said(decode.answer()) == alone(prefill, [tokens])
    freed(router.home, prefill)


@pytest.mark.parametrize("steps", [0, 3], ids=["before-it-is-published", "halfway"])
def test_prefill_may_abort_a_request(router: Router, pair: tuple[Node, Node], steps: int) -> None:
    """Decode hears of it, long before its timeout of two minutes, and computes the prompt itself."""
    prefill, decode = pair
    tokens = prompt(10 + steps, 257)
    mine, theirs = router.request("prefill", tokens)
    before = read(decode)
    decode.send("generate", theirs)
    prefill.call("begin", mine, steps)
    if steps:
        until(lambda: router.leases() == 1)
    prefill.call("abort_begun")
    assert said(decode.answer(60)) == alone(prefill, [tokens])
    assert read(decode) == before
    assert ("Aborted" if steps else "PublicationReleased") in decode.tail(20000)
    freed(router.home, prefill)


def decode_aborts(router: Router, pair: tuple[Node, Node], tokens: list[int], steps: int) -> None:
    """Decode aborts a request after so many steps; prefill has begun it, and ends it."""
    prefill, decode = pair
    mine, theirs = router.request("prefill", tokens)
    prefill.call("begin", mine, 2)
    decode.call("abort", theirs, steps)
    prefill.call("end_begun")
    # The blocks of the aborted request can be used again.
    assert alone(decode, [tokens]) == alone(prefill, [tokens])
    freed(router.home, prefill)


def test_decode_may_abort_a_request(router: Router, pair: tuple[Node, Node]) -> None:
    """Prefill computes on, and holds nothing for it."""
    for steps in (0, 1, 4):
        decode_aborts(router, pair, prompt(20 + steps, 257), steps)


def test_decode_of_two_ranks_may_abort_a_request(
    router: Router, pair: tuple[Node, Node], node: Callable[..., Node]
) -> None:
    """Each rank of decode reads half of what prefill's one rank has: on either side a request is aborted halfway, and
    both ranks have given up, or have read, the same."""
    prefill, _ = pair
    decode = ready(node("decode-2", tp=2))
    for steps in (1, 4):
        decode_aborts(router, (prefill, decode), prompt(24 + steps, 257), steps)
    tokens = prompt(29, 257)
    mine, theirs = router.request("prefill", tokens)
    before = read(decode)
    decode.send("generate", theirs)
    prefill.call("begin", mine, 3)
    until(lambda: router.leases() == 1)
    prefill.call("abort_begun")
    assert said(decode.answer(60)) == alone(prefill, [tokens])
    assert read(decode) == before
    assert "Aborted" in decode.tail(20000)
    # Both ranks are there for the next one.
    tokens = prompt(35, 257)
    assert said(concurrently(prefill, decode, [router.request("prefill", tokens)])) == alone(prefill, [tokens])
    assert read(decode) == before + 1
    freed(router.home, prefill)


def test_blocks_that_decode_has_are_not_read(router: Router, pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    whole = prompt(30, 257)
    decode.generate(request(whole[:100], 1))
    bytes_before = decode.call("metric", "vllm:kvferry_bytes")
    answers = concurrently(prefill, decode, [router.request("prefill", whole)])
    assert said(answers) == alone(prefill, [whole])
    # Three of eight blocks were there, of 32 tokens of 4 KiB. Decode computes the last token itself.
    assert decode.call("metric", "vllm:kvferry_bytes") - bytes_before == 5 * 32 * 4096
    # Now it has all of it: it reads nothing, and prefill is told while it still computes.
    before = read(decode)
    assert said(concurrently(prefill, decode, [router.request("prefill", whole[:129])])) == alone(
        prefill, [whole[:129]]
    )
    assert read(decode) == before
    freed(router.home, prefill)


def test_cached_blocks_of_prefill_are_held_for_two_readers(router: Router, pair: tuple[Node, Node]) -> None:
    """Both prompts have their first blocks in common."""
    prefill, decode = pair
    first = prompt(40, 200)
    second = [*first[:160], *prompt(41, 97)]
    answers = concurrently(prefill, decode, [router.request("prefill", tokens) for tokens in (first, second)])
    assert said(answers) == alone(prefill, [first, second])
    freed(router.home, prefill)


def test_samples_are_published_and_read_once(router: Router, pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    sampled: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 5}
    tokens = prompt(50, 200)
    before = [prefill.call("metric", "vllm:kvferry_published"), read(decode)]
    mine, theirs = router.request("prefill", tokens, **sampled)
    # vLLM on CPU takes no seed where it computes a prompt in chunks.
    [answer] = concurrently(prefill, decode, [({**mine, "seed": None}, theirs)])
    [wanted] = prefill.generate(request(tokens, 12, **sampled))
    assert answer["samples"] == wanted["samples"]
    after = [prefill.call("metric", "vllm:kvferry_published"), read(decode)]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1]
    freed(router.home, prefill)


def test_prefill_may_die_halfway(router: Router, pair: tuple[Node, Node], node: Callable[..., Node]) -> None:
    whole, decode = pair
    prefill = ready(node("prefill-dies", max_num_batched_tokens=STEP))
    tokens = prompt(60, 257)
    mine, theirs = router.request("prefill-dies", tokens)
    decode.send("generate", theirs)
    prefill.call("begin", mine, 3)
    until(lambda: router.leases() == 1)
    prefill.close(signal.SIGKILL)
    assert said(decode.answer()) == alone(whole, [tokens])


FEW: dict[str, Any] = {"kv_cache_memory_bytes": 2 << 20, "max_model_len": 320, "max_num_batched_tokens": 32}
"""15 blocks of 32 tokens beside the null block."""


@pytest.mark.parametrize(
    ("name", "length", "others", "withdrawn"),
    [
        # The preempted request finds its held blocks in the prefix cache again.
        pytest.param("prefill-cached", 289, 3, False, id="same-blocks"),
        # The preempted request is computed in other blocks, while the first blocks are held.
        pytest.param("prefill-few", 190, 5, False, id="other-blocks"),
        # There are not as many: 10, beside those that are held.
        pytest.param("prefill-few", 289, 3, True, id="no-blocks"),
    ],
)
def test_prefill_may_preempt_a_partly_published_request(
    router: Router,
    pair: tuple[Node, Node],
    node: Callable[..., Node],
    name: str,
    length: int,
    others: int,
    withdrawn: bool,
) -> None:
    """Requests that generate grow, and take the memory of the youngest, which is halfway through its prompt."""
    whole, decode = pair
    prefill = ready(node(name, enable_prefix_caching=name == "prefill-cached", **FEW))
    tokens = prompt(7000 + length + withdrawn, length)
    growing = [request(prompt(80 + index, 28), 100) for index in range(others)]
    before, preempted = read(decode), prefill.call("metric", "vllm:num_preemptions")
    answers = concurrently(prefill, decode, [router.request(name, tokens)], *growing)
    assert prefill.call("metric", "vllm:num_preemptions") > preempted
    assert said(answers) == alone(whole, [tokens])
    assert read(decode) == before + (not withdrawn)
    assert ("its publication is withdrawn" in prefill.tail(100000)) == withdrawn
    freed(router.home, prefill)


def test_layers_with_a_sliding_window_are_read(router: Router, node: Callable[..., Node]) -> None:
    """What they see comes with the last step."""
    settings: dict[str, Any] = {"window": 64, "disable_hybrid_kv_cache_manager": False, "max_num_batched_tokens": STEP}
    prefill, decode = node("prefill-window", **settings), node("decode-window", keep=("prefill-window",), **settings)
    ready(prefill), ready(decode)
    prompts = [prompt(300 + length, length) for length in (20, 64, 65, 97, 300)]
    answers = concurrently(prefill, decode, [router.request("prefill-window", tokens) for tokens in prompts])
    assert said(answers) == alone(prefill, prompts)
    assert read(decode) == len(prompts)
    freed(router.home, prefill)


@pytest.mark.skipif(not convolves_float32(), reason="this vLLM takes Mamba on this CPU in bfloat16 only")
def test_states_are_published_at_the_end(router: Router, node: Callable[..., Node], tmp_path: Path) -> None:
    """Blocks have 128 tokens, as vLLM chooses them for the model."""
    model = make_hybrid_model(tmp_path / "model")
    settings: dict[str, Any] = {
        "path": model,
        "block": None,
        "kv_cache_memory_bytes": 32 << 20,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 128,
    }
    prefill, decode = node("prefill-states", **settings), node("decode-states", keep=("prefill-states",), **settings)
    ready(prefill), ready(decode)
    prompts = [prompt(400 + length, length) for length in (2, 128, 129, 300)]
    answers = concurrently(prefill, decode, [router.request("prefill-states", tokens) for tokens in prompts])
    assert said(answers) == alone(prefill, prompts)
    assert read(decode) == len(prompts)
    freed(router.home, prefill)
