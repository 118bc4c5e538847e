"""The requests that decode wants to read, from their arrival until the read has ended or was given up; and the log line
of a failed read."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from kvferry import Listing, Prompt, parse_reference
from kvferry.engine import ReadEnd
from kvferry.errors import KvferryError

logger = logging.getLogger(__name__)


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


class Loads:
    """The loads of an engine by their request_ids, and by their references, of which several requests may have one."""

    def __init__(self) -> None:
        self._by_request: dict[str, Load] = {}
        self._by_reference: dict[str, dict[str, Load]] = {}
        self._led: dict[str, str] = {}
        """The references of requests that are read, or whose blocks will be in vLLM's prefix cache soon. Without that
        cache nothing follows, and several requests may have one reference."""
        self._leads: set[str] = set()
        """The references in `_led`."""

    def __len__(self) -> int:
        return len(self._by_request)

    def __getitem__(self, request_id: str) -> Load:
        return self._by_request[request_id]

    def get(self, request_id: str) -> Load | None:
        return self._by_request.get(request_id)

    def add(self, request_id: str, load: Load) -> None:
        self._by_request[request_id] = load
        self._by_reference.setdefault(load.reference, {})[request_id] = load

    def pop(self, request_id: str) -> Load:
        """Remove the load of a request, and return it. The request still leads its followers."""
        load = self._by_request.pop(request_id)
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
