"""Asks the engines that requests name for what their prefix caches have of the requests' prompts.

Requests name them by `PREFIX_SOURCE`, or by the hints of other projects' routers:

Dynamo:  ``Request.kv_hints`` (vLLM 0.31), or ``kv_transfer_params["kv_hint"]``: an envelope of actions, ``kv.fetch``
llm-d:   ``kv_transfer_params["remote_kv_source"]``: host and port of vLLM's P2P tier

Such a hint names an address. Nothing connects to it: it is looked up as an engine_id in the directory, and the engine
of that name is asked by the prompt. So the hashes in a hint are not read: they are the router's belief, by the hash
function of some engine. A hint may contain values of any type and size, as clients may have written it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry import Directory, Listing, Prompt
from kvferry.engine import SchedulerPort
from kvferry.errors import EngineNotListed, InvalidField, KvferryError, NotAllowed
from kvferry.integrations.settings import shown
from kvferry.integrations.vllm.cached import PrefixCache
from kvferry.integrations.vllm.loads import Load
from kvferry.integrations.vllm.requests import prefix_source, traceparent_of
from kvferry.integrations.vllm.setup import Setup

logger = logging.getLogger(__name__)

MOST_TIME = 30.0
"""Most seconds for the read of a prefix. Then the request is computed."""

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


class Prefixes:
    """Asks for prefixes, and lets vLLM compute what cannot be read: no request fails because of its hint.

    `directory` has the homes of the engines that routers' hints name by address; None: nobody is asked by those.
    `count` adds to a count by its name, see `KvferryStats`.
    """

    def __init__(
        self,
        setup: Setup,
        port: SchedulerPort,
        cache: PrefixCache,
        directory: Directory | None,
        count: Callable[[str], None],
    ) -> None:
        self._setup = setup
        self._port = port
        self._cache = cache
        self._directory = directory
        self._count = count
        self._said: set[tuple[object, ...]] = set()
        """The kinds of mistakes that were logged."""

    def wanted(self, request: Any, prompt_of: Callable[[Any], Prompt]) -> Load | None:
        """Return the load of an arrived request that names an engine which may have what this engine lacks of the
        prompt; None: the request is computed. Equal prompts have equal references."""
        if not self._setup.reads:
            return None
        source = prefix_source(request) or self._hinted(request)
        if not source or source == self._port.engine_reference:
            return None
        # A request with a salt shares its cache with others of this salt only, and a `Prompt` has none. An aborted one
        # is a notice, see `ConnectorScheduler.on_new_request`.
        if request.cache_salt or request.skip_reading_prefix_cache or request.abort_immediately:
            return None
        prompt, first = prompt_of(request), self._cache.own(request)
        if not prompt.known or first >= request.num_tokens - self._setup.recomputed:
            return None
        asked = source.engine_id if isinstance(source, Listing) else source
        reference = f"{asked} {prompt.digest(prompt.known).hex()}"
        until = time.monotonic() + min(MOST_TIME, self._setup.settings.read_timeout)
        return Load(reference, until, traceparent_of(request), prompt, computed=first, prefix=request, source=source)

    def _hinted(self, request: Any) -> Listing | None:
        """Return the engine that the hint of another project's router names by its address, which is the engine_id;
        None: there is no such hint, or it names this engine or nobody. Does not wait."""
        try:
            address = hinted_engine(request)
            names = engine_names(address) if address else ()
            if not names or self._setup.spec.engine_id in names:
                return None
            if self._directory is None:
                message = f"a hint names engine {address!r}, and this engine has no directory, which says where it is"
                raise EngineNotListed(message, engine_id=address, directory="")
            wanted = set(names)
            listed = {each.engine_id: each for each in self._directory.listed().engines if each.engine_id in wanted}
            found = next((listed[name] for name in names if name in listed), None)
            return found or self._directory.resolve(address)
        except KvferryError as error:
            self._count("hints_ignored")
            self._say_once(request.request_id, error)
            return None

    def ask(self, load: Load) -> bool:
        """Ask for what a load lacks; return whether there will be an answer."""
        self._count("prefixes_asked")
        try:
            self._port.ask(
                load.prefix.request_id,
                load.source,
                load.prompt,
                first_token=load.computed,
                wait=self._setup.settings.prefix_wait,
                timeout=load.until - time.monotonic(),
                traceparent=load.traceparent,
            )
        except KvferryError as error:
            self.missed(load.prefix.request_id, error)
            return False
        return True

    def missed(self, request_id: str, error: KvferryError) -> None:
        """Count a request without a prefix to read."""
        self._count("prefixes_missed")
        if isinstance(error, NotAllowed):
            self._say_once(request_id, error)
        logger.debug("request %r: no prefix is read: %s", request_id, error)

    def _say_once(self, request_id: str, error: KvferryError) -> None:
        """Log what an operator has to mend, once for each kind: every request may have it."""
        kind = (type(error), error.values["field"] if isinstance(error, InvalidField) else "")
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("request %r is computed, and so are all like it: %s", request_id, error)

    def compute(self, request: Any) -> None:
        """Let vLLM compute a request whose prefix could not be read, as if it had just come. If the workers reported
        the failure, and ``kv_load_failure_policy`` is "fail", vLLM would fail the request.

        vLLM does the same for "recompute" (``_update_waiting_for_remote_kv`` in vllm/v1/core/sched/scheduler.py;
        0.32.0). It hears of the end of the read next, and then takes the request up again.
        """
        if not RequestStatus.is_finished(request.status):
            request.num_computed_tokens = 0
            self._cache.free(request)


def hinted_engine(request: Any) -> str:
    """Return the ``host:port`` that a request's hint names, as it is written there; empty: the request has no hint. Of
    several hints vLLM's own counts, then Dynamo's, then llm-d's.

    Raises:
        InvalidField: the hint is malformed, of another version, or asks for something else; `field` is what is wrong.
    """
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
