"""The prompts of vLLM's requests."""

from __future__ import annotations

from typing import Any


def shorten(request: Any, tokens: int) -> None:
    """Take tokens off the end of a prompt that is prefilled for another engine, which computes them itself.

    Source: vllm-project/vllm 0.32.0, ``_truncate_request_for_prefill`` in
    vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py.
    """
    # A request that does not read the prefix cache reads nothing in decode either.
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
