"""The sources that decode reads from: new sources, the turns of requests at each source, and the log line of a failed
read."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import islice

from kvferry import parse_reference
from kvferry.engine import ReadEnd
from kvferry.errors import KvferryError
from kvferry.integrations.vllm.remembered import Remembered

logger = logging.getLogger(__name__)

MOST = 1024
"""Most remembered sources. A source that was forgotten and is seen again costs a needless connection."""


class NewSources:
    """Finds the new sources in the references of requests. `own` is the incarnation of this engine, which does not read
    from itself."""

    def __init__(self, own: bytes = b"") -> None:
        self._own = own
        self._seen = Remembered[tuple[str, str, bytes]](MOST)
        self._new: list[str] = []

    def see(self, reference: str) -> None:
        """Add the source of a request's reference, unless it is known."""
        try:
            parsed = parse_reference(reference)
        except KvferryError:
            # The read fails with this error.
            return
        source = parsed.home, parsed.engine_id, parsed.incarnation
        # A router's own reference does not name the incarnation that will publish.
        if parsed.router_key or parsed.incarnation == self._own or source in self._seen:
            return
        self._seen.add(source)
        self._new.append(reference)

    def take(self) -> list[str]:
        """Return one reference of each source that is new since the last call."""
        found, self._new = self._new, []
        return found


@dataclass(slots=True)
class _Source:
    engine_id: str
    asked: set[str] = field(default_factory=set)
    waiting: dict[str, None] = field(default_factory=dict)


class Turns:
    """The turns of requests that wait for their publications: at each source, at most `most` are asked for at once, in
    the order of their arrival. A dead or slow source delays only its own requests (R10)."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sources: dict[str, _Source] = {}
        self._by_request: dict[str, _Source] = {}

    def add(self, request_id: str, reference: str) -> None:
        """Add an arrived request."""
        try:
            engine_id = parse_reference(reference).engine_id
        except KvferryError:
            # `SchedulerPort.acquire` will refuse the reference.
            engine_id = ""
        source = self._sources.setdefault(engine_id, _Source(engine_id))
        source.waiting[request_id] = None
        self._by_request[request_id] = source

    def waits(self, request_id: str) -> bool:
        """Whether a request still waits for its turn."""
        source = self._by_request.get(request_id)
        return source is not None and request_id in source.waiting

    def take(self) -> list[str]:
        """Return the requests whose turn it is now; each request only once."""
        found: list[str] = []
        for source in self._sources.values():
            turns = [*islice(source.waiting, self._most - len(source.asked))]
            source.asked.update(turns)
            for request_id in turns:
                del source.waiting[request_id]
            found += turns
        return found

    def end(self, request_id: str) -> None:
        """End the turn of a request that is granted, refused or gone. Idempotent."""
        source = self._by_request.pop(request_id, None)
        if source is not None:
            source.asked.discard(request_id)
            source.waiting.pop(request_id, None)
            if not (source.asked or source.waiting):
                del self._sources[source.engine_id]


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
