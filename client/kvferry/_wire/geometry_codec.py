"""Encodes and decodes geometry as protobuf messages. Decoding returns a checked value, or raises a typed error."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from kvferry.errors import BadGeometry
from kvferry.geometry.model import EngineGeometry, Group, GroupKind, MemoryRegion, RankGeometry
from kvferry.geometry.plane import Interval, MemoryKind, Plane, TokenShard
from kvferry.v1 import geometry_pb2 as pb


def group_to_proto(group: Group) -> pb.Group:
    """Encode a group."""
    return pb.Group(
        name=group.name,
        kind=pb.GroupKind.ValueType(group.kind),
        block_tokens=group.block_tokens,
        num_blocks=group.num_blocks,
        has_null_block=group.null_block is not None,
        null_block=group.null_block or 0,
        window_tokens=group.window_tokens,
        pool=group.pool,
    )


def group_from_proto(message: pb.Group) -> Group:
    """Decode a group; raises `BadGeometry`."""
    return Group(
        name=message.name,
        kind=_group_kind(message),
        block_tokens=message.block_tokens,
        num_blocks=message.num_blocks,
        null_block=message.null_block if message.has_null_block else None,
        window_tokens=message.window_tokens,
        pool=message.pool,
    )


def token_shard_to_proto(shard: TokenShard) -> pb.TokenShard:
    """Encode a token shard."""
    return pb.TokenShard(index=shard.index, count=shard.count, interleave=shard.interleave)


def plane_to_proto(plane: Plane) -> pb.Plane:
    """Encode a plane."""
    return pb.Plane(
        layer=plane.layer,
        component=plane.component,
        group=plane.group,
        format=plane.format,
        dtype=plane.dtype,
        memory_kind=pb.MemoryKind.ValueType(plane.memory_kind),
        device=plane.device,
        base=plane.base,
        num_blocks=plane.num_blocks,
        block_stride=plane.block_stride,
        page_tokens=plane.page_tokens,
        page_stride=plane.page_stride,
        block_states=plane.block_states,
        unit_stride=plane.unit_stride,
        token_stride=plane.token_stride,
        state_bytes=plane.state_bytes,
        axis_size=plane.axis_size,
        unit_begin=plane.units.begin,
        unit_end=plane.units.end,
        token_shard=token_shard_to_proto(plane.token_shard) if plane.token_shard.count > 1 else None,
        tokens_per_state_num=plane.tokens_per_state.numerator,
        tokens_per_state_den=plane.tokens_per_state.denominator,
        token_granule=plane.token_granule,
        units_divide=plane.units_divide,
        optional_cover=plane.optional_cover,
        shared=plane.shared,
    )


class PlaneDecoder:
    """Decodes planes that come together. Most of them differ from another one in their layer and address only: those
    are made from it, and share its values."""

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
    where = f"plane {message.layer}/{message.component}"
    try:
        memory_kind = MemoryKind(message.memory_kind)
    except ValueError:
        raise BadGeometry(where, f"memory_kind {message.memory_kind} is not known") from None
    shard = message.token_shard
    return Plane(
        layer=message.layer,
        component=message.component,
        group=message.group,
        format=message.format,
        dtype=message.dtype,
        memory_kind=memory_kind,
        device=message.device,
        base=message.base,
        num_blocks=message.num_blocks,
        block_stride=message.block_stride,
        page_tokens=message.page_tokens,
        page_stride=message.page_stride,
        block_states=message.block_states,
        unit_stride=message.unit_stride,
        token_stride=message.token_stride,
        state_bytes=message.state_bytes,
        axis_size=message.axis_size,
        units=Interval(message.unit_begin, message.unit_end),
        token_shard=TokenShard(shard.index, shard.count or 1, shard.interleave or 1),
        tokens_per_state=Fraction(message.tokens_per_state_num or 1, message.tokens_per_state_den or 1),
        token_granule=message.token_granule or message.page_tokens,
        units_divide=message.units_divide,
        optional_cover=message.optional_cover,
        shared=message.shared,
    )


def rank_to_proto(rank: RankGeometry) -> pb.RankGeometry:
    """Encode the geometry of a rank."""
    return pb.RankGeometry(rank=rank.rank, labels=rank.labels, planes=[plane_to_proto(plane) for plane in rank.planes])


def rank_from_proto(message: pb.RankGeometry, planes_of: PlaneDecoder | None = None) -> RankGeometry:
    """Decode the geometry of a rank; raises `BadGeometry`. Ranks that come together share a decoder of planes."""
    decode = (planes_of or PlaneDecoder()).decode
    planes = tuple(decode(plane) for plane in message.planes)
    return RankGeometry(rank=message.rank, planes=planes, labels=dict(message.labels))


def groups_from_proto(messages: Sequence[pb.Group]) -> tuple[Group, ...]:
    """Decode groups; raises `BadGeometry`."""
    return tuple(group_from_proto(message) for message in messages)


def engine_to_proto(engine: EngineGeometry) -> pb.EngineGeometry:
    """Encode an engine."""
    return pb.EngineGeometry(
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        identity=engine.identity,
        groups=[group_to_proto(group) for group in engine.groups],
        ranks=[rank_to_proto(rank) for rank in engine.ranks],
        partial=engine.partial,
    )


def engine_from_proto(message: pb.EngineGeometry) -> EngineGeometry:
    """Decode an engine; raises `BadGeometry`."""
    planes_of = PlaneDecoder()
    return EngineGeometry(
        engine_id=message.engine_id,
        groups=groups_from_proto(message.groups),
        ranks=tuple(rank_from_proto(rank, planes_of) for rank in message.ranks),
        identity=dict(message.identity),
        incarnation=message.incarnation,
        partial=message.partial,
    )


def region_to_proto(region: MemoryRegion) -> pb.MemoryRegion:
    """Encode a memory region."""
    return pb.MemoryRegion(
        memory_kind=pb.MemoryKind.ValueType(region.memory_kind),
        device=region.device,
        base=region.base,
        length=region.length,
    )


def region_from_proto(message: pb.MemoryRegion) -> MemoryRegion:
    """Decode a memory region; raises `BadGeometry`."""
    try:
        memory_kind = MemoryKind(message.memory_kind)
    except ValueError:
        raise BadGeometry("memory region", f"memory_kind {message.memory_kind} is not known") from None
    return MemoryRegion(memory_kind, message.device, message.base, message.length)


def _group_kind(message: pb.Group) -> GroupKind:
    try:
        return GroupKind(message.kind)
    except ValueError:
        raise BadGeometry(f"group {message.name!r}", f"kind {message.kind} is not known") from None
