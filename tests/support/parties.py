"""What the tests of the domain share: a clock that is turned by hand, and a source and readers with short words."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry._wire.authority import SECRET_BYTES, PublicationKeys, incarnation_of
from kvferry._wire.geometry_codec import runs_to_proto
from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.geometry import Group, GroupKind, Interval, MemoryKind, MemoryRegion, Plane, RankGeometry
from kvferry.geometry.blocks import BlockRuns
from kvferry.geometry.model import AgentInfo
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Engine, Feed, Process, Role
from kvferry_server.domain.lessor import Lessor
from kvferry_server.domain.limits import Limits
from kvferry_server.domain.publications import Lease, PublicationRecord, PublicationStage
from kvferry_server.domain.records import Changed, Records
from kvferry_server.domain.registrations import Registration
from kvferry_server.domain.registry import Registry
from kvferry_server.domain.sources import Sources
from kvferry_server.domain.steps import PublicationStep
from kvferry_server.domain.times import Times
from kvferry_server.domain.values import (
    EngineRef,
    LeaseRequest,
    LeaseState,
    RankOutcome,
    RankReport,
    ReadKey,
)

SECRETS: dict[EngineRef, bytes] = {}
"""Session secrets of the engines here."""


def start(engine_id: str, letter: str) -> EngineRef:
    """A start of an engine, the same in every run."""
    secret = letter.encode() * SECRET_BYTES
    ref = EngineRef(engine_id, incarnation_of(secret))
    SECRETS[ref] = secret
    return ref


P = start("prefill", "P")
P2 = start("prefill", "Q")
D = start("decode", "D")
E = start("other-decode", "E")


def key(number: int = 1, source: EngineRef = P) -> bytes:
    """The key of a publication's reference."""
    return PublicationKeys(SECRETS[source]).key(number)


def read_id(name: str) -> bytes:
    """A read_id that a test calls by a short name."""
    return name.encode().ljust(16, b".")


BLOCK = 16
FULL = Group("full", GroupKind.TOKENS, BLOCK, 1000, null_block=0)
WINDOW = Group("window", GroupKind.WINDOW, BLOCK, 1000, window_tokens=64)
STATE = Group("state", GroupKind.STATE, 0, 100)
GROUPS = (FULL, WINDOW, STATE)

TIMES = Times(ttl=30, max_ttl=40, engine_ttl=10, hold=120, final=600, max_wait=100, retire=600)


class FakeClock:
    """Time that only tests move."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def pass_by(self, seconds: float) -> None:
        self.time += seconds


def blocks(first: int = 0, count: int = 4, start: int = 1, group: str = "full") -> BlockRuns:
    """`count` full blocks from block `first` of the request on, with consecutive ids."""
    return BlockRuns(group, first * BLOCK, (first + count) * BLOCK, 0, (start,), (count,))


def offer(number: int = 1, step: int = 0, marks: Sequence[pb.PromptMark] = (), **changes: Any) -> PublicationStep:
    given: dict[str, Any] = {
        "request_id": f"r{number}",
        "groups": (blocks(4 * step, start=1 + 4 * step),),
        "mark_ends": tuple(mark.end for mark in marks),
    }
    made = PublicationStep(number, index=step, **{**given, **changes})
    told = pb.Blocks(step=step, groups=map(runs_to_proto, made.groups), marks=marks)
    if made.unfinished is not None:
        begun = map(runs_to_proto, made.unfinished.groups)
        told.unfinished.CopyFrom(pb.Unfinished(groups=begun, layers=made.unfinished.layers))
    return replace(made, encoded=pb.ReadBlocksResponse(blocks=[told]).SerializeToString())


def ask(
    number: int = 1,
    reader: EngineRef = D,
    name: str = "read",
    source: EngineRef = P,
    **changes: Any,
) -> LeaseRequest:
    """A call for a publication; `name` stands for the read_id."""
    given = {"key": key(number, source), **changes}
    return LeaseRequest(ReadKey(source, number, reader, read_id(name)), **given)


def arrived(records: Records) -> list[PublicationRecord]:
    """The publications that have arrived and whose release is not acknowledged."""
    publications = [one for engine in records.engines.values() for _, one in sorted(engine.publications.items())]
    return [one for one in publications if one.stage is not PublicationStage.AWAITED]


def done(*ranks: int, outcome: RankOutcome = RankOutcome.DONE) -> list[RankReport]:
    return [RankReport(rank, outcome, 100) for rank in ranks]


@dataclass
class Scene:
    """A home's records with one open source."""

    clock: FakeClock
    records: Records
    sources: Sources
    lessor: Lessor
    registry: Registry
    engine: Engine
    feed: Feed
    times: Times

    def __init__(self, times: Times = TIMES, limits: Limits | None = None, recovering: bool = False) -> None:
        self.clock, self.times = FakeClock(), times
        self.woken: list[Changed] = []
        self.records = Records(self.clock, times, limits or Limits(), self.woken.append)
        self.sources, self.lessor = Sources(self.records), Lessor(self.records)
        self.registry = Registry(self.records)
        self.engine = self.open(P)
        scheduler = Process(P, Role.SCHEDULER)
        self.feed = self.engine.feeds[scheduler] = Feed(scheduler, kept=100_000)
        self._seen = 0
        if not recovering:
            self.sources.begin_snapshot(P)
            self.sources.end_snapshot(P, 0)
        self.engine.groups = {group.name: group for group in GROUPS}

    def open(self, ref: EngineRef) -> Engine:
        """Open the scheduler's Watch of an engine."""
        return self.registry.open_engine(ref, SECRETS[ref])

    def lose(self, ref: EngineRef = P) -> None:
        """The Watch of an engine is lost until the engine counts as dead."""
        self.registry.close_engine(ref)
        self.wait(self.times.engine_ttl)

    def publish(self, number: int = 1, step: int = 0, source: EngineRef = P, **changes: Any) -> PublicationRecord:
        return self.sources.publish(source, offer(number, step, **changes))

    def grant(self, number: int = 1, reader: EngineRef = D, name: str = "read", **changes: Any) -> Lease:
        return self.lessor.grant(ask(number, reader, name, P, **changes))

    def report(self, lease: Lease, *ranks: int, outcome: RankOutcome = RankOutcome.DONE) -> pb.ReadEnded:
        return self.lessor.report(lease.lease_id, lease.request.read.reader, done(*ranks, outcome=outcome))

    def renew(self, lease: Lease) -> float:
        return self.lessor.renew(lease.lease_id, lease.request.read.reader).remaining(self.clock.now())

    def cancel(self, lease: Lease) -> None:
        self.lessor.cancel(lease.lease_id, lease.request.read.reader)

    def wait(self, seconds: float) -> None:
        """Time passes, and the timers fire as they become due."""
        until = self.clock.time + seconds
        while (due := self.records.deadlines.next_deadline()) <= until:
            self.clock.time = max(self.clock.time, due)
            self._advance()
        self.clock.time = until
        self._advance()

    def told(self) -> list[tuple[int, ReleaseOutcome | None]]:
        """Releases told since the last call."""
        told = [event for _, event in self.feed.after(self._seen)]
        self._seen = self.feed.sequence
        return [(event.number, event.outcome) for event in told if isinstance(event, PublicationRecord)]

    def _advance(self) -> None:
        self.records.advance()

    def states(self, publication: PublicationRecord) -> list[LeaseState]:
        return [lease.state for lease in publication.reads]


BASE = 0x10000


def rank_geometry(rank: int = 0, ranks: int = 1, base: int = BASE, heads: int = 8) -> RankGeometry:
    """Key and value of two layers, whole heads shared out over the ranks."""
    held = Interval(rank * heads // ranks, (rank + 1) * heads // ranks)
    state_bytes, tokens, num_blocks = 256, BLOCK, FULL.num_blocks
    unit = tokens * state_bytes
    block = unit * len(held)
    planes = [
        Plane(
            layer=f"layers.{layer}",
            component=component,
            group="full",
            format="dense",
            dtype="bfloat16",
            memory_kind=MemoryKind.DRAM,
            device=0,
            base=base + (2 * layer + index) * block * num_blocks,
            num_blocks=num_blocks,
            block_stride=block,
            page_tokens=tokens,
            page_stride=0,
            block_states=tokens,
            unit_stride=unit,
            token_stride=state_bytes,
            state_bytes=state_bytes,
            axis_size=heads,
            units=held,
        )
        for layer in range(2)
        for index, component in enumerate(("key", "value"))
    ]
    return RankGeometry(rank, tuple(planes), {"tp_rank": rank})


def agent_of(geometry: RankGeometry, name: str) -> AgentInfo:
    first = min(plane.extent[0] for plane in geometry.planes)
    last = max(plane.extent[1] for plane in geometry.planes)
    metadata = f"metadata of {name}".encode()
    region = MemoryRegion(MemoryKind.DRAM, 0, first, last - first)
    return AgentInfo(name, metadata, hashlib.sha256(metadata).digest(), (region,))


def registration(
    engine: EngineRef = P,
    rank: int = 0,
    ranks: int = 1,
    identity: dict[str, str] | None = None,
    geometry: RankGeometry | None = None,
    groups: tuple[Group, ...] = (FULL,),
) -> Registration:
    geometry = geometry or rank_geometry(rank, ranks)
    agent = agent_of(geometry, f"{engine.engine_id}/{engine.incarnation.hex()}/{rank}")
    return Registration(engine, ranks, identity or {"model": "m"}, groups, geometry, agent)
