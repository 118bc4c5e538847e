"""From a checked document to an `EngineGeometry`: every rank's planes in one virtual allocation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from kvferry.errors import BadGeometry, InvalidField
from kvferry.geometry.file.components import DTYPE_BYTES, Component
from kvferry.geometry.file.document import Document, GroupPart
from kvferry.geometry.file.layout import Blocking, Piece, Place, natural_block_bytes, place
from kvferry.geometry.model import EngineGeometry, GroupKind, RankGeometry
from kvferry.geometry.plane import Plane, TokenShard

FIRST_ADDRESS = 1 << 32
"""Where each rank's allocation begins; not zero, so that no address looks like "none"."""

ALIGNMENT = 4096
"""Every pool of a rank begins at a multiple of this, as engines' allocations do."""


def build_engine(document: Document) -> EngineGeometry:
    """The engine a file describes.

    Raises:
        InvalidField: a block that does not hold whole states, pages or turns of the token shards.
        BadGeometry: a layout that contradicts itself.
    """
    ranks = [
        _build_rank(document, tp_rank, pp_rank)
        for pp_rank in range(document.pp_size)
        for tp_rank in range(document.tp_size)
    ]
    groups = tuple(part.group for part in document.groups)
    return EngineGeometry(document.engine_id, groups, tuple(ranks), document.identity, partial=document.partial)


def rank_bytes(rank: RankGeometry) -> int:
    """Bytes from the first to one past the last byte of a rank's planes; 0 if it has none."""
    if not rank.planes:
        return 0
    return max(plane.extent[1] for plane in rank.planes) - _first_address(rank.planes)


def rebase(rank: RankGeometry, base: int) -> RankGeometry:
    """The same rank with its first byte at `base`, all planes moved alike.

    Raises:
        BadGeometry: addresses that reach past 2**63.
    """
    if not rank.planes:
        return rank
    by = base - _first_address(rank.planes)
    return replace(rank, planes=tuple(replace(plane, base=plane.base + by) for plane in rank.planes))


def _first_address(planes: Iterable[Plane]) -> int:
    return min(plane.base for plane in planes)


def _build_rank(document: Document, tp_rank: int, pp_rank: int) -> RankGeometry:
    planes: list[Plane] = []
    address = FIRST_ADDRESS
    labels = {"tp_rank": tp_rank, "pp_rank": pp_rank}
    for pool in _pools(document.groups):
        held = [(part, _pieces(document, part, tp_rank, pp_rank)) for part in pool]
        held = [(part, pieces) for part, pieces in held if pieces]
        if not held:
            continue
        # Groups of a pool share its block ids, so block n of one is block n of all: equally long.
        shared = max(natural_block_bytes(part.order, list(pieces), _blocking(part)) for part, pieces in held)
        found, pool_bytes = [], 0
        for part, pieces in held:
            block_bytes = shared if len(pool) > 1 else 0
            places, size = place(part.order, list(pieces), _blocking(part, block_bytes))
            pool_bytes = max(pool_bytes, size)
            found += [
                _plane(document, part, component, piece, places[piece], address, tp_rank)
                for piece, component in pieces.items()
            ]
        if len(pool) > 1:
            _check_pool(pool, found, address, shared)
        planes += found
        address += -(-pool_bytes // ALIGNMENT) * ALIGNMENT
    if any(part.token_shards > 1 for part in document.groups):
        labels["dcp_rank"] = tp_rank % max(part.token_shards for part in document.groups)
    return RankGeometry(pp_rank * document.tp_size + tp_rank, tuple(planes), labels)


def _pools(parts: Iterable[GroupPart]) -> list[list[GroupPart]]:
    """Groups by the memory they share, in the order of the file."""
    pools: dict[tuple[str, str], list[GroupPart]] = {}
    for part in parts:
        key = ("pool", part.group.pool) if part.group.pool else ("group", part.group.name)
        pools.setdefault(key, []).append(part)
    return list(pools.values())


def _blocking(part: GroupPart, block_bytes: int = 0) -> Blocking:
    pages = part.group.block_tokens // part.page_tokens if part.page_tokens else 1
    return Blocking(part.group.num_blocks, pages, part.page_padding, part.block_padding, block_bytes)


def _pieces(document: Document, part: GroupPart, tp_rank: int, pp_rank: int) -> dict[Piece, Component]:
    """What a rank holds of a group."""
    stage, last = document.stages[pp_rank], pp_rank == document.pp_size - 1
    past_all = max(stage.end for stage in document.stages)
    pieces: dict[Piece, Component] = {}
    for layer in part.layers:
        by_index = stage.begin <= layer < stage.end or (last and layer >= past_all)
        if not (by_index if part.stage is None else part.stage == pp_rank):
            continue
        for component in part.components:
            if component.layers is None or layer in component.layers:
                piece = Piece(
                    layer=part.layer_name.replace("{}", str(layer)),
                    component=component.name,
                    tensor=component.tensor,
                    units=len(component.shards[tp_rank]),
                    page_states=_page_states(part, component),
                    state_bytes=component.content * DTYPE_BYTES[component.dtype],
                )
                pieces[piece] = component
    return pieces


def _page_states(part: GroupPart, component: Component) -> int:
    if part.group.kind is GroupKind.STATE:
        return component.rows
    states = Fraction(part.page_tokens, part.token_shards) / component.tokens_per_state
    if states.denominator != 1:
        name = "block_size" if part.page_tokens == part.group.block_tokens else "page_size"
        raise InvalidField(
            f"{part.path}.{name}" if part.path else name,
            part.page_tokens,
            f"tokens that are whole states of {component.tokens_per_state} tokens on each of {part.token_shards} "
            f"token shards ({component.name} has {states} states per page)",
        )
    return states.numerator


def _plane(
    document: Document,
    part: GroupPart,
    component: Component,
    piece: Piece,
    found: Place,
    address: int,
    tp_rank: int,
) -> Plane:
    group, state = part.group, part.group.kind is GroupKind.STATE
    pages = group.block_tokens // part.page_tokens if part.page_tokens else 1
    shard = TokenShard(tp_rank % part.token_shards, part.token_shards, part.interleave)
    return Plane(
        layer=piece.layer,
        component=component.name,
        group=group.name,
        format=component.format,
        dtype=component.dtype,
        memory_kind=document.memory_kind,
        device=document.device,
        base=address + found.offset,
        num_blocks=group.num_blocks,
        block_stride=found.strides["block"],
        page_tokens=piece.page_states,
        page_stride=found.strides["page"] if pages > 1 else 0,
        block_states=piece.page_states * pages,
        unit_stride=found.strides["unit"] if piece.units > 1 else 0,
        token_stride=found.strides["token"] if piece.page_states > 1 else 0,
        state_bytes=piece.state_bytes,
        axis_size=component.units,
        units=component.shards[tp_rank],
        token_shard=TokenShard() if part.token_shards == 1 else shard,
        tokens_per_state=Fraction(1) if state else component.tokens_per_state,
        token_granule=component.granule or piece.page_states,
        units_divide=component.units_divide,
        optional_cover=component.optional,
    )


def _check_pool(pool: list[GroupPart], planes: list[Plane], address: int, block_bytes: int) -> None:
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
