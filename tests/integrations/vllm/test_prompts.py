"""The prompts of vLLM's own requests: what the connector takes off for decode, and what marks are made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvferry import Prompt, PromptInput
from kvferry.integrations.vllm.requests import prompt_of, published_prompt, shorten
from kvferry.integrations.vllm.setup import _names_inputs

TEXT = [5, 9, 9, 9, 7]


def made(tokens: list[int] | None, **options: Any) -> Request:
    return Request("r", tokens, SamplingParams(max_tokens=1), None, **options)


def image(offset: int, name: str) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=offset, length=3))


def same(one: Prompt, other: Prompt) -> bool:
    """Whether a source and a destination take them for the same prompt."""
    return one.ends == other.ends and [*map(one.digest, one.ends)] == [*map(other.digest, other.ends)]


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


def test_prompt_of_tokens_and_embeddings_is_shortened_in_both() -> None:
    """vLLM's model runners copy which places are tokens into rows of the prompt's length."""
    mask = [True, False, True, True]
    request = made([7, 0, 8, 9], prompt_embeds=torch.zeros(4, 2), prompt_is_token_ids=mask)
    shorten(request, 1)
    assert request.prompt_token_ids == [7, 0, 8]
    assert request.prompt_is_token_ids == mask[:-1]
    assert request.prompt_embeds is not None
    assert len(request.prompt_embeds) == 3


@pytest.mark.parametrize("length", [1, 2])
def test_prompt_keeps_a_token_to_compute(length: int) -> None:
    request = made(list(range(length)))
    shorten(request, 1)
    assert request.num_prompt_tokens == request.num_tokens == 1


def test_a_prompt_is_its_tokens_its_adapters_name_and_its_inputs() -> None:
    """Not the number or the path of the adapter, nor the prefix cache's salt, which differ from server to server."""
    adapters = [LoRARequest("sql", number, path) for number, path in ((1, "/models/sql"), (4, "/mnt/sql"))]
    for adapter, salt in zip(adapters, ("a", None), strict=True):
        request = made(TEXT, lora_request=adapter, cache_salt=salt, mm_features=[image(1, "cat")])
        expected = Prompt(TEXT, adapter="sql", inputs=[PromptInput(1, 3, "cat")])
        assert same(prompt_of(request, names_inputs=True), expected)
    plain = prompt_of(made(TEXT), names_inputs=True)
    assert same(plain, Prompt(TEXT))
    assert not same(plain, prompt_of(made(TEXT, mm_features=[image(1, "cat")]), names_inputs=True))


def test_prompt_is_known_up_to_the_first_input_without_a_name() -> None:
    found = prompt_of(made(TEXT, mm_features=[image(1, "renderer0-mm-1-image-0")]), names_inputs=False)
    assert (len(found), found.known, found.ends) == (5, 1, (1,))


@pytest.mark.parametrize(
    ("caches_prefixes", "processed_gb", "named"), [(True, 0, True), (False, 4, True), (False, 0, False)]
)
def test_vllm_names_inputs_by_their_content_if_it_caches_any(
    caches_prefixes: bool, processed_gb: float, named: bool
) -> None:
    inputs = MultiModalConfig(mm_processor_cache_gb=processed_gb)
    cache: Any = CacheConfig(enable_prefix_caching=caches_prefixes)
    config = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=inputs), cache_config=cache)
    assert _names_inputs(config) == named
    config.model_config.multimodal_config = None
    assert _names_inputs(config)


def test_prompt_of_embeddings_is_unknown() -> None:
    """Also beside tokens; and so are token ids that no vocabulary has, which a vLLM without a tokenizer takes."""
    some = torch.zeros(5, 2)
    mask = [True, False, True, True, True]
    for request in (
        made(None, prompt_embeds=some),
        made(TEXT, prompt_embeds=some, prompt_is_token_ids=mask),
        made([5, -1]),
    ):
        found = prompt_of(request, names_inputs=True)
        assert not found
        request.append_output_token_ids([8, 9])
        assert not published_prompt(request, found, 6, names_inputs=True)


def test_generated_tokens_are_marked_beside_the_prompt() -> None:
    request = made(TEXT)
    found = prompt_of(request, names_inputs=True)
    # The KV cache of the last token is not computed.
    request.append_output_token_ids([20, 21, 22])
    assert same(published_prompt(request, found, 5, names_inputs=True), found)
    assert same(published_prompt(request, found, 7, names_inputs=True), Prompt(TEXT).followed_by([20, 21]))


def test_prompt_of_a_session_may_have_grown() -> None:
    """vLLM adds what was generated, and what came then, to the request's prompt."""
    request = made(list(TEXT), resumable=True)
    found = prompt_of(request, names_inputs=True)
    assert request.prompt_token_ids is not None
    more = [20, 11, 11, 11]
    request.prompt_token_ids.extend(more)
    request._all_token_ids.extend([*more, 30])
    request.num_prompt_tokens += len(more)
    request.mm_features.append(image(6, "dog"))
    expected = Prompt([*TEXT, *more], inputs=[PromptInput(6, 3, "dog")])
    assert same(published_prompt(request, found, 9, names_inputs=True), expected)
