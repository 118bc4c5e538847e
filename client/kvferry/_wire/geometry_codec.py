"""The values of `kvferry.geometry` as protobuf messages, and the handshake that brings those of a source engine.
Decoding returns a checked value, or raises a typed error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np

from kvferry._wire.version import OURS, Version, check_together
from kvferry.errors import BadGeometry, InvalidField, LimitReached
from kvferry.geometry.blocks import FEW_RUNS, MAX_BLOCKS, BlockRuns, Blocks, ids_of_runs
from kvferry.geometry.model import AgentInfo, EngineGeometry, Group, GroupKind, MemoryRegion, RankGeometry
from kvferry.geometry.plane import Interval, MemoryKind, Plane, TokenShard
from kvferry.v1 import geometry_pb2 as pb
from kvferry.v1.kv_transfer_pb2 import GroupBlocks, HandshakeResponse

Kind = TypeVar("Kind", bound=IntEnum)

MAX_RANKS = 4096
MAX_BYTES = 1 << 30
MAX_PLANES = 1 << 20
"""Limits for one engine: a home must not fill the reader's memory. A decoded plane takes thirty times its message."""

# Fields with the same name and value in a message and in its dataclass.
GROUP_FIELDS = ("name", "block_tokens", "num_blocks", "window_tokens", "pool")
PLANE_FIELDS = (
    *("layer", "component", "group", "format", "dtype", "device", "base", "num_blocks", "block_stride", "page_tokens"),
    *("page_stride", "block_states", "unit_stride", "token_stride", "state_bytes", "axis_size", "units_divide"),
    *("optional_cover", "shared"),
)
AGENT_FIELDS = ("name", "metadata", "metadata_sha256")
REGION_FIELDS = ("device", "base", "length")
RUNS_FIELDS = ("group", "first_token", "state_token")


def _alike(names: Sequence[str], found: object) -> dict[str, Any]:
    return {name: getattr(found, name) for name in names}


def _member(kind: type[Kind], number: int, field: str, where: str) -> Kind:
    try:
        return kind(number)
    except ValueError:
        raise BadGeometry(where, f"{field} {number} is not known") from None


def group_to_proto(group: Group) -> pb.Group:
    return pb.Group(
        kind=pb.GroupKind.ValueType(group.kind),
        has_null_block=group.null_block is not None,
        null_block=group.null_block or 0,
        **_alike(GROUP_FIELDS, group),
    )


def groups_from_proto(messages: Iterable[pb.Group]) -> tuple[Group, ...]:
    """Decode groups; raises `BadGeometry`."""
    groups = []
    for message in messages:
        kind = _member(GroupKind, message.kind, "kind", f"group {message.name!r}")
        null_block = message.null_block if message.has_null_block else None
        groups.append(Group(kind=kind, null_block=null_block, **_alike(GROUP_FIELDS, message)))
    return tuple(groups)


def token_shard_to_proto(shard: TokenShard) -> pb.TokenShard:
    return pb.TokenShard(index=shard.index, count=shard.count, interleave=shard.interleave)


def plane_to_proto(plane: Plane) -> pb.Plane:
    return pb.Plane(
        memory_kind=pb.MemoryKind.ValueType(plane.memory_kind),
        unit_begin=plane.units.begin,
        unit_end=plane.units.end,
        token_shard=token_shard_to_proto(plane.token_shard) if plane.token_shard.count > 1 else None,
        tokens_per_state_num=plane.tokens_per_state.numerator,
        tokens_per_state_den=plane.tokens_per_state.denominator,
        token_granule=plane.token_granule,
        **_alike(PLANE_FIELDS, plane),
    )


class PlaneDecoder:
    """Decodes the planes of one message. Most planes differ from an earlier one only in layer and address: they are
    made from the earlier plane and share its values."""

    def __init__(self) -> None:
        self._known: dict[bytes, Plane] = {}
        self._rest = pb.Plane()

    def decode(self, message: pb.Plane) -> Plane:
        """Decode a plane; raises `BadGeometry`."""
        layer, base = message.layer, message.base
        rest = self._rest
        rest.CopyFrom(message)
        rest.ClearField("layer")
        rest.ClearField("base")
        key = rest.SerializeToString()
        like = self._known.get(key)
        if like is not None:
            return like.moved(layer, base)
        self._known[key] = plane = plane_from_proto(message)
        return plane


def plane_from_proto(message: pb.Plane) -> Plane:
    """Decode a plane; raises `BadGeometry`."""
    where, shard = f"plane {message.layer}/{message.component}", message.token_shard
    return Plane(
        memory_kind=_member(MemoryKind, message.memory_kind, "memory_kind", where),
        units=Interval(message.unit_begin, message.unit_end),
        token_shard=TokenShard(shard.index, shard.count or 1, shard.interleave or 1),
        tokens_per_state=Fraction(message.tokens_per_state_num or 1, message.tokens_per_state_den or 1),
        token_granule=message.token_granule or message.page_tokens,
        **_alike(PLANE_FIELDS, message),
    )


def rank_to_proto(rank: RankGeometry) -> pb.RankGeometry:
    return pb.RankGeometry(rank=rank.rank, labels=rank.labels, planes=[plane_to_proto(plane) for plane in rank.planes])


def rank_from_proto(message: pb.RankGeometry, planes_of: PlaneDecoder | None = None) -> RankGeometry:
    """Decode the geometry of a rank; raises `BadGeometry`. Ranks of one message share `planes_of`."""
    decode = (planes_of or PlaneDecoder()).decode
    planes = tuple(decode(plane) for plane in message.planes)
    return RankGeometry(rank=message.rank, planes=planes, labels=dict(message.labels))


def engine_to_proto(engine: EngineGeometry) -> pb.EngineGeometry:
    return pb.EngineGeometry(
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        identity=engine.identity,
        groups=map(group_to_proto, engine.groups),
        ranks=map(rank_to_proto, engine.ranks),
        partial=engine.partial,
    )


def engine_from_proto(message: pb.EngineGeometry, ranks: Iterable[RankGeometry] | None = None) -> EngineGeometry:
    """Decode an engine; raises `BadGeometry`. `ranks` replace those of the message."""
    planes_of = PlaneDecoder()
    return EngineGeometry(
        engine_id=message.engine_id,
        groups=groups_from_proto(message.groups),
        ranks=tuple(rank_from_proto(rank, planes_of) for rank in message.ranks) if ranks is None else tuple(ranks),
        identity=dict(message.identity),
        incarnation=message.incarnation,
        partial=message.partial,
    )


def region_to_proto(region: MemoryRegion) -> pb.MemoryRegion:
    return pb.MemoryRegion(memory_kind=pb.MemoryKind.ValueType(region.memory_kind), **_alike(REGION_FIELDS, region))


def region_from_proto(message: pb.MemoryRegion) -> MemoryRegion:
    """Decode a memory region; raises `BadGeometry`."""
    kind = _member(MemoryKind, message.memory_kind, "memory_kind", "memory region")
    return MemoryRegion(kind, **_alike(REGION_FIELDS, message))


def agent_to_proto(agent: AgentInfo) -> pb.Agent:
    return pb.Agent(regions=map(region_to_proto, agent.regions), **_alike(AGENT_FIELDS, agent))


def agent_from_proto(message: pb.Agent) -> AgentInfo:
    """Decode an agent, whose metadata nobody has checked; raises `BadGeometry`."""
    return AgentInfo(regions=tuple(map(region_from_proto, message.regions)), **_alike(AGENT_FIELDS, message))


def blocks_from_proto(message: GroupBlocks) -> Blocks:
    """Decode blocks; raises `InvalidField`."""
    runs = len(message.run_starts)
    if runs <= FEW_RUNS or runs != len(message.run_counts):
        return runs_from_proto(message).blocks()
    # As `BlockRuns.check`, without a Python number for each run.
    starts, counts = np.array(message.run_starts, np.uint64), np.array(message.run_counts, np.uint64)
    where = f"blocks of group {message.group!r}"
    if not counts.all() or int(counts.sum()) > MAX_BLOCKS:
        raise InvalidField(where, "run_counts", f"counts of at least 1, in total at most {MAX_BLOCKS}")
    if int(starts.max()) >= 2**31 or int((starts + counts).max()) > 2**31:
        raise InvalidField(where, int(starts.max()), "block ids below 2**31")
    ids = ids_of_runs(starts.astype(np.int64), counts.astype(np.int64))
    return Blocks(ids, message.first_token, message.end_token, message.state_token)


def runs_to_proto(runs: BlockRuns) -> GroupBlocks:
    alike = _alike(RUNS_FIELDS, runs)
    return GroupBlocks(end_token=runs.end, run_starts=runs.starts, run_counts=runs.counts, **alike)


def runs_from_proto(message: GroupBlocks) -> BlockRuns:
    """Decode runs of blocks without a check: see `BlockRuns.check`."""
    # Slices, because protobuf iterates over single numbers slowly.
    starts, counts = tuple(message.run_starts[:]), tuple(message.run_counts[:])
    return BlockRuns(end_token=message.end_token, starts=starts, counts=counts, **_alike(RUNS_FIELDS, message))


@dataclass(frozen=True, slots=True)
class Handshaken:
    """The result of a handshake: the geometry of the whole engine, and its serving agents by rank. A rank with
    ``serve=False`` has no agent. Without `has_agents`, the home sent the geometry only."""

    geometry: EngineGeometry
    agents: dict[int, pb.Agent] = field(repr=False)
    has_agents: bool


def put_together(messages: Iterable[HandshakeResponse]) -> Handshaken:
    """Decode the messages of a handshake.

    Raises:
        BadGeometry: the messages contradict each other, or the geometry contradicts itself.
        LimitReached: the engine is larger than the limits.
        ContractDiffers: the engine and this release do not work together.
    """
    first: HandshakeResponse | None = None
    ranks: list[RankGeometry] = []
    agents: dict[int, pb.Agent] = {}
    size = num_agents = planes = 0
    planes_of = PlaneDecoder()
    for message in messages:
        size += message.ByteSize()
        if first is None:
            first = message
            if not message.HasField("engine"):
                raise BadGeometry("handshake", "its first message does not name the engine")
            source = Version.from_proto(message.source_version)
            check_together(source, f"the source {message.engine.engine_id!r}", OURS, "this reader")
        if size > MAX_BYTES or first.num_ranks > MAX_RANKS:
            so_far = f"{first.num_ranks} ranks, {size} bytes so far"
            problem = f"engine {first.engine.engine_id!r} is too large: {so_far}"
            raise LimitReached(problem, limit="handshake_bytes", value=MAX_BYTES)
        planes += sum(len(rank.planes) for rank in message.ranks)
        if planes > MAX_PLANES or len(ranks) + len(message.ranks) > first.num_ranks:
            raise BadGeometry("handshake", f"more than {first.num_ranks} ranks, or {MAX_PLANES} planes")
        if len(message.agents) not in (0, len(message.ranks)):
            raise BadGeometry("handshake", f"a page of {len(message.ranks)} ranks has {len(message.agents)} agents")
        ranks += (rank_from_proto(rank, planes_of) for rank in message.ranks)
        num_agents += len(message.agents)
        for rank, agent in zip(message.ranks, message.agents, strict=False):
            if agent.name:
                agents[rank.rank] = agent
    if first is None or len(ranks) != first.num_ranks:
        raise BadGeometry("handshake", f"it ended after {len(ranks)} of {first.num_ranks if first else 'its'} ranks")
    if num_agents not in (0, len(ranks)):
        raise BadGeometry("handshake", f"{num_agents} of {len(ranks)} ranks have agents")
    return Handshaken(engine_from_proto(first.engine, ranks), agents, num_agents > 0)
