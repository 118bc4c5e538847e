"""The source engines of one destination rank: does the handshake with each incarnation, and plans its reads, once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry._clock import now
from kvferry._control.breaker import Breaker
from kvferry._control.connection import HANDSHAKE_TIMEOUT, Control
from kvferry._control.retrying import retrying
from kvferry._engine_spec import EngineSpec
from kvferry._transport.nixl_agent import AgentInfo
from kvferry._wire.authority import has_agent_key
from kvferry._wire.geometry_codec import group_to_proto, rank_to_proto, region_from_proto
from kvferry._wire.handshake import Handshaken
from kvferry.errors import AgentsWithheld, BadAgentMetadata, Unreachable, WrongState
from kvferry.geometry.model import EngineGeometry
from kvferry.planner.path_choice import PathRule
from kvferry.planner.plan import ReadPlan, plan_read
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb

BREAKER_THRESHOLD = 3
BREAKER_FIRST = 0.5
BREAKER_LAST = 8.0
"""Failures after which reads from an engine pause, and the shortest and longest pause in seconds: each attempt to
connect to a dead rank would cost a read seconds."""

PEER_IDLE = 600.0
"""Seconds without a read after which an engine is dropped; the next read does a new handshake."""

PARTS_KEPT = 256
"""How many parts of a plan are kept: more than a large model has layers."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceEngine:
    """A source engine after its handshake, and the plan of reads from it.

    Attributes:
        geometry: geometry of the whole engine.
        agents: the serving agents that the plan reads from, by source rank.
        plan: the read plan of this rank.
    """

    geometry: EngineGeometry
    agents: dict[int, AgentInfo]
    plan: ReadPlan
    _parts: dict[frozenset[str], ReadPlan] = field(default_factory=dict)

    def plan_of(self, layers: frozenset[str] | None) -> ReadPlan:
        """Return the plan, or the part of it that reads these layers. Parts are cached."""
        if layers is None:
            return self.plan
        part = self._parts.get(layers)
        if part is None:
            if len(self._parts) >= PARTS_KEPT:
                self._parts.clear()
            part = self._parts[layers] = self.plan.only(lambda plane: plane.layer in layers)
        return part


@dataclass(slots=True)
class _Slot:
    """An engine with its handshake. The lock admits one handshake per engine at a time; others wait for its result."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    source: SourceEngine | None = None
    breaker: Breaker = field(default_factory=lambda: Breaker(BREAKER_THRESHOLD, BREAKER_FIRST, BREAKER_LAST))
    used_at: float = 0.0
    users: int = 0
    """Calls of `SourceEngines.get` in progress."""


class SourceEngines:
    """The source engines of one destination rank. Thread-safe; `get` waits for a handshake, `known` for nothing.

    Args:
        spec, reader: the destination engine.
        rank: index of the destination rank.
        geometry: called with a deadline; returns the geometry of the whole destination engine. Called at the first
            handshake, when all of the engine's ranks have registered.
        rule: chooses the paths of reads.
        measure: called with a home, an agent behind it and a deadline if costs are to be measured; returns a rule with
            the measured costs, or None.
        drop: called with each engine that is dropped.
    """

    def __init__(
        self,
        spec: EngineSpec,
        reader: pb.EngineRef,
        rank: int,
        geometry: Callable[[float], EngineGeometry],
        rule: PathRule,
        measure: Callable[[str, AgentInfo, float], PathRule | None],
        drop: Callable[[SourceEngine], None],
    ) -> None:
        self._spec = spec
        self._reader = reader
        self._rank = rank
        self._geometry = geometry
        self._rule = rule
        self._measure = measure
        self._drop = drop
        self._lock = threading.Lock()
        self._slots: dict[tuple[str, str, bytes], _Slot] = {}

    def get(self, home: Control, engine_id: str, incarnation: bytes, reference: str, deadline: float) -> SourceEngine:
        """Return a source engine; does the handshake if it is new.

        Args:
            home: connection to the engine's home.
            engine_id, incarnation: the engine.
            reference: reference of one of its publications, or of the engine.
            deadline: time on `kvferry._clock`.

        Raises:
            Incompatible: its cache cannot be read; the error says why.
            PeerRestarted: the engine has restarted as another incarnation.
            WrongKey, PublicationStale, PublicationReleased: the home does not accept the reference, or no longer does.
            Unavailable: the engine was not complete by the deadline, or reads from it keep failing and the next attempt
                is not due yet.
        """
        key = (home.address, engine_id, incarnation)
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            slot.used_at = now()
            slot.users += 1
        try:
            self._drop_idle()
            return self._source(slot, home, engine_id, incarnation, reference, deadline)
        finally:
            with self._lock:
                slot.users -= 1
                # An engine that was never met is forgotten: a reference that nobody has checked may name any.
                unknown = slot.source is None and not slot.users and not slot.breaker.failing_for(now())
                if unknown and self._slots.get(key) is slot:
                    del self._slots[key]

    def _source(
        self, slot: _Slot, home: Control, engine_id: str, incarnation: bytes, reference: str, deadline: float
    ) -> SourceEngine:
        pause = slot.breaker.ask(now())
        if pause > 0:
            message = f"reads from engine {engine_id!r} keep failing; the next attempt is due in {pause:.1f} s"
            raise Unreachable(message, retry_after=pause, address=home.address)
        if not slot.lock.acquire(timeout=max(0.0, deadline - now())):
            raise Unreachable(f"the handshake with engine {engine_id!r} did not end in time", address=home.address)
        try:
            if slot.source is None:
                slot.source = self._handshake(home, engine_id, incarnation, reference, deadline)
                self._drop_replaced((home.address, engine_id, incarnation))
            return slot.source
        finally:
            slot.lock.release()

    def known(self, home: str, engine_id: str, incarnation: bytes) -> SourceEngine | None:
        """Return a source engine if that needs no handshake and no pause; None otherwise."""
        with self._lock:
            slot = self._slots.get((home, engine_id, incarnation))
            if slot is None or slot.source is None or slot.breaker.ask(now()) > 0:
                return None
            slot.used_at = now()
            return slot.source

    def failed(self, home: str, engine_id: str, incarnation: bytes) -> None:
        """Record a failed transfer: the next read does a new handshake, after a pause if several have failed."""
        with self._lock:
            slot = self._slots.get((home, engine_id, incarnation))
            if slot is not None:
                slot.source = None
                slot.breaker.failed(now())

    def succeeded(self, home: str, engine_id: str, incarnation: bytes) -> None:
        """Record a successful transfer."""
        with self._lock:
            slot = self._slots.get((home, engine_id, incarnation))
        if slot is not None:
            slot.breaker.succeeded()

    def gone(self, home: str, engine_id: str, incarnation: bytes) -> None:
        """Drop an incarnation that has ended according to its home.

        Only the engine at this home: another home may have, or claim to have, an engine of the same name.
        """
        self._drop_where(lambda key, _: key == (home, engine_id, incarnation))

    def _drop_idle(self) -> None:
        """Drop engines that have not been read from for a long time: nothing reports one that is gone for good."""
        before = now() - PEER_IDLE
        self._drop_where(lambda _, slot: slot.used_at < before)

    def _drop_where(self, chosen: Callable[[tuple[str, str, bytes], _Slot], bool]) -> None:
        with self._lock:
            keys = [key for key, slot in self._slots.items() if chosen(key, slot)]
            dropped = [self._slots.pop(key).source for key in keys]
        for source in dropped:
            if source is not None:
                self._drop(source)

    def _drop_replaced(self, key: tuple[str, str, bytes]) -> None:
        # Only at the same home: an engine at another home may have the same name.
        self._drop_where(lambda other, _: other[:2] == key[:2] and other[2] != key[2])

    def _handshake(
        self, home: Control, engine_id: str, incarnation: bytes, reference: str, deadline: float
    ) -> SourceEngine:
        destination = self._geometry(deadline)
        mine = next(rank for rank in destination.ranks if rank.rank == self._rank)
        request = pb.HandshakeRequest(
            engine_id=engine_id,
            incarnation=incarnation,
            reader=self._reader,
            identity=self._spec.identity,
            groups=[group_to_proto(group) for group in self._spec.groups],
            rank=rank_to_proto(mine),
            reference=reference,
        )
        found = _handshaken(home, request, deadline)
        source = found.geometry
        plan = plan_read(source, destination, self._rank, rule=self._rule)
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
        if any(choice.measurable for choice in plan.paths):
            rule = self._measure(home.address, agents[plan.source_ranks[0]], deadline)
            plan = plan if rule is None else plan.choose_paths(rule)
        return SourceEngine(source, agents, plan)


def _agent(engine_id: str, incarnation: bytes, rank: int, agent: geometry_pb2.Agent | None) -> AgentInfo:
    problem = "it was registered with serve=False, so nobody can read from it" if agent is None else ""
    if agent is not None and not has_agent_key(agent.name) and incarnation.hex() not in agent.name:
        # NIXL identifies agents by name: an agent with the name of another engine's would replace that one.
        problem = f"agent {agent.name[:80]!r} is named neither after a key nor after its engine's incarnation"
    if agent is None or problem:
        raise BadAgentMetadata(
            f"engine {engine_id!r}, rank {rank}: {problem}", engine_id=engine_id, rank=rank, problem=problem
        )
    return AgentInfo(
        name=agent.name,
        metadata=agent.metadata,
        sha256=agent.metadata_sha256,
        regions=tuple(region_from_proto(region) for region in agent.regions),
    )


def whole_engine(control: Control, token: pb.EngineRef, deadline: float) -> EngineGeometry:
    """Return the geometry of the reader's own engine; waits until all of its ranks have registered."""
    request = pb.HandshakeRequest(engine_id=token.engine_id, incarnation=token.incarnation, reader=token)
    return _handshaken(control, request, deadline).geometry


def _handshaken(home: Control, request: pb.HandshakeRequest, deadline: float) -> Handshaken:
    what = f"the handshake with engine {request.engine_id!r} at {home.address}"
    return retrying(lambda left: home.handshake(request, left), deadline, most=HANDSHAKE_TIMEOUT, what=what)
