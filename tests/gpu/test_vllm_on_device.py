"""A real vLLM on the device, where it is installed: after reading prefill's cache, decode generates its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvferry import EmbeddedServer
from tests.support.vllm_engines import Node, kvferry, make_model, prompt, request
from tests.support.vllm_requests import alone, computed_as_another, offered, said

BLOCK = 32
LENGTHS = (31, 64, 100, 257)


@pytest.fixture
def engines(node: EmbeddedServer, device: str, tmp_path: Path) -> Iterator[list[Node]]:
    """Prefill and decode, side by side on one card."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed, with which vLLM's model is made")
    model = make_model(tmp_path / "model", kv_heads=4, head_dim=64)
    made: list[Node] = []
    try:
        for role in ("producer", "consumer"):
            connector = kvferry(f"kv_{role}", node.address, kv_load_failure_policy="fail")
            settings: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20}
            if device != "cpu":
                connector["kv_buffer_device"] = "cuda"
                settings |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.3}
            made.append(Node(model, tmp_path / f"{role}.log", block=BLOCK, connector=connector, **settings))
        yield [engine.ready() for engine in made]
    finally:
        for engine in made:
            engine.close()


@pytest.mark.timeout(900)
def test_decode_generates_the_tokens_of_prefill(engines: list[Node]) -> None:
    """One request at a time, since the rounding of bfloat16 depends on the batch. Where prefill takes a prompt for
    another one, decode goes on from that: it reads the cache, and computes nothing of the prompt itself."""
    prefill, decode = engines
    for seed, length in enumerate(LENGTHS):
        tokens, mistaken = prompt(seed, length), prompt(100 + seed, length)
        expected = alone(prefill, [tokens])
        assert said(decode.generate(request(tokens, 12, *offered(prefill, [tokens])))) == expected
        params, other = computed_as_another(prefill, mistaken)
        assert said(decode.generate(request(mistaken, 12, params))) == alone(prefill, [other])
