"""The cache of a reader of one rank that holds all that another engine holds of a prompt, whatever that engine's
parallelism, block sizes and layouts: tokens first, then all heads. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvferry.geometry.blocks import Blocks
from kvferry.geometry.model import EngineGeometry, Group, GroupKind
from kvferry.geometry.plane import Interval, MemoryKind, Plane, TokenShard
from kvferry.planner.request_blocks import needed

ELEMENT_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz"), 1),
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
}
"""Bytes of an element, by the names of those types of planes that safetensors has."""


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """What was read of one plane: `size` bytes from `address` on.

    Attributes:
        shape: ``[states, heads, elements]``: the states of the tokens, or the rows of a state, in their order, and all
            heads (units) of the engine. Where the format orders the bytes of several states as it likes, the first axis
            counts these pieces; where it does so over the heads, too, there is no axis of heads.
        dtype: of the elements; uint8 if safetensors has no such type.
    """

    plane: Plane
    address: int
    size: int
    shape: tuple[int, ...]
    dtype: str


class WholeCache:
    """The groups and planes of the reader. Its blocks are as large as the source's, and block n of the cache is block n
    of the prompt, so that a plane's tokens lie one after the other.

    Attributes:
        groups: its groups, with blocks for the whole prompt.
        size: bytes of its memory.
    """

    def __init__(self, source: EngineGeometry, tokens: int) -> None:
        """Make the cache for a prompt of this many tokens."""
        self._source = {group.name: group for group in source.groups}
        self.groups = tuple(_roomy(group, tokens) for group in source.groups)
        by_name = {group.name: group for group in self.groups}
        held: dict[str, list[Plane]] = {}
        for _, plane in source.planes():
            held.setdefault(plane.name, []).append(plane)
        self.size, self._planes = 0, list[Plane]()
        for planes in held.values():
            self._planes.append(_whole(planes, by_name[planes[0].group], self.size))
            self.size = self._planes[-1].extent[1]

    def planes(self, base: int) -> list[Plane]:
        """The planes in memory that begins at this address."""
        return [plane.moved(plane.layer, base + plane.base) for plane in self._planes]

    def blocks(self, offered: Mapping[str, Blocks], first: int) -> dict[str, Blocks]:
        """The blocks that hold the source's `offered` ones from the token `first` on, by group."""
        found = {}
        for group in self.groups:
            theirs = offered.get(group.name)
            if group.kind is GroupKind.STATE:
                found[group.name] = Blocks([0], state_token=0 if theirs is None else theirs.state_token)
            else:
                end = max(first, 0 if theirs is None else theirs.end_token or 0)
                ids = range(first // group.block_tokens, min(-(-end // group.block_tokens), group.num_blocks))
                found[group.name] = Blocks(ids, first, end)
        return found

    def tensors(self, offered: Mapping[str, Blocks], first: int, base: int) -> Iterator[WholeTensor]:
        """What a read of the source's `offered` blocks into `blocks` has brought, in memory that begins at `base`."""
        moved = needed(self.groups, self._source, offered, self.blocks(offered, first), None)
        kinds = {group.name: group.kind for group in self.groups}
        for plane in self.planes(base):
            if plane.group not in moved:
                continue
            begin, end = 0, plane.block_states
            if kinds[plane.group] is not GroupKind.STATE:
                request, per_state = moved[plane.group], plane.tokens_per_state
                begin, end = int(request.begin // per_state), -int(-request.end // per_state)
            yield _tensor(plane, begin, end)


def _roomy(group: Group, tokens: int) -> Group:
    blocks = 1 if group.kind is GroupKind.STATE else max(1, -(-tokens // group.block_tokens))
    return replace(group, num_blocks=blocks, null_block=None, pool="")


def _whole(held: list[Plane], group: Group, base: int) -> Plane:
    """The plane that holds all units and tokens that the planes of this name hold together."""
    one = held[0]
    units = Interval(min(plane.units.begin for plane in held), max(plane.units.end for plane in held))
    size, granule, states = one.state_bytes, one.token_granule, one.block_states * one.token_shard.count
    # The bytes of a granule, and of units that do not divide, have an order of the format's own, which is kept.
    heads_first = granule > 1 and (one.units_divide or one.unit_stride != size)
    page = states if granule == 1 else granule
    return replace(
        one,
        memory_kind=MemoryKind.DRAM,
        device=0,
        base=base,
        num_blocks=group.num_blocks,
        block_stride=states * len(units) * size,
        page_tokens=page,
        page_stride=page * len(units) * size,
        block_states=states,
        unit_stride=granule * size if heads_first else size,
        token_stride=size if heads_first else len(units) * size,
        units=units,
        token_shard=TokenShard(),
        optional_cover=False,
        shared=False,
    )


def _tensor(plane: Plane, begin: int, end: int) -> WholeTensor:
    """The states ``[begin, end)`` of a plane, in whole granules."""
    granule, heads = plane.token_granule, len(plane.units)
    first, last = begin // granule, -(-end // granule)
    piece = granule * heads * plane.state_bytes
    axes = (last - first, heads) if plane.units_divide or granule == 1 else (last - first,)
    width = piece // heads if len(axes) == 2 else piece
    element = ELEMENT_BYTES.get(plane.dtype, 0)
    dtype = plane.dtype if element and width % element == 0 else "uint8"
    shape = (*axes, width // ELEMENT_BYTES[dtype])
    return WholeTensor(plane, plane.base + first * piece, (last - first) * piece, shape, dtype)
