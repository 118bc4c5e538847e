"""Lanes: what one destination rank reads from one source rank in one step, ready to be expanded.

A lane is a set of plane reads whose blocks turn into addresses in the same way: with the same source rank, stripe,
memory kinds, token layout and block strides on both sides. Only the address of block 0 differs from plane to plane. So
the rows of a lane (`rows`) are made once, and a request adds ``id * block_stride``. Rows that are adjacent on both
sides are fused when they are made: K with V, layers of one storage.

`segments` says which states a lane moves for a request, as few cuts with many blocks each. The pieces of one period of
the lane's line repeat, so those of a request of any length are made by slicing its block ids; only the two ends of the
request are enumerated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from math import lcm
from typing import TypeAlias

from kvferry.errors import InvalidField
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import Plane
from kvferry.planner.coverage import PlaneRead
from kvferry.planner.descriptors import MemoryPair
from kvferry.planner.line_rule import Stripe
from kvferry.planner.request_blocks import GroupRequest, NeededBlocks
from kvferry.planner.rows import (
    AlikePlanes,
    Cut,
    Int64s,
    RowExtent,
    RowLoop,
    Rows,
    alike,
    extents_of,
    loops_of,
    rows_of,
)
from kvferry.planner.token_line import Line, StateLayout

ROWS_KEPT = 1024
"""Cuts whose rows a lane keeps. Requests have few different ones; a caller that asks for ever new token ranges must not
fill the memory."""


LaneKey: TypeAlias = tuple[int, Group, Stripe, MemoryPair, StateLayout, StateLayout, int, Fraction]


@dataclass(frozen=True, eq=False)
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

    @property
    def alike(self) -> LaneKey:
        """What all its reads have in common, and those of no other lane of its plan."""
        layouts = (self.source, self.destination)
        return (self.source_rank, self.group, self.stripe, self.memory, *layouts, self.granule, self.tokens_per_state)

    @cached_property
    def line(self) -> Line:
        """The blocks of both sides, end to end."""
        return Line(self.source, self.destination)

    @cached_property
    def planes(self) -> tuple[AlikePlanes, ...]:
        """The plane reads by their strides."""
        return alike(self.reads)

    @cached_property
    def extents(self) -> tuple[RowExtent, ...]:
        """The rows of one source block, as they are read into staging memory."""
        return extents_of(self.planes, self.source.held_per_block)

    def cut_below(self, token: int) -> int:
        """A token up to `token` behind which no smaller one can be read apart from its neighbours: `token` itself if a
        read may end there and another one begin, else a lower one, which is no lower than the next where that is so."""
        return int(_first_moved(self, int(token // self.tokens_per_state)))

    @cached_property
    def linear_bytes(self) -> tuple[int, ...]:
        """Bytes per held state of each member of `planes`, if all its bytes lie end to end on both sides, block after
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
        """The fused rows of a cut; kept, since requests ask for the same few again and again."""
        # With one block, planes that touch may be tensors of their own; no descriptor spans two NIXL regions.
        across = min(self.source.num_blocks, self.destination.num_blocks) > 1
        return lru_cache(ROWS_KEPT)(partial(rows_of, self.planes, across=across))

    @cached_property
    def loops(self) -> Callable[[int, Cut], tuple[RowLoop, ...]]:
        """Given an index of `planes` and a cut, the loops that copy the cut of these planes; kept, as rows are."""
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
    gathered: dict[LaneKey, list[PlaneRead]] = {}
    for read in reads:
        a, b = read.source, read.destination
        group = groups[b.group]
        memory = MemoryPair(a.memory_kind, a.device, b.memory_kind, b.device)
        layouts = (StateLayout.of(a, source_groups[a.group]), StateLayout.of(b, group))
        key = (read.source_rank, group, read.stripe, memory, *layouts, b.token_granule, b.tokens_per_state)
        gathered.setdefault(key, []).append(read)
    lanes = [Lane(*key, reads=tuple(members)) for key, members in gathered.items()]
    return tuple(sorted(lanes, key=lambda lane: lane.source_rank))


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The same cut of many blocks: ``source[i]`` is read into ``destination[i]``, block ids, ``int64[n]`` each."""

    cut: Cut
    source: Int64s
    destination: Int64s


def segments(lane: Lane, needed: GroupRequest) -> list[Segment]:
    """The segments of a lane.

    Raises:
        InvalidField: the start lies inside what may not be cut.
    """
    if lane.group.kind is GroupKind.STATE:
        # A request has one block of state: it falls to one of the stripes.
        begin, end = lane.stripe.blocks(1)
        return [Segment(lane.whole_block, needed.source.ids, needed.destination.ids)] if begin < end else []
    begin, end = span(lane, needed)
    if begin >= end:
        return []
    line, period = lane.line, lane.line.period
    first, last = -(-begin // period), end // period
    if first >= last:
        return _enumerated(lane, begin, end, needed)
    found = _enumerated(lane, begin, first * period, needed) if begin < first * period else []
    for pieces in line.period_pieces:
        # A cut tells where in the period its piece lies: there is one piece of each cut.
        (index,), (own_index,) = pieces.source_block.tolist(), pieces.destination_block.tolist()
        source = _repeated(needed.source, index, period // line.source_step, first, last)
        destination = _repeated(needed.destination, own_index, period // line.destination_step, first, last)
        found.append(Segment(pieces.cut, source, destination))
    if last * period < end:
        found += _enumerated(lane, last * period, end, needed)
    return found


def span(lane: Lane, needed: GroupRequest) -> tuple[int, int]:
    """The part ``[begin, end)`` of its line that a lane moves: its stripe of the needed tokens, in whole granules.

    Raises:
        InvalidField: see `segments`.
    """
    per_state, granule, token = lane.tokens_per_state, lane.granule, needed.begin
    if token < needed.required and _first_moved(lane, int(token // per_state)) < needed.floor:
        # The token that is not required cannot be moved alone. All stripes leave it out, or they would not meet.
        token = needed.required
    begin, end = int(token // per_state), -int(-needed.end // per_state)
    if begin * per_state < needed.floor:
        raise _torn(lane, needed, per_state)
    begin, end = _striped(lane, begin, end)
    first, last = begin, end
    if lane.line.same_tokens:
        first, last = lane.source.held_before(begin), lane.source.held_before(end)
    if first >= last:
        return 0, 0
    if _first_moved(lane, begin) < needed.floor:
        raise _torn(lane, needed, granule * per_state * (lane.source.shard.count if lane.line.same_tokens else 1))
    return first // granule * granule, -(-last // granule) * granule


def _first_moved(lane: Lane, state: int) -> Fraction:
    """The first token that is moved with a state of the lane: that of the granule, where it lies inside one."""
    if lane.line.same_tokens:
        first = lane.source.held_before(state) // lane.granule * lane.granule
        state = min(state, lane.source.held_state(first))
    else:
        # Interleaves are multiples of the granule (`coverage`), so that a granule is one on both sides.
        state = state // lane.granule * lane.granule
    return state * lane.tokens_per_state


def _torn(lane: Lane, needed: GroupRequest, tokens: Fraction) -> InvalidField:
    what = f"a multiple of {tokens} tokens: group {lane.group.name!r} cannot be cut finer"
    return InvalidField("first token", needed.floor, what)


def _striped(lane: Lane, begin: int, end: int) -> tuple[int, int]:
    """The lane's stripe of states ``[begin, end)``."""
    if lane.stripe.whole:
        return begin, end
    # Stripes begin and end at multiples of so many states.
    step = lcm(lane.source.block_states, lane.destination.block_states)
    first = begin // step
    low, high = lane.stripe.blocks(-(-end // step) - first)
    return max(begin, (first + low) * step), min(end, (first + high) * step)


def _enumerated(lane: Lane, begin: int, end: int, needed: GroupRequest) -> list[Segment]:
    """The segments of a short stretch."""
    line = lane.line
    origin = begin // line.period
    # Blocks and states are counted from the period's begin: the line may be longer than numpy's integers.
    skipped = needed.source.first - origin * (line.period // line.source_step)
    own_skipped = needed.destination.first - origin * (line.period // line.destination_step)
    return [
        Segment(
            pieces.cut,
            needed.source.ids[pieces.source_block - skipped],
            needed.destination.ids[pieces.destination_block - own_skipped],
        )
        for pieces in line.pieces(begin - origin * line.period, end - origin * line.period)
    ]


def _repeated(blocks: NeededBlocks, index: int, step: int, first: int, last: int) -> Int64s:
    """Ids of the block at `index` of every period from `first` to before `last`; a period has `step` blocks."""
    begin = first * step + index - blocks.first
    return blocks.ids[begin : begin + (last - first - 1) * step + 1 : step]
