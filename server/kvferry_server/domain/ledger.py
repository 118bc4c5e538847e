"""The publications of one incarnation of an engine, and which numbers may still come."""

from __future__ import annotations

import enum
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry._wire.authority import engine_key, publication_key
from kvferry.errors import HomeRecovering, PublicationStale, WrongKey
from kvferry.geometry.model import Group
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.publications import PublicationRecord
from kvferry_server.domain.shares import Shares

MAX_SKIPPED = 1024
"""Numbers below the high-water mark that may still come."""

NUMBER_BYTES = 128
"""About what a number takes in memory."""


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
        arrived: how many of them have come.
        released: how many of those are released.
        live_leases: on them.
        waiting: live leases on those of them that have not come, by who asked.
        declined: those of them that have not come, and were declined.
        high_water: the highest number seen.
        skipped: numbers below it that were never seen, and since when they are awaited.
        recovering: the engine's snapshot is not complete yet. A home cannot tell an engine that is new from one that it
            has lost its record of, so every engine sends one.
        snapshot: numbers seen since the snapshot began; None outside of one.
        snapshot_name: which snapshot that is.
        gone: numbers that came and were forgotten since a home that lost its record saw the engine again.
        checksum_bytes: bytes that the sums of unreleased publications take.
    """

    source: EngineRef
    secret: bytes = field(repr=False)
    waiting: Shares
    recovering: bool = True
    standing: Standing = Standing.LIVE
    groups: Mapping[str, Group] | None = None
    publications: dict[int, PublicationRecord] = field(default_factory=dict)
    declined: set[PublicationRecord] = field(default_factory=set)
    arrived: int = 0
    released: int = 0
    live_leases: int = 0
    high_water: int = 0
    skipped: dict[int, float] = field(default_factory=dict)
    snapshot: set[int] | None = None
    snapshot_name: bytes = b""
    gone: set[int] = field(default_factory=set)
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
        if self.recovering and number not in self.gone:
            # Its mark says nothing of what came before this home: the snapshot will.
            return
        source = self.source
        raise PublicationStale(
            f"publication {number} of {source} is gone, or never was; the last was {self.high_water}",
            engine_id=source.engine_id,
            publication=number,
        )

    def see(self, number: int, now: float) -> None:
        """Take note that a number came: from now on it is live, or stale for ever."""
        self.arrived += 1
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
        self.gone.clear()

    def live_until(self) -> float:
        """When the last live lease ends; 0 if there is none."""
        return max((lease.expires for found in self.publications.values() for lease in found.leases), default=0.0)

    def passed_over_size(self, number: int) -> int:
        """About as many bytes as the numbers take that a publication passes over."""
        return NUMBER_BYTES * min(MAX_SKIPPED, max(0, number - 1 - self.high_water))

    @property
    def numbers_size(self) -> int:
        """About as many bytes as the numbers take that are kept apart from publications."""
        return NUMBER_BYTES * (len(self.skipped) + len(self.gone))
