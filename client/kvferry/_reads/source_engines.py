"""Source engines as one destination rank knows them: handshaken and planned once per incarnation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry._clock import now
from kvferry._control.breaker import Breaker
from kvferry._control.connection import HANDSHAKE_TIMEOUT, Control, retrying
from kvferry._engine_spec import EngineSpec
from kvferry._transport.nixl_agent import AgentInfo
from kvferry._wire.geometry_codec import group_to_proto, rank_to_proto, region_from_proto
from kvferry._wire.handshake import Handshaken
from kvferry.errors import AgentsWithheld, BadAgentMetadata, Unreachable
from kvferry.geometry.model import EngineGeometry
from kvferry.planner.path_choice import PathRule
from kvferry.planner.plan import ReadPlan, plan_read
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb

BREAKER_THRESHOLD = 3
BREAKER_FIRST = 0.5
BREAKER_LAST = 8.0
"""A rank that cannot be read from costs each read a connection attempt of seconds."""

PEER_IDLE = 600.0
"""Seconds without a read after which an engine is dropped; the next read handshakes again."""

PARTS_KEPT = 256
"""Parts of a plan that are kept: one for each layer of a large model, with room."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceEngine:
    """A source engine, planned.

    Attributes:
        geometry: the whole engine.
        agents: serving agents by source rank, for the ranks that the plan reads from.
        plan: what this rank reads.
    """

    geometry: EngineGeometry
    agents: dict[int, AgentInfo]
    plan: ReadPlan
    _parts: dict[frozenset[str], ReadPlan] = field(default_factory=dict)

    def plan_of(self, layers: frozenset[str] | None) -> ReadPlan:
        """The plan, or that part of it which reads these layers; kept, since requests ask for the same few."""
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
    """One handshake at a time per engine; others wait for its result, and handshakes with other engines go on."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    peer: SourceEngine | None = None
    breaker: Breaker = field(default_factory=lambda: Breaker(BREAKER_THRESHOLD, BREAKER_FIRST, BREAKER_LAST))
    used_at: float = 0.0


class SourceEngines:
    """The peers of one destination rank. Thread-safe; `get` waits for a handshake, `known` for nothing.

    Args:
        spec, reader: the destination engine.
        geometry: the whole destination engine, asked for at the first handshake, when all its ranks have registered.
        rank: this rank.
        rule: how paths are chosen.
        measure: called with a home, one of its agents and a deadline where the rule's constants are to be measured;
            answers a rule with them, or None.
        drop: called with the agents of an incarnation that was replaced.
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
        """The peer, handshaken if it is new.

        Args:
            home: its home.
            engine_id, incarnation: which engine.
            reference: to one of its publications, or its own.
            deadline: on `kvferry._clock`.

        Raises:
            Incompatible: its cache cannot be read, and why.
            PeerRestarted: it is not this incarnation any more.
            WrongKey, PublicationStale, PublicationReleased: the reference is not good (any more).
            Unavailable: it was not complete by the deadline, or reads from it failed again and again and the next
                attempt is not due.
        """
        key = (home.address, engine_id, incarnation)
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            slot.used_at = now()
        self._drop_idle()
        pause = slot.breaker.ask(now())
        if pause > 0:
            message = f"reads from engine {engine_id!r} keep failing; the next attempt is due in {pause:.1f} s"
            raise Unreachable(message, retry_after=pause, address=home.address)
        if not slot.lock.acquire(timeout=max(0.0, deadline - now())):
            raise Unreachable(f"the handshake with engine {engine_id!r} did not end in time", address=home.address)
        try:
            if slot.peer is None:
                slot.peer = self._handshake(home, engine_id, incarnation, reference, deadline)
                self._drop_replaced(key)
            return slot.peer
        finally:
            slot.lock.release()

    def known(self, home: str, engine_id: str, incarnation: bytes) -> SourceEngine | None:
        """The peer, if nothing has to be waited for."""
        with self._lock:
            slot = self._slots.get((home, engine_id, incarnation))
            if slot is None or slot.peer is None or slot.breaker.ask(now()) > 0:
                return None
            slot.used_at = now()
            return slot.peer

    def failed(self, home: str, engine_id: str, incarnation: bytes) -> None:
        """A transfer from it failed: handshake anew next time, and after several failures not at once."""
        with self._lock:
            slot = self._slots.get((home, engine_id, incarnation))
            if slot is not None:
                slot.peer = None
                slot.breaker.failed(now())

    def succeeded(self, home: str, engine_id: str, incarnation: bytes) -> None:
        """A transfer from it ended well."""
        with self._lock:
            slot = self._slots.get((home, engine_id, incarnation))
        if slot is not None:
            slot.breaker.succeeded()

    def gone(self, home: str, engine_id: str, incarnation: bytes) -> None:
        """Its home says that this incarnation is no more: drop it as soon as it is quiet.

        A home speaks of its own engines: an engine of another home may have the same name, or be said to be this one.
        """
        self._drop_where(lambda key, _: key == (home, engine_id, incarnation))

    def _drop_idle(self) -> None:
        """Drop engines that nothing was read from for a long time: those that vanished for good say nothing."""
        before = now() - PEER_IDLE
        self._drop_where(lambda _, slot: slot.used_at < before)

    def _drop_where(self, chosen: Callable[[tuple[str, str, bytes], _Slot], bool]) -> None:
        with self._lock:
            keys = [key for key, slot in self._slots.items() if chosen(key, slot)]
            dropped = [self._slots.pop(key).peer for key in keys]
        for peer in dropped:
            if peer is not None:
                self._drop(peer)

    def _drop_replaced(self, key: tuple[str, str, bytes]) -> None:
        # At its own home only: anybody can have an engine of this name elsewhere.
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
        if not found.agents_told:
            message = f"the home of engine {engine_id!r} gave its geometry only, because it was shown no reference"
            if (self._reader.engine_id, self._reader.incarnation) == (engine_id, incarnation):
                message = f"engine {engine_id!r} cannot read from itself: its own memory holds these blocks already"
            raise AgentsWithheld(message, engine_id=engine_id, missing="reference")
        agents = {rank: _agent(engine_id, incarnation, rank, found.agents.get(rank)) for rank in plan.source_ranks}
        if any(choice.measurable for choice in plan.paths):
            rule = self._measure(home.address, agents[plan.source_ranks[0]], deadline)
            plan = plan if rule is None else plan.choose_paths(rule)
        return SourceEngine(source, agents, plan)


def _agent(engine_id: str, incarnation: bytes, rank: int, agent: geometry_pb2.Agent | None) -> AgentInfo:
    problem = "it was registered with serve=False, so nobody can read from it" if agent is None else ""
    if agent is not None and incarnation.hex() not in agent.name:
        # NIXL knows agents by name alone: one that is named as another engine's would take that one's place.
        problem = f"agent {agent.name[:80]!r} is not named after its engine's incarnation"
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
    """The geometry of one's own engine, once all its ranks have registered."""
    request = pb.HandshakeRequest(engine_id=token.engine_id, incarnation=token.incarnation, reader=token)
    return _handshaken(control, request, deadline).geometry


def _handshaken(home: Control, request: pb.HandshakeRequest, deadline: float) -> Handshaken:
    what = f"the handshake with engine {request.engine_id!r} at {home.address}"
    return retrying(lambda left: home.handshake(request, left), deadline, most=HANDSHAKE_TIMEOUT, what=what)
