"""Which states a lane moves for a request, as few cuts with many blocks each.

The pieces of one period of the lane's line repeat, so those of a request of any length are made by slicing its block
ids; only the two ends of the request are enumerated.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvferry.errors import InvalidField
from kvferry.geometry.model import GroupKind
from kvferry.planner.lane import Lane
from kvferry.planner.request_blocks import GroupRequest, NeededBlocks
from kvferry.planner.rows import Cut, Int64s


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
    for alike in line.period_pieces:
        # The places in a block of either side tell the place in the period: there is one piece of each cut.
        (place,), (own_place,) = alike.source_block.tolist(), alike.destination_block.tolist()
        source = _repeated(needed.source, place, period // line.source_step, first, last)
        destination = _repeated(needed.destination, own_place, period // line.destination_step, first, last)
        found.append(Segment(alike.cut, source, destination))
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
    if lane.line.same_tokens:
        first, last = lane.source.held_before(begin), lane.source.held_before(end)
    else:
        # Interleaves are multiples of the granule (`coverage`), so that a granule is one on both sides.
        first, last = begin, end
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
        state = state // lane.granule * lane.granule
    return state * lane.tokens_per_state


def _torn(lane: Lane, needed: GroupRequest, tokens: Fraction) -> InvalidField:
    what = f"a multiple of {tokens} tokens: group {lane.group.name!r} cannot be cut finer"
    return InvalidField("first token", needed.floor, what)


def _striped(lane: Lane, begin: int, end: int) -> tuple[int, int]:
    """The lane's stripe of states ``[begin, end)``."""
    if lane.stripe.whole:
        return begin, end
    step = lane.stripe_states
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
            alike.cut,
            needed.source.ids[alike.source_block - skipped],
            needed.destination.ids[alike.destination_block - own_skipped],
        )
        for alike in line.pieces(begin - origin * line.period, end - origin * line.period)
    ]


def _repeated(blocks: NeededBlocks, place: int, step: int, first: int, last: int) -> Int64s:
    """Ids of the block at `place` of every period from `first` to before `last`; a period has `step` blocks."""
    begin = first * step + place - blocks.first
    return blocks.ids[begin : begin + (last - first - 1) * step + 1 : step]
