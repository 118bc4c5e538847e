"""The publications of one incarnation of an engine, and which numbers may still come."""

from __future__ import annotations

import enum
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.authority import engine_key, publication_key
from kvferry.errors import HomeRecovering, PublicationStale, WrongKey
from kvferry.geometry import Group
from kvferry_server.identity import EngineRef
from kvferry_server.publications import Publication

MAX_SKIPPED = 1024
"""Numbers below the high-water mark that may still come."""


class Standing(enum.Enum):
    """What the engine of a book is to its leases."""

    LIVE = "live"
    """Its Watch is open."""
    LOST = "lost"
    """Its Watch is lost: nothing is granted or renewed, nothing is cut short."""
    DEAD = "dead"
    """Lost for an engine_ttl: all its publications end. It may still come back and hear of their release."""
    REPLACED = "replaced"
    """Another incarnation lives, or it is long dead: nobody is left to acknowledge a release."""


@dataclass(slots=True, eq=False)
class Book:
    """What a home keeps of one incarnation.

    Attributes:
        source: the incarnation.
        secret: of its session; the keys of its references are derived from it.
        standing: whether its leases are renewed and its releases acknowledged.
        groups: of the engine, by name; None until a rank has registered.
        publications: by number, until their release is acknowledged.
        awaited: those of them that have not come.
        high_water: the highest number seen.
        skipped: numbers below it that were never seen, and since when they are awaited.
        recovering: the engine's snapshot is not complete yet. A home cannot tell an engine that is new from one that it
            has lost its record of, so every engine sends one.
        snapshot: numbers seen since the snapshot began; None outside of one.
        size: bytes that the unreleased publications take.
        checksum_bytes: bytes that their sums take.
    """

    source: EngineRef
    secret: bytes = field(repr=False)
    recovering: bool = True
    standing: Standing = Standing.LIVE
    groups: Mapping[str, Group] | None = None
    publications: dict[int, Publication] = field(default_factory=dict)
    awaited: set[Publication] = field(default_factory=set)
    high_water: int = 0
    skipped: dict[int, float] = field(default_factory=dict)
    snapshot: set[int] | None = None
    size: int = 0
    checksum_bytes: int = 0

    def key(self, number: int) -> bytes:
        """The key in the reference of a publication, come or not."""
        return publication_key(self.secret, number)

    def check_key(self, number: int, key: bytes) -> None:
        """Raise `WrongKey` unless this is the key of the publication, come or not."""
        if not hmac.compare_digest(self.key(number), key):
            raise WrongKey(
                f"the key is not that of publication {number} of engine {self.source.engine_id!r}",
                engine_id=self.source.engine_id,
                publication=number,
            )

    def check_refilled(self) -> None:
        """Raise `HomeRecovering` until the home has been told what the engine holds published."""
        if self.recovering:
            waits = f"this home waits for the snapshot of {self.source}"
            raise HomeRecovering(waits, engine_id=self.source.engine_id)

    def check_engine_key(self, key: bytes) -> None:
        """Raise `WrongKey` unless this is the key of the engine's own reference."""
        if not hmac.compare_digest(engine_key(self.secret), key):
            engine_id = self.source.engine_id
            raise WrongKey(f"the key is not that of engine {engine_id!r}", engine_id=engine_id)

    def check_may_come(self, number: int, not_before: float) -> None:
        """Raise `PublicationStale` unless a publication that is not here can still come.

        A number at or below the high-water mark is stale (PROTOCOL, Identities), with one exception: numbers that the
        mark has just passed over. A source publishes from several threads and repeats what was lost, so they overtake
        each other.

        Args:
            number: of the publication.
            not_before: numbers passed over earlier than this are stale as well.
        """
        since = self.skipped.get(number)
        if number > self.high_water or (since is not None and since > not_before):
            return
        source = self.source
        raise PublicationStale(
            f"publication {number} of {source} is gone, or never was; the last was {self.high_water}",
            engine_id=source.engine_id,
            publication=number,
        )

    def see(self, number: int, now: float) -> None:
        """Take note that a number came: from now on it is live, or stale for ever."""
        if number <= self.high_water:
            self.skipped.pop(number, None)
            return
        for skipped in range(max(self.high_water + 1, number - MAX_SKIPPED), number):
            self.skipped[skipped] = now
        self.high_water = number
        while len(self.skipped) > MAX_SKIPPED:
            self.skipped.pop(next(iter(self.skipped)))

    def close_below(self, high_water: int) -> None:
        """Nothing at or below this number will come any more, but for what is here."""
        self.high_water = max(self.high_water, high_water)
        self.skipped = {number: since for number, since in self.skipped.items() if number > high_water}

    def live_until(self) -> float:
        """When the last live lease ends; 0 if there is none."""
        return max((lease.expires for found in self.publications.values() for lease in found.leases), default=0.0)

    def waiting_reads(self) -> int:
        """Reads, and declines, of publications that have not come."""
        return sum(max(1, len(publication.leases)) for publication in self.awaited)
