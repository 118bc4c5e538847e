"""A prefill and a decode instance of SGLang, asked as its routers ask them: both at once, for the same room."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.node_servers import NodeServerProcess
from tests.support.sglang_engines import Instance, named, served, some_room
from tests.support.vllm_engines import prompt
from tests.support.vllm_requests import pinned
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

PROMPTS = [prompt(seed, length) for seed, length in enumerate([100, 33, 16, 7, 1, 200])]
CHUNK = 64
"""Tokens that prefill computes at once: the longest prompts come in several parts."""
TOKEN_BYTES = 4 * 2 * 2 * 32 * 4
"""Of the model: layers, K and V, heads, their size, float32."""


@dataclass
class Pair:
    """Two instances, and what one instance by itself says to `PROMPTS`."""

    model: Path
    folder: Path
    home: NodeServerProcess
    alone: list[list[int]]
    prefill: Instance
    decode: Instance

    def started(self, mode: str) -> Instance:
        """Start an instance, at the place of the one that was there before."""
        before = self.prefill if mode == "prefill" else self.decode
        return start(self.model, self.folder, mode, self.home, before).ready()


def start(model: Path, folder: Path, mode: str, home: NodeServerProcess, before: Instance | None = None) -> Instance:
    more = ["--chunked-prefill-size", str(CHUNK)] if mode == "prefill" else ["--enable-metrics"]
    environment = {"KVFERRY_ENGINE_ID": mode, "KVFERRY_READ_TIMEOUT": "60"}
    return Instance(model, folder / f"{mode}.log", mode, home.address, *more, environment=environment, before=before)


@pytest.fixture(scope="module")
def pair(model: Path, home: NodeServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    single = Instance(model, folder / "alone.log").ready()
    alone = [single.generate(tokens)["output_ids"] for tokens in PROMPTS]
    single.close()
    both = [start(model, folder, mode, home) for mode in ("prefill", "decode")]
    try:
        made = Pair(model, folder, home, alone, *(instance.ready() for instance in both))
        yield made
        both += [made.prefill, made.decode]
    finally:
        for instance in both:
            instance.close()


def test_pair_generates_the_same_tokens_as_one_instance(pair: Pair) -> None:
    """Also where prefill computes in chunks, has the prompt already, and where the prompt is shorter than a page."""
    for _ in range(2):
        answers = [served(pair.prefill, pair.decode, some_room(), tokens) for tokens in PROMPTS]
        assert [answer["output_ids"] for answer in answers] == pair.alone
    until(lambda: pinned(pair.home) == 0)


def test_pair_answers_many_requests_at_once(pair: Pair) -> None:
    wanted = list(enumerate(PROMPTS)) * 4
    random.Random(0).shuffle(wanted)
    with ThreadPoolExecutor(len(wanted)) as pool:
        asked = [pool.submit(served, pair.prefill, pair.decode, some_room(), tokens) for _, tokens in wanted]
        answers = [each.result()["output_ids"] for each in asked]
    assert answers == [pair.alone[index] for index, _ in wanted]
    until(lambda: pinned(pair.home) == 0)


def test_decode_reads_the_cache_of_the_whole_prompt(pair: Pair) -> None:
    """Decode computes no token of the prompt: the cache of each token has come from prefill."""
    for tokens in PROMPTS:
        before = pair.decode.counted("kvferry_reader_bytes")
        served(pair.prefill, pair.decode, some_room(), tokens)
        assert pair.decode.counted("kvferry_reader_bytes") - before == len(tokens) * TOKEN_BYTES


def test_log_probabilities_of_the_first_token_come_from_prefill(pair: Pair) -> None:
    answer = served(pair.prefill, pair.decode, some_room(), PROMPTS[1], return_logprob=True)
    found = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in found] == pair.alone[1]
    assert all(value <= 0 for value, _, _ in found)
    assert found[0][0] != 0


@pytest.mark.parametrize("more", [67, 1], ids=["more-pages", "as-many-pages"])
def test_prompt_that_extends_the_prompt_of_prefill_fails_by_name(pair: Pair, more: int) -> None:
    room, other = some_room(), [*PROMPTS[1], *prompt(77, more)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(pair.prefill.generate, PROMPTS[1], **named(pair.prefill, room))
        answer = pool.submit(pair.decode.generate, other, **named(pair.prefill, room)).result()
        first.result()
    assert "a prompt of 33 tokens" in str(answer) or "BlocksShort" in str(answer)


def test_a_room_that_was_used_is_refused_by_name(pair: Pair) -> None:
    room = some_room()
    assert served(pair.prefill, pair.decode, room, PROMPTS[1])["output_ids"] == pair.alone[1]
    late = pair.decode.generate(PROMPTS[1], **named(pair.prefill, room))
    assert "PublicationReleased" in str(late)


def test_repeated_request_is_answered_once(pair: Pair) -> None:
    """As clients and routers repeat requests: each side has both at the same time."""
    room = some_room()
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(instance.generate, PROMPTS[5], **named(pair.prefill, room))
            for instance in (pair.prefill, pair.prefill, pair.decode, pair.decode)
        ]
        answers = [each.result().get("output_ids") for each in asked]
    assert answers.count(pair.alone[5]) == 1
    until(lambda: pinned(pair.home) == 0)


def test_two_decodes_read_from_one_prefill_and_finish_retracted_requests(pair: Pair) -> None:
    """SGLang retracts requests when it runs out of pages; here it does so every few steps."""
    environment = {"KVFERRY_ENGINE_ID": "decode-2", "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    log = pair.folder / "retracting.log"
    second = Instance(pair.model, log, "decode", pair.home.address, environment=environment).ready()
    try:
        wanted = list(enumerate(PROMPTS)) * 2
        with ThreadPoolExecutor(len(wanted)) as pool:
            asked = [
                pool.submit(served, pair.prefill, decode, some_room(), tokens)
                for _, tokens in wanted
                for decode in (pair.decode, second)
            ]
            answers = [each.result()["output_ids"] for each in asked]
        assert answers == [pair.alone[index] for index, _ in wanted for _ in range(2)]
        assert "#retracted_reqs: 1" in log.read_text()
        assert "leak" not in log.read_text()
    finally:
        second.close()
    until(lambda: pinned(pair.home) == 0)


def test_an_aborted_request_releases_prefill_at_once(pair: Pair) -> None:
    """Decode waits for a request that prefill gets only after decode has given up."""
    room = some_room()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(pair.decode.generate, PROMPTS[0], rid="aborted", **named(pair.prefill, room))
        pair.decode.abort("aborted", waiting)
        assert "abort" in str(waiting.result())
    answer = pair.prefill.generate(PROMPTS[0], **named(pair.prefill, room))
    assert "DECLINED" in str(answer)
    until(lambda: pinned(pair.home) == 0, 10)
    assert served(pair.prefill, pair.decode, some_room(), PROMPTS[2])["output_ids"] == pair.alone[2]


def test_unread_request_fails_after_the_hold(pair: Pair) -> None:
    answer = pair.prefill.generate(PROMPTS[0], **named(pair.prefill, some_room()))
    assert "UNREAD" in str(answer)
    assert pinned(pair.home) == 0
    assert served(pair.prefill, pair.decode, some_room(), PROMPTS[0])["output_ids"] == pair.alone[0]


def test_requests_of_a_dead_prefill_fail_and_a_restarted_prefill_serves(pair: Pair) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(pair.decode.generate, PROMPTS[0], **named(pair.prefill, some_room())) for _ in range(2)]
        pair.prefill.close()
        for each in waiting:
            said = str(each.result())
            assert "EngineUnknown" in said or "PeerRestarted" in said or "EngineLost" in said, said
    pair.prefill = pair.started("prefill")
    assert served(pair.prefill, pair.decode, some_room(), PROMPTS[0])["output_ids"] == pair.alone[0]
    assert "leak" not in pair.decode.log.read_text()


def test_prefill_frees_the_blocks_of_a_decode_that_dies(pair: Pair) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(pair.prefill.generate, PROMPTS[0], **named(pair.prefill, some_room()))
        pair.decode.close()
        assert "UNREAD" in str(first.result())
    until(lambda: pinned(pair.home) == 0)
    pair.decode = pair.started("decode")
    assert served(pair.prefill, pair.decode, some_room(), PROMPTS[0])["output_ids"] == pair.alone[0]
    assert "leak" not in pair.prefill.log.read_text()
