"""The source engines of one destination rank: one handshake and one plan of reads per incarnation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from kvferry._control.backoff import Breaker, retrying
from kvferry._control.connection import HANDSHAKE_TIMEOUT, Control
from kvferry._engine_spec import EngineSpec
from kvferry._logs import Log
from kvferry._loop import Loop
from kvferry._tracing import start_span
from kvferry._wire.authority import has_agent_key
from kvferry._wire.geometry_codec import Handshaken, agent_from_proto, group_to_proto, rank_to_proto
from kvferry.errors import (
    AgentsWithheld,
    BadAgentMetadata,
    EngineUnknown,
    KvferryError,
    PeerRestarted,
    PublicationReleased,
    PublicationStale,
    TransferFailed,
    Unavailable,
    Unreachable,
    WrongKey,
    WrongState,
)
from kvferry.geometry.model import AgentInfo, EngineGeometry, RankGeometry
from kvferry.planner.path_choice import PathRule
from kvferry.planner.plan import ReadPlan, plan_read
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb

logger = Log(__name__)

BREAKER_THRESHOLD = 3
BREAKER_FIRST = 0.5
BREAKER_LAST = 8.0
"""Failures after which reads from an engine pause, and the shortest and longest pause in seconds: each attempt to
connect to a dead rank would cost a read seconds."""

PEER_IDLE = 600.0
"""Seconds without a read after which an engine is dropped; the next read does a new handshake."""

SourceKey: TypeAlias = tuple[str, str, bytes]
"""An engine: the address of its home, its engine_id, and its incarnation."""

REFERENCE_GONE = (WrongKey, PublicationStale, PublicationReleased)
"""Errors with which a home rejects a reference for good."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceEngine:
    """A source engine after its handshake, with the plan of this rank's reads. `agents` are those that the plan reads
    from, by source rank."""

    agents: dict[int, AgentInfo]
    plan: ReadPlan

    def plan_of(self, layers: frozenset[str] | None) -> ReadPlan:
        return self.plan if layers is None else self.plan.of_layers(layers)


@dataclass(slots=True)
class _Handshake:
    """A handshake in progress, until `deadline` on the loop's clock, for which several reads may wait. The task returns
    its error, which perhaps no read waits for any more."""

    reference: str
    deadline: float
    task: asyncio.Task[SourceEngine | KvferryError]


@dataclass(slots=True)
class _Slot:
    """An engine, after its handshake (of which there is one at a time), and the time of its last read. `waiting` are
    the deadlines of the reads that wait for a handshake."""

    source: SourceEngine | None = None
    handshake: _Handshake | None = None
    breaker: Breaker = field(default_factory=lambda: Breaker(BREAKER_THRESHOLD, BREAKER_FIRST, BREAKER_LAST))
    used_at: float = 0.0
    waiting: list[float] = field(default_factory=list)


class SourceEngines:
    """The source engines of one destination rank. Belongs to the client's event loop.

    Args:
        own_home: the home of the destination engine.
        measure: called with a home, an agent behind it and a deadline if costs are to be measured; returns a rule with
            the measured costs, or None.
        retire: called with the name of each agent of an engine that is dropped.
    """

    def __init__(
        self,
        loop: Loop,
        spec: EngineSpec,
        reader: pb.EngineRef,
        rank: RankGeometry,
        own_home: Control,
        rule: PathRule,
        measure: Callable[[str, AgentInfo, float], Awaitable[PathRule | None]],
        retire: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._reader = reader
        self._rank = rank
        self._own_home = own_home
        self._own: EngineGeometry | None = None
        """The whole destination engine, once known."""
        if spec.num_ranks == 1:
            self._own = EngineGeometry(spec.engine_id, spec.groups, (rank,), spec.identity, reader.incarnation)
        self._rule = rule
        self._measure = measure
        self._retire = retire
        self._slots: dict[SourceKey, _Slot] = {}

    async def get(
        self, home: Control, key: SourceKey, reference: str, deadline: float, traceparent: str = ""
    ) -> SourceEngine:
        """Return the source engine at this home; makes the handshake with a new engine, once for all reads that wait.
        `reference` is that of one of its publications, or of the engine; `deadline` is on the loop's clock.

        Raises:
            Incompatible: the source's cache cannot be read; the error has the reason.
            PeerRestarted: the engine has restarted as another incarnation.
            WrongKey, PublicationStale, PublicationReleased: the home does not accept the reference, or no longer does.
            Unavailable: the engine was not complete by the deadline, or reads from it keep failing and the next attempt
                is not due yet.
        """
        slot = self._slots.setdefault(key, _Slot())
        slot.used_at = self._loop.now()
        slot.waiting.append(deadline)
        # No message reports an engine that is gone for good.
        idle_since = self._loop.now() - PEER_IDLE
        self._drop_where(lambda _, other: other.used_at < idle_since)
        try:
            while True:
                handshake = slot.handshake
                mine = handshake is None
                if handshake is None:
                    pause = slot.breaker.ask(self._loop.now())
                    if pause > 0:
                        message = f"reads from engine {key[1]!r} keep failing; the next attempt is due in {pause:.1f} s"
                        raise Unreachable(message, retry_after=pause, address=home.address)
                    if slot.source is not None:
                        return slot.source
                    # Reads that wait after a failed handshake make the next one together.
                    until = max(slot.waiting)
                    shaking = self._shake_hands(slot, home, key, reference, until, traceparent)
                    handshake = slot.handshake = _Handshake(reference, until, asyncio.ensure_future(shaking))
                # Another may wait for it with a longer deadline.
                left = None if handshake.deadline <= deadline else max(0.0, deadline - self._loop.now())
                await asyncio.wait((handshake.task,), timeout=left)
                if not handshake.task.done():
                    raise Unavailable(f"engine {key[1]!r} was not complete in time", engine_id=key[1])
                found = handshake.task.result()
                if isinstance(found, SourceEngine):
                    return found
                # The handshake may have had a shorter deadline, or a reference that is gone.
                longer = found.retryable and deadline > max(handshake.deadline, self._loop.now())
                other = isinstance(found, REFERENCE_GONE) and reference != handshake.reference
                if mine or not (longer or other):
                    raise found
        finally:
            slot.waiting.remove(deadline)
            self._forget_unknown(key, slot)

    async def _shake_hands(
        self, slot: _Slot, home: Control, key: SourceKey, reference: str, deadline: float, traceparent: str
    ) -> SourceEngine | KvferryError:
        engine_id = key[1]
        span = start_span("kvferry.handshake", traceparent, source=engine_id)
        found: SourceEngine | KvferryError
        try:
            with span.calling():
                found = await self._handshake(home, key, reference, deadline)
        except KvferryError as error:
            found = error.with_traceback(None)
        except Exception as error:
            logger.exception("the handshake with %s failed", engine_id)
            found = TransferFailed(f"handshake: {error!r}")
        slot.handshake = None
        if isinstance(found, SourceEngine):
            span.end()
            slot.source = found
            # Only at the same home: an engine at another home may have the same name.
            self._drop_where(lambda other, _: other[:2] == key[:2] and other[2] != key[2])
        else:
            span.end(found)
            if isinstance(found, (PeerRestarted, EngineUnknown)):
                self.gone(key)
            self._forget_unknown(key, slot)
        return found

    def _forget_unknown(self, key: SourceKey, slot: _Slot) -> None:
        """Forget an engine without a handshake: a reference that no home has checked may name any engine."""
        busy = slot.waiting or slot.handshake is not None or slot.breaker.failing_for(self._loop.now())
        if slot.source is None and not busy and self._slots.get(key) is slot:
            del self._slots[key]

    def known(self, key: SourceKey) -> SourceEngine | None:
        """Return a source engine that needs no handshake and no pause; None otherwise."""
        slot = self._slots.get(key)
        if slot is None or slot.source is None or slot.breaker.ask(self._loop.now()) > 0:
            return None
        slot.used_at = self._loop.now()
        return slot.source

    def failed(self, key: SourceKey) -> None:
        """Record a failed transfer: the next read makes a new handshake, after a pause if several have failed."""
        slot = self._slots.get(key)
        if slot is not None:
            slot.source = None
            slot.breaker.failed(self._loop.now())

    def succeeded(self, key: SourceKey) -> None:
        slot = self._slots.get(key)
        if slot is not None:
            slot.breaker.succeeded()

    def gone(self, key: SourceKey) -> None:
        """Drop an incarnation that has ended according to its home. Only the engine at this home: another home may
        have, or claim to have, an engine of the same name."""
        self._drop_where(lambda other, _: other == key)

    def _drop_where(self, chosen: Callable[[SourceKey, _Slot], bool]) -> None:
        for key in [key for key, slot in self._slots.items() if chosen(key, slot)]:
            source = self._slots.pop(key).source
            for agent in () if source is None else source.agents.values():
                self._retire(agent.name)

    async def _handshake(self, home: Control, key: SourceKey, reference: str, deadline: float) -> SourceEngine:
        _, engine_id, incarnation = key
        destination = await self._destination(deadline)
        mine = next(rank for rank in destination.ranks if rank.rank == self._rank.rank)
        request = pb.HandshakeRequest(
            engine_id=engine_id,
            incarnation=incarnation,
            reader=self._reader,
            identity=self._spec.identity,
            groups=[group_to_proto(group) for group in self._spec.groups],
            rank=rank_to_proto(mine),
            reference=reference,
        )
        found = await _handshaken(home, request, deadline)
        # Planning takes long for engines of many ranks.
        thread = f"kvferry-plan-{engine_id}"
        source = await self._loop.on_thread(partial(self._planned, incarnation, destination, found), thread)
        plan = source.plan
        if any(choice.measurable for choice in plan.paths):
            rule = await self._measure(home.address, source.agents[plan.source_ranks[0]], deadline)
            if rule is not None:
                return replace(source, plan=await self._loop.on_thread(partial(plan.choose_paths, rule), thread))
        return source

    async def _destination(self, deadline: float) -> EngineGeometry:
        """Return the geometry of the reader's own engine, which is fetched once, when all of its ranks have registered:
        it does not change within an incarnation."""
        if self._own is None:
            reader = self._reader
            request = pb.HandshakeRequest(engine_id=reader.engine_id, incarnation=reader.incarnation, reader=reader)
            self._own = (await _handshaken(self._own_home, request, deadline)).geometry
        return self._own

    def _planned(self, incarnation: bytes, destination: EngineGeometry, found: Handshaken) -> SourceEngine:
        source, engine_id = found.geometry, found.geometry.engine_id
        plan = plan_read(source, destination, self._rank.rank, rule=self._rule)
        if not found.has_agents:
            message = (
                f"the home of engine {engine_id!r} returned only its geometry, because the reader gave no reference: "
                "give `warm` the engine's engine_reference"
            )
            if (self._reader.engine_id, self._reader.incarnation) == (engine_id, incarnation):
                message = f"engine {engine_id!r} cannot read from itself: its own memory holds these blocks already"
                raise WrongState(message, engine_id=engine_id)
            raise AgentsWithheld(message, engine_id=engine_id, missing="reference")
        agents = {rank: _agent(engine_id, incarnation, rank, found.agents.get(rank)) for rank in plan.source_ranks}
        return SourceEngine(agents, plan)


def _agent(engine_id: str, incarnation: bytes, rank: int, agent: geometry_pb2.Agent | None) -> AgentInfo:
    problem = "it was registered with serve=False, so its memory cannot be read" if agent is None else ""
    if agent is not None and not has_agent_key(agent.name) and incarnation.hex() not in agent.name:
        # NIXL identifies agents by name: an agent with the name of another engine's would replace that one.
        problem = f"agent {agent.name[:80]!r} is named neither after a key nor after its engine's incarnation"
    if agent is None or problem:
        raise BadAgentMetadata(
            f"engine {engine_id!r}, rank {rank}: {problem}", engine_id=engine_id, rank=rank, problem=problem
        )
    return agent_from_proto(agent)


async def _handshaken(home: Control, request: pb.HandshakeRequest, deadline: float) -> Handshaken:
    what = f"the handshake with engine {request.engine_id!r} at {home.address}"
    return await retrying(lambda left: home.handshake(request, left), deadline, most=HANDSHAKE_TIMEOUT, what=what)
