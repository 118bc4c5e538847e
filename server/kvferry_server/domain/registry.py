"""The registry: which engines a home has, with their incarnations, sessions and ranks, and which of them are alive
(PROTOCOL, Identities; Watch, liveness).

    Watch ──► WATCHED ──(Watch ends)──► LOST ──(engine_ttl)──► DEAD ──(retire)──► forgotten
                 ▲───────(Watch)─────────┴──────────(Watch)─────┤
                                     another incarnation ◄──────┘  and this one is refused for `retire`

A home that has just started cannot tell which of two incarnations of an engine_id is the older one. For one engine_ttl
the home therefore accepts every incarnation that proves its secret, so that no peer can keep an engine out by coming
first. From then on they are two engines: references name their incarnations.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from kvferry._wire.authority import incarnation_of
from kvferry.errors import (
    EngineIdInUse,
    EngineIncomplete,
    EngineUnknown,
    HomeRecovering,
    InvalidField,
    KvferryError,
    PeerRestarted,
    WrongSession,
)
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.journal import UNIX_PEER, short
from kvferry_server.domain.limits import Budget, check_budget, check_limit
from kvferry_server.domain.records import Records
from kvferry_server.domain.registrations import OF_ENGINE, OF_RANK, EngineDescription, Registration, check_same
from kvferry_server.domain.steps import check_step
from kvferry_server.domain.times import RECOVERING_RETRY_AFTER
from kvferry_server.domain.values import EngineRef, RevokeReason

REPLACED = "was replaced by another incarnation"


class Registry:
    """The engines whose home this is. The publications of an engine, in the home's `records`, end with the engine."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._clock, self._times, self._limits = records.clock, records.times, records.limits
        self._memory, self._journal = records.memory, records.journal
        self._engines_by_host = Budget(self._limits.engines)
        self._engines: dict[EngineRef, Engine] = {}  # Those that are not gone
        # Incarnations that ended for good, and are refused for `retire` seconds, so that a delayed message cannot evict
        # the live incarnation (PROTOCOL, Identities): the end of each refusal, rising, and the host that it came from.
        # Beyond `Limits.retired` the oldest of the host with the most are not refused any more: a peer that retires
        # incarnations without end must neither fill the memory nor bring back those of others.
        self._retired: dict[EngineRef, tuple[float, str]] = {}
        self._deadlines = records.deadlines

    # Looking engines up.

    def all_engines(self) -> Collection[Engine]:
        """Return all engines, including dead ones that may come back, in no order."""
        return self._engines.values()

    def engines(self) -> Iterator[Engine]:
        """Yield the engines that are not dead."""
        return (engine for engine in self._engines.values() if not engine.dead)

    def find(self, ref: EngineRef) -> Engine:
        """Return an engine that is alive or may come back. Raises `PeerRestarted` if another incarnation took its
        place, `HomeRecovering` while this home, just started, waits for its engines, and otherwise `EngineUnknown`."""
        engine = self._engines.get(ref)
        if engine is not None:
            return engine
        if self._is_retired(ref) or (self._named(ref.engine_id) and not self.recovering):
            raise self._restarted(ref)
        raise self._unknown(ref.engine_id)

    def find_live(self, engine_id: str, incarnation: bytes = b"") -> Engine:
        """Return an engine that is not dead, of this incarnation (empty: any), for readers. Raises as `find`."""
        engine = self.find(EngineRef(engine_id, incarnation)) if incarnation else self.find_named([engine_id])[0]
        if engine.dead:
            raise self._unknown(engine_id)
        return engine

    def find_named(self, engine_ids: Sequence[str]) -> list[Engine]:
        """Return the living engines of these names, for readers that know no incarnation: mostly one. Only a key can
        tell which of several is meant: an engine that takes another's name must not take its readers. Raises
        `EngineUnknown` or `HomeRecovering` if no engine has any of these names."""
        named = (engine for engine_id in engine_ids for engine in self._named(engine_id))
        found = [engine for engine in named if not engine.dead]
        if not found:
            raise self._unknown(engine_ids[0])
        return found

    def reuse_after(self, ref: EngineRef) -> float:
        """Return the seconds until the last lease on older incarnations of an engine has ended (PROTOCOL, A source that
        restarts over the same memory). A home that has just started does not know all of these leases; but none was
        granted after it started. Leases on an older incarnation that still seems alive may be extended until its death
        is noticed, at most to their final deadline."""
        if any(engine.ref != ref and not engine.dead for engine in self._named(ref.engine_id)):
            return self._times.final
        known = self._records.engines.items()
        others = [engine for other, engine in known if other.engine_id == ref.engine_id and other != ref]
        until = max([self._records.knows_all_leases_from, *(engine.live_until() for engine in others)])
        return max(0.0, until - self._clock.now())

    def check_session(self, ref: EngineRef, secret: bytes) -> Engine:
        """Return the engine in whose name a call is made. Raises `WrongSession` for another secret, `EngineIncomplete`
        if the engine counts as dead and must open its Watch first, and as `find`."""
        check_secret(ref, secret)
        engine = self.find(ref)
        if engine.dead:
            problem = f"{ref}: its Watch is lost; open it again first"
            raise EngineIncomplete(problem, engine_id=ref.engine_id, missing_ranks="")
        return engine

    # Watches and registrations of an engine's processes.

    def open_engine(self, ref: EngineRef, secret: bytes, host: str = "") -> Engine:
        """Open the scheduler's Watch of an incarnation, new or known, which comes from a host (empty: unknown). Raises
        `WrongSession`, `EngineIdInUse` if another incarnation is alive or may still come back, `PeerRestarted` if this
        one was replaced, and `LimitReached` if there are too many engines."""
        now = self._records.advance()
        check_secret(ref, secret)
        if self._is_retired(ref):
            raise self._restarted(ref)
        engine = self._engines.get(ref)
        if engine is None:
            others = self._named(ref.engine_id)
            # All checks come before any change: if this call is refused, a dead engine may still come back.
            for other in others:
                self._check_not_in_use(other, now)
            replaced = [other for other in others if other.dead]
            count = len(self._engines) - len(replaced)
            check_limit("engines", count, self._limits.engines, self._times.engine_ttl)
            if host and all(other.host != host for other in replaced):
                check_budget("engines", self._engines_by_host, host, self._times.engine_ttl)
            for other in replaced:
                self._journal.engine("engine_replaced", other.ref, by=short(ref.incarnation), peer=host or UNIX_PEER)
                self._forget(other, _restarted(other.ref, REPLACED, ref.incarnation.hex()))
            engine = self._engines[ref] = self._records.open(ref, secret)
            self._journal.engine("engine_opened", ref, peer=host or UNIX_PEER)
        elif engine.lost_at is not None:
            self._journal.engine("engine_back", ref, peer=host or UNIX_PEER, lost_s=now - engine.lost_at)
        engine.lost_at, engine.dead = None, False
        self._comes_from(engine, host)
        return engine

    def close_engine(self, ref: EngineRef) -> None:
        """Note that the scheduler's Watch ended."""
        now = self._records.advance()
        engine = self._engines.get(ref)
        if engine is not None and engine.lost_at is None:
            engine.lost_at = now
            self._deadlines.put(engine, self._on_due)
            # An engine that its scheduler stops ends its Watch like this, too. If it stays away, engine_dead warns.
            self._journal.engine("engine_lost", ref, peer=engine.host or UNIX_PEER, dead_in_s=self._times.engine_ttl)

    def evict(self, ref: EngineRef) -> None:
        """End an incarnation for good, for an operator, alive or not, as if another had taken its place: its
        publications end, leases on them run out, and its Watches end. Idempotent. Raises `EngineUnknown` or
        `HomeRecovering` if this home does not have it."""
        self._records.advance()
        if self._is_retired(ref):
            return
        engine = self._engines.get(ref)
        if engine is None:
            raise self._unknown(ref.engine_id)
        self._journal.engine("engine_evicted", ref, bad=True)
        self._forget(engine, _restarted(ref, "was evicted by an operator"))

    def retire(self, ref: EngineRef) -> None:
        """End an incarnation for good, for its scheduler, after `check_session`. Raises as `find`."""
        self._records.advance()
        engine = self.find(ref)
        self._journal.engine("engine_retired", ref)
        self._forget(engine)

    def open_rank(self, ref: EngineRef, secret: bytes, rank: int, node: str = "") -> Engine:
        """Open the Watch of a rank's process, relayed by a node server at the address `node`; empty: a process of the
        home's own node. Raises `InvalidField` if the engine has no such rank, and as `check_session`."""
        self._records.advance()
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
        """Note that the Watch of a rank's process ended."""
        now = self._records.advance()
        engine = self._engines.get(ref)
        if engine is not None and rank in engine.watched_ranks:
            engine.watched_ranks.discard(rank)
            engine.rank_lost_at[rank] = now
            self._deadlines.put(engine, self._on_due)

    def rank_left(self, ref: EngineRef, rank: int) -> None:
        """Note that a relayed rank's process has ended, as its node server reports just before it ends the Watch.
        Raises `InvalidField` if no node server relays for this rank."""
        engine = self.find(ref)
        if rank not in engine.nodes:
            raise InvalidField("rank_left.rank", rank, "a rank for which another node server relays")
        engine.left_ranks.add(rank)

    def completed_by(self, registration: Registration, secret: bytes) -> EngineDescription | None:
        """Return the description of an engine for checks before its last rank registers; None: others are missing, or
        the rank has registered before. Raises as `register`."""
        self._records.advance()
        return self._check_registration(registration, secret).completed_by(registration)

    def register(self, registration: Registration, secret: bytes) -> Engine:
        """Register a rank's cache. Idempotent for the same content. With the first rank come the engine's groups;
        publications from an earlier snapshot are checked against them, and those that fail are aborted (R7). Raises
        `CacheDiffers` if the rank, or its engine, was registered with other content; `InvalidField` if the engine has
        too many ranks, or another rank's agent has this agent's name; `LimitReached`; and as `check_session`."""
        now = self._records.advance()
        engine = self._check_registration(registration, secret)
        before = engine.ranks.get(registration.rank)
        if before is None:
            self._memory.take(engine.ref, registration.size)
        back = registration.rank in engine.lost_ranks
        if back and registration.rank not in engine.watched_ranks:
            # The rank is back without a Watch: it has one engine_ttl to open a Watch.
            engine.rank_lost_at[registration.rank] = now
        first = engine.groups is None
        engine.add(registration)
        for publication in list(engine.publications.values()) if first else ():
            try:
                for step in publication.steps:
                    check_step(engine.groups or {}, step)
            except KvferryError:
                self._records.abort(publication, RevokeReason.ABORTED, now)
        self._deadlines.put(engine, self._on_due)
        if before is None or back:
            self._journal.engine(
                "rank_registered" if before is None else "rank_back",
                engine.ref,
                rank=registration.rank,
                ranks=engine.num_ranks,
                missing=engine.num_missing,
                node=engine.nodes.get(registration.rank),
            )
            if not engine.num_missing:
                ranks, cache_bytes = engine.num_ranks, engine.cache_bytes
                self._journal.engine("engine_complete", engine.ref, ranks=ranks, cache_bytes=cache_bytes)
        return engine

    def _check_registration(self, registration: Registration, secret: bytes) -> Engine:
        engine = self.check_session(registration.engine, secret)
        before = engine.ranks.get(registration.rank)
        if before is not None:
            check_same(registration, before, OF_RANK)
            return engine
        if engine.first is not None:
            check_same(registration, engine.first, OF_ENGINE)
        if registration.num_ranks > self._limits.ranks:
            raise InvalidField("num_ranks", registration.num_ranks, f"at most {self._limits.ranks}")
        agent = registration.agent
        if agent and any(other.agent and other.agent.name == agent.name for other in engine.ranks.values()):
            raise InvalidField("agent.name", agent.name, "a name that no other rank of the engine uses")
        self._memory.check(engine.ref, registration.size)
        return engine

    def _check_not_in_use(self, engine: Engine, now: float) -> None:
        """Raise `EngineIdInUse` if another incarnation may not take the engine_id from this one: unless this one is
        dead, or this home has just started and cannot tell which is the older."""
        if engine.dead or self.recovering:
            return
        ref, ttl = engine.ref, self._times.engine_ttl
        raise EngineIdInUse(
            f"{ref} is alive or may come back. A rank of it registers with its token (token=...); another start of the "
            f"engine must wait until it has been gone for {ttl:g} s",
            retry_after=ttl if engine.lost_at is None else engine.lost_at + ttl - now,
            engine_id=ref.engine_id,
            incarnation=ref.incarnation.hex(),
        )

    def _comes_from(self, engine: Engine, host: str) -> None:
        if engine.host:
            self._engines_by_host.give(engine.host)
        if host:
            self._engines_by_host.take(host)
            self._memory.comes_from(engine.ref, host)
        engine.host = host

    def _forget(self, engine: Engine, why: KvferryError | None = None, *, refuse: bool = True) -> None:
        """End an incarnation, and `refuse` it from now on. Watches that its processes still have end with `why`:
        nothing would reach them any more. None: its scheduler has stopped it, and its processes end by themselves."""
        if refuse:
            self._refuse(engine, self._clock.now())
        if why is not None:
            for feed in engine.feeds.values():
                feed.ended = why
                self._records.wake(feed)
        del self._engines[engine.ref]
        self._comes_from(engine, "")
        registered = sum(registration.size for registration in engine.ranks.values())
        self._memory.give(engine.ref, registered + engine.feed_bytes)
        engine.end()
        self._deadlines.put(engine, self._on_due)
        # An engine that its scheduler has stopped keeps its memory as it is until its leases have ended.
        reason = RevokeReason.ABORTED if why is None else RevokeReason.SOURCE_LOST
        self._records.end_all(engine, reason)

    def _is_retired(self, ref: EngineRef) -> bool:
        until, _ = self._retired.get(ref, (0.0, ""))
        return until > self._clock.now()

    def _refuse(self, engine: Engine, now: float) -> None:
        self._retired.pop(engine.ref, None)
        self._retired[engine.ref] = now + self._times.retire, engine.host
        while self._retired[oldest := next(iter(self._retired))][0] <= now:
            del self._retired[oldest]
        if len(self._retired) > self._limits.retired:
            ((most, _),) = Counter(host for _, host in self._retired.values()).most_common(1)
            del self._retired[next(ref for ref, (_, host) in self._retired.items() if host == most)]

    @property
    def recovering(self) -> bool:
        """Whether this home has just started, and waits for engines that it had before a restart."""
        return self._clock.now() < self._records.started + self._times.engine_ttl

    def _named(self, engine_id: str) -> list[Engine]:
        """Return the engines of this name, including dead ones."""
        return [engine for ref, engine in self._engines.items() if ref.engine_id == engine_id]

    def _restarted(self, ref: EngineRef) -> PeerRestarted:
        others = self._named(ref.engine_id)
        if others:
            return _restarted(ref, REPLACED, others[0].ref.incarnation.hex())
        return _restarted(ref, "was stopped, replaced, or evicted by an operator")

    def _unknown(self, engine_id: str) -> EngineUnknown | HomeRecovering:
        if self.recovering:
            problem = f"this home has just started and waits for its engines; {engine_id!r} is not back yet"
            return HomeRecovering(problem, retry_after=RECOVERING_RETRY_AFTER, engine_id=engine_id)
        problem = f"this home has no engine {engine_id!r}: it has ended, or its home is another node server"
        return EngineUnknown(problem, engine_id=engine_id)

    def _on_due(self, engine: Engine, now: float) -> None:
        engine_ttl = self._times.engine_ttl
        for rank in [rank for rank, lost_at in engine.rank_lost_at.items() if lost_at + engine_ttl <= now]:
            del engine.rank_lost_at[rank]
            if rank in engine.ranks:
                engine.lost_ranks.add(rank)
                lost = engine.rank_lost(rank)
                self._records.tell(engine, lost)
                node, node_lost = lost.node or None, lost.node_lost or None
                self._journal.engine("rank_lost", engine.ref, bad=True, rank=rank, node=node, node_lost=node_lost)
        if engine.lost_at is None or engine.lost_at + engine_ttl > now:
            return
        if not engine.dead:
            engine.dead = True
            self._records.end_all(engine, RevokeReason.SOURCE_LOST)
            self._journal.engine("engine_dead", engine.ref, bad=True, lost_s=now - engine.lost_at)
        elif engine.lost_at + engine_ttl + self._times.retire <= now:
            self._journal.engine("engine_forgotten", engine.ref)
            problem = f"this home has forgotten {engine.ref}, whose scheduler has been away for too long"
            self._forget(engine, EngineUnknown(problem, engine_id=engine.ref.engine_id), refuse=False)


def _restarted(ref: EngineRef, how: str, current: str = "") -> PeerRestarted:
    problem = f"{ref} {how}: it has to be started again"
    return PeerRestarted(problem, engine_id=ref.engine_id, incarnation=ref.incarnation.hex(), current=current)


def check_secret(ref: EngineRef, secret: bytes) -> None:
    """Raise `WrongSession` unless the secret is that of the incarnation. This needs no record of the engine, so a
    restarted home recognises its engines and accepts no impostor."""
    if not hmac.compare_digest(incarnation_of(secret), ref.incarnation):
        wrong = f"is not that of {ref}" if secret else f"of {ref} is missing"
        problem = f"the session secret {wrong}: its ranks need the token that its scheduler made at this start"
        raise WrongSession(problem, engine_id=ref.engine_id)
