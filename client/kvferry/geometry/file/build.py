"""From a checked file to an `EngineGeometry`: every rank's planes in one virtual allocation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import BadGeometry, InvalidField
from kvferry.geometry.file.fields import MAX_RANKS, GeometryFile
from kvferry.geometry.file.parts import Component, GroupPart, check_content, checked_shards, intervals
from kvferry.geometry.model import EngineGeometry, RankGeometry
from kvferry.geometry.plane import Interval, MemoryKind, Plane, TokenShard
from kvferry.geometry.sharding import shards

MAX_PLANES = 1 << 16
"""Of all ranks together. No message could carry more."""
MAX_RANK_LAYERS = 1 << 20
"""Ranks times layers of all groups, held or not."""
FIRST_ADDRESS = 1 << 32
"""Where each rank's allocation begins; not zero, so that no address looks like "none"."""
ALIGNMENT = 4096
"""Every pool of a rank begins at a multiple of this, as engines' allocations do."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """What a rank holds of one component of one layer. `along` has how many there are along each counted axis of the
    memory (`AXES`); pieces of one layer, tensor or component, which are named there as well, lie together."""

    component: Component
    along: Mapping[str, Any]


_Place = tuple[int, dict[str, int]]
"""Where a piece lies: bytes from the start of the group's memory, and from one to the next along each counted axis."""


def build_engine(file: GeometryFile) -> EngineGeometry:
    """Build the engine that a file describes.

    Raises:
        InvalidField: fields that do not fit each other.
        BadGeometry: a layout that contradicts itself.
    """
    tp_size, pp_size, layers = file.tp_size, file.pp_size, file.model.layers
    if tp_size * pp_size > MAX_RANKS:
        raise InvalidField("pp_size", pp_size, f"at most {MAX_RANKS} ranks in all")
    if file.stages is None and pp_size > layers:
        raise InvalidField("pp_size", pp_size, f"at most the {layers} layers of the model")
    stages = shards(pp_size, layers) if file.stages is None else intervals("stages", file.stages, pp_size, layers)
    check_content("model", file.model, file.model.attention)
    checked_shards("shards", file.shards, tp_size, file.model.kv_heads)
    parts = [GroupPart(file, *table) for table in file.tables()]
    names = [part.group.name for part in parts]
    if twice := [index for index, name in enumerate(names) if names.count(name) > 1]:
        raise InvalidField(f"groups[{twice[0]}].name", names[twice[0]], "a name that no other group has")
    planes = tp_size * sum(len(part.layers) * len(part.components) for part in parts)
    if planes > MAX_PLANES:
        raise InvalidField("model.layers", layers, f"layers that make at most {MAX_PLANES} planes, not {planes}")
    looked_at = tp_size * pp_size * sum(len(part.layers) for part in parts)
    if looked_at > MAX_RANK_LAYERS:
        raise InvalidField("pp_size", pp_size, f"ranks times layers of at most {MAX_RANK_LAYERS}, not {looked_at}")
    ranks = [_rank(file, parts, stages, tp, pp) for pp in range(pp_size) for tp in range(tp_size)]
    groups = tuple(part.group for part in parts)
    return EngineGeometry(file.engine_id, groups, tuple(ranks), file.identity, partial=file.partial)


def _rank(
    file: GeometryFile, parts: Sequence[GroupPart], stages: Sequence[Interval], tp_rank: int, pp_rank: int
) -> RankGeometry:
    planes: list[Plane] = []
    address = FIRST_ADDRESS
    pools: dict[tuple[str, str], list[GroupPart]] = {}
    for part in parts:
        key = ("pool", part.group.pool) if part.group.pool else ("group", part.group.name)
        pools.setdefault(key, []).append(part)
    for pool in pools.values():
        held = [(part, pieces) for part in pool if (pieces := _pieces(part, stages, tp_rank, pp_rank))]
        # Groups of a pool share its block ids, so block n of one is block n of all: equally long.
        block_bytes = 0
        if len(pool) > 1 and held:
            alone = [_nest(part.order, pieces, _spacing(part))[1] for part, pieces in held]
            block_bytes = max(strides["block"] for places in alone for _, strides in places.values())
        pool_bytes = 0
        for part, pieces in held:
            size, places = _nest(part.order, pieces, _spacing(part, block_bytes))
            pool_bytes = max(pool_bytes, size)
            found = [_plane(file, part, piece, address, places[piece], tp_rank) for piece in pieces]
            if block_bytes:
                _check_pool(pool, found, address, block_bytes)
            planes += found
        address += -(-pool_bytes // ALIGNMENT) * ALIGNMENT
    count = max(part.fields.token_shard.count for part in parts)
    labels = {"tp_rank": tp_rank, "pp_rank": pp_rank, **({"dcp_rank": tp_rank % count} if count > 1 else {})}
    return RankGeometry(pp_rank * file.tp_size + tp_rank, tuple(planes), labels)


def _pieces(part: GroupPart, stages: Sequence[Interval], tp_rank: int, pp_rank: int) -> list[_Piece]:
    """Return what a rank holds of a group."""
    stage, last = stages[pp_rank], pp_rank == len(stages) - 1
    past_all = max(stage.end for stage in stages)

    def held(layer: int) -> bool:
        if part.fields.stage is not None:
            return part.fields.stage == pp_rank
        return stage.begin <= layer < stage.end or (last and layer >= past_all)

    return [
        _Piece(
            component,
            {
                "layer": part.fields.layer_name.replace("{}", str(layer)),
                "tensor": component.tensor,
                "component": component.name,
                "block": part.group.num_blocks,
                "page": part.pages,
                "unit": len(component.shards[tp_rank]),
                "token": component.page_states,
            },
        )
        for layer in part.layers
        if held(layer)
        for component in part.components
        if component.layers is None or layer in component.layers
    ]


def _spacing(part: GroupPart, block_bytes: int = 0) -> dict[str, tuple[int, int]]:
    """Return bytes after each step along an axis, and the smallest step."""
    return {"page": (part.fields.page_padding, 0), "block": (part.fields.block_padding, block_bytes)}


def _nest(
    axes: Sequence[str], pieces: Sequence[_Piece], spacing: Mapping[str, tuple[int, int]]
) -> tuple[int, dict[_Piece, _Place]]:
    """Nest the axes as ordered, outermost first; returns the bytes of the whole, and where each piece lies.

    Raises:
        BadGeometry: pieces that lie side by side inside a counted axis differ in its count.
    """
    if not axes:
        return pieces[0].component.state_bytes, {pieces[0]: (0, {})}
    axis, rest = axes[0], axes[1:]
    if axis in ("layer", "tensor", "component"):
        size = 0
        places: dict[_Piece, _Place] = {}
        beside: dict[str, list[_Piece]] = {}
        for piece in pieces:
            beside.setdefault(piece.along[axis], []).append(piece)
        for members in beside.values():
            more, inner = _nest(rest, members, spacing)
            places.update({piece: (size + offset, strides) for piece, (offset, strides) in inner.items()})
            size += more
        return size, places
    size, inner = _nest(rest, pieces, spacing)
    counts: dict[int, _Piece] = {piece.along[axis]: piece for piece in pieces}
    if len(counts) > 1:
        (one, first), (other, second) = list(counts.items())[:2]
        raise BadGeometry(
            " and ".join(f"{piece.along['layer']}/{piece.component.name}" for piece in (first, second)),
            f"they lie side by side inside the {axis} axis, but have {one} and {other} of it; give them different "
            f'"tensor"s, or another "kv" or "order"',
        )
    padding, least = spacing.get(axis, (0, 0))
    stride = max(size + padding, least)
    return stride * next(iter(counts)), {
        piece: (offset, {**strides, axis: stride}) for piece, (offset, strides) in inner.items()
    }


def _plane(file: GeometryFile, part: GroupPart, piece: _Piece, address: int, place: _Place, tp_rank: int) -> Plane:
    said, component, along = part.fields.token_shard, piece.component, piece.along
    offset, strides = place
    return Plane(
        layer=along["layer"],
        component=component.name,
        group=part.group.name,
        memory_kind=MemoryKind[file.memory.upper()],
        device=file.device,
        base=address + offset,
        num_blocks=part.group.num_blocks,
        block_stride=strides["block"],
        page_tokens=component.page_states,
        page_stride=strides["page"] if part.pages > 1 else 0,
        block_states=component.page_states * part.pages,
        unit_stride=strides["unit"] if along["unit"] > 1 else 0,
        token_stride=strides["token"] if component.page_states > 1 else 0,
        state_bytes=component.state_bytes,
        units=component.shards[tp_rank],
        token_shard=TokenShard(tp_rank % said.count, said.count, said.interleave),
        **component.plane,
    )


def _check_pool(pool: Sequence[GroupPart], planes: Iterable[Plane], address: int, block_bytes: int) -> None:
    """In a pool, different ids must never meet in memory, whichever groups they are used for."""
    where = f"pool {pool[0].group.pool!r}"
    counts = {part.group.num_blocks for part in pool}
    if len(counts) > 1:
        raise BadGeometry(where, f"its groups have {sorted(counts)} blocks; they share one space of block ids")
    tensor_bytes = block_bytes * counts.pop()
    for plane in planes:
        at = (plane.base - address) % tensor_bytes
        if plane.block_stride != block_bytes or at + plane.block_extent > block_bytes:
            raise BadGeometry(
                where,
                f"block n of {plane.name} does not lie within block n of the pool: {plane.block_extent} bytes, blocks "
                f'{plane.block_stride} bytes apart, the pool\'s {block_bytes}; use another "order", with unit and '
                f"token inside block",
            )
