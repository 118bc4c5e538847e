"""Whose turn it is among the requests that wait for their publications: of each source, so many are asked for at once.

Each source has its own turns. A source that is dead, or slow, holds up its own requests and no others (R10).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from kvferry import parse_reference
from kvferry.errors import KvferryError


@dataclass(slots=True)
class _Source:
    engine_id: str
    asked: set[str] = field(default_factory=set)
    waiting: dict[str, None] = field(default_factory=dict)


class Turns:
    """The requests that are asked for, and those whose turn comes later, in the order of their arrival.

    Args:
        most: requests of one source that are asked for at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sources: dict[str, _Source] = {}
        self._by_request: dict[str, _Source] = {}

    def add(self, request_id: str, reference: str) -> None:
        """Add a request that has arrived."""
        try:
            engine_id = parse_reference(reference).engine_id
        except KvferryError:
            # It is refused when it is asked for.
            engine_id = ""
        source = self._sources.setdefault(engine_id, _Source(engine_id))
        source.waiting[request_id] = None
        self._by_request[request_id] = source

    def waits(self, request_id: str) -> bool:
        """Whether a request still waits for its turn."""
        source = self._by_request.get(request_id)
        return source is not None and request_id in source.waiting

    def take(self) -> list[str]:
        """Return the requests whose turn it is now; each only once."""
        found: list[str] = []
        for source in self._sources.values():
            turns = [*islice(source.waiting, self._most - len(source.asked))]
            source.asked.update(turns)
            for request_id in turns:
                del source.waiting[request_id]
            found += turns
        return found

    def end(self, request_id: str) -> None:
        """Note that a request is granted, refused or gone: it makes room for another. Idempotent."""
        source = self._by_request.pop(request_id, None)
        if source is not None:
            source.asked.discard(request_id)
            source.waiting.pop(request_id, None)
            if not (source.asked or source.waiting):
                del self._sources[source.engine_id]
