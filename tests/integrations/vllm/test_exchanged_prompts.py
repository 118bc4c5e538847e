"""A router gives decode the KV cache of another prompt: decode does not take it, and computes or fails the request as
vLLM's policy says. Its prefix cache is as if nothing had been, so that no later request finds wrong tokens in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry import router_reference
from tests.support.node_servers import NodeServerProcess
from tests.support.vllm_engines import PREFILL, Node, kvferry, make_model, prompt, request
from tests.support.vllm_models import make_adapter
from tests.support.vllm_requests import offered, pinned, ready, said
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

POLICIES = ("recompute", "fail")
READS = {"do_remote_prefill": True, "do_remote_decode": False}


@dataclass(frozen=True)
class Pair:
    """Two engines, and what decode does with a request that it could not read."""

    prefill: Node
    decode: Node
    policy: str

    def counts(self) -> list[float]:
        """Reads of decode: those that were good, and those that failed."""
        return [self.decode.call("metric", f"vllm:kvferry_{name}") for name in ("read", "failures")]

    def alone(self, asked: list[dict[str, Any]]) -> list[list[int]]:
        """Return the answers of one engine without reads."""
        return said(self.prefill.generate(*({**each, "params": None} for each in asked)))

    def check_read(self, *asked: dict[str, Any]) -> None:
        """Decode reads what it is asked for: the publications are still there for their own requests."""
        reads, failures = self.counts()
        assert said(self.decode.generate(*asked)) == self.alone([*asked])
        assert self.counts() == [reads + len(asked), failures]

    def check_refused(self, *asked: dict[str, Any], meanwhile: Callable[[], Any] = lambda: None) -> None:
        """Decode takes nothing for what it is asked, says so in its log, and is right about the prompts ever after."""
        reads, failures = self.counts()
        logged = len(self.decode.tail(1 << 30))
        self.decode.send("generate", *asked)
        meanwhile()
        answers = self.decode.answer()
        assert self.counts() == [reads, failures + len(asked)]
        lines = self.decode.tail(1 << 30)[logged:].splitlines()
        # vLLM's own errors are beside them.
        errors = [line for line in lines if " ERROR " in line and "PromptMismatch" in line]
        assert len(errors) == len(asked)
        assert all("router" in line for line in errors)
        expected = self.alone([*asked])
        if self.policy == "recompute":
            assert said(answers) == expected
        else:
            assert [answer["finish"] for answer in answers] == ["error"] * len(asked)
        # Without kvferry: the same prompts, and others that have their first blocks in common with them.
        plain = [{**each, "params": None} for each in asked]
        assert said(self.decode.generate(*plain)) == expected
        sharing = [
            {**each, "prompt": [*each["prompt"][: len(each["prompt"]) * 2 // 3], *prompt(9, 20)]} for each in plain
        ]
        assert said(self.decode.generate(*sharing)) == self.alone(sharing)


@pytest.fixture(scope="module")
def engines(home: NodeServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Node]]:
    """A prefill engine, and a decode engine of each policy."""
    folder = tmp_path_factory.mktemp("engines")
    model = make_model(folder / "model", kv_heads=4)
    made = {}
    for name in ("prefill", *POLICIES):
        role = "kv_producer" if name == "prefill" else "kv_consumer"
        policy = "recompute" if name == "recompute" else "fail"
        connector = kvferry(role, home.address, kv_load_failure_policy=policy, engine_id=name)
        made[name] = Node(
            model,
            folder / f"{name}.log",
            connector=connector,
            max_num_batched_tokens=128,
            enable_lora=True,
            max_lora_rank=8,
        )
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(params=POLICIES)
def pair(home: NodeServerProcess, engines: dict[str, Node], request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield Pair(ready(engines["prefill"]), ready(engines[request.param]), request.param)
    # Each publication has found its own reader.
    until(lambda: pinned(home) == 0)


def changed(tokens: list[int], place: int) -> list[int]:
    """A prompt that differs in one token."""
    return [*tokens[:place], tokens[place] ^ 1, *tokens[place + 1 :]]


def seed(pair: Pair, number: int) -> int:
    """Prompts of its own for each policy: prefill is the same engine."""
    return number + 1000 * POLICIES.index(pair.policy)


CASES: dict[str, Callable[[int], tuple[list[int], list[int]]]] = {
    "another": lambda seed: (prompt(seed, 200), prompt(seed + 1, 200)),
    "one-token": lambda seed: (prompt(seed, 300), changed(prompt(seed, 300), 150)),
    "last-token": lambda seed: (prompt(seed, 300), changed(prompt(seed, 300), 299)),
    "longer": lambda seed: (prompt(seed, 200), prompt(seed + 1, 300)),
    "shorter": lambda seed: (prompt(seed, 300), prompt(seed + 1, 200)),
    "one-block-more": lambda seed: (prompt(seed, 64), prompt(seed + 1, 65)),
    "much-shorter": lambda seed: (prompt(seed, 1000), prompt(seed + 1, 40)),
    "its-beginning": lambda seed: (prompt(seed, 300), prompt(seed, 300)[:200]),
}
"""The prompt that was published, and that of the request that is given it."""


@pytest.mark.parametrize("case", CASES)
def test_cache_of_another_prompt_is_not_taken(pair: Pair, case: str) -> None:
    published, mine = CASES[case](seed(pair, 10 * [*CASES].index(case)))
    [params] = offered(pair.prefill, [published])
    pair.check_refused(request(mine, 12, params))
    # The publication was not declined.
    pair.check_read(request([*published, 5], 12, params))


def test_exchanged_requests_are_refused(pair: Pair) -> None:
    prompts = [prompt(seed(pair, 200 + index), 150) for index in range(2)]
    params = offered(pair.prefill, prompts)
    pair.check_refused(*(request(tokens, 12, some) for tokens, some in zip(prompts, reversed(params), strict=True)))
    # It tries again.
    pair.check_read(*(request(tokens, 12, some) for tokens, some in zip(prompts, params, strict=True)))


def test_exchanged_requests_sent_to_both_at_once_are_refused(pair: Pair, home: NodeServerProcess) -> None:
    """Prefill computes each in several steps, and says with the first what prompt it is."""
    prompts = [prompt(seed(pair, 220 + index), 300) for index in range(2)]
    references = [router_reference(home.address, "prefill") for _ in prompts]
    mine, wrong, right = (
        [
            request(tokens, most, {**asked, "kvferry_reference": reference})
            for tokens, reference in zip(prompts, given, strict=True)
        ]
        for most, asked, given in ((1, PREFILL, references), (12, READS, references[::-1]), (12, READS, references))
    )
    pair.check_refused(*wrong, meanwhile=lambda: pair.prefill.generate(*mine))
    pair.check_read(*right)


def test_parameters_chosen_by_a_client_are_refused(pair: Pair) -> None:
    """A client that knows the reference of another client's prompt gets no token of it, and does not disturb its
    reader."""
    somebodys = prompt(seed(pair, 240), 200)
    [params] = offered(pair.prefill, [somebodys])
    chosen = {**READS, "kvferry_reference": params["kvferry_reference"]}
    pair.check_refused(*(request(prompt(seed(pair, 241 + index), 90), 12, chosen) for index in range(2)))
    pair.check_read(request(somebodys, 12, params))


def test_samples_of_another_prompt_are_refused(pair: Pair) -> None:
    """vLLM makes a request of each, and each of them asks for itself."""
    tokens, other = (prompt(seed(pair, 260 + index), 60) for index in range(2))
    [params] = offered(pair.prefill, [other])
    failures = pair.counts()[1]
    [answer] = pair.decode.generate(request(tokens, 12, params, n=2, temperature=1.0, seed=3))
    assert pair.counts()[1] == failures + 2
    if pair.policy == "recompute":
        [expected] = pair.prefill.generate(request(tokens, 12, n=2, temperature=1.0, seed=3))
        assert answer["samples"] == expected["samples"]
    pair.check_read(request(other, 12, params))


def test_cache_of_another_adapter_is_not_taken(pair: Pair, tmp_path: Path) -> None:
    """The tokens are the same. vLLM's numbers of adapters differ between engines; their names do not.

    One by one: vLLM 0.32.0 on CPU computes a batch of requests with an adapter and without as if all had the same.
    """
    adapter = str(make_adapter(tmp_path / "adapter", layers=4))
    tokens = prompt(seed(pair, 280), 150)
    adapted = request(tokens, 1, PREFILL, adapter=("sql", 1, adapter))
    plain = request(tokens, 1, PREFILL)
    assert pair.alone([{**adapted, "max_tokens": 12}]) != pair.alone([{**plain, "max_tokens": 12}])
    [with_adapter, without] = (pair.prefill.generate(each)[0]["params"] for each in (adapted, plain))
    pair.check_refused(request(tokens, 12, with_adapter))
    pair.check_refused(request(tokens, 12, without, adapter=("sql", 2, adapter)))
    pair.check_read(request(tokens, 12, with_adapter, adapter=("sql", 2, adapter)))
    pair.check_read(request(tokens, 12, without))


def test_generated_tokens_of_prefill_are_read_by_a_continuation(pair: Pair) -> None:
    """The generated tokens are marked as well as the prompt."""
    tokens = prompt(seed(pair, 300), 100)
    [turn] = pair.prefill.generate(request(tokens, 40, PREFILL))
    whole = [*tokens, *turn["tokens"], *prompt(seed(pair, 301), 20)]
    pair.check_refused(request(changed(whole, 120), 12, turn["params"]))
    pair.check_read(request(whole, 12, turn["params"]))
    # The prompt's own reader takes no more than the prompt.
    other = prompt(seed(pair, 302), 100)
    [turn] = pair.prefill.generate(request(other, 40, PREFILL))
    pair.check_read(request(other, 12, turn["params"]))
