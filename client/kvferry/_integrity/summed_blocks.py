"""Integrity mode: the blocks that have sums, and the positions of their summed states on either side.

The design (`kvferry.planner.checksum` defines the sum):

- A *sum* belongs to (source rank, plane, block, unit). The block is named by its *block index*, counted in the source's
  blocks from the request's first token (`places` here and in the protos). Its published states are summed. A block
  whose published tokens end, or begin, inside a granule or a state has no sum: the rest of that granule may still
  change.
- A source rank sums the blocks of a publication in its own memory, when its engine calls `Cache.checksum` after the
  publish, and sends the sums to the home in pages. The publish announces the sums, and a rank's last page is marked, so
  a reader knows which sums to wait for.
- The home keeps the sums with the publication, within a limit, until the publication is released. A home that restarts
  has lost them, and they are not sent again: the blocks count as unverified.
- A reader, once all bytes have arrived and before the read counts, asks for the sums of the blocks that it holds whole,
  sums its own memory, and compares. Blocks that have no sum, were read in part (a prefix was there already, or tokens
  are sharded differently) or were left out by sampling count as unverified: neither an error nor a success.
- The positions of states at the destination are computed here from the geometries and block tables alone, not from the
  descriptors that moved the states, so that mistakes in descriptors are found as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvferry._arguments import described, seconds
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import Blocks
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import Interval, Plane
from kvferry.planner.checksum import sampled
from kvferry.planner.lane import Lane, span
from kvferry.planner.request_blocks import GroupRequest
from kvferry.planner.rows import Int64s
from kvferry.planner.token_line import AlikeBlocks, StateLayout, StateRun, rows_alike, states_in_blocks, whole_granules

STATES_AT_ONCE = 1 << 18
"""States that are handled together, so that a long request does not fill the memory."""


@dataclass(frozen=True, slots=True)
class IntegrityOptions:
    """Whether sums of published blocks are made and compared.

    Attributes:
        mode: "off": nothing is computed, sent or asked; "sampled": of a share of the blocks; "full": of all.
        rate: the share for "sampled".
        patience: seconds that a read waits for announced sums.
    """

    mode: Literal["off", "sampled", "full"] = "off"
    rate: float = 0.1
    patience: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in ("off", "sampled", "full"):
            raise InvalidField("mode", self.mode, "off, sampled or full")
        if isinstance(self.rate, bool) or not isinstance(self.rate, (int, float)) or not 0 < self.rate <= 1:
            raise InvalidField("rate", described(self.rate), "more than 0.0, at most 1.0")
        seconds("patience", self.patience, zero=True)

    @property
    def share(self) -> float:
        return {"off": 0.0, "sampled": self.rate, "full": 1.0}[self.mode]


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of comparing the sums of one read, counted in units of source blocks of planes: `verified` were
    compared and equal; `unverified` were read in part, have no sum, or were not sampled."""

    verified: int
    unverified: int


def published_states(layout: StateLayout, plane: Plane, group: Group, blocks: Blocks) -> tuple[int, int]:
    """The held states of a request that have sums, as a range on the line of held states: all published states except
    those of blocks whose published tokens end inside a granule. All arguments are the source's."""
    if group.kind is GroupKind.STATE:
        return 0, len(blocks.ids) * layout.held_per_block
    end, per_block = blocks.end_token, layout.held_per_block
    if end is None:
        end = (blocks.first_token // group.block_tokens + len(blocks.ids)) * group.block_tokens
    touched_begin, begin = whole_granules(layout, plane, blocks.first_token)
    stop, touched_stop = whole_granules(layout, plane, end)
    if touched_begin < begin:
        begin = (touched_begin // per_block + 1) * per_block
    if touched_stop > stop:
        stop = stop // per_block * per_block
    return begin, max(begin, stop)


def source_blocks(
    plane: Plane, group: Group, blocks: Blocks, publication: int, share: float
) -> tuple[AlikeBlocks, ...]:
    """The blocks of a publication that a source rank sums, with their positions at the source."""
    layout = StateLayout.of(plane, group)
    published = published_states(layout, plane, group, blocks)
    return states_in_blocks(layout, group, blocks, published, lambda indices, _: sampled(publication, indices, share))


def divided(units: Interval, indices: Int64s, most: int) -> Iterator[tuple[Interval, slice]]:
    """Divide the sums of these units and blocks into parts of at most `most`: some units, some rows of `indices`."""
    step = min(len(units), most)
    rows = most // step
    for unit in range(units.begin, units.end, step):
        for first in range(0, len(indices), rows):
            yield Interval(unit, min(unit + step, units.end)), slice(first, first + rows)


def held_blocks(
    lane: Lane, needed: GroupRequest, source_group: Group, granted: Blocks, publication: int, share: float
) -> Iterator[tuple[tuple[AlikeBlocks, ...], int]]:
    """A lane's source blocks that its reader has read, a stretch of the request at a time: those that the reader holds
    whole and that are sampled, with their positions at the destination, and the number of the others. `needed` is the
    moved part of the lane's group, `granted` the blocks as published; for `publication` and `share` see `sampled`."""
    source, destination, per_block = lane.source, lane.destination, lane.source.held_per_block
    published = published_states(source, lane.reads[0].source, source_group, granted)
    moved = _moved(lane, needed)
    all_indices = np.arange(moved[0] // per_block, -(-moved[1] // per_block), dtype=np.int64)
    at_once = max(1, STATES_AT_ONCE // per_block)
    for first in range(0, len(all_indices), at_once):
        indices = all_indices[first : first + at_once]
        index = indices[:, None] * per_block + np.arange(per_block, dtype=np.int64)
        summed = (index >= published[0]) & (index < published[1])
        got = (index >= moved[0]) & (index < moved[1])
        there = index
        if not lane.line.same_tokens:
            states = source.held_state(index)
            got &= destination.holds(states)
            there = destination.held_indices(states)
        chosen = summed.any(axis=1) & (got | ~summed).all(axis=1) & sampled(publication, indices, share)
        others = int(np.count_nonzero(got.any(axis=1) & ~chosen))
        of = (indices[chosen], there[chosen], summed[chosen])
        yield tuple(_alike(*of, lane, needed)) if bool(chosen.any()) else (), others


def _moved(lane: Lane, needed: GroupRequest) -> tuple[int, int]:
    """The held states of the source that the lane has moved, including those that the destination does not hold."""
    if lane.group.kind is GroupKind.STATE:
        begin, end = lane.stripe.blocks(1)
        return 0, lane.source.held_per_block if begin < end else 0
    begin, end = span(lane, needed)
    if lane.line.same_tokens:
        return begin, end
    return lane.source.held_before(begin), lane.source.held_before(end)


def _alike(
    indices: Int64s, there: Int64s, summed: npt.NDArray[np.bool_], lane: Lane, needed: GroupRequest
) -> Iterator[AlikeBlocks]:
    """Gather source blocks by the positions of their states in the destination's blocks. `there` has the index of each
    state on the destination's line of held states, ``int64[n, states]``; `summed`, whether the state counts, as at
    least one state of each block does."""
    per_block = lane.destination.held_per_block
    first = there[np.arange(len(there)), summed.argmax(axis=1)] // per_block
    # Counted from the destination block of the first state, so that the pattern repeats from block to block.
    pattern = np.where(summed, there - first[:, None] * per_block, -1)
    for alike in rows_alike(pattern):
        states = pattern[alike[0]]
        states = states[states >= 0]
        block, at = np.divmod(states, per_block)
        breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(block) != 0)) + 1
        starts = np.concatenate((np.zeros(1, np.int64), breaks))
        counts = np.diff(np.concatenate((starts, [len(states)])))
        runs = tuple(StateRun(int(a), int(c)) for a, c in zip(at[starts], counts, strict=True))
        ids = needed.destination.ids[first[alike][:, None] + block[starts] - needed.destination.first]
        yield AlikeBlocks(indices[alike], runs, ids)
