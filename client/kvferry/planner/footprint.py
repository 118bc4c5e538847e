"""Checks that a request's descriptors touch only the request's blocks.

The planner goes from block ids to addresses. Here addresses are divided back into block ids, which must belong to the
request, and both ends of a descriptor must lie in blocks that hold the same tokens. For that the memory of planes is
seen as *slabs*, stretches of blocks of one stride. This uses none of the planner's arithmetic, so it finds an address
that wrapped into another block of the same region (R7). It does not find a wrong position within the right block.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import InvalidField
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import ADDRESS_LIMIT, MemoryKind, Plane
from kvferry.planner.coverage import PlaneRead
from kvferry.planner.descriptors import Addresses, Descriptors
from kvferry.planner.request_blocks import GroupRequest, NeededBlocks
from kvferry.planner.rows import Int64s

Bools: TypeAlias = npt.NDArray[np.bool_]
_Space: TypeAlias = tuple[MemoryKind, int]

EXPECTED = "of the request's blocks, to the blocks of the same tokens"

AT_ONCE = 1 << 18
"""An effort (`Footprint.check`) up to which a check takes about 0.1 s at most. Where a hundred planes overlap, the
check of a long request takes 15 s and more (measured)."""


@dataclass(frozen=True, slots=True, eq=False)
class Slabs:
    """Slabs that do not overlap, by rising address: ``uint64[n]`` each. Of the `stride` from block to block, `window`
    bytes belong to the block; `span` are the bytes of all blocks within one cycle. `cycles` has (bytes, used bytes) of
    a cycle of each axis (see `_Slab`), the longest first: a source may declare more cycles than memory holds."""

    begin: Addresses
    end: Addresses
    stride: Addresses
    window: Addresses
    span: Addresses
    cycles: tuple[tuple[Addresses, Addresses], ...]

    def blocks(self, address: Addresses, length: Addresses) -> tuple[Bools, Int64s, Int64s]:
        """Whether each range lies inside one slab and one cycle, and the ids of its first and last block."""
        place = self.at(address)
        begin = self.begin[place]
        # The ranges lie inside regions (`kvferry._transport.bounds`): their ends do not wrap.
        inside = (address >= begin) & (address + length <= self.end[place])
        # Ranges that are not inside may wrap here; their ids are not used.
        first = address - begin
        last = first + length - np.uint64(1)
        for steps, used in self.cycles:
            step = steps[place]
            inside &= first // step == last // step
            first, last = first % step, last % step
            inside &= last < used[place]
        stride = self.stride[place]
        first_block = first // stride
        # Bytes between blocks may belong to blocks of other planes: only a range that begins in a block may end there.
        inside &= first - first_block * stride < self.window[place]
        return inside, first_block.astype(np.int64), (last // stride).astype(np.int64)

    def room(self, address: Addresses) -> Addresses:
        """Bytes from each address to the end of its slab or cycle; 0 for addresses in no slab."""
        place = self.at(address)
        begin, span = self.begin[place], self.span[place]
        offset = address - begin
        for steps, _ in self.cycles:
            offset = offset % steps[place]
        inside = (address >= begin) & (address < self.end[place]) & (offset < span)
        return np.where(inside, span - offset, np.uint64(0))

    def at(self, address: Addresses) -> npt.NDArray[np.intp]:
        """The index of the slab in which, or behind which, each address lies."""
        return np.maximum(np.searchsorted(self.begin, address, side="right"), 1) - 1


def layers_of(planes: Iterable[Plane]) -> tuple[Slabs, ...]:
    """The slabs of planes in layers. Slabs that overlap, which no engine's do, are in different layers."""
    layers: list[list[_Slab]] = []
    ends: list[tuple[int, int]] = []
    for slab in sorted(_slabs(planes), key=lambda slab: slab.begin):
        if ends and ends[0][0] <= slab.begin:
            layer = heapq.heappop(ends)[1]
        else:
            layer = len(layers)
            layers.append([])
        layers[layer].append(slab)
        heapq.heappush(ends, (slab.end, layer))
    return tuple(_arrays(slabs) for slabs in layers)


def _arrays(slabs: Sequence[_Slab]) -> Slabs:
    begin, end, stride, window, span = (
        np.array([getattr(slab, name) for slab in slabs], np.uint64)
        for name in ("begin", "end", "stride", "window", "span")
    )
    # A slab with fewer cycles than another gets some that never end.
    cycles = zip_longest(*(slab.used for slab in slabs), fillvalue=(ADDRESS_LIMIT, ADDRESS_LIMIT))
    pairs = (np.array(pair, np.uint64).T for pair in cycles)
    return Slabs(begin, end, stride, window, span, tuple((steps, used) for steps, used in pairs))


@dataclass(frozen=True, slots=True)
class _Slab:
    """A slab, or several: where an axis of a plane, its units for example, steps further than from block to block, the
    same blocks occur again and again, once per *cycle* of that axis. `cycles` are (bytes, number) of each such axis,
    the longest first."""

    begin: int
    end: int
    stride: int
    blocks: int
    window: int
    cycles: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, plane: Plane) -> _Slab:
        begin, end = plane.extent
        if plane.num_blocks == 1:
            return cls(begin, end, end - begin, 1, end - begin, ())
        # `Plane` allows no two equal strides.
        cycles = [(step, count) for step, count, _ in plane.axes if step > plane.block_stride]
        window = plane.block_extent - sum(step * (count - 1) for step, count in cycles)
        return cls(begin, end, plane.block_stride, plane.num_blocks, window, tuple(cycles))

    @property
    def span(self) -> int:
        return self.window + self.stride * (self.blocks - 1)

    @property
    def used(self) -> tuple[tuple[int, int], ...]:
        found, span = [], self.span
        for step, count in reversed(self.cycles):
            found.append((step, span))
            span += step * (count - 1)
        return tuple(reversed(found))

    def joined(self, other: _Slab) -> _Slab | None:
        """Both as one slab, if their blocks have equal steps and do not overlap; else None."""
        window = max(self.window, other.begin - self.begin + other.window)
        blocks = max(self.blocks, other.blocks)
        if (self.stride, self.cycles) != (other.stride, other.cycles) or window > self.stride:
            return None
        both = _Slab(self.begin, max(self.end, other.end), self.stride, blocks, window, self.cycles)
        return both if all(used <= step for step, used in both.used) else None


def _slabs(planes: Iterable[Plane]) -> list[_Slab]:
    """The slabs of planes. Planes with equal steps, as of layers packed into one storage, are joined into one slab."""
    found: list[_Slab] = []
    for slab in sorted(map(_Slab.of, planes), key=lambda slab: (slab.stride, slab.cycles, slab.begin)):
        joined = found[-1].joined(slab) if found else None
        if joined is not None:
            found.pop()
        found.append(joined or slab)
    return found


class BlockMap:
    """The positions of the blocks of the planes that one rank reads from another. Made once per plan. `source` and
    `destination` have the slabs of each group in each address space, by layer (`layers_of`); `layers` is the most pairs
    of layers in which a descriptor is looked up."""

    def __init__(self, reads: Sequence[PlaneRead]) -> None:
        source: dict[tuple[str, _Space], dict[str, Plane]] = {}
        destination: dict[tuple[str, _Space], dict[str, Plane]] = {}
        for read in reads:
            for side, plane in ((source, read.source), (destination, read.destination)):
                space = (plane.memory_kind, plane.device)
                side.setdefault((read.destination.group, space), {})[plane.name] = plane
        self.source, self.destination = (
            {key: layers_of(planes.values()) for key, planes in side.items()} for side in (source, destination)
        )
        self.layers = sum(
            len(theirs) * len(mine)
            for (group, _), theirs in self.source.items()
            for (own_group, _), mine in self.destination.items()
            if own_group == group
        )


class _RequestBlocks:
    """The blocks of a request on one side: from block ids to their indices in the request."""

    def __init__(self, blocks: NeededBlocks, group: Group) -> None:
        self._ids = blocks.ids
        self._order: npt.NDArray[np.intp] | None = None
        """The indices of `_ids` in the request; None: `_ids` are in the request's order."""
        steps = self._ids[1:] - self._ids[:-1]
        if not bool((steps > 0).all()):
            # Most requests have rising ids. Sorting costs more than everything else here.
            self._ids, self._order = np.unique(self._ids, return_index=True)
        self._first = blocks.first
        # A request has one block of state.
        self.block_tokens = 1 if group.kind is GroupKind.STATE else group.block_tokens
        self.unambiguous = len(self._ids) == len(blocks.ids)
        """Whether no id occurs twice in the request. A source may publish a block twice."""
        breaks = steps != 1
        self._run = np.cumsum(np.concatenate((np.zeros(1, np.int64), breaks))) if breaks.any() else None
        """For each block of the request, the number of its run in memory; None: there is one run."""

    def find(self, first: Int64s, last: Int64s) -> tuple[Bools, Int64s, Int64s]:
        """Whether all ids from `first` to `last` are the request's, and the indices of these two in `_ids`."""
        low = np.searchsorted(self._ids, first)
        high = low + (last - first)
        known = np.less_equal(first, last) & np.less(high, len(self._ids))
        low, high = np.where(known, low, 0), np.where(known, high, 0)
        # `_ids` rises without repetition: if the last id has its expected index, so have all ids before it.
        known &= np.equal(self._ids[high], last)
        return known, low, high

    def one_run(self, low: Int64s, high: Int64s) -> Bools:
        """Whether the blocks from `low` to `high` follow each other in the request as they do in memory."""
        if self._run is None:
            return np.ones(len(low), np.bool_)
        same: Bools = np.equal(self._run[self._indices(low)], self._run[self._indices(high)])
        return same

    def _indices(self, at: Int64s) -> npt.NDArray[np.signedinteger[Any]]:
        return at if self._order is None else self._order[at]

    def token(self, at: Int64s) -> Int64s:
        """The first tokens of the blocks at these indices of `_ids`."""
        tokens: Int64s = (self._indices(at).astype(np.int64) + self._first) * self.block_tokens
        return tokens

    def share_tokens(self, mine: Int64s, other: _RequestBlocks, theirs: Int64s) -> Bools:
        here, there = self.token(mine), other.token(theirs)
        return np.less(here, there + other.block_tokens) & np.less(there, here + self.block_tokens)


class Footprint:
    """The blocks of one request that are read from one rank. Immutable, so thread-safe."""

    def __init__(self, block_map: BlockMap, blocks: Mapping[str, tuple[_RequestBlocks, _RequestBlocks]]) -> None:
        self._map = block_map
        self._blocks = blocks

    def check(self, descriptors: Descriptors, most: float = inf) -> int:
        """Raise `InvalidField` unless every descriptor reads blocks of the request into the blocks of the same tokens.

        The caller has checked that the descriptors lie inside registered regions (`kvferry._transport.bounds`).

        Returns about the number of lookups that the check needs, the effort. If this is above `most`, the descriptors
        are not checked.
        """
        spaces, rows, layers = descriptors.memory.spaces, descriptors, self._map.layers
        effort = layers * len(rows.length)
        if not descriptors.plain:
            effort += layers * len(rows.repeats)
            if effort > most:
                return effort
            # Where a source's planes lie over each other, rows may need a lookup for each run.
            rows = self._irregular(descriptors, *spaces)
            effort += layers * rows.count
        if effort > most:
            return effort
        left = rows.one_by_one()
        while True:
            left = left.rows(self._unknown(left, *spaces))
            if not left.count:
                return effort
            # A descriptor may span planes that are adjacent on both sides: it is checked piece by piece.
            room = np.minimum(
                _room(self._map.source, self._blocks, spaces[0], left.source),
                _room(self._map.destination, self._blocks, spaces[1], left.destination),
            )
            left = _divided(left, room)

    def _irregular(self, every: Descriptors, source_space: _Space, destination_space: _Space) -> Descriptors:
        """The rows that are not right because each run has the same blocks in all rows, and the blocks of the
        runs are right."""
        left = np.arange(len(every.length), dtype=np.int64)
        for theirs, mine, source, destination in self._pairs(source_space, destination_space):
            if not len(left):
                break
            rows = every.rows(left)
            alike, there = _blocks_of(source, rows.source, rows.source_offset, rows)
            alike_here, here = _blocks_of(destination, rows.destination, rows.destination_offset, rows)
            both = alike & alike_here
            more = every.repeats.astype(np.int64) - 1
            found = theirs.find(there, there + more), mine.find(here, here + more)
            if bool(both.any()) and bool(_agree(theirs, mine, *found).all()):
                left = left[~both]
        return every.rows(left)

    def _unknown(self, single: Descriptors, source_space: _Space, destination_space: _Space) -> Int64s:
        """The indices of single descriptors that do not go from blocks of the request to blocks of the same tokens."""
        left = np.arange(single.count, dtype=np.int64)
        for theirs, mine, source, destination in self._pairs(source_space, destination_space):
            if not len(left):
                return left
            length = single.length[left]
            there = _find(theirs, source, single.source[left], length)
            here = _find(mine, destination, single.destination[left], length)
            left = left[~_agree(theirs, mine, there, here)]
        return left

    def _pairs(
        self, source_space: _Space, destination_space: _Space
    ) -> Iterator[tuple[_RequestBlocks, _RequestBlocks, Slabs, Slabs]]:
        """By group and layers: the request's blocks, and the slabs that may hold them, of both sides."""
        for name, (theirs, mine) in self._blocks.items():
            for source in self._map.source.get((name, source_space), ()):
                for destination in self._map.destination.get((name, destination_space), ()):
                    yield theirs, mine, source, destination

    def check_source(self, descriptors: Descriptors) -> None:
        """Raise `InvalidField` unless both ends of every descriptor lie in source blocks of the request: for reads into
        staging memory. Bytes between the ends may belong to other blocks, where units or planes are further apart than
        blocks; they are not copied on."""
        space, _ = descriptors.memory.spaces
        single = descriptors.one_by_one()
        one = np.ones(single.count, np.uint64)
        for ends in (single.source, single.source + single.length - one):
            wrong = np.arange(single.count, dtype=np.int64)
            for name, (theirs, _) in self._blocks.items():
                for slabs in self._map.source.get((name, space), ()):
                    known, _, _ = _find(theirs, slabs, ends[wrong], one[wrong])
                    wrong = wrong[~known]
            _refuse(single, wrong)


def _blocks_of(slabs: Slabs, row: Addresses, offset: Addresses, of: Descriptors) -> tuple[Bools, Int64s]:
    """The rows that have the same blocks in each run, on the side with these addresses, and the first block of each run
    in these rows.

    In such rows all blocks of all runs are those of one slab, at one distance, and the bytes begin at one position in
    the block. So if the lowest run and the highest run lie in one slab, all runs do, in the blocks as many strides away
    as their offsets say: addresses that differ by as many strides as their blocks lie in one cycle.
    """
    ends = [int(offset.argmin()), int((offset + of.repeats * of.length[0]).argmax())]
    address, more = np.add.outer(row, offset[ends]), of.repeats.astype(np.int64) - 1
    inside, first, last = slabs.blocks(address, np.multiply.outer(of.length, of.repeats[ends]))
    place = slabs.at(address)
    right = (inside & (last - first == more[ends])).all(axis=1) & (place[:, 0] == place[:, 1])
    like = int(right.argmax())
    stride = slabs.stride[place[:, 0]]
    right &= (first == first[like]).all(axis=1) & (stride == stride[like])
    # Only whole blocks go on in the next block.
    right &= (of.length == stride) | (not more.any())
    steps, rest = np.divmod(offset - offset[ends[0]], stride[like])
    blocks: Int64s = first[like, 0] + steps.astype(np.int64)
    return right & bool(not rest.any() and blocks[ends[1]] == first[like, 1]), blocks


def _agree(
    theirs: _RequestBlocks,
    mine: _RequestBlocks,
    there: tuple[Bools, Int64s, Int64s],
    here: tuple[Bools, Int64s, Int64s],
) -> Bools:
    """Whether blocks found by `_RequestBlocks.find` on both sides are the request's, and of the same tokens."""
    (known, low, high), (known_here, low_here, high_here) = there, here
    right = known & known_here & mine.one_run(low_here, high_here)
    if theirs.unambiguous:
        right &= theirs.one_run(low, high)
        right &= mine.share_tokens(low_here, theirs, low) & mine.share_tokens(high_here, theirs, high)
    return right


def _divided(single: Descriptors, room: Addresses) -> Descriptors:
    """Each descriptor cut in two after `room` bytes; raises `InvalidField` where that leaves it whole."""
    _refuse(single, np.flatnonzero((room == 0) | (room >= single.length)))
    return Descriptors(
        single.memory,
        np.concatenate((single.source, single.source + room)),
        np.concatenate((single.destination, single.destination + room)),
        np.concatenate((room, single.length - room)),
    )


def _refuse(single: Descriptors, wrong: Int64s) -> None:
    if len(wrong):
        at = int(wrong[0])
        length, source, destination = (int(column[at]) for column in (single.length, single.source, single.destination))
        raise InvalidField("descriptors", f"{length} bytes at {source:#x} to {destination:#x}", EXPECTED)


def _room(
    layers: Mapping[tuple[str, _Space], tuple[Slabs, ...]], groups: Iterable[str], space: _Space, address: Addresses
) -> Addresses:
    """Bytes from each address to the end of its slab, of any group; 0 for addresses in no slab."""
    least = np.full(len(address), ADDRESS_LIMIT, np.uint64)
    for name in groups:
        for slabs in layers.get((name, space), ()):
            room = slabs.room(address)
            least = np.where(room > 0, np.minimum(least, room), least)
    return np.where(least == ADDRESS_LIMIT, np.uint64(0), least)


def _find(blocks: _RequestBlocks, slabs: Slabs, address: Addresses, length: Addresses) -> tuple[Bools, Int64s, Int64s]:
    inside, first, last = slabs.blocks(address, length)
    known, low, high = blocks.find(first, last)
    return inside & known, low, high


def request_blocks(
    source_groups: Mapping[str, Group], groups: Mapping[str, Group], needed: Mapping[str, GroupRequest]
) -> dict[str, tuple[_RequestBlocks, _RequestBlocks]]:
    """The blocks of one request on both sides, by group; all footprints of the request share them."""
    return {
        name: (_RequestBlocks(wanted.source, source_groups[name]), _RequestBlocks(wanted.destination, groups[name]))
        for name, wanted in needed.items()
    }
