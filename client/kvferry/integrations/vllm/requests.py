"""What the connector takes from requests of vLLM: the fields of ``kv_transfer_params``, which routers set, or forward
from prefill's answer to decode; and the prompt."""

from __future__ import annotations

import re
from typing import Any

from kvferry import Prompt, PromptInput, Publication, parse_reference
from kvferry.errors import InvalidField, KvferryError

REFERENCE = "kvferry_reference"
"""The field of kvferry's reference: of the publication that decode reads, or that prefill makes."""

PUBLISH_AS = "kvferry_publish_as"
"""The field of the reference to publish under, for a request that reads `REFERENCE`."""

TRACEPARENT = "kvferry_traceparent"
"""The field of the W3C traceparent: for prefill that of its router, for decode that of prefill's span."""

PREFIX_SOURCE = "kvferry_prefix_source"
"""The field of the engine reference of an engine that may have the prompt's beginning in its cache. A request that has
this field, be it empty, is answered with the engine reference of the engine that has computed it."""

_SHORT = re.compile(r"[!-~]{55,455}")
"""Upper bound of a traceparent: 55 characters, later versions more. The SDK ignores malformed ones."""


def asks_to_publish(request: Any) -> bool:
    """Whether another engine will read a request."""
    return bool(_params(request).get("do_remote_decode"))


def read_reference(request: Any) -> str:
    """Return the reference of the publication that a request reads; empty: none.

    Clients may send any value. For a value that is not a string, a string that is not a reference is returned, so that
    the read fails with `BadReference`.
    """
    params = _params(request)
    reference = params.get(REFERENCE)
    if not params.get("do_remote_prefill") or not reference:
        return ""
    return reference if isinstance(reference, str) else type(reference).__name__


def publish_reference(request: Any) -> str:
    """Return the router's reference for a request's publication; empty: the router has made none."""
    params = _params(request)
    reference = params.get(PUBLISH_AS) or (None if params.get("do_remote_prefill") else params.get(REFERENCE))
    return reference if isinstance(reference, str) and is_routers(reference) else ""


def prefix_source(request: Any) -> str:
    """Return the reference of the engine that a request names as the source of its prefix; empty: none."""
    source = _params(request).get(PREFIX_SOURCE)
    return source if isinstance(source, str) else ""


def asks_for_source(request: Any) -> bool:
    """Whether the answer to a request names this engine as a source of prefixes."""
    return PREFIX_SOURCE in _params(request)


def is_routers(reference: str) -> bool:
    """Whether a router has made a reference, before there was a publication."""
    try:
        return bool(parse_reference(reference).router_key)
    except KvferryError:
        return False


def published_params(published: Publication) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` for decode. Routers pass them on unread."""
    params = {"do_remote_prefill": True, "do_remote_decode": False, REFERENCE: published.reference}
    return {**params, TRACEPARENT: published.traceparent} if published.traceparent else params


def traceparent_of(request: Any) -> str:
    """Return the traceparent of a request: from its parameters, otherwise from its HTTP headers, which vLLM keeps if it
    traces itself; empty: there is none, or it is malformed."""
    headers = getattr(request, "trace_headers", None) or {}
    given = _params(request).get(TRACEPARENT) or headers.get("traceparent")
    # Bounded, because every worker receives the traceparent.
    return given if isinstance(given, str) and _SHORT.fullmatch(given) else ""


def _params(request: Any) -> dict[str, Any]:
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}


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
