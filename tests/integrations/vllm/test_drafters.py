"""Speculative decoding in real vLLM engines: the drafter's cache is moved with the target's, so that decode drafts as
prefill would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_engines import Node, make_model, prompt, request
from tests.support.vllm_models import make_eagle_head, make_predicting_model
from tests.support.vllm_requests import offered

pytestmark = pytest.mark.timeout(900)

VOCABULARY = 4
"""So few tokens that some drafts of random weights are accepted."""


def small_model(folder: Path) -> Path:
    return make_model(folder / "target", kv_heads=4, vocabulary=VOCABULARY)


def draft_model(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A draft model's layers have other numbers of heads, and their own names in vLLM."""
    drafter = make_model(folder / "drafter", kv_heads=2, layers=2, vocabulary=VOCABULARY)
    return small_model(folder), {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 2}


def eagle(folder: Path, version: int = 1, method: str = "eagle") -> tuple[Path, dict[str, Any]]:
    """The drafter's layer is numbered behind the target's."""
    head = make_eagle_head(folder / "head", kv_heads=2, vocabulary=VOCABULARY, version=version)
    return small_model(folder), {"method": method, "model": str(head), "num_speculative_tokens": 2}


def eagle3(folder: Path) -> tuple[Path, dict[str, Any]]:
    return eagle(folder, 3, "eagle3")


def mtp(folder: Path) -> tuple[Path, dict[str, Any]]:
    model = make_predicting_model(folder / "target", vocabulary=VOCABULARY)
    return model, {"method": "mtp", "num_speculative_tokens": 1}


def drafted(engine: Node, asked: dict[str, Any]) -> tuple[list[int], float]:
    """Return an engine's answers, and their number of accepted draft tokens."""
    accepted = "vllm:spec_decode_num_accepted_tokens"
    before = engine.call("metric", accepted)
    [answer] = engine.generate(asked)
    return answer["tokens"], engine.call("metric", accepted) - before


@pytest.mark.parametrize(
    ("made", "tp"),
    [
        pytest.param(draft_model, 1, id="draft-model"),
        pytest.param(eagle, 2, id="eagle-2-to-1"),
        pytest.param(eagle3, 1, id="eagle3"),
        pytest.param(mtp, 1, id="mtp"),
    ],
)
def test_decode_drafts_as_one_engine_does(
    pair: Callable[..., tuple[Node, Node]], tmp_path: Path, made: Callable[[Path], tuple[Path, dict[str, Any]]], tp: int
) -> None:
    model, speculative = made(tmp_path)
    settings = {"speculative_config": speculative}
    prefill, decode = pair(model, {**settings, "tp": tp}, settings)
    prompts = [[token % VOCABULARY for token in prompt(700 + length, length)] for length in (2, 33, 64, 150)]
    # One by one: with another cache a drafter drafts other tokens, and the model accepts others.
    for tokens in prompts:
        expected, wanted = drafted(prefill, request(tokens, 100))
        [params] = offered(prefill, [tokens])
        assert drafted(decode, request(tokens, 100, params)) == (expected, wanted)
        assert wanted > 0
    assert decode.call("metric", "vllm:kvferry_read") == len(prompts)
