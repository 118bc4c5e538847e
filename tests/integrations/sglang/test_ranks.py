"""Instances of several ranks: each rank of SGLang has a scheduler of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.node_servers import NodeServerProcess
from tests.support.sglang_engines import Instance, named, served, some_room
from tests.support.vllm_engines import prompt
from tests.support.vllm_requests import pinned
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

PROMPTS = [prompt(seed, length) for seed, length in enumerate([100, 33, 7])]


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    single = Instance(model, tmp_path_factory.mktemp("alone") / "log").ready()
    try:
        return [single.generate(tokens)["output_ids"] for tokens in PROMPTS]
    finally:
        single.close()


@pytest.mark.parametrize(
    ("source", "destination", "more"), [(2, 1, ["--disaggregation-decode-enable-radix-cache"]), (1, 2, [])]
)
def test_instances_of_other_tp_sizes_generate_the_same_tokens(
    source: int,
    destination: int,
    more: list[str],
    model: Path,
    home: NodeServerProcess,
    tmp_path: Path,
    alone: list[list[int]],
) -> None:
    """Also together, after one of them was aborted, after one was of another prompt, with what prefill has in its
    prefix cache, and with what decode has in its own, which it does not read again."""
    instances = [
        Instance(model, tmp_path / "prefill.log", "prefill", home.address, tp=source),
        Instance(model, tmp_path / "decode.log", "decode", home.address, *more, tp=destination),
    ]
    try:
        prefill, decode = (instance.ready() for instance in instances)
        for _ in range(2):
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                answers = list(pool.map(lambda tokens: served(prefill, decode, some_room(), tokens), PROMPTS))
            assert [answer["output_ids"] for answer in answers] == alone
        with ThreadPoolExecutor(1) as pool:
            room = some_room()
            waiting = pool.submit(decode.generate, PROMPTS[0], rid="aborted", **named(prefill, room))
            decode.abort("aborted", waiting)
            assert "abort" in str(waiting.result())
            # Whichever rank finds it out first, nobody declines what was published.
            room = some_room()
            waiting = pool.submit(prefill.generate, PROMPTS[0], **named(prefill, room))
            refused = decode.generate([*PROMPTS[0][:-1], PROMPTS[0][-1] ^ 1], **named(prefill, room))
            assert "output_ids" not in refused
            assert "PromptMismatch" in decode.log.read_text()
            assert "UNREAD" in str(waiting.result())
        assert served(prefill, decode, some_room(), PROMPTS[0])["output_ids"] == alone[0]
        until(lambda: pinned(home) == 0)
        for instance in instances:
            assert "leak" not in instance.log.read_text()
    finally:
        for instance in instances:
            instance.close()
