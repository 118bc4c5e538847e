"""Asks the engines that requests name for what their prefix caches have of the requests' prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry import Directory, Listing, Prompt
from kvferry.engine import SchedulerPort
from kvferry.errors import EngineNotListed, InvalidField, KvferryError, NotAllowed
from kvferry.integrations.vllm.cached import PrefixCache
from kvferry.integrations.vllm.hints import engine_names, hinted_engine
from kvferry.integrations.vllm.loads import Load
from kvferry.integrations.vllm.params import prefix_source, traceparent_of
from kvferry.integrations.vllm.setup import Setup

logger = logging.getLogger(__name__)

MOST_TIME = 30.0
"""Most seconds for the read of a prefix. Then the request is computed."""


class Prefixes:
    """Asks for prefixes, and lets vLLM compute what cannot be read: no request fails because of its hint.

    `directory` has the homes of the engines that routers' hints name by address; None: nobody is asked by those.
    `count` adds to a count by its name, see `KvferryStats`.
    """

    def __init__(
        self, setup: Setup, port: SchedulerPort, directory: Directory | None, count: Callable[[str], None]
    ) -> None:
        self._setup = setup
        self._port = port
        self._directory = directory
        self._count = count
        self._cache: PrefixCache | None = None
        self._said: set[tuple[object, ...]] = set()
        """The kinds of mistakes that were logged."""

    def bind(self, cache: PrefixCache) -> None:
        """Take vLLM's prefix cache. Without it, nobody is asked."""
        self._cache = cache

    def wanted(self, request: Any, prompt_of: Callable[[Any], Prompt]) -> Load | None:
        """Return the load of an arrived request that names an engine which may have what this engine lacks of the
        prompt; None: the request is computed. Equal prompts have equal references."""
        if not self._setup.reads or self._cache is None:
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
        if self._cache is not None and not RequestStatus.is_finished(request.status):
            request.num_computed_tokens = 0
            self._cache.free(request)
