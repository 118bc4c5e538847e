"""The requests that decode wants to read, publications that routers name and prefixes, from their arrival until the
read has ended or was given up; and the log line of a failed read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry import Directory, Listing, Prompt, parse_reference
from kvferry.engine import ReadEnd, SchedulerPort
from kvferry.errors import EngineNotListed, InvalidField, KvferryError, NotAllowed
from kvferry.integrations.vllm.cached import PrefixCache
from kvferry.integrations.vllm.requests import engine_names, hinted_engine, prefix_source, traceparent_of
from kvferry.integrations.vllm.setup import Setup

logger = logging.getLogger(__name__)

MOST_TIME = 30.0
"""Most seconds for the read of a prefix. Then the request is computed."""


@dataclass(slots=True)
class Load:
    """A request that decode wants to read."""

    reference: str = field(repr=False)  # of the publication; of a prefix, the engine that is asked and the prompt
    until: float  # end of the time to read, on the scheduler's clock
    traceparent: str = ""  # of the request's trace; empty: none
    prompt: Prompt = Prompt.unknown  # set when the request is to be read and does not follow another
    follows: bool = False
    """Another request of the same reference is read, and this request waits to find its blocks in vLLM's prefix cache,
    without a lease of its own."""
    found: bool = False  # the request follows, and the blocks are in the prefix cache
    waits: bool = False  # there was no news since vLLM was last answered to ask again
    computed: int = 0  # tokens that are computed already, according to vLLM's last call
    reading: bool = False  # the request has blocks, and the workers are reading into them
    aborted: bool = False  # by vLLM
    failed: bool = False  # the read has failed, and the failure is on its way to vLLM
    error: KvferryError | None = None
    """Of a refused or a failed read. Both are reported to vLLM alike, after vLLM has allocated blocks."""
    prefix: Any = None
    """vLLM's request, of which only a prefix is wanted: what cannot be read is computed, whatever vLLM does with failed
    reads. None: the request reads a publication that its router names."""
    source: str | Listing = field(default="", repr=False)
    """Of a prefix, the engine that is asked: its own reference, or its name and home."""


class Loads(dict[str, Load]):
    """The loads of an engine by their request_ids, and by their references, of which several requests may have one.
    Changed by `add` and `remove`."""

    def __init__(self) -> None:
        super().__init__()
        self._by_reference: dict[str, dict[str, Load]] = {}
        self._led: dict[str, str] = {}
        """The references of requests that are read, or whose blocks will be in vLLM's prefix cache soon. Without that
        cache nothing follows, and several requests may have one reference."""
        self._leads: set[str] = set()
        """The references in `_led`."""

    def add(self, request_id: str, load: Load) -> None:
        self[request_id] = load
        self._by_reference.setdefault(load.reference, {})[request_id] = load

    def remove(self, request_id: str) -> Load:
        """Remove the load of a request, and return it. The request still leads its followers."""
        load = self.pop(request_id)
        others = self._by_reference[load.reference]
        del others[request_id]
        if not others:
            del self._by_reference[load.reference]
        return load

    def any_of(self, reference: str) -> bool:
        """Whether a request has this reference."""
        return reference in self._by_reference

    def lead(self, request_id: str, load: Load) -> None:
        """Make a request the leader of its reference: the request that is read."""
        self._led[request_id] = load.reference
        self._leads.add(load.reference)

    def is_led(self, reference: str) -> bool:
        """Whether a request of this reference is read, or its blocks will be in the prefix cache soon."""
        return reference in self._leads

    def end_lead(self, request_id: str, *, found: bool) -> str:
        """Wake the followers of a request; return its reference, empty if the request was no leader. `found`: its
        blocks are in the prefix cache."""
        reference = self._led.pop(request_id, "")
        if reference:
            self._leads.discard(reference)
            for load in self._by_reference.get(reference, {}).values():
                load.found |= found and load.follows
                load.waits = False
        return reference


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
        the failure, and ``kv_load_failure_policy`` is "fail", vLLM would fail the request; for "recompute" it does the
        same as this (``_update_waiting_for_remote_kv`` in vllm/v1/core/sched/scheduler.py; 0.32.0). It hears of the
        end of the read next, and then takes the request up again."""
        if not RequestStatus.is_finished(request.status):
            request.num_computed_tokens = 0
            self._cache.free(request)


def log_failure(end: ReadEnd, reference: str, engine_id: str, *, aborted: bool) -> None:
    """Log a failed read in one line, with the names in the source's log, and without secrets. `engine_id` is that of
    the reader; `aborted`: vLLM has aborted the request."""
    mine = _shown(end.request_id)
    read = f"read {end.read_id} of request {mine}" if end.read_id else f"request {mine}"
    try:
        known = parse_reference(reference) if end.source is None else end.source
    except KvferryError:
        source = "a source that its reference does not name"
    else:
        named = f"publication {known.publication} of request {known.request_id!r}"
        if not known.publication:
            # A router made the reference, and no publication has come.
            named = "a publication that has not come"
        source = f"{named}, engine {_shown(known.engine_id)} at {_shown(known.home)}"
    how = "was cancelled" if aborted else "failed" if end.read_id else "will not be read"
    log = logger.info if aborted else logger.warning
    log("%s, engine %s, %s: %s: %s; source: %s", read, engine_id, how, type(end.error).__name__, end.error, source)


def _shown(name: str) -> str:
    """Quote a name unless it is printable: names of references and requests come from clients, and must not begin new
    lines in the log."""
    return name if name.isprintable() else repr(name)
