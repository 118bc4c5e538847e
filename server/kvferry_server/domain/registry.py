"""The engines of a home: incarnations, sessions, ranks, and who of them lives (PROTOCOL, Identities; Watch, liveness).

Pure: no I/O, no clock of its own. What time brings about is left in `take_effects`.

    Watch ──► WATCHED ──(Watch ends)──► LOST ──(engine_ttl)──► DEAD ──(retire)──► forgotten
                 ▲───────(Watch)─────────┴──────────(Watch)─────┤
                                     another incarnation ◄──────┘  and this one is refused for `retire`

A home that has just started cannot know which of two incarnations of one engine_id is the older. For one engine_ttl
it takes each that proves itself, so that nobody keeps an engine from coming back by being there first. They are two
engines from then on: references name their incarnations.
"""

from __future__ import annotations

import hmac
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvferry._wire.authority import incarnation_of
from kvferry.errors import (
    CacheDiffers,
    EngineIdInUse,
    EngineIncomplete,
    EngineUnknown,
    HomeRecovering,
    InvalidField,
    PeerRestarted,
    WrongSession,
)
from kvferry_server.domain.agenda import NEVER, Agenda
from kvferry_server.domain.clock import Clock
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.limits import Limits, check_limit
from kvferry_server.domain.registrations import Registration, engine_difference, first_difference
from kvferry_server.domain.shares import Memory, Shares, check_share
from kvferry_server.domain.sources import Source
from kvferry_server.domain.times import Times

MISSING_TOLD = 64
"""Missing ranks that are named; of more it is said how many."""

NODES_TOLD = 16
"""Node servers of missing ranks that are named."""

RECOVERING_RETRY = 0.25
"""Seconds after which it makes sense to ask a home again that waits for its engines."""


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine's Watch has been lost for an engine_ttl."""

    engine: EngineRef


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The incarnation will not come back: it was replaced, or has been dead for long."""

    engine: EngineRef


@dataclass(frozen=True, slots=True)
class RankDied:
    """The Watch of a rank's process has been lost for an engine_ttl."""

    engine: EngineRef
    rank: int
    node: str
    node_lost: bool


@dataclass(slots=True, eq=False)
class Engine:
    """One incarnation at its home.

    Attributes:
        ref: which one.
        lost_at: when its scheduler's Watch ended; None while that is open.
        dead: lost for an engine_ttl.
        ranks: registrations by rank; kept when a rank is lost, since no other content may take its place.
        lost_ranks: registered ones whose process is gone.
        watched_ranks: ranks with an open Watch of their own.
        rank_lost_at: when the Watch of a rank ended, while its time runs.
        nodes: node servers that relay for ranks, by rank.
        left_ranks: relayed ones of which their node server says that their processes ended.
        cache_bytes: over all ranks.
        peer: that its scheduler comes from; empty if it cannot be told apart from others.
    """

    ref: EngineRef
    ttl: float
    retire: float
    lost_at: float | None = None
    dead: bool = False
    ranks: dict[int, Registration] = field(default_factory=dict)
    lost_ranks: set[int] = field(default_factory=set)
    watched_ranks: set[int] = field(default_factory=set)
    rank_lost_at: dict[int, float] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    left_ranks: set[int] = field(default_factory=set)
    peer: str = ""
    scheduled: float = NEVER
    cache_bytes: int = 0
    _source: Source | None = None

    @property
    def first(self) -> Registration | None:
        """What says for all ranks how many they are, and of which identity and groups."""
        return next(iter(self.ranks.values()), None)

    @property
    def num_ranks(self) -> int:
        """Number of ranks; 0 until one has registered."""
        return self.first.num_ranks if self.first else 0

    @property
    def num_missing(self) -> int:
        """Ranks that are not registered, or not any more."""
        return self.num_ranks - len(self.ranks) + len(self.lost_ranks)

    def missing_ranks(self, most: int | None = None) -> list[int]:
        """Which those are; the first of them, if `most` says how many to look for."""
        missing = (rank for rank in range(self.num_ranks) if rank not in self.ranks or rank in self.lost_ranks)
        return list(itertools.islice(missing, most))

    @property
    def source(self) -> Source | None:
        """What is told of the ranks registered so far; None before the first."""
        if self._source is None and self.ranks:
            self._source = Source(self.ref, tuple(self.ranks[rank] for rank in sorted(self.ranks)))
        return self._source

    def lost_with_node(self, rank: int) -> bool:
        """Whether a rank that is lost was lost with its node, as far as is known: a node server that lives says so of
        a rank that ended."""
        return rank in self.nodes and rank not in self.left_ranks

    def add(self, registration: Registration) -> None:
        """A rank is there, or back."""
        if registration.rank not in self.ranks:
            self.ranks[registration.rank] = registration
            self.cache_bytes += registration.cache_bytes
            self._source = None
        self.lost_ranks.discard(registration.rank)

    def due(self) -> float:
        """When the engine, or a rank, counts as dead, or the dead engine is forgotten."""
        ranks = min(self.rank_lost_at.values(), default=NEVER) + self.ttl
        if self.lost_at is None:
            return ranks
        return min(ranks, self.lost_at + self.ttl + (self.retire if self.dead else 0.0))


class Registry:
    """The engines whose home this is. Not thread-safe: it belongs to its home's event loop."""

    def __init__(self, clock: Clock, times: Times, limits: Limits, memory: Memory | None = None) -> None:
        self._clock = clock
        self._times = times
        self._limits = limits
        self._memory = memory or Memory(limits.memory, limits.engine_memory, times.renew_every)
        self._peers = Shares(limits.engines)
        self._started = clock.now()
        self._engines: dict[EngineRef, Engine] = {}
        self._retired: dict[EngineRef, float] = {}
        self._agenda: Agenda[Engine] = Agenda()
        self._effects: list[EngineDied | EngineGone | RankDied] = []

    def advance(self) -> float:
        """Bring everything up to the present; returns it."""
        now = self._clock.now()
        self._agenda.advance(now, self._on_due)
        return now

    def next_deadline(self) -> float:
        """When to call `advance` next."""
        return self._agenda.next_deadline()

    def take_effects(self) -> list[EngineDied | EngineGone | RankDied]:
        """What happened since the last call."""
        effects, self._effects = self._effects, []
        return effects

    # Who asks for an engine.

    def engines(self) -> Iterator[Engine]:
        """Engines that are not dead, by engine_id."""
        return (self._engines[ref] for ref in sorted(self._engines) if not self._engines[ref].dead)

    def find(self, ref: EngineRef) -> Engine:
        """The engine, if it lives or may come back.

        Raises:
            PeerRestarted: it is another incarnation now.
            EngineUnknown, HomeRecovering: there is none; the latter while a restarted home waits for its engines.
        """
        engine = self._engines.get(ref)
        if engine is not None:
            return engine
        if self._is_retired(ref) or (self._named(ref.engine_id) and not self._new):
            raise self._restarted(ref)
        raise self._unknown(ref.engine_id)

    def find_live(self, engine_id: str, incarnation: bytes = b"") -> Engine:
        """An engine by its name, for those who read from it. Errors as `find`; a dead engine is unknown.

        Args:
            engine_id: the engine.
            incarnation: the one expected; empty: whatever lives.
        """
        found = [self.find(EngineRef(engine_id, incarnation))] if incarnation else self._named(engine_id)
        for engine in found:
            if not engine.dead:
                return engine
        raise self._unknown(engine_id)

    def has_rival(self, ref: EngineRef) -> bool:
        """Whether another incarnation of the same engine_id lives, or may come back."""
        return any(engine.ref != ref and not engine.dead for engine in self._named(ref.engine_id))

    def check_readable(self, engine: Engine) -> Source:
        """What is told of an engine whose Watch is open and whose ranks are all there; else `EngineIncomplete`."""
        ref, missing = engine.ref, engine.missing_ranks() if engine.num_missing else []
        if engine.lost_at is not None:
            problem = "its Watch is lost"
        elif engine.source is None:
            problem = "no rank is registered"
        elif missing:
            some = ", ".join(map(str, missing[:MISSING_TOLD]))
            problem = f"{len(missing)} of {engine.num_ranks} ranks are missing: {some}"
            problem += " ..." if len(missing) > MISSING_TOLD else ""
        else:
            return engine.source
        listed, values = ",".join(map(str, missing[:MISSING_TOLD])), dict[str, Any](missing=len(missing))
        if nodes := sorted({engine.nodes[rank] for rank in missing if rank in engine.nodes})[:NODES_TOLD]:
            values["nodes"] = ",".join(nodes)
            problem += f"; of other nodes: {', '.join(nodes)}"
        if lost := sorted({engine.nodes[rank] for rank in missing if engine.lost_with_node(rank)})[:NODES_TOLD]:
            values["lost_nodes"] = ",".join(lost)
            problem += f"; nodes lost: {', '.join(lost)}"
        raise EngineIncomplete(f"{ref}: {problem}", engine_id=ref.engine_id, missing_ranks=listed, **values)

    def check_session(self, ref: EngineRef, secret: bytes) -> Engine:
        """The engine in whose name this is said.

        Raises:
            WrongSession: the secret is not its.
            EngineIncomplete: it counts as dead; its Watch has to come first.
        """
        check_secret(ref, secret)
        engine = self.find(ref)
        if engine.dead:
            raise EngineIncomplete(f"{ref}: its Watch is lost", engine_id=ref.engine_id, missing_ranks="")
        return engine

    # An engine's processes.

    def open_engine(self, ref: EngineRef, secret: bytes, peer: str = "") -> Engine:
        """The scheduler's Watch opens: a new incarnation, or one that lives on.

        Args:
            ref: the incarnation.
            secret: of its session.
            peer: that it comes from, if it can be told apart from others.

        Raises:
            WrongSession: the secret is not that of the incarnation.
            EngineIdInUse: another incarnation lives, or may still come back.
            PeerRestarted: this one was replaced.
            LimitReached: too many engines.
        """
        now = self.advance()
        check_secret(ref, secret)
        if self._is_retired(ref):
            raise self._restarted(ref)
        engine = self._engines.get(ref)
        if engine is None:
            others = self._named(ref.engine_id)
            # Who is refused changes nothing: a dead engine may still come back.
            for other in others:
                self._check_not_in_use(other, now)
            replaced = [other for other in others if other.dead]
            count = len(self._engines) - len(replaced)
            check_limit("engines", count, self._limits.engines, self._times.engine_ttl)
            if peer and all(other.peer != peer for other in replaced):
                check_share("engines", self._peers, peer, self._times.engine_ttl)
            for other in replaced:
                self._forget(other)
                self._retired[other.ref] = now + self._times.retire
            engine = Engine(ref, self._times.engine_ttl, self._times.retire)
            self._engines[ref] = engine
        engine.lost_at, engine.dead = None, False
        self._comes_from(engine, peer)
        return engine

    def close_engine(self, ref: EngineRef) -> None:
        """The scheduler's Watch ended."""
        now = self.advance()
        engine = self._engines.get(ref)
        if engine is not None and engine.lost_at is None:
            engine.lost_at = now
            self._agenda.put(engine)

    def open_rank(self, ref: EngineRef, secret: bytes, rank: int, node: str = "") -> Engine:
        """The Watch of a rank's process opens, relayed by a node server if `node` is one. Errors as `check_session`;
        `InvalidField` for a rank the engine has not."""
        self.advance()
        engine = self.check_session(ref, secret)
        most = engine.num_ranks or self._limits.ranks
        if rank >= most:
            raise InvalidField("rank", rank, f"below {most}")
        engine.watched_ranks.add(rank)
        engine.left_ranks.discard(rank)
        engine.nodes.pop(rank, None)
        if node:
            engine.nodes[rank] = node
        engine.rank_lost_at.pop(rank, None)
        return engine

    def close_rank(self, ref: EngineRef, rank: int) -> None:
        """The Watch of a rank's process ended."""
        now = self.advance()
        engine = self._engines.get(ref)
        if engine is not None and rank in engine.watched_ranks:
            engine.watched_ranks.discard(rank)
            engine.rank_lost_at[rank] = now
            self._agenda.put(engine)

    def rank_left(self, ref: EngineRef, rank: int) -> None:
        """The node server that relays for a rank says that its process has ended; its Watch ends next."""
        engine = self.find(ref)
        if rank not in engine.nodes:
            raise InvalidField("rank_left.rank", rank, "a rank that another node server relays for")
        engine.left_ranks.add(rank)

    def register(self, registration: Registration, secret: bytes) -> Engine:
        """Take a rank's cache. Idempotent for the same content.

        Raises:
            CacheDiffers: the rank, or its engine, was registered with another content.
            InvalidField: too many ranks, or the name of another rank's agent.
            LimitReached: the engine takes too much memory.
            WrongSession, PeerRestarted, EngineUnknown, Unavailable: see `check_session`.
        """
        now = self.advance()
        engine = self.check_session(registration.engine, secret)
        before = engine.ranks.get(registration.rank)
        if before is not None:
            _raise_if_different(registration, first_difference(before, registration))
        else:
            if engine.first is not None:
                _raise_if_different(registration, engine_difference(engine.first, registration))
            if registration.num_ranks > self._limits.ranks:
                raise InvalidField("num_ranks", registration.num_ranks, f"at most {self._limits.ranks}")
            self._check_agent_name(engine, registration)
            self._memory.check(engine.ref, registration.size)
            self._memory.take(engine.ref, registration.size)
        if registration.rank in engine.lost_ranks and registration.rank not in engine.watched_ranks:
            # Back, but not watched: that gives it one engine_ttl to open its Watch.
            engine.rank_lost_at[registration.rank] = now
        engine.add(registration)
        self._agenda.put(engine)
        return engine

    # Within.

    def _check_agent_name(self, engine: Engine, registration: Registration) -> None:
        agent = registration.agent
        others = (other.agent for other in engine.ranks.values() if other.agent is not None)
        if agent is not None and any(other.name == agent.name for other in others):
            raise InvalidField("agent.name", agent.name, "a name that no other rank of the engine has")

    def _check_not_in_use(self, engine: Engine, now: float) -> None:
        """Another incarnation wants the name: only if this one is dead, or nobody can know which is the older."""
        if engine.dead or self._new:
            return
        ref, ttl = engine.ref, self._times.engine_ttl
        raise EngineIdInUse(
            f"{ref} lives, or may come back: a rank of it registers with its token (token=...), and another start of "
            f"the engine waits until it has been gone for {ttl:g} s",
            retry_after=ttl if engine.lost_at is None else engine.lost_at + ttl - now,
            engine_id=ref.engine_id,
            incarnation=ref.incarnation.hex(),
        )

    def _comes_from(self, engine: Engine, peer: str) -> None:
        if engine.peer:
            self._peers.give(engine.peer)
        if peer:
            self._peers.take(peer)
        engine.peer = peer
        self._memory.comes_from(engine.ref, peer)

    def _forget(self, engine: Engine) -> None:
        del self._engines[engine.ref]
        self._comes_from(engine, "")
        self._memory.give(engine.ref, sum(registration.size for registration in engine.ranks.values()))
        engine.lost_at = None
        engine.rank_lost_at.clear()
        self._effects.append(EngineGone(engine.ref))

    def _is_retired(self, ref: EngineRef) -> bool:
        now = self._clock.now()
        # They end in the order in which they came.
        while self._retired and next(iter(self._retired.values())) <= now:
            del self._retired[next(iter(self._retired))]
        return ref in self._retired

    @property
    def _new(self) -> bool:
        """Whether this home waits for the engines of its predecessor."""
        return self._clock.now() < self._started + self._times.engine_ttl

    def _named(self, engine_id: str) -> list[Engine]:
        """Engines of this name, dead ones included."""
        return [engine for ref, engine in self._engines.items() if ref.engine_id == engine_id]

    def _restarted(self, ref: EngineRef) -> PeerRestarted:
        others = self._named(ref.engine_id)
        current = others[0].ref.incarnation.hex() if others else ""
        return PeerRestarted(
            f"{ref} is not the engine's any more",
            engine_id=ref.engine_id,
            incarnation=ref.incarnation.hex(),
            current=current,
        )

    def _unknown(self, engine_id: str) -> EngineUnknown | HomeRecovering:
        if self._new:
            waits = f"this home has just started and waits for its engines; {engine_id!r} is not back yet"
            return HomeRecovering(waits, retry_after=RECOVERING_RETRY, engine_id=engine_id)
        return EngineUnknown(f"no engine {engine_id!r} at this home", engine_id=engine_id)

    def _on_due(self, engine: Engine, now: float) -> None:
        for rank in [rank for rank, lost_at in engine.rank_lost_at.items() if lost_at + engine.ttl <= now]:
            del engine.rank_lost_at[rank]
            if rank in engine.ranks:
                engine.lost_ranks.add(rank)
                node, node_lost = engine.nodes.get(rank, ""), engine.lost_with_node(rank)
                self._effects.append(RankDied(engine.ref, rank, node, node_lost))
        if engine.lost_at is None or engine.lost_at + engine.ttl > now:
            return
        if not engine.dead:
            engine.dead = True
            self._effects.append(EngineDied(engine.ref))
        elif engine.lost_at + engine.ttl + engine.retire <= now:
            self._forget(engine)


def check_secret(ref: EngineRef, secret: bytes) -> None:
    """Raise `WrongSession` unless the secret is that of the incarnation. This needs no record of the engine: a home
    that has lost its own knows its engines again, and takes nobody for another one."""
    if not hmac.compare_digest(incarnation_of(secret), ref.incarnation):
        raise WrongSession(f"the session secret is not that of {ref}", engine_id=ref.engine_id)


def _raise_if_different(registration: Registration, difference: str) -> None:
    if difference:
        ref, rank = registration.engine, registration.rank
        raise CacheDiffers(
            f"rank {rank} of {ref} was registered with another {difference}",
            engine_id=ref.engine_id,
            rank=rank,
            field=difference,
        )
