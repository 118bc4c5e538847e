"""One incarnation of an engine at its home: its ranks, whether they are alive, and its publications; and its feeds, the
numbered events for the Watch of each of its processes, bounded, so that a Watch may resume or lag.
"""

from __future__ import annotations

import enum
import hmac
import itertools
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeAlias

from kvferry._wire.authority import PublicationKeys, engine_key
from kvferry.errors import EngineIncomplete, HomeRecovering, KvferryError, PublicationStale, WrongKey
from kvferry.geometry.model import Group
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.limits import MAX_NAMED_NODES, MAX_NAMED_RANKS, MAX_QUESTIONS, MAX_SKIPPED
from kvferry_server.domain.publications import PublicationRecord
from kvferry_server.domain.registrations import EngineDescription, Registration
from kvferry_server.domain.router_keys import Question, RouterKeys
from kvferry_server.domain.times import NEVER, UNSCHEDULED, Times
from kvferry_server.domain.values import EngineRef


class Role(enum.IntEnum):
    """The role of a process in its engine, numbered as in the proto."""

    SCHEDULER = 1
    RANK = 2


@dataclass(frozen=True, slots=True)
class Process:
    """One process of an engine."""

    engine: EngineRef
    role: Role
    rank: int = 0  # 0 for the scheduler
    node: str = field(default="", compare=False)  # address of the relaying node server; empty: the home's own node


Event: TypeAlias = PublicationRecord | pb.RankLost | pb.Draining | Question | pb.QuestionEnded
"""A publication means that it is released, so that its source may reuse the blocks. This is state: part of every full
state until acknowledged. A question is state while it is open."""


class Feed:
    """The events of one process: the last `kept` of them."""

    def __init__(self, process: Process, kept: int) -> None:
        self.process = process
        self.sequence = 0  # Number of the last event, from 1; 0 before the first
        self.current_watch = 0  # Number of the Watch that the feed serves; older ones were taken over
        self.full_states = 0  # Watches, older ones included, that are being sent the full state
        self.ended: KvferryError | None = None  # Why its Watches end: the home has forgotten the engine
        self._kept = kept
        self._dropped = 0
        self._events: dict[int, Event] = {}  # By number, in order
        # The events of open questions, by the questions' numbers, and the ends of questions. A full feed may have
        # dropped them.
        self._questions: dict[int, int] = {}
        self._ends: deque[int] = deque()

    def push(self, event: Event) -> None:
        """Add an event; a full feed drops its oldest. The end of a question replaces the question. Of the ends only the
        last `MAX_QUESTIONS` are kept, so that questions never fill a feed, which each acknowledgement looks through: a
        process that misses one gives a question up by its deadline."""
        self.sequence += 1
        if isinstance(event, Question):
            self._questions[event.number] = self.sequence
        elif isinstance(event, pb.QuestionEnded):
            self._events.pop(self._questions.pop(event.number, 0), None)
            if len(self._ends) == MAX_QUESTIONS:
                self._events.pop(self._ends.popleft(), None)
            self._ends.append(self.sequence)
        if len(self._events) == self._kept:
            self._dropped = next(iter(self._events))
            del self._events[self._dropped]
        self._events[self.sequence] = event

    def acknowledged(self, numbers: Collection[int]) -> None:
        """Remove the release events of these publications: the process has received them."""
        # An engine that keeps up has few events; none has more than `kept`.
        for sequence, event in list(self._events.items()):
            if isinstance(event, PublicationRecord) and event.number in numbers:
                del self._events[sequence]

    def dropped_after(self, sequence: int) -> int | None:
        """Return how many events after this one were dropped; None if there has been no such event."""
        if sequence > self.sequence:
            return None
        return max(0, self._dropped - sequence)

    def after(self, sequence: int) -> list[tuple[int, Event]]:
        """Return the events after this one, with their numbers."""
        # From the end: a process that keeps up lacks only the last of maybe a thousand events.
        found = list(takewhile(lambda numbered: numbered[0] > sequence, reversed(self._events.items())))
        found.reverse()
        return found


STATES = ("ready", "incomplete", "lost", "dead")


@dataclass(slots=True, eq=False)
class Engine:
    """One incarnation, also after it is `gone`, while leases on it are live. Times are seconds on the home's clock."""

    ref: EngineRef
    times: Times
    secret: bytes = field(repr=False)  # session secret, from which the keys of references are derived
    router_keys: RouterKeys
    lost_at: float | None = None  # when the scheduler's Watch ended; None while the Watch is open
    # The scheduler's Watch has been lost for `engine_ttl`. It may still come back and get its releases.
    dead: bool = False
    # Replaced, evicted, stopped by its scheduler, or dead for `retire`: no process acknowledges a release any more.
    gone: bool = False
    feeds: dict[Process, Feed] = field(default_factory=dict)  # of its processes that have had a Watch
    feed_bytes: int = 0
    groups: Mapping[str, Group] | None = None  # by name; None until a rank has registered
    # Kept when a rank is lost, since it may not register other content.
    ranks: dict[int, Registration] = field(default_factory=dict)
    lost_ranks: set[int] = field(default_factory=set)  # registered ranks whose process is gone
    watched_ranks: set[int] = field(default_factory=set)  # ranks with an open Watch of their own
    rank_lost_at: dict[int, float] = field(default_factory=dict)  # end of a rank's Watch, for an `engine_ttl`
    nodes: dict[int, str] = field(default_factory=dict)  # by rank, the relaying node server
    left_ranks: set[int] = field(default_factory=set)  # relayed ranks whose end their node server has reported
    host: str = ""  # origin of the scheduler's Watch; empty if unknown
    scheduled: tuple[float, int] = UNSCHEDULED
    cache_bytes: int = 0  # of all ranks
    block_bytes: Counter[str] = field(default_factory=Counter)  # of one block of each group, over all ranks
    # The engine has not sent its full snapshot yet. A home cannot tell a new engine from one whose records it lost, so
    # every engine sends a snapshot.
    recovering: bool = True
    publications: dict[int, PublicationRecord] = field(default_factory=dict)  # until their release is acknowledged
    declined: set[PublicationRecord] = field(default_factory=set)  # declined before they arrived, and not ended yet
    pinned: dict[PublicationRecord, None] = field(default_factory=dict)  # arrived and not released, oldest first
    pinned_blocks: Counter[str] = field(default_factory=Counter)  # by group, over all pinned publications
    live_leases: int = 0  # number of live leases on publications
    high_water: int = 0  # the highest number seen
    skipped: dict[int, float] = field(default_factory=dict)  # by unseen number below `high_water`, time of the skip
    snapshot: set[int] | None = None  # numbers seen since the current snapshot began; None outside of a snapshot
    snapshot_name: bytes = b""
    checksum_bytes: int = 0  # bytes of checksums for unreleased publications
    _keys: PublicationKeys = field(init=False, repr=False)
    _description: EngineDescription | None = None

    def __post_init__(self) -> None:
        self._keys = PublicationKeys(self.secret)

    @property
    def watched(self) -> bool:
        """Whether the scheduler's Watch is open."""
        return self.lost_at is None and not self.gone

    @property
    def state(self) -> str:
        """One of `STATES`."""
        if self.dead:
            return "dead"
        if self.lost_at is not None:
            return "lost"
        return "incomplete" if self.num_missing or self.first is None else "ready"

    @property
    def scheduler(self) -> Feed | None:
        """The feed of the scheduler; None until it has had a Watch here."""
        return self.feeds.get(Process(self.ref, Role.SCHEDULER))

    @property
    def first(self) -> Registration | None:
        """The first registration, which states the number of ranks, identity and groups for all."""
        return next(iter(self.ranks.values()), None)

    @property
    def num_ranks(self) -> int:
        """The number of ranks; 0 until one has registered."""
        return self.first.num_ranks if self.first else 0

    @property
    def num_missing(self) -> int:
        """The number of ranks that are not registered or are lost."""
        return self.num_ranks - len(self.ranks) + len(self.lost_ranks)

    def missing_ranks(self, most: int | None = None) -> list[int]:
        """Return the ranks that are not registered or are lost: the first `most` of them; None: all."""
        missing = (rank for rank in range(self.num_ranks) if rank not in self.ranks or rank in self.lost_ranks)
        return list(itertools.islice(missing, most))

    @property
    def description(self) -> EngineDescription | None:
        """The description of the ranks registered so far; None before the first."""
        if self._description is None and self.ranks:
            self._description = EngineDescription(tuple(self.ranks[rank] for rank in sorted(self.ranks)))
        return self._description

    def completed_by(self, registration: Registration) -> EngineDescription | None:
        """Return the description of all ranks if this registration is the last that is missing; else None."""
        ranks = {**self.ranks, registration.rank: registration}
        if registration.rank in self.ranks or len(ranks) < registration.num_ranks:
            return None
        return EngineDescription(tuple(ranks[rank] for rank in sorted(ranks)))

    def lost_with_node(self, rank: int) -> bool:
        """Whether a lost rank was lost with its node: a node server that is alive reports a rank that ends."""
        return rank in self.nodes and rank not in self.left_ranks

    def rank_lost(self, rank: int) -> pb.RankLost:
        return pb.RankLost(rank=rank, node=self.nodes.get(rank, ""), node_lost=self.lost_with_node(rank))

    def check_readable(self) -> EngineDescription:
        """Return the engine's description if its Watch is open and all its ranks are there; else raise
        `EngineIncomplete` with the missing ranks and their nodes."""
        ref, missing = self.ref, self.missing_ranks() if self.num_missing else []
        if self.lost_at is not None:
            problem = "its Watch is lost"
        elif self.description is None:
            problem = "no rank is registered"
        elif missing:
            some = ", ".join(map(str, missing[:MAX_NAMED_RANKS]))
            problem = f"{len(missing)} of {self.num_ranks} ranks are missing: {some}"
            problem += " ..." if len(missing) > MAX_NAMED_RANKS else ""
        else:
            return self.description
        listed, values = ",".join(map(str, missing[:MAX_NAMED_RANKS])), dict[str, Any](missing=len(missing))
        if nodes := sorted({self.nodes[rank] for rank in missing if rank in self.nodes})[:MAX_NAMED_NODES]:
            values["nodes"] = ",".join(nodes)
            problem += f"; on other nodes: {', '.join(nodes)}"
        if lost := sorted({self.nodes[rank] for rank in missing if self.lost_with_node(rank)})[:MAX_NAMED_NODES]:
            values["lost_nodes"] = ",".join(lost)
            problem += f"; nodes lost: {', '.join(lost)}"
        raise EngineIncomplete(f"{ref}: {problem}", engine_id=ref.engine_id, missing_ranks=listed, **values)

    def add(self, registration: Registration) -> None:
        """Add a rank's registration, or note that a lost rank is back."""
        if registration.rank not in self.ranks:
            self.ranks[registration.rank] = registration
            self.groups = self.groups or {group.name: group for group in registration.groups}
            self.cache_bytes += registration.cache_bytes
            self.block_bytes.update(registration.block_bytes)
            self._description = None
        self.lost_ranks.discard(registration.rank)

    def end(self) -> None:
        """Note that the incarnation is gone. Only what live leases on its publications need is kept."""
        self.gone, self.lost_at, self._description = True, None, None
        self.cache_bytes = self.feed_bytes = 0
        self.feeds.clear()
        self.ranks.clear()
        self.nodes.clear()
        self.rank_lost_at.clear()
        for ranks in (self.lost_ranks, self.watched_ranks, self.left_ranks):
            ranks.clear()

    def due(self) -> float:
        """When the engine or a rank counts as dead, or when the dead engine is forgotten."""
        ranks = min(self.rank_lost_at.values(), default=NEVER) + self.times.engine_ttl
        if self.lost_at is None:
            return ranks
        return min(ranks, self.lost_at + self.times.engine_ttl + (self.times.retire if self.dead else 0.0))

    # Its publications.

    @property
    def pinned_bytes(self) -> int:
        """Bytes that the pinned publications hold on all ranks. A block counts for each publication that holds it."""
        return sum(count * self.block_bytes[group] for group, count in self.pinned_blocks.items())

    def unpin(self, publication: PublicationRecord) -> None:
        """Note that a pinned publication is released. Call this before its steps are dropped."""
        del self.pinned[publication]
        for group, held in publication.extents.items():
            self.pinned_blocks[group] -= held.blocks
            if not self.pinned_blocks[group]:
                # A peer chooses the names of groups.
                del self.pinned_blocks[group]

    def bytes_of(self, publication: PublicationRecord) -> int:
        """Return the bytes that an unreleased publication holds on all ranks that have registered."""
        return sum(held.blocks * self.block_bytes[group] for group, held in publication.extents.items())

    def key(self, number: int) -> bytes:
        """Return the key in the reference of a publication, arrived or not; 0: in the engine's own reference."""
        return self._keys.key(number) if number else engine_key(self.secret)

    def check_key(self, number: int, key: bytes) -> None:
        """Raise `WrongKey` unless this is the key in the reference that `key` is for."""
        if not hmac.compare_digest(self.key(number), key):
            engine_id = self.ref.engine_id
            named = f"publication {number} of engine {engine_id!r}" if number else f"engine {engine_id!r}"
            values = {"publication": number} if number else {}
            raise WrongKey(f"the reference's key is not that of {named}", engine_id=engine_id, **values)

    def check_recovered(self) -> None:
        """Raise `HomeRecovering` until the engine has sent its full snapshot."""
        if self.recovering:
            problem = f"this home waits for the snapshot of {self.ref}"
            raise HomeRecovering(problem, engine_id=self.ref.engine_id)

    def may_arrive(self, number: int, now: float) -> bool:
        """Whether a publication that is not here can still arrive. A number at or below the high-water mark is stale
        (PROTOCOL, Identities), except for numbers that the mark has skipped in the last `max_ttl`: a source publishes
        from several threads and repeats lost calls, so numbers overtake each other."""
        since = self.skipped.get(number)
        if number > self.high_water or (since is not None and since > now - self.times.max_ttl):
            return True
        # The mark does not cover numbers from before this home started. The snapshot will.
        return self.recovering

    def check_may_arrive(self, number: int, now: float) -> None:
        """Raise `PublicationStale` unless a publication that is not here can still arrive."""
        if not self.may_arrive(number, now):
            problem = f"publication {number} of {self.ref} is gone or was never published"
            last = f"the last number was {self.high_water}"
            raise PublicationStale(f"{problem}; {last}", engine_id=self.ref.engine_id, publication=number)

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

    def live_until(self) -> float:
        """When the last live lease ends; 0 without any."""
        return max((lease.expires for found in self.publications.values() for lease in found.leases), default=0.0)
