"""Lanes: what one destination rank reads from one source rank in one step, ready to be expanded.

A lane is a set of plane reads that share everything about how a request's blocks turn into addresses: source rank,
stripe, memory kinds, token layout and block strides on both sides. What differs from plane to plane is only where block
0 begins, so a lane keeps *rows* ``(source address, destination address, length)`` for block ids 0 and a request adds
``id * block_stride``. Rows that are adjacent on both sides are fused
when they are made: K with V, layers of one storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.covering import PlaneRead, Stripe
from kvferry.descriptors import MemoryPair
from kvferry.geometry import Group, GroupKind, Plane, TokenShard

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StateLayout:
    """How the states of a request lie in the blocks of one side. Counted on the global axis of states.

    Attributes:
        block_states: global states per block (over all token shards).
        shard: the held states, counted in states.
        page_tokens: held states per page.
        block_stride: bytes from block to block.
        num_blocks: block ids of the group on this side.
    """

    block_states: int
    shard: TokenShard
    page_tokens: int
    block_stride: int
    num_blocks: int

    @property
    def held_per_block(self) -> int:
        """States of a block that are held."""
        return self.block_states // self.shard.count

    def held_before(self, state: int) -> int:
        """How many of the states below `state` are held."""
        turn = self.shard.count * self.shard.interleave
        whole, rest = divmod(state, turn)
        in_turn = min(max(rest - self.shard.index * self.shard.interleave, 0), self.shard.interleave)
        return whole * self.shard.interleave + in_turn


def layout_of(plane: Plane, group: Group) -> StateLayout:
    """The state layout of a plane."""
    shard = plane.token_shard
    in_states = TokenShard(
        shard.index, shard.count, int(shard.interleave / plane.tokens_per_state) if shard.count > 1 else 1
    )
    held = plane.block_states * shard.count
    return StateLayout(held, in_states, plane.page_tokens, plane.block_stride, group.num_blocks)


@dataclass(frozen=True, slots=True)
class _Box:
    """The bytes of one plane read: units by states, strided on both sides."""

    source: int
    destination: int
    units: int
    source_unit_stride: int
    destination_unit_stride: int
    source_token_stride: int
    destination_token_stride: int
    source_page_stride: int
    destination_page_stride: int
    state_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Pieces of one block, ``int64[rows]`` each, for block id 0 on both sides; sorted by source address, fused.

    Attributes:
        source, destination: addresses.
        length: bytes.
        unfused: how many contiguous pieces the single planes have.
    """

    source: Int64s
    destination: Int64s
    length: Int64s
    unfused: int

    def __len__(self) -> int:
        return len(self.length)

    @property
    def total_bytes(self) -> int:
        """Bytes of one block."""
        return int(self.length.sum())


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """Which states of a block a row set covers: `count` held states from `source` in the source's block, `destination`
    in the destination's. Cuts repeat: a request of any length has few different ones."""

    source: int
    destination: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """See the module's docstring.

    Attributes:
        source_rank: rank read from.
        group: the destination's group.
        stripe: share of the request's blocks.
        memory: address spaces.
        source, destination: layouts of states.
        granule: smallest number of states that may be cut off.
        tokens_per_state: tokens that one state stands for.
        reads: the plane reads.
    """

    source_rank: int
    group: Group
    stripe: Stripe
    memory: MemoryPair
    source: StateLayout
    destination: StateLayout
    granule: int
    tokens_per_state: Fraction
    reads: tuple[PlaneRead, ...]
    _rows: dict[Cut, Rows] = field(default_factory=dict, repr=False)

    @property
    def same_tokens(self) -> bool:
        """Whether both sides hold the same states, so that held states are consecutive on both."""
        return self.source.shard == self.destination.shard

    @property
    def stripe_states(self) -> int:
        """Stripes begin and end at multiples of this many states: the lcm of the block sizes."""
        return lcm(self.source.block_states, self.destination.block_states)

    def rows(self, cut: Cut) -> Rows:
        """The fused rows of a cut; kept, since requests ask for the same few again and again."""
        rows = self._rows.get(cut)
        if rows is None:
            planes = [_box_rows(_box(read), self, cut) for read in self.reads]
            rows = self._rows[cut] = _fuse(planes, sum(plane.unfused for plane in planes))
        return rows

    def recurring_cuts(self) -> tuple[Cut, ...]:
        """The cuts that whole blocks of a long request are made of; empty where tokens are sharded differently."""
        if self.group.kind is GroupKind.STATE:
            return (Cut(0, 0, self.source.held_per_block),)
        if not self.same_tokens:
            return ()
        mine, theirs = self.destination.held_per_block, self.source.held_per_block
        edges = sorted({*range(0, lcm(mine, theirs) + 1, mine), *range(0, lcm(mine, theirs) + 1, theirs)})
        cuts = {Cut(a % theirs, a % mine, b - a) for a, b in pairwise(edges)}
        return tuple(sorted(cuts))


_LaneKey: TypeAlias = tuple[int, Group, Stripe, MemoryPair, StateLayout, StateLayout, int, Fraction]


def build_lanes(
    reads: Iterable[PlaneRead], source_groups: dict[str, Group], groups: dict[str, Group]
) -> tuple[Lane, ...]:
    """Gather plane reads into lanes, ordered by source rank and group."""
    gathered: dict[_LaneKey, list[PlaneRead]] = {}
    for read in reads:
        a, b = read.source, read.destination
        group = groups[b.group]
        memory = MemoryPair(a.memory_kind, a.device, b.memory_kind, b.device)
        layouts = (layout_of(a, source_groups[a.group]), layout_of(b, group))
        key = (read.source_rank, group, read.stripe, memory, *layouts, b.token_granule, b.tokens_per_state)
        gathered.setdefault(key, []).append(read)
    lanes = [Lane(*key, reads=tuple(members)) for key, members in gathered.items()]
    return tuple(sorted(lanes, key=lambda lane: lane.source_rank))


def _box(read: PlaneRead) -> _Box:
    a, b = read.source, read.destination
    return _Box(
        source=a.base + (read.units.begin - a.units.begin) * a.unit_stride,
        destination=b.base + (read.units.begin - b.units.begin) * b.unit_stride,
        units=len(read.units),
        source_unit_stride=a.unit_stride,
        destination_unit_stride=b.unit_stride,
        source_token_stride=a.token_stride,
        destination_token_stride=b.token_stride,
        source_page_stride=a.page_stride,
        destination_page_stride=b.page_stride,
        state_bytes=a.state_bytes,
    )


def _box_rows(box: _Box, lane: Lane, cut: Cut) -> Rows:
    """One row per contiguous stretch of a box: units times states, cut at the pages of both sides."""
    pieces = []
    done = 0
    while done < cut.count:
        source_page, source_at = divmod(cut.source + done, lane.source.page_tokens)
        page, at = divmod(cut.destination + done, lane.destination.page_tokens)
        count = min(cut.count - done, lane.source.page_tokens - source_at, lane.destination.page_tokens - at)
        source = box.source + source_page * box.source_page_stride + source_at * box.source_token_stride
        destination = box.destination + page * box.destination_page_stride + at * box.destination_token_stride
        pieces.append(_rectangle(box, source, destination, count))
        done += count
    fused = _fuse(pieces, 0)
    return replace(fused, unfused=len(fused))


def _rectangle(box: _Box, source: int, destination: int, states: int) -> Rows:
    """Rows of `units` times `states` cells of one page on both sides."""
    whole_units = box.source_unit_stride == box.destination_unit_stride == box.state_bytes or box.units == 1
    whole_states = box.source_token_stride == box.destination_token_stride == box.state_bytes or states == 1
    unit_index, state_index = np.arange(box.units), np.arange(states)
    length = box.state_bytes
    if whole_states:
        state_index, length = state_index[:1], length * states
    if whole_units and (states == 1 or not whole_states):
        unit_index, length = unit_index[:1], length * box.units
    source_at = source + unit_index[:, None] * box.source_unit_stride + state_index * box.source_token_stride
    destination_at = (
        destination + unit_index[:, None] * box.destination_unit_stride + state_index * box.destination_token_stride
    )
    return Rows(
        source_at.ravel().astype(np.int64),
        destination_at.ravel().astype(np.int64),
        np.full(source_at.size, length, np.int64),
        source_at.size,
    )


def _fuse(parts: list[Rows], unfused: int) -> Rows:
    """All rows by source address, those that touch on both sides made one."""
    source = np.concatenate([part.source for part in parts])
    destination = np.concatenate([part.destination for part in parts])
    length = np.concatenate([part.length for part in parts])
    order = np.argsort(source, kind="stable")
    source, destination, length = source[order], destination[order], length[order]
    touches = (source[1:] == source[:-1] + length[:-1]) & (destination[1:] == destination[:-1] + length[:-1])
    first = np.concatenate(([0], np.flatnonzero(~touches) + 1))
    return Rows(source[first], destination[first], np.add.reduceat(length, first), unfused)
