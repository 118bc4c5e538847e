"""Which states a lane moves for a request, as few cuts with many blocks each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.blocks import BlockIds, Blocks
from kvferry.errors import InvalidField
from kvferry.geometry import GroupKind
from kvferry.lanes import Cut, Int64s, Lane, StateLayout


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The same cut of many blocks: ``source[i]`` is read into ``destination[i]``, block ids, ``int32[n]`` each."""

    cut: Cut
    source: BlockIds
    destination: BlockIds


def segments(
    lane: Lane, source: Blocks, destination: Blocks, tokens: tuple[int, int], asked_from: int
) -> list[Segment]:
    """The segments of a lane.

    Args:
        lane: the lane.
        source, destination: checked blocks that hold `tokens`.
        tokens: the tokens to move, ``[a, b)``; ignored for state groups.
        asked_from: the first token that may be written; the start of a window rounds down to it at most.

    Raises:
        InvalidField: the start lies inside what may not be cut.
    """
    if lane.group.kind is GroupKind.STATE:
        return [Segment(Cut(0, 0, lane.source.held_per_block), source.ids, destination.ids)]
    begin, end = _states(lane, tokens, asked_from)
    begin, end = _striped(lane, begin, end)
    if begin >= end:
        return []
    first_source = source.first_token // _block_tokens(lane, lane.source)
    first_destination = destination.first_token // _block_tokens(lane, lane.destination)
    if lane.same_tokens:
        low, high = lane.source.held_before(begin), lane.source.held_before(end)
        if low >= high:
            return []
        if lane.source.held_per_block == lane.destination.held_per_block:
            return _aligned(lane, low, high, source.ids, destination.ids, first_source, first_destination)
        return _recut(lane, low, high, source.ids, destination.ids, first_source, first_destination)
    return _resharded(lane, begin, end, source.ids, destination.ids, first_source, first_destination)


def _block_tokens(lane: Lane, layout: StateLayout) -> int:
    return int(layout.block_states * lane.tokens_per_state)


def _states(lane: Lane, tokens: tuple[int, int], asked_from: int) -> tuple[int, int]:
    """Tokens as global states, the end rounded up and the start checked against the granule (DESIGN §5, Tokens)."""
    per_state = lane.tokens_per_state
    turn = lane.source.shard.count if lane.same_tokens and lane.source.shard.count > 1 else 1
    step = lane.granule * turn
    begin = int(tokens[0] / per_state // step) * step
    end = -int(-(tokens[1] / per_state) // step) * step
    if begin * per_state < asked_from and begin * per_state != tokens[0]:
        cut = step * per_state
        raise InvalidField(
            "tokens", tokens, f"a start at a multiple of {cut} tokens: {lane.group.name!r} cannot be cut finer"
        )
    return begin, end


def _striped(lane: Lane, begin: int, end: int) -> tuple[int, int]:
    if lane.stripe.whole:
        return begin, end
    step = lane.stripe_states
    first = begin // step
    low, high = lane.stripe.blocks(-(-end // step) - first)
    return max(begin, (first + low) * step), min(end, (first + high) * step)


def _aligned(
    lane: Lane, low: int, high: int, source: BlockIds, destination: BlockIds, first_source: int, first_destination: int
) -> list[Segment]:
    """Equal blocks on both sides: a partial first block, whole blocks, a partial last block."""
    held = lane.source.held_per_block
    found = []
    while low < high:
        block, at = divmod(low, held)
        count = min(high - low, held - at)
        blocks = (high - low) // held if at == 0 and count == held else 1
        here, there = block - first_source, block - first_destination
        found.append(Segment(Cut(at, at, count), source[here : here + blocks], destination[there : there + blocks]))
        low += count * blocks
    return found


def _recut(
    lane: Lane, low: int, high: int, source: BlockIds, destination: BlockIds, first_source: int, first_destination: int
) -> list[Segment]:
    """Different blocks, the same tokens: cut at every block boundary of either side."""
    theirs, mine = lane.source.held_per_block, lane.destination.held_per_block
    edges = np.unique(
        np.concatenate(
            (
                np.array([low, high], np.int64),
                np.arange(low // theirs + 1, -(-high // theirs), dtype=np.int64) * theirs,
                np.arange(low // mine + 1, -(-high // mine), dtype=np.int64) * mine,
            )
        )
    )
    begin, count = edges[:-1], np.diff(edges)
    return _by_cut(
        begin % theirs,
        begin % mine,
        count,
        source[begin // theirs - first_source],
        destination[begin // mine - first_destination],
    )


def _resharded(
    lane: Lane, begin: int, end: int, source: BlockIds, destination: BlockIds, first_source: int, first_destination: int
) -> list[Segment]:
    """Different token shards: enumerate the states that both hold and keep those together that are so on both sides."""
    state = np.arange(begin, end, dtype=np.int64)
    state = state[_held(state, lane.source) & _held(state, lane.destination)]
    if len(state) == 0:
        return []
    source_at, destination_at = _place(state, lane.source), _place(state, lane.destination)
    theirs, mine = lane.source.held_per_block, lane.destination.held_per_block
    # A new piece begins where either side jumps or enters another block.
    new = (np.diff(source_at) != 1) | (np.diff(destination_at) != 1)
    new |= (np.diff(source_at // theirs) != 0) | (np.diff(destination_at // mine) != 0)
    first = np.concatenate(([0], np.flatnonzero(new) + 1))
    count = np.diff(np.concatenate((first, [len(state)])))
    source_at, destination_at = source_at[first], destination_at[first]
    return _by_cut(
        source_at % theirs,
        destination_at % mine,
        count,
        source[source_at // theirs - first_source],
        destination[destination_at // mine - first_destination],
    )


def _held(state: Int64s, layout: StateLayout) -> npt.NDArray[np.bool_]:
    shard = layout.shard
    return np.equal(state // shard.interleave % shard.count, shard.index)


def _place(state: Int64s, layout: StateLayout) -> Int64s:
    """Index of held states among the held states of the request."""
    shard = layout.shard
    return state // (shard.interleave * shard.count) * shard.interleave + state % shard.interleave


def _by_cut(
    source_at: Int64s, destination_at: Int64s, count: Int64s, source: BlockIds, destination: BlockIds
) -> list[Segment]:
    """Pieces gathered by their cut."""
    cuts, which = np.unique(np.stack((source_at, destination_at, count)), axis=1, return_inverse=True)
    which = which.ravel()
    found = []
    for index, (at, to, states) in enumerate(cuts.T.tolist()):
        chosen = which == index
        found.append(Segment(Cut(at, to, states), source[chosen], destination[chosen]))
    return found
