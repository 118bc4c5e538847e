"""Checks that what a request reads and writes lies in the request's blocks.

The planner goes from block ids to addresses. Here addresses are divided back into block ids, which must belong to the
request and hold the same tokens on both sides; and rows must lie in block 0 of the lane's planes. This uses the fields
of the planes and none of the planner's arithmetic, so it finds an address that wrapped into another block of the same
region (R7). It does not find a wrong position within the right block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import InvalidField
from kvferry.geometry.plane import ADDRESS_LIMIT, Plane
from kvferry.planner.descriptors import Addresses, Descriptors
from kvferry.planner.request_blocks import GroupRequest, NeededBlocks
from kvferry.planner.rows import Int64s, RowExtent
from kvferry.planner.token_line import Segment, StateLayout

Bools: TypeAlias = npt.NDArray[np.bool_]

EXPECTED = "of the request's blocks, to the blocks of the same tokens"


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The bytes of block 0 of some planes: stretches ``[begin, end)`` that do not touch, by rising address. Blocks are
    `stride` bytes apart."""

    stride: int
    begin: Int64s
    end: Int64s

    @classmethod
    def of(cls, planes: Iterable[Plane], layout: StateLayout) -> Windows:
        """The windows of planes of one layout."""
        begins, ends = [], []
        for plane in planes:
            # `coverage` limits the number of places: a source declares what it likes.
            apart, places = plane.apart, np.full(1, plane.base, np.int64)
            for step, count in apart:
                places = np.add.outer(places, np.arange(count, dtype=np.int64) * step).ravel()
            begins.append(places)
            ends.append(places + plane.block_extent - sum(step * (count - 1) for step, count in apart))
        order = np.argsort(starts := np.concatenate(begins), kind="stable")
        starts, reached = starts[order], np.maximum.accumulate(np.concatenate(ends)[order])
        cuts = np.flatnonzero(starts[1:] > reached[:-1])
        begin, end = starts[np.append(0, cuts + 1)], reached[np.append(cuts, len(reached) - 1)]
        # Where there is one block, none is further on, and its stride means nothing.
        return cls(layout.block_stride if layout.num_blocks > 1 else ADDRESS_LIMIT - 1, begin, end)

    def room(self, address: Int64s) -> Int64s:
        """Bytes from each address to the end of its stretch; 0 or less for addresses in none."""
        place = np.searchsorted(self.begin, address, side="right") - 1
        return np.where(place >= 0, self.end[place] - address, 0)


class _RequestBlocks:
    """The blocks of a request on one side: from block ids to their indices in the request."""

    def __init__(self, blocks: NeededBlocks) -> None:
        self._ids = blocks.ids
        self._order: Int64s | None = None
        """The indices of `_ids` in the request; None: `_ids` are in the request's order."""
        steps = self._ids[1:] - self._ids[:-1]
        if not bool((steps > 0).all()):
            # Most requests have rising ids. Sorting costs more than everything else here.
            self._ids, order = np.unique(self._ids, return_index=True)
            self._order = order.astype(np.int64)
        self._first = blocks.first
        self.block_tokens = blocks.block_tokens
        self.unambiguous = len(self._ids) == len(blocks.ids)
        """Whether no id occurs twice in the request. A source may publish a block twice."""
        breaks = steps != 1
        self._run = np.cumsum(np.concatenate((np.zeros(1, np.int64), breaks))) if breaks.any() else None
        """For each block of the request, the number of its run in memory; None: there is one run."""

    def find(self, first: Int64s, last: Int64s) -> tuple[Bools, Int64s, Int64s]:
        """Whether all ids from `first` to `last` are the request's, one after the other, and the indices of these two
        in the request."""
        low = np.searchsorted(self._ids, first)
        high = low + (last - first)
        known = np.less_equal(first, last) & np.less(high, len(self._ids))
        low, high = np.where(known, low, 0), np.where(known, high, 0)
        # `_ids` rises without repetition: if the last id has its expected index, so have all ids before it.
        known &= np.equal(self._ids[high], last)
        if self._order is not None:
            low, high = self._order[low], self._order[high]
        if self._run is not None and self.unambiguous:
            known &= np.equal(self._run[low], self._run[high])
        return known, low, high

    def token(self, index: Int64s) -> Int64s:
        """The first tokens of the blocks at these indices of the request."""
        return np.multiply(index + self._first, self.block_tokens)


class Footprint:
    """The blocks of one request in one group. Immutable."""

    def __init__(self, needed: GroupRequest) -> None:
        self._theirs, self._mine = _RequestBlocks(needed.source), _RequestBlocks(needed.destination)

    def check(self, theirs: Windows, mine: Windows, made: Descriptors) -> None:
        """Raise `InvalidField` unless all descriptors read blocks of the request into the blocks of the same tokens, in
        planes with these windows."""
        there = _blocks_of(theirs, made, made.source, made.source_offset)
        here = _blocks_of(mine, made, made.destination, made.destination_offset)
        if there is None or here is None or not self._agree(there, here):
            where = f"{int(made.source[0]):#x} to {int(made.destination[0]):#x}"
            raise InvalidField("descriptors", f"{made.count} from {where} on", EXPECTED)

    def check_staged(
        self, theirs: Windows, extents: Sequence[RowExtent], blocks: Int64s, pieces: Sequence[Segment]
    ) -> None:
        """Raise `InvalidField` unless the `blocks` read into staging memory are the request's, both ends of each row
        lie in them, and the `pieces`, whose sources are indices into `blocks`, go on to the blocks of the same tokens.
        Bytes between the ends may belong to other blocks, where units or planes are further apart than blocks; they are
        not copied on."""
        ends = np.array([(extent.source, extent.source + extent.length - 1) for extent in extents], np.int64)
        right = bool((theirs.room(ends) > 0).all() and self._theirs.find(blocks, blocks)[0].all())
        for piece in pieces:
            source, destination = blocks[piece.source], piece.destination
            right = right and self._agree((source, source), (destination, destination))
        if not right:
            raise InvalidField("staged rows", f"{len(extents)} from {extents[0].source:#x} on", EXPECTED)

    def _agree(self, there: tuple[Int64s, Int64s], here: tuple[Int64s, Int64s]) -> bool:
        """Whether runs of blocks, by first and last id on both sides, are the request's, and of the same tokens."""
        known, low, high = self._theirs.find(*there)
        known_here, low_here, high_here = self._mine.find(*here)
        right = bool(known.all() and known_here.all())
        if right and self._theirs.unambiguous:
            for index, own_index in ((low, low_here), (high, high_here)):
                token, own = self._theirs.token(index), self._mine.token(own_index)
                overlap = (own < token + self._theirs.block_tokens) & (token < own + self._mine.block_tokens)
                right = right and bool(overlap.all())
        return right


def _blocks_of(windows: Windows, made: Descriptors, row: Addresses, offset: Addresses) -> tuple[Int64s, Int64s] | None:
    """The first and the last block of each run, on the side with these addresses; None if a row does not lie in these
    blocks."""
    # A number that wrapped is negative here, and belongs to no block.
    rows, offsets = row.view(np.int64), offset.view(np.int64)
    length, repeats = made.length.view(np.int64), made.repeats.view(np.int64)
    longest, room = int(length.max()), windows.room(rows)
    first, at = np.divmod(offsets, windows.stride)
    if not at.any() and bool((repeats == 1).all()) and bool((length <= room).all()):
        return first, first
    # Runs of several states or blocks, which the rows have to hold without holes.
    end = at + longest * repeats
    last = first + (end - 1) // windows.stride
    needed = windows.stride if bool((last > first).any()) else int(end.max())
    return (first, last) if bool((room >= needed).all()) else None
