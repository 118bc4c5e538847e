"""Hints of other projects' routers: which engine may have the beginning of a request's prompt in its cache.

Dynamo:  ``Request.kv_hints`` (vLLM 0.31), or ``kv_transfer_params["kv_hint"]``: an envelope of actions, ``kv.fetch``
llm-d:   ``kv_transfer_params["remote_kv_source"]``: host and port of vLLM's P2P tier

Such a hint names an address. Nothing connects to it: it is looked up as an engine_id in the directory, and the engine
of that name is asked by the prompt. So the hashes in a hint are not read: they are the router's belief, by the hash
function of some engine. A hint may contain values of any type and size, as clients may have written it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.errors import InvalidField

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


def hinted_engine(request: Any) -> str:
    """Return the ``host:port`` that a request's hint names, as it is written there; empty: the request has no hint. Of
    several hints vLLM's own counts, then Dynamo's, then llm-d's.

    Raises:
        InvalidField: the hint is malformed, of another version, or asks for something else; `field` is what is wrong.
    """
    # Versions of vLLM before 0.31 have no hints of their own.
    envelope, params = getattr(request, "kv_hints", None), request.kv_transfer_params
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
    version, actions = _part(envelope, "protocol_version"), _part(envelope, "actions")
    if version != PROTOCOL_VERSION:
        raise InvalidField(f"{ENVELOPE}.protocol_version", _shown(version), repr(PROTOCOL_VERSION))
    listed = actions[:MOST_ACTIONS] if isinstance(actions, list) else []
    fetch = next((action for action in listed if _part(action, "action_type") == FETCH), None)
    if fetch is None:
        raise InvalidField(
            f"{ENVELOPE}.actions", _shown(actions), f"a list with {FETCH} among the first {MOST_ACTIONS}"
        )
    version, payload = _part(fetch, "action_version"), _part(fetch, "payload")
    if version != FETCH_VERSION:
        raise InvalidField(f"{FETCH}.action_version", _shown(version), repr(FETCH_VERSION))
    endpoint, mode = _part(payload, "source_control_endpoint"), _part(payload, "mode")
    if mode not in (None, "copy"):
        raise InvalidField(f"{FETCH}.mode", _shown(mode), "'copy'")
    expected = f"{SCHEME}host:port of at most {MOST_CHARACTERS} characters"
    if not isinstance(endpoint, str) or not endpoint.startswith(SCHEME):
        raise InvalidField(f"{FETCH}.source_control_endpoint", _shown(endpoint), expected)
    address = endpoint[len(SCHEME) :]
    if not 0 < len(address) <= MOST_CHARACTERS:
        raise InvalidField(f"{FETCH}.source_control_endpoint", f"{len(address)} characters", expected)
    return address


def _peer(source: Any) -> str:
    """Return the address of llm-d's source, which has IPv6 addresses without brackets."""
    host, port = _part(source, "remote_host"), _part(source, "remote_port")
    if not isinstance(host, str) or not 0 < len(host) <= MOST_CHARACTERS:
        raise InvalidField(f"{SOURCE}.remote_host", _shown(host), f"1 to {MOST_CHARACTERS} characters")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise InvalidField(f"{SOURCE}.remote_port", _shown(port), "1 to 65535")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _part(of: Any, name: str) -> Any:
    """Return a field of a JSON object, or of vLLM's own structures; None: there is none."""
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)


def _shown(value: object) -> object:
    """Return a short string as it is, and the type of any other value, for errors."""
    return value if isinstance(value, str) and len(value) <= 80 else type(value)
