"""Lanes: the reads of one destination rank from one source rank in one step, ready to be expanded.

A lane is a set of plane reads whose blocks become addresses in the same way: with the same source rank, stripe, memory
kinds, token layout and block strides on both sides. Only the address of block 0 differs from plane to plane. So the
rows of a lane (`rows`) are made once, and a request adds ``id * block_stride``. Rows that are adjacent on both sides
are fused when they are made: K with V, layers of one storage.

`segments` gives the states that a lane moves for a request, as few cuts with many blocks each. The pieces of one period
of the lane's line repeat, so the pieces of a request of any length are slices of its block ids; only the two ends of
the request are enumerated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from math import lcm

import numpy as np

from kvferry.errors import InvalidField
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import Plane
from kvferry.planner.coverage import PlaneRead
from kvferry.planner.descriptors import BlockRows, MemoryPair
from kvferry.planner.footprint import Windows
from kvferry.planner.line_rule import Stripe
from kvferry.planner.request_blocks import GroupRequest, NeededBlocks
from kvferry.planner.rows import (
    AlikePlanes,
    Cells,
    Cut,
    Int64s,
    RowExtent,
    Rows,
    alike,
    extents_of,
    loops_of,
    rows_of,
)
from kvferry.planner.token_line import Line, Segment, StateLayout

ROWS_KEPT = 1024
"""Cuts whose rows a lane keeps: a caller that asks for ever new token ranges must not fill the memory."""


@dataclass(frozen=True, eq=False)
class Lane:
    """See the module's docstring. `group` is the destination's, `stripe` the share of the request's blocks, and
    `granule` the smallest number of states that may be cut off."""

    source_rank: int
    group: Group
    stripe: Stripe
    memory: MemoryPair
    source: StateLayout
    destination: StateLayout
    granule: int
    tokens_per_state: Fraction
    reads: tuple[PlaneRead, ...]

    @cached_property
    def line(self) -> Line:
        return Line(self.source, self.destination)

    @cached_property
    def planes(self) -> tuple[AlikePlanes, ...]:
        return alike(self.reads)

    @cached_property
    def extents(self) -> tuple[RowExtent, ...]:
        """The rows of one source block, as reads into staging memory."""
        return extents_of(self.planes, self.source.held_per_block)

    @cached_property
    def windows(self) -> tuple[Windows, Windows]:
        """Those of the planes read and of the planes written."""
        theirs, mine = (read.source for read in self.reads), (read.destination for read in self.reads)
        return Windows.of(theirs, self.source), Windows.of(mine, self.destination)

    def cut_below(self, token: int) -> int:
        """`token` itself if a read of the lane may end there and another begin; else a lower token, but none below the
        next lower token at which a read may end (`ReadPlan.cut_below` repeats this step)."""
        return int(_first_moved(self, int(token // self.tokens_per_state)))

    @cached_property
    def linear_bytes(self) -> tuple[int, ...]:
        """Bytes per held state of each member of `planes`, if all their bytes lie end to end on both sides, block after
        block; else empty. Then blocks with consecutive ids are contiguous in memory, whatever the block sizes."""
        if not self.line.same_tokens or self.group.kind is GroupKind.STATE:
            return ()
        if all(_is_linear(plane, len(read.units)) for read in self.reads for plane in (read.source, read.destination)):
            return tuple(members.units * members.state_bytes for members in self.planes)
        return ()

    @property
    def whole_block(self) -> Cut:
        """The cut of a whole block, where both sides' blocks are alike."""
        return Cut(0, 0, self.source.held_per_block)

    @cached_property
    def rows(self) -> Callable[[Cut], Rows]:
        """The fused rows of a cut; cached, since requests ask for the same few cuts again and again."""
        # With one block, planes that touch may be separate tensors; no descriptor spans two NIXL regions.
        across = min(self.source.num_blocks, self.destination.num_blocks) > 1
        return lru_cache(ROWS_KEPT)(partial(rows_of, self.planes, across=across))

    @cached_property
    def block_rows(self) -> Callable[[Cut], tuple[BlockRows, BlockRows]]:
        """The rows of a cut that go on in the next block, on both sides, and the others; cached like `rows`."""
        return lru_cache(ROWS_KEPT)(self._block_rows)

    def _block_rows(self, cut: Cut) -> tuple[BlockRows, BlockRows]:
        rows, source, destination = self.rows(cut), self.source, self.destination
        streams = (rows.length == source.block_stride) & (rows.length == destination.block_stride)
        one, other = (
            BlockRows(
                source=rows.source[chosen].view(np.uint64),
                destination=rows.destination[chosen].view(np.uint64),
                length=rows.length[chosen].view(np.uint64),
                source_stride=source.block_stride,
                destination_stride=destination.block_stride,
                source_blocks=source.num_blocks,
                destination_blocks=destination.num_blocks,
            )
            for chosen in (streams, ~streams)
        )
        return one, other

    @cached_property
    def loops(self) -> Callable[[int, Cut], tuple[tuple[Cells, Cells], ...]]:
        """The loops that copy a cut of the planes at an index of `planes`; cached like `rows`."""
        planes = self.planes
        return lru_cache(ROWS_KEPT)(lambda alike, cut: loops_of(planes[alike], cut))


def _is_linear(plane: Plane, units: int) -> bool:
    """Whether the `units` read are all bytes of a plane, token after token without holes."""
    state = units * plane.state_bytes
    return (
        (units == 1 or plane.unit_stride == plane.state_bytes)
        and (plane.page_tokens == 1 or plane.token_stride == state)
        and (plane.pages == 1 or plane.page_stride == plane.page_tokens * state)
        and plane.block_stride == plane.block_states * state
    )


def build_lanes(
    reads: Iterable[PlaneRead], source_groups: Mapping[str, Group], groups: Mapping[str, Group]
) -> tuple[Lane, ...]:
    """Gather plane reads into lanes, ordered by source rank."""
    gathered: dict[tuple[int, Group, Stripe, MemoryPair, StateLayout, StateLayout, int, Fraction], list[PlaneRead]] = {}
    for read in reads:
        a, b = read.source, read.destination
        group = groups[b.group]
        memory = MemoryPair((a.memory_kind, a.device), (b.memory_kind, b.device))
        layouts = (StateLayout.of(a, source_groups[a.group]), StateLayout.of(b, group))
        key = (read.source_rank, group, read.stripe, memory, *layouts, b.token_granule, b.tokens_per_state)
        gathered.setdefault(key, []).append(read)
    lanes = [Lane(*key, reads=tuple(members)) for key, members in gathered.items()]
    return tuple(sorted(lanes, key=lambda lane: lane.source_rank))


def segments(lane: Lane, needed: GroupRequest) -> list[Segment]:
    """The segments of a lane; raises `InvalidField` for a start inside tokens that may not be cut apart."""
    if lane.group.kind is GroupKind.STATE:
        # A request has one block of state, which belongs to one of the stripes.
        begin, end = lane.stripe.blocks(1)
        return [Segment(lane.whole_block, needed.source.ids, needed.destination.ids)] if begin < end else []
    begin, end = span(lane, needed)
    if begin >= end:
        return []
    line, period = lane.line, lane.line.period
    first, last = -(-begin // period), end // period
    if first >= last:
        return _enumerated(lane, begin, end, needed)
    found = _enumerated(lane, begin, first * period, needed)
    for pieces in line.period_pieces:
        # A cut includes its piece's position in the period, so each cut has one piece.
        (index,), (own_index,) = pieces.source.tolist(), pieces.destination.tolist()
        source = _repeated(needed.source, index, period // line.source_step, first, last)
        destination = _repeated(needed.destination, own_index, period // line.destination_step, first, last)
        found.append(Segment(pieces.cut, source, destination))
    return found + _enumerated(lane, last * period, end, needed)


def span(lane: Lane, needed: GroupRequest) -> tuple[int, int]:
    """The part ``[begin, end)`` of its line that a lane moves: its stripe of the needed tokens, in whole granules.
    Raises the error of `segments`."""
    per_state, granule, token = lane.tokens_per_state, lane.granule, needed.begin
    if token < needed.required and _first_moved(lane, int(token // per_state)) < needed.floor:
        # The token that is not required cannot be moved alone. All stripes omit it, or they would not meet.
        token = needed.required
    begin, end = int(token // per_state), -int(-needed.end // per_state)
    if begin * per_state < needed.floor:
        raise _torn(lane, needed, per_state)
    if not lane.stripe.whole:
        # Stripes begin and end at multiples of this many states.
        step = lcm(lane.source.block_states, lane.destination.block_states)
        blocks = begin // step
        low, high = lane.stripe.blocks(-(-end // step) - blocks)
        begin, end = max(begin, (blocks + low) * step), min(end, (blocks + high) * step)
    first, last = begin, end
    if lane.line.same_tokens:
        first, last = lane.source.held_before(begin), lane.source.held_before(end)
    if first >= last:
        return 0, 0
    if _first_moved(lane, begin) < needed.floor:
        raise _torn(lane, needed, granule * per_state * (lane.source.shard.count if lane.line.same_tokens else 1))
    return first // granule * granule, -(-last // granule) * granule


def _first_moved(lane: Lane, state: int) -> Fraction:
    """The first token that is moved with a state of the lane: the granule's first, where the state is inside one."""
    if lane.line.same_tokens:
        first = lane.source.held_before(state) // lane.granule * lane.granule
        state = min(state, lane.source.held_state(first))
    else:
        # Interleaves are multiples of the granule (`coverage`), so both sides have the same granules.
        state = state // lane.granule * lane.granule
    return state * lane.tokens_per_state


def _torn(lane: Lane, needed: GroupRequest, tokens: Fraction) -> InvalidField:
    what = f"a multiple of {tokens} tokens: group {lane.group.name!r} cannot be cut finer"
    return InvalidField("first token", needed.floor, what)


def _enumerated(lane: Lane, begin: int, end: int, needed: GroupRequest) -> list[Segment]:
    if begin >= end:
        return []
    line = lane.line
    origin = begin // line.period
    # Blocks and states are counted from the period's begin: the line may be longer than numpy's integers.
    skipped = needed.source.first - origin * (line.period // line.source_step)
    own_skipped = needed.destination.first - origin * (line.period // line.destination_step)
    ids, own_ids = needed.source.ids, needed.destination.ids
    found = line.pieces(begin - origin * line.period, end - origin * line.period)
    return [Segment(of.cut, ids[of.source - skipped], own_ids[of.destination - own_skipped]) for of in found]


def _repeated(blocks: NeededBlocks, index: int, step: int, first: int, last: int) -> Int64s:
    """Ids of the block at `index` of every period from `first` to before `last`; a period has `step` blocks."""
    begin = first * step + index - blocks.first
    return blocks.ids[begin : begin + (last - first - 1) * step + 1 : step]
