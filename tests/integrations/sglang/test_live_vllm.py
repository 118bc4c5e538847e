"""A real ``vllm serve`` prefills, and a real SGLang decodes, token for token what each of them says alone.

vLLM runs its FlashAttention backend here, whose cache is that of GPUs (`tests.support.vllm_flash_attention`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry import Client, router_reference
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.node_servers import NodeServerProcess, free_port
from tests.support.repository import ROOT
from tests.support.sglang_engines import ANSWER_TIMEOUT, Instance, add_tokenizer, some_room
from tests.support.vllm_engines import PREFILL, VOCABULARY, Node, Server, kvferry, prompt, request
from tests.support.vllm_flash_attention import environment
from tests.support.vllm_requests import pinned
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

PROMPTS = [prompt(seed, length) for seed, length in enumerate([100, 33, 32, 16, 7, 1, 257])]
STEP = 64
"""Tokens that vLLM computes in a step: the longest prompts come in several parts."""
TOKEN_BYTES = 4 * 2 * 2 * 32 * 4
"""Of the model: layers, K and V, heads, their size, float32."""


def carried(reference: str) -> dict[str, Any]:
    """Return a router's additions to SGLang's request: the reference, without vLLM's answer."""
    return {"bootstrap_host": reference, "bootstrap_port": 1, "bootstrap_room": some_room()}


@dataclass
class Pair:
    """vLLM and SGLang, and what each of them says alone to `PROMPTS`."""

    model: Path
    home: NodeServerProcess
    vllm: Server
    sglang: Instance
    client: Client
    alone: list[list[int]]

    def prefill(self, tokens: list[int], params: dict[str, Any] | None, max_tokens: int = 1) -> Any:
        """Ask vLLM."""
        common = {"model": str(self.model), "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.vllm.complete({**common, "prompt": tokens, "max_tokens": max_tokens, "kv_transfer_params": params})

    def dispatch(self, tokens: list[int], other: list[int] | None = None, sglang: Instance | None = None) -> Any:
        """Ask both at once, as a router does that makes the reference; returns SGLang's answer."""
        reference = router_reference(self.home.address, "vllm")
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(self.prefill, tokens, {**PREFILL, "kvferry_reference": reference})
            answer = (sglang or self.sglang).generate(other or tokens, **carried(reference))
            first.result()
        if "output_ids" not in answer:
            self.client.decline(reference)
        return answer

    def leases(self) -> int:
        """Leases on publications of which more will come."""
        with grpc.insecure_channel(self.home.address) as channel:
            answer = IntrospectionStub(channel).ListRequests(ipb.ListRequestsRequest(), timeout=5)
        return sum(each.leases for each in answer.requests if each.state == ipb.REQUEST_STATE_PUBLISHING)


@pytest.fixture(scope="module")
def pair(model: Path, home: NodeServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("live")
    connector = kvferry("kv_producer", home.address, engine_id="vllm")
    steps = ("--max-num-batched-tokens", str(STEP))
    vllm = Server(model, folder / "vllm.log", free_port(), connector, *steps, environment=environment())
    single = Instance(model, folder / "alone.log")
    try:
        vllm.ready(), single.ready()
        alone = [single.generate(tokens)["output_ids"] for tokens in PROMPTS]
    finally:
        single.close()
    add_tokenizer(model)
    sglang = Instance(model, folder / "decode.log", "decode", home.address, "--enable-metrics", tokenizer=True)
    try:
        with Client(home.address) as client:
            yield Pair(model, home, vllm, sglang.ready(), client, alone)
    finally:
        sglang.close()
        vllm.close()


@pytest.fixture
def node(model: Path, home: NodeServerProcess, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start another vLLM, whose steps are made one by one."""
    made: list[Node] = []

    def make(name: str, **settings: Any) -> Node:
        connector = kvferry("kv_producer", home.address, engine_id=name)
        settings = {"connector": connector, "environment": environment(), "max_num_batched_tokens": STEP, **settings}
        made.append(Node(model, tmp_path / f"{name}.log", **settings))
        return made[-1].ready()

    yield make
    for each in made:
        each.close()


def test_vllm_and_sglang_are_asked_at_once(pair: Pair) -> None:
    """The first token of the answer comes with vLLM's publication: the router carries nothing from one to the other."""
    assert "FLASH_ATTN by values of key, value" in pair.vllm.log.read_text()
    said = [pair.prefill(tokens, None, 12)["choices"][0]["token_ids"] for tokens in PROMPTS]
    assert said == pair.alone
    assert [pair.dispatch(tokens)["output_ids"] for tokens in PROMPTS] == pair.alone
    until(lambda: pinned(pair.home) == 0)


def test_the_example_of_a_router_asks_both_at_once(pair: Pair) -> None:
    port = free_port()
    command = [sys.executable, str(ROOT / "examples" / "dispatch_router.py"), str(port)]
    command += [f"{pair.vllm.url}#vllm@{pair.home.address}", f"sglang+{pair.sglang.url}", pair.home.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as router:
        try:
            assert router.stdout is not None
            assert router.stdout.readline() == b"listening\n"
            for tokens, alone in zip(PROMPTS, pair.alone, strict=True):
                body = {"model": str(pair.model), "prompt": tokens, "max_tokens": 12, "temperature": 0}
                body |= {"ignore_eos": True, "return_token_ids": True}
                asked = urllib.request.Request(f"http://127.0.0.1:{port}", json.dumps(body).encode())
                with urllib.request.urlopen(asked, timeout=ANSWER_TIMEOUT) as answer:
                    assert json.load(answer)["choices"][0]["token_ids"] == alone
        finally:
            router.kill()
    until(lambda: pinned(pair.home) == 0)


def test_many_requests_are_answered_at_once(pair: Pair) -> None:
    prompts = [prompt(100 + seed, length) for seed, length in enumerate([5, 40, 64, 65, 130, 200] * 2)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda tokens: pair.dispatch(tokens)["output_ids"], prompts))
    assert answers == [pair.prefill(tokens, None, 12)["choices"][0]["token_ids"] for tokens in prompts]
    until(lambda: pinned(pair.home) == 0)


def test_vllm_and_sglang_are_asked_one_after_the_other(pair: Pair) -> None:
    """A router that waits for vLLM's answer forwards its reference alone."""
    for tokens, alone in zip(PROMPTS, pair.alone, strict=True):
        params = pair.prefill(tokens, PREFILL)["kv_transfer_params"]
        assert pair.sglang.generate(tokens, **carried(params["kvferry_reference"]))["output_ids"] == alone
    until(lambda: pinned(pair.home) == 0)


def test_sglang_has_no_log_probability_of_the_first_token(pair: Pair) -> None:
    params = pair.prefill(PROMPTS[1], PREFILL)["kv_transfer_params"]
    answer = pair.sglang.generate(PROMPTS[1], return_logprob=True, **carried(params["kvferry_reference"]))
    first, *found = answer["meta_info"]["output_token_logprobs"]
    assert first[0] == 0
    assert [token for _, token, _ in found] == pair.alone[1][1:]
    assert all(value < 0 for value, _, _ in found)


def test_sglang_reads_the_cache_of_the_whole_prompt(pair: Pair) -> None:
    """SGLang computes no token of the prompt: the cache of each token has come from vLLM."""
    for tokens in PROMPTS:
        before = pair.sglang.counted("kvferry_reader_bytes")
        pair.dispatch(tokens)
        assert pair.sglang.counted("kvferry_reader_bytes") - before == len(tokens) * TOKEN_BYTES


def test_requests_with_swapped_references_are_both_refused(pair: Pair) -> None:
    """And not declined: given rightly, each of them is read."""
    wanted = [PROMPTS[0], PROMPTS[-1]]
    before = pair.sglang.counted("kvferry_reader_failures", reason="PromptMismatch")
    references = [pair.prefill(tokens, PREFILL)["kv_transfer_params"]["kvferry_reference"] for tokens in wanted]
    for reference, tokens in zip(references, reversed(wanted), strict=True):
        assert "PromptMismatch" in str(pair.sglang.generate(tokens, **carried(reference)))
    assert pair.sglang.counted("kvferry_reader_failures", reason="PromptMismatch") - before == 2
    answers = [
        pair.sglang.generate(tokens, **carried(reference)) for reference, tokens in zip(references, wanted, strict=True)
    ]
    assert [answer["output_ids"] for answer in answers] == [pair.alone[0], pair.alone[-1]]
    until(lambda: pinned(pair.home) == 0)


@pytest.mark.parametrize("token", [0, 70, 256])
def test_a_prompt_that_differs_in_one_token_is_refused(pair: Pair, token: int) -> None:
    """Asked at once, while vLLM computes in several steps."""
    other = [*PROMPTS[-1][:token], (PROMPTS[-1][token] + 1) % VOCABULARY, *PROMPTS[-1][token + 1 :]]
    assert "PromptMismatch" in str(pair.dispatch(PROMPTS[-1], other=other))
    assert pair.dispatch(PROMPTS[-1])["output_ids"] == pair.alone[-1]
    until(lambda: pinned(pair.home) == 0)


def test_partial_prompt_fails_by_name(pair: Pair) -> None:
    for other in (PROMPTS[0], PROMPTS[1][:-1]):
        assert "PromptMismatch" in str(pair.dispatch(PROMPTS[1], other=other))
    # A longer prompt with this beginning matches the marks, but needs more tokens, even with equally many pages.
    longer = pair.dispatch(PROMPTS[1], other=[*PROMPTS[1], 7])
    assert "a prompt of 33 tokens" in str(longer) or "BlocksShort" in str(longer), longer
    # Of an answer of several tokens, the cache has more than the prompt.
    params = pair.prefill(PROMPTS[1], PREFILL, 3)["kv_transfer_params"]
    longer = pair.sglang.generate(PROMPTS[1], **carried(params["kvferry_reference"]))
    assert "no first token" in str(longer)
    assert pair.dispatch(PROMPTS[1])["output_ids"] == pair.alone[1]
    until(lambda: pinned(pair.home) == 0)


def test_sglang_of_one_rank_reads_from_two_ranks_of_vllm(pair: Pair, node: Callable[..., Node]) -> None:
    """In blocks of 64 tokens, in steps of 64."""
    prefill = node("two-ranks", tp=2, block=64)
    for tokens, alone in zip(PROMPTS, pair.alone, strict=True):
        reference = router_reference(pair.home.address, "two-ranks")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(pair.sglang.generate, tokens, **carried(reference))
            prefill.generate(request(tokens, 1, {**PREFILL, "kvferry_reference": reference}))
            assert asked.result()["output_ids"] == alone
    until(lambda: pinned(pair.home) == 0)


def test_sglang_of_two_ranks_reads_from_one_rank_of_vllm(pair: Pair, tmp_path: Path) -> None:
    """The second time they have most of it in their own prefix cache, and do not read it again."""
    more = ["--disaggregation-decode-enable-radix-cache"]
    sglang = Instance(pair.model, tmp_path / "log", "decode", pair.home.address, *more, tp=2)
    try:
        sglang.ready()
        for _ in range(2):
            assert [pair.dispatch(tokens, sglang=sglang)["output_ids"] for tokens in PROMPTS] == pair.alone
        until(lambda: pinned(pair.home) == 0)
        assert "leak" not in sglang.log.read_text()
    finally:
        sglang.close()


def test_a_request_that_is_aborted_in_sglang_releases_vllm_at_once(pair: Pair, node: Callable[..., Node]) -> None:
    """Halfway, and long before the hold ends. vLLM goes on."""
    prefill = node("goes-on")
    reference = router_reference(pair.home.address, "goes-on")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.sglang.generate, PROMPTS[-1], rid="halfway", **carried(reference))
        prefill.call("begin", request(PROMPTS[-1], 1, {**PREFILL, "kvferry_reference": reference}), 3)
        until(lambda: pair.leases() == 1)
        pair.sglang.abort("halfway", asked)
    until(lambda: pinned(pair.home) == 0, 10)
    prefill.call("end_begun")
    assert pair.dispatch(PROMPTS[-1])["output_ids"] == pair.alone[-1]


@pytest.mark.parametrize("how", ["aborts", "dies"])
def test_request_fails_when_vllm_ends_halfway(how: str, pair: Pair, node: Callable[..., Node]) -> None:
    """SGLang's request fails with kvferry's error, and the next one is right."""
    prefill = node(how)
    reference = router_reference(pair.home.address, how)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.sglang.generate, PROMPTS[-1], **carried(reference))
        prefill.call("begin", request(PROMPTS[-1], 1, {**PREFILL, "kvferry_reference": reference}), 3)
        until(lambda: pair.leases() == 1)
        if how == "dies":
            prefill.close(signal.SIGKILL)
        else:
            prefill.call("abort_begun")
        said = str(asked.result())
    if how == "aborts":
        assert "PublicationAborted" in said
    else:
        # By the transfer, or by the home.
        assert "TransferFailed" in said or "SOURCE_LOST" in said
    assert pair.dispatch(PROMPTS[-1])["output_ids"] == pair.alone[-1]
    until(lambda: pinned(pair.home) == 0)
    assert "leak" not in pair.sglang.log.read_text()
