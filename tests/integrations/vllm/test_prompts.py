"""What the connector takes off the prompt of a prefill, in vLLM's own requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvferry.integrations.vllm.prompts import shorten


def made(tokens: list[int] | None, **options: Any) -> Request:
    return Request("r", tokens, SamplingParams(max_tokens=1), None, **options)


@pytest.mark.parametrize("withheld", [1, 3])
def test_a_prompt_is_shortened_for_its_request_alone(withheld: int) -> None:
    """In an engine of one process vLLM's front end, which counts the tokens and answers with them, has the same list,
    as have all samples of the prompt (n > 1)."""
    prompt = list(range(100, 110))
    samples = [made(prompt) for _ in range(2)]
    for request in samples:
        shorten(request, withheld)
    # vLLM makes the request of a sample after it has added the one before.
    samples.append(made(prompt))
    shorten(samples[-1], withheld)
    assert prompt == list(range(100, 110))
    for request in samples:
        assert request.num_prompt_tokens == request.num_tokens == 10 - withheld
        assert request.prompt_token_ids == list(request.all_token_ids) == prompt[:-withheld]


def test_a_prompt_of_tokens_and_embeddings_keeps_the_two_in_step() -> None:
    """vLLM's model runners copy which places are tokens into rows of the prompt's length."""
    mask = [True, False, True, True]
    request = made([7, 0, 8, 9], prompt_embeds=torch.zeros(4, 2), prompt_is_token_ids=mask)
    shorten(request, 1)
    assert request.prompt_token_ids == [7, 0, 8]
    assert request.prompt_is_token_ids == mask[:-1]
    assert request.prompt_embeds is not None
    assert len(request.prompt_embeds) == 3


@pytest.mark.parametrize("length", [1, 2])
def test_a_token_is_left_to_compute(length: int) -> None:
    request = made(list(range(length)))
    shorten(request, 1)
    assert request.num_prompt_tokens == request.num_tokens == 1
