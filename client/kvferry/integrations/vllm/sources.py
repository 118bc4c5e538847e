"""Source engines that decode sees for the first time: its ranks connect to them while a request still waits."""

from __future__ import annotations

from kvferry import parse_reference
from kvferry.errors import KvferryError

MOST = 1024
"""Sources that are remembered. A source that is seen again after it was forgotten is only connected to for nothing."""


class NewSources:
    """The sources of the requests that have arrived.

    Args:
        own: the incarnation of this engine, which it does not read from.
    """

    def __init__(self, own: bytes = b"") -> None:
        self._own = own
        self._seen: dict[tuple[str, str, bytes], None] = {}
        self._new: list[str] = []

    def see(self, reference: str) -> None:
        """Look at the reference of a request."""
        try:
            parsed = parse_reference(reference)
        except KvferryError:
            # The read says so.
            return
        source = parsed.home, parsed.engine_id, parsed.incarnation
        # A router's own reference does not say which incarnation will publish.
        if parsed.router_key or parsed.incarnation == self._own or source in self._seen:
            return
        self._seen[source] = None
        if len(self._seen) > MOST:
            del self._seen[next(iter(self._seen))]
        self._new.append(reference)

    def take(self) -> list[str]:
        """Return one reference of each source that is new since the last call."""
        found, self._new = self._new, []
        return found
