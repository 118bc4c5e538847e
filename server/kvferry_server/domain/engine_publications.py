"""The publications of an engine at its home, and which publication numbers may still arrive."""

from __future__ import annotations

import hmac
from collections import Counter
from dataclasses import dataclass, field

from kvferry._wire.authority import PublicationKeys, engine_key
from kvferry.errors import HomeRecovering, PublicationStale, WrongKey
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.limits import MAX_SKIPPED, Budget
from kvferry_server.domain.ordered import Ordered
from kvferry_server.domain.publications import PublicationRecord
from kvferry_server.domain.router_keys import RouterKeys

NUMBER_BYTES = 128  # Bytes that a remembered publication number takes in memory, estimated


@dataclass(slots=True, eq=False)
class EnginePublications:
    """The publications of one incarnation."""

    life: Engine  # the incarnation: whether it is alive, and its ranks
    secret: bytes = field(repr=False)  # session secret, from which the keys of references are derived
    waiting_reads: Budget  # live leases on publications that have not arrived, by the reader's host
    router_keys: RouterKeys
    # The engine has not sent its full snapshot yet. A home cannot tell a new engine from one whose records it lost, so
    # every engine sends a snapshot.
    recovering: bool = True
    publications: dict[int, PublicationRecord] = field(default_factory=dict)  # until their release is acknowledged
    listed: Ordered[PublicationRecord] = field(default_factory=Ordered)  # the arrived publications, in order
    declined: set[PublicationRecord] = field(default_factory=set)  # declined before they arrived, and not ended yet
    pinned: dict[PublicationRecord, None] = field(default_factory=dict)  # arrived and not released, oldest first
    pinned_blocks: Counter[str] = field(default_factory=Counter)  # by group, over all pinned publications
    live_leases: int = 0  # number of live leases on publications
    high_water: int = 0  # the highest number seen
    skipped: dict[int, float] = field(default_factory=dict)  # by unseen number below `high_water`, time of the skip
    snapshot: set[int] | None = None  # numbers seen since the current snapshot began; None outside of a snapshot
    snapshot_name: bytes = b""
    forgotten: set[int] = field(default_factory=set)  # numbers that arrived and were forgotten during recovery
    checksum_bytes: int = 0  # bytes of checksums for unreleased publications
    _keys: PublicationKeys = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._keys = PublicationKeys(self.secret)

    @property
    def source(self) -> EngineRef:
        return self.life.ref

    @property
    def num_arrived(self) -> int:
        return len(self.listed)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that the pinned publications hold on all ranks that have registered. A block counts once for each
        publication that holds it."""
        return sum(count * self.life.block_bytes[group] for group, count in self.pinned_blocks.items())

    def unpin(self, publication: PublicationRecord) -> None:
        """Note that a pinned publication is released. Call this before its steps are dropped."""
        del self.pinned[publication]
        # The difference leaves out groups without blocks: a peer chooses their names.
        self.pinned_blocks -= Counter({group: held.blocks for group, held in publication.extents.items()})

    def bytes_of(self, publication: PublicationRecord) -> int:
        """Return the bytes that an unreleased publication holds on all ranks that have registered."""
        return sum(held.blocks * self.life.block_bytes[group] for group, held in publication.extents.items())

    def key(self, number: int) -> bytes:
        """Return the key in the reference of a publication, arrived or not."""
        return self._keys.key(number)

    def check_key(self, number: int, key: bytes) -> None:
        """Raise `WrongKey` unless this is the key of the publication, arrived or not."""
        if not hmac.compare_digest(self.key(number), key):
            engine_id = self.source.engine_id
            problem = f"the reference's key is not that of publication {number} of engine {engine_id!r}"
            raise WrongKey(problem, engine_id=engine_id, publication=number)

    def check_engine_key(self, key: bytes) -> None:
        """Raise `WrongKey` unless this is the key in the engine's own reference."""
        if not hmac.compare_digest(engine_key(self.secret), key):
            engine_id = self.source.engine_id
            raise WrongKey(f"the reference's key is not that of engine {engine_id!r}", engine_id=engine_id)

    def check_recovered(self) -> None:
        """Raise `HomeRecovering` until the engine has sent its full snapshot."""
        if self.recovering:
            problem = f"this home waits for the snapshot of {self.source}"
            raise HomeRecovering(problem, engine_id=self.source.engine_id)

    def may_arrive(self, number: int, now: float) -> bool:
        """Whether a publication that is not here can still arrive.

        A number at or below the high-water mark is stale (PROTOCOL, Identities), except for numbers that the mark has
        skipped in the last `max_ttl`: a source publishes from several threads and repeats lost calls, so numbers
        overtake each other.
        """
        since = self.skipped.get(number)
        if number > self.high_water or (since is not None and since > now - self.life.times.max_ttl):
            return True
        # The mark does not cover numbers from before this home started. The snapshot will.
        return self.recovering and number not in self.forgotten

    def check_may_arrive(self, number: int, now: float) -> None:
        """Raise `PublicationStale` unless a publication that is not here can still arrive."""
        if not self.may_arrive(number, now):
            problem = f"publication {number} of {self.source} is gone or was never published"
            last = f"the last number was {self.high_water}"
            raise PublicationStale(f"{problem}; {last}", engine_id=self.source.engine_id, publication=number)

    def see(self, number: int, now: float) -> None:
        """Record that a publication arrived: its number is now in use, and afterwards stale for ever."""
        if number <= self.high_water:
            self.skipped.pop(number, None)
            return
        for skipped in range(max(self.high_water + 1, number - MAX_SKIPPED), number):
            self.skipped[skipped] = now
        self.high_water = number
        while len(self.skipped) > MAX_SKIPPED:
            self.skipped.pop(next(iter(self.skipped)))

    def close_below(self, high_water: int) -> None:
        """Accept no further publication with a number up to `high_water`; publications that are here stay."""
        self.high_water = max(self.high_water, high_water)
        self.skipped = {number: since for number, since in self.skipped.items() if number > high_water}
        self.forgotten.clear()

    def live_until(self) -> float:
        """When the last live lease ends; 0 without any."""
        return max((lease.expires for found in self.publications.values() for lease in found.leases), default=0.0)

    def skipped_size(self, number: int) -> int:
        """Estimate the bytes for the numbers that a publication with this number would skip."""
        return NUMBER_BYTES * min(MAX_SKIPPED, max(0, number - 1 - self.high_water))

    @property
    def numbers_size(self) -> int:
        """Estimated bytes for the numbers that are remembered without a publication."""
        return NUMBER_BYTES * (len(self.skipped) + len(self.forgotten))
