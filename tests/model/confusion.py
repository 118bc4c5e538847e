"""Routers: which request a publication and a read are for, and which reference the reader gets."""

from __future__ import annotations

import hashlib
import random

from kvferry._wire.reference import format_reference, parse_reference
from tests.model.prompts import REQUESTS, WHOLE, Errand, Request, Said, Says, Takes
from tests.model.source import Offered, Routed

SAYS: tuple[Says, ...] = ("first", "first", "first", "next", "last", "last", "never")
TAKES: tuple[Takes, ...] = ("own", "own", "own", "all", "a block")


class Router:
    """An honest router, of requests that are all alike."""

    def request(self) -> Request:
        """Return the request for a new reference."""
        return WHOLE

    def said(self, routed: Routed | None) -> Said:
        """Return the request that the source publishes next, and its marks."""
        return Said(routed.request if routed is not None else WHOLE)

    def errand(self, offered: Offered | Routed) -> Errand:
        """Return the errand of the reader that gets this reference."""
        return Errand(request_of(offered))


class ConfusedRouter(Router):
    """A router that swaps, repeats and invents references, of requests of every kind.

    Attributes:
        confused: how often, 0 to 1.
    """

    def __init__(self, seed: int) -> None:
        self.confused = 0.5
        self._turns = random.Random(seed)
        self._last = 0

    def request(self) -> Request:
        """Return a request; every other time a request easily confused with the last."""
        turns = self._turns
        nearly = turns.random() < 0.5
        self._last = (self._last + turns.choice((-1, 1)) if nearly else turns.randrange(1 << 16)) % len(REQUESTS)
        return REQUESTS[self._last]

    def _confused_with(self, request: Request) -> Request:
        self._last = REQUESTS.index(request)
        return self.request()

    def said(self, routed: Routed | None) -> Said:
        swaps = routed is None or self._turns.random() < self.confused / 2
        request = self.request() if swaps or routed is None else routed.request
        return Said(request, self._turns.choice(SAYS), self._turns.random() < 0.7)

    def errand(self, offered: Offered | Routed) -> Errand:
        turns = self._turns
        takes, late = turns.choice(TAKES), turns.random() < 0.25
        if turns.random() >= self.confused:
            return Errand(request_of(offered), takes, late)
        request = self._confused_with(request_of(offered))
        what = turns.choice(("swapped", "swapped", "swapped", "forged", "forged", "invented"))
        if what == "swapped":
            return Errand(request, takes, late)
        if what == "forged" and isinstance(offered, Offered):
            return Errand(request, takes, late, self._forged(offered, request), forged=True)
        return Errand(request, takes, late, self._invented(offered), invented=True)

    def _forged(self, offered: Offered, request: Request) -> str:
        """Return a reference with other marks. A reference is a capability: its bearer can make marks of any prompt."""
        parsed, what = parse_reference(offered.publication.reference), self._turns.randrange(3)
        del parsed.marks[:]
        prompt = request.prompt()
        ends = {0: [], 1: [prompt.known], 2: [prompt.known, 300]}[what]
        for end in ends:
            digest = prompt.mark(parsed.key, end) if end <= prompt.known else bytes(16)
            parsed.marks.add(end=end, digest=digest)
        parsed.request_id = self._turns.choice((parsed.request_id, "another"))
        return format_reference(parsed)

    def _invented(self, offered: Offered | Routed) -> str:
        """Return a reference with the key of another publication, or an unknown key."""
        given = offered.reference if isinstance(offered, Routed) else offered.publication.reference
        parsed = parse_reference(given)
        number = self._turns.choice((0, 0, 1, 7))
        if isinstance(offered, Routed):
            parsed.router_key += "!" * number
        else:
            parsed.publication += number
        parsed.key = hashlib.sha256(parsed.key).digest()[:16]
        return format_reference(parsed)


def request_of(offered: Offered | Routed) -> Request:
    """The request that a reference was made for."""
    return offered.request if isinstance(offered, Routed) else offered.said.request
