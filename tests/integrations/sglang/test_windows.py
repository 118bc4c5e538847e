"""A model whose layers see a window and all tokens by turns, each kind of layer with a pool of its own: `SWAKVPool`.

SGLang's attention for CPUs is mended here, `tests.support.sglang_window_reads`; what is moved, and how, is not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.node_servers import NodeServerProcess
from tests.support.sglang_engines import PAGE, Instance, make_windowed_model, served, some_room
from tests.support.sglang_window_reads import environment
from tests.support.vllm_engines import prompt
from tests.support.vllm_requests import pinned
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

WINDOW = 40
"""Tokens, no whole number of pages."""
PROMPTS = [prompt(seed, length) for seed, length in enumerate([1, PAGE, 39, 40, 41, 64, 65, 96, 100, 200])]
"""Shorter than the window, as long, and longer; in one part, and in several."""


@pytest.mark.parametrize(("source", "destination"), [(2, 1)])
def test_pair_with_windows_generates_the_same_tokens_as_one_instance(
    source: int, destination: int, home: NodeServerProcess, tmp_path: Path
) -> None:
    """One by one, with what prefill has in its prefix cache, and together; decode goes on until all of the prompt has
    left the window."""
    model = make_windowed_model(tmp_path / "model", kv_heads=2, window=WINDOW)
    instances = [
        Instance(model, tmp_path / f"{name}.log", mode, home.address, *more, tp=tp, environment=environment())
        for name, mode, tp, more in (
            ("alone", "null", 1, []),
            ("prefill", "prefill", source, ["--chunked-prefill-size", "64"]),
            ("decode", "decode", destination, []),
        )
    ]
    try:
        single, prefill, decode = (instance.ready() for instance in instances)
        alone = [single.generate(tokens, 50)["output_ids"] for tokens in PROMPTS]
        for _ in range(2):
            answers = [served(prefill, decode, some_room(), tokens, 50) for tokens in PROMPTS]
            assert [answer["output_ids"] for answer in answers] == alone
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(lambda tokens: served(prefill, decode, some_room(), tokens, 50), PROMPTS))
        assert [answer["output_ids"] for answer in answers] == alone
        until(lambda: pinned(home) == 0)
        for instance in instances[1:]:
            assert "SWA" in instance.log.read_text()
            assert "leak" not in instance.log.read_text()
    finally:
        for instance in instances:
            instance.close()
