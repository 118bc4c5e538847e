"""The prompts of vLLM's requests."""

from __future__ import annotations

from typing import Any

from kvferry import Prompt, PromptInput
from kvferry.errors import InvalidField


def prompt_of(request: Any, *, names_inputs: bool) -> Prompt:
    """Return the prompt of a request, without the salt of the prefix cache; unknown if it contains embeddings.

    Call this when the request arrives, after `shorten`: the tokens are hashed now, and not in the step that needs the
    digest. `names_inputs`: see `Setup`.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return Prompt.unknown
    inputs = (
        PromptInput(each.mm_position.offset, each.mm_position.length, each.identifier if names_inputs else "")
        for each in request.mm_features
    )
    # An adapter's number and path differ from server to server.
    adapter = request.lora_request.lora_name if request.lora_request else ""
    try:
        return Prompt(request.prompt_token_ids, adapter=adapter, inputs=inputs)
    except InvalidField:
        # Without a tokenizer, vLLM takes negative token ids, too.
        return Prompt.unknown


def published_prompt(request: Any, prompt: Prompt, tokens: int, *, names_inputs: bool) -> Prompt:
    """Return the prompt of a finished request with the generated tokens up to `tokens`, the number of published tokens.

    `prompt` is that of the request's arrival. `names_inputs`: see `Setup`.
    """
    if not prompt:
        return prompt
    if len(prompt) != request.num_prompt_tokens:
        # The prompt of a session has grown since, perhaps by images.
        prompt = prompt_of(request, names_inputs=names_inputs)
    generated = request.all_token_ids[len(prompt) : tokens]
    return prompt.followed_by(generated) if generated else prompt


def shorten(request: Any, tokens: int) -> None:
    """Remove tokens from the end of a prompt that is prefilled for another engine, which computes these tokens itself.

    Source: vllm-project/vllm 0.32.0, ``_truncate_request_for_prefill`` in
    vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py.
    """
    # A request that does not read the prefix cache is not read by decode either.
    if not 0 < tokens < request.num_prompt_tokens or request.get_skip_reading_prefix_cache():
        return
    if request.prompt_token_ids is None and request.prompt_embeds is None:
        return
    # Not in place: in an engine of one process vLLM's front end has the same list, as have all samples of the prompt.
    # A prompt of tokens and embeddings has all three.
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        given = getattr(request, name, None)
        if given is not None:
            setattr(request, name, given[:-tokens])
    del request._all_token_ids[-tokens:]
    request.num_prompt_tokens -= tokens
