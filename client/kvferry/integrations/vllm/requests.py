"""What the connector takes from requests of vLLM: the fields of ``kv_transfer_params``, which routers set, or forward
from prefill's answer to decode; the prompt; and the hints of other projects' routers, that an engine may have its
beginning:

Dynamo:  ``Request.kv_hints`` (vLLM 0.31), or ``kv_transfer_params["kv_hint"]``: an envelope of actions, ``kv.fetch``
llm-d:   ``kv_transfer_params["remote_kv_source"]``: host and port of vLLM's P2P tier

A hint names an address. Nothing connects to it: it is looked up as an engine_id in the directory, and the engine of
that name is asked by the prompt. So the hashes in a hint are not read: they are the router's belief, by the hash
function of some engine. A hint may contain values of any type and size, as clients may have written it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvferry import Prompt, PromptInput, Publication, parse_reference
from kvferry.errors import InvalidField, KvferryError
from kvferry.integrations.settings import shown

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

ENVELOPE = "kv_hint"
"""The field of Dynamo's envelope (`_apply_kv_hint` in dynamo/vllm/kv_hints.py; ai-dynamo 1.6.1)."""

SOURCE = "remote_kv_source"
"""The field of llm-d's sidecar (`p2pSourceParams` in pkg/sidecar/proxy/connector_p2p.go; August 2026)."""

PROTOCOL_VERSION = "0.1"
FETCH = "kv.fetch"
FETCH_VERSION = "1.0"
SCHEME = "tcp://"

MOST_ACTIONS = 16
"""Most actions of an envelope that are looked at."""

MOST_CHARACTERS = 255
"""Most characters of an address, or of a host: no engine has a longer name."""

MOST_RANKS = 128
"""Ranks of data-parallel servers whose engines are found."""


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
    """Return the prompt of a finished request, from that of its arrival, with the generated tokens up to the number of
    published `tokens`. `names_inputs`: see `Setup`."""
    if not prompt:
        return prompt
    if len(prompt) != request.num_prompt_tokens:
        # The prompt of a session has grown since, perhaps by images.
        prompt = prompt_of(request, names_inputs=names_inputs)
    generated = request.all_token_ids[len(prompt) : tokens]
    return prompt.followed_by(generated) if generated else prompt


def shorten(request: Any, tokens: int) -> None:
    """Remove tokens from the end of a prompt that is prefilled for another engine, which computes these tokens itself:
    as ``_truncate_request_for_prefill`` in vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py
    (0.32.0).
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


def hinted_engine(request: Any) -> str:
    """Return the ``host:port`` that a request's hint names, as it is written there; empty: the request has no hint. Of
    several hints vLLM's own counts, then Dynamo's, then llm-d's. Raises `InvalidField`: the hint is malformed, of
    another version, or asks for something else; `field` is what is wrong."""
    envelope, params = request.kv_hints, request.kv_transfer_params
    if envelope is None:
        envelope = _part(params, ENVELOPE)
    if envelope is not None:
        return _fetched_from(envelope)
    source = _part(params, SOURCE)
    return "" if source is None else _peer(source)


def engine_names(address: str) -> tuple[str, ...]:
    """Return the engine_ids that the engine at a ``host:port`` may have, first the address itself.

    vLLM names the engine of data-parallel rank n ``{engine_id}_dp{n}``, and its P2P tier, for which hints are made,
    listens n ports above the configured one (vllm/v1/kv_offload/tiering/p2p/manager.py; 0.32.0).
    """
    host, _, port = address.rpartition(":")
    first = int(port) if port.isascii() and port.isdigit() else 0
    ranks = (f"{host}:{first - rank}_dp{rank}" for rank in range(min(first, MOST_RANKS)))
    return address, *ranks


def _fetched_from(envelope: Any) -> str:
    """Return the address of the source of an envelope's first fetch, as others that execute such hints take it."""
    actions = _part(envelope, "actions")
    listed = actions[:MOST_ACTIONS] if isinstance(actions, list) else []
    fetch = next((action for action in listed if _part(action, "action_type") == FETCH), None)
    payload = _part(fetch, "payload")
    for field, found, expected in (
        (f"{ENVELOPE}.protocol_version", _part(envelope, "protocol_version"), PROTOCOL_VERSION),
        (f"{ENVELOPE}.actions", _part(fetch, "action_type"), FETCH),
        (f"{FETCH}.action_version", _part(fetch, "action_version"), FETCH_VERSION),
        (f"{FETCH}.mode", _part(payload, "mode") or "copy", "copy"),
    ):
        if found != expected:
            raise InvalidField(field, shown(found), repr(expected))
    endpoint = _part(payload, "source_control_endpoint")
    address = endpoint.removeprefix(SCHEME) if isinstance(endpoint, str) and endpoint.startswith(SCHEME) else ""
    if not 0 < len(address) <= MOST_CHARACTERS:
        expected = f"{SCHEME}host:port of at most {MOST_CHARACTERS} characters"
        raise InvalidField(f"{FETCH}.source_control_endpoint", shown(endpoint), expected)
    return address


def _peer(source: Any) -> str:
    """Return the address of llm-d's source, which has IPv6 addresses without brackets."""
    host, port = _part(source, "remote_host"), _part(source, "remote_port")
    if not isinstance(host, str) or not 0 < len(host) <= MOST_CHARACTERS:
        raise InvalidField(f"{SOURCE}.remote_host", shown(host), f"1 to {MOST_CHARACTERS} characters")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise InvalidField(f"{SOURCE}.remote_port", shown(port), "1 to 65535")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _part(of: Any, name: str) -> Any:
    """Return a field of a JSON object, or of vLLM's own structures; None: there is none."""
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)
