"""Checks that a request's descriptors touch only the request's blocks.

The planner goes from block ids to addresses. Here every address is divided back into a block id, which must belong to
the request, and both ends of a descriptor must lie in blocks that hold the same tokens. This uses none of the planner's
arithmetic, so it finds an address that wrapped into another block of the same region (R7). It does not find a wrong
position within the right block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import InvalidField
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import ADDRESS_LIMIT, MemoryKind, Plane
from kvferry.planner.coverage import PlaneRead
from kvferry.planner.descriptors import (
    Addresses,
    Descriptors,
    DescriptorTable,
    Indices,
    PreparedDescriptors,
    RawDescriptors,
)
from kvferry.planner.request_blocks import GroupRequest, NeededBlocks
from kvferry.planner.rows import Int64s
from kvferry.planner.slabs import Bools, Slabs, layers_of

_Space: TypeAlias = tuple[MemoryKind, int]

EXPECTED = "of the request's blocks, to the blocks of the same tokens"
NOWHERE = -(1 << 62)
"""The first token of a block outside the request: far from every token."""

AT_ONCE = 1 << 18
"""An effort (`Footprint.effort`) up to which a check takes about 0.1 s at most. Where a hundred planes overlap, the
check of a long request takes 15 s and more (measured)."""

BY_ID_LIMIT = 1 << 23
"""If all block ids are below this, they are looked up in a table; else they are searched for."""


class BlockMap:
    """The positions of the blocks of the planes that one rank reads from another. Made once per plan. `source` and
    `destination` have the slabs of each group in each address space, by layer (`layers_of`); `layers` is the most pairs
    of layers in which a descriptor by address is looked up."""

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
        self._groups = sorted({read.destination.group for read in reads})
        self.layers = sum(
            len(theirs) * len(mine)
            for (group, _), theirs in self.source.items()
            for (own_group, _), mine in self.destination.items()
            if own_group == group
        )
        self._tables: dict[DescriptorTable, tuple[_Entries, _Entries]] = {}

    def table(self, table: DescriptorTable) -> tuple[_Entries, _Entries]:
        """The entries of a table, of the source and of the destination. Kept like the plan's tables."""
        known = self._tables.get(table)
        if known is None:
            theirs, mine = table.memory.spaces
            known = self._tables[table] = (
                self._entries(self.source, theirs, table.source, table.source_first),
                self._entries(self.destination, mine, table.destination, table.destination_first),
            )
        return known

    def _entries(
        self, layers: Mapping[tuple[str, _Space], tuple[Slabs, ...]], space: _Space, rows: Addresses, first: Int64s
    ) -> _Entries:
        count = int(rows[0, 4]) if bool((rows[:, 4] == rows[0, 4]).all()) else 0
        return _Entries(first, count, {group: _rows_of(layers.get((group, space), ()), rows) for group in self._groups})


def _rows_of(layers: tuple[Slabs, ...], rows: Addresses) -> Bools:
    """The rows that begin with block 0 of a slab and step from block to block of this slab."""
    found = np.zeros(len(rows), np.bool_)
    for slabs in layers:
        inside, first, last = slabs.blocks(rows[:, 0], rows[:, 1])
        steps = (rows[:, 4] == 1) | (rows[:, 3] == slabs.stride[slabs.at(rows[:, 0])])
        found |= inside & (first == 0) & (last == 0) & steps
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Entries:
    """The rows of one side of a table, to look up flat indices in: the index of the `first` entry of each row, the
    `count` of entries of every row (0 if rows differ in it), and for each group the rows that are its `blocks`."""

    first: Int64s
    count: int
    blocks: Mapping[str, Bools]

    def rows(self, flat: Indices) -> npt.NDArray[np.signedinteger[Any]]:
        count = self.count
        return np.floor_divide(flat, np.int32(count)) if count else np.searchsorted(self.first, flat, side="right") - 1

    def ids(self, flat: Indices) -> npt.NDArray[np.signedinteger[Any]]:
        return np.remainder(flat, np.int32(self.count)) if self.count else flat - self.first[self.rows(flat)]


class _RequestBlocks:
    """The blocks of a request on one side: from block ids to their indices in the request."""

    def __init__(self, blocks: NeededBlocks, block_tokens: int) -> None:
        self._ids = blocks.ids
        self._order: npt.NDArray[np.intp] | None = None
        """The indices of `_ids` in the request; None: `_ids` are in the request's order."""
        steps = self._ids[1:] - self._ids[:-1]
        if not bool((steps > 0).all()):
            # Most requests have rising ids. Sorting costs more than everything else here.
            self._ids, self._order = np.unique(self._ids, return_index=True)
        self._first = blocks.first
        self.block_tokens = block_tokens
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

    def tokens_of(self, ids: npt.NDArray[np.signedinteger[Any]]) -> Int64s:
        """The first tokens of the blocks with these ids; `NOWHERE` or less for ids outside the request."""
        if self._by_id is None:
            known, low, _ = self.find(ids.astype(np.int64), ids.astype(np.int64))
            return np.where(known, self.token(low), NOWHERE)
        found: Int64s = self._by_id[np.minimum(ids, len(self._by_id) - 1)]
        return found

    @cached_property
    def _by_id(self) -> Int64s | None:
        """`tokens_of` every id up to the highest, and one more; None if the ids are too high."""
        if int(self._ids[-1]) >= BY_ID_LIMIT:
            return None
        tokens = np.full(int(self._ids[-1]) + 2, NOWHERE, np.int64)
        tokens[self._ids] = self.token(np.arange(len(self._ids), dtype=np.int64))
        return tokens

    def share_tokens(self, mine: Int64s, other: _RequestBlocks, theirs: Int64s) -> Bools:
        here, there = self.token(mine), other.token(theirs)
        return np.less(here, there + other.block_tokens) & np.less(there, here + self.block_tokens)


class Footprint:
    """The blocks of one request that are read from one rank. Immutable, so thread-safe."""

    def __init__(self, block_map: BlockMap, blocks: Mapping[str, tuple[_RequestBlocks, _RequestBlocks]]) -> None:
        self._map = block_map
        self._blocks = blocks

    def effort(self, descriptors: Descriptors) -> int:
        """The work of `check`: about the number of descriptors that it looks up (`AT_ONCE`)."""
        # Indices are looked up directly, even where planes overlap.
        prepared = isinstance(descriptors, PreparedDescriptors)
        return descriptors.count // 16 if prepared else descriptors.count * self._map.layers

    def check(self, descriptors: Descriptors) -> None:
        """Raise `InvalidField` unless every descriptor reads blocks of the request into the blocks of the same tokens.

        The caller has checked that the descriptors lie inside registered regions (`kvferry._transport.bounds`).
        """
        if isinstance(descriptors, PreparedDescriptors):
            self._check_prepared(descriptors)
        else:
            self._check_raw(descriptors)

    def _check_raw(self, raw: RawDescriptors) -> None:
        left, (theirs, mine) = raw, raw.memory.spaces
        while True:
            left = _at(left, self._unknown(left, theirs, mine))
            if not left.count:
                return
            # A descriptor may span planes that are adjacent on both sides: it is checked piece by piece.
            room = np.minimum(
                _room(self._map.source, self._blocks, theirs, left.source),
                _room(self._map.destination, self._blocks, mine, left.destination),
            )
            left = self._divided(left, room)

    def _unknown(self, raw: RawDescriptors, source_space: _Space, destination_space: _Space) -> Int64s:
        """The indices of descriptors that do not go from blocks of the request to the blocks of the same tokens."""
        left = np.arange(raw.count, dtype=np.int64)
        for name, (theirs, mine) in self._blocks.items():
            for source in self._map.source.get((name, source_space), ()):
                for destination in self._map.destination.get((name, destination_space), ()):
                    if not len(left):
                        return left
                    length = raw.length[left]
                    known, low, high = _find(theirs, source, raw.source[left], length)
                    known_here, low_here, high_here = _find(mine, destination, raw.destination[left], length)
                    right = known & known_here & mine.one_run(low_here, high_here)
                    if theirs.unambiguous:
                        right &= theirs.one_run(low, high)
                        right &= mine.share_tokens(low_here, theirs, low) & mine.share_tokens(high_here, theirs, high)
                    left = left[~right]
        return left

    def _divided(self, raw: RawDescriptors, room: Addresses) -> RawDescriptors:
        """Each descriptor cut in two after `room` bytes; raises `InvalidField` where that leaves it whole."""
        self._refuse(raw, np.flatnonzero((room == 0) | (room >= raw.length)))
        return RawDescriptors(
            raw.memory,
            np.concatenate((raw.source, raw.source + room)),
            np.concatenate((raw.destination, raw.destination + room)),
            np.concatenate((room, raw.length - room)),
        )

    def _check_prepared(self, prepared: PreparedDescriptors) -> None:
        entries = self._map.table(prepared.table)
        grids = prepared.grids
        if sum(rows * blocks for rows, blocks in grids) != prepared.count:
            # The hint is absent or wrong.
            grids = ((1, prepared.count),)
        begin = 0
        for rows, blocks in grids:
            part = slice(begin, begin + rows * blocks)
            begin = part.stop
            source, destination = prepared.source[part], prepared.destination[part]
            if not self._right_by_edges(entries, source, destination, rows):
                self._check_each(entries, source, destination)

    def _right_by_edges(
        self, entries: tuple[_Entries, _Entries], source: Indices, destination: Indices, rows: int
    ) -> bool:
        """Whether indices are right because their first row and first column are, and every other row has the blocks of
        the first row. False: unknown."""
        if rows < 2 or len(source) < rows or not all(of.count for of in entries):
            return False
        edges = []
        for of, flat in zip(entries, (source, destination), strict=True):
            grid = flat.reshape(rows, -1)
            # The first row lies in one row of the table, the first column in one block, and rows of the table are
            # equally long. Each index is as far from its row's first index as the index above it, in the first row,
            # is from the first row's. So it lies in the same row of the table as its row's first index, and in the
            # same block as the index above it.
            firsts, in_rows = of.ids(grid[:, 0]), of.rows(grid[0])
            if not ((firsts == firsts[0]).all() and (in_rows == in_rows[0]).all()):
                return False
            if not np.equal(grid - grid[:, :1], grid[0] - grid[0, 0]).all():
                return False
            edges.append(np.concatenate((grid[0], grid[:, 0])))
        return any(self._right(name, entries, *edges).all() for name in self._blocks if name in entries[0].blocks)

    def _check_each(self, entries: tuple[_Entries, _Entries], source: Indices, destination: Indices) -> None:
        for name in self._blocks:
            if len(source) and name in entries[0].blocks:
                # Descriptors outside this group may be of another group.
                wrong = ~self._right(name, entries, source, destination)
                source, destination = source[wrong], destination[wrong]
        if len(source):
            value = f"index {int(source[0])} to index {int(destination[0])}"
            raise InvalidField("descriptors", value, EXPECTED)

    def _right(self, group: str, entries: tuple[_Entries, _Entries], source: Indices, destination: Indices) -> Bools:
        """The indices that go from blocks of the request, in a group, to the blocks of the same tokens."""
        theirs, mine = self._blocks[group]
        there = theirs.tokens_of(entries[0].ids(source))
        here = mine.tokens_of(entries[1].ids(destination))
        right: Bools = here > NOWHERE
        if theirs.unambiguous:
            right &= np.less(here, there + theirs.block_tokens)
            right &= np.less(there, here + mine.block_tokens)
        else:
            right &= there > NOWHERE
        for of, flat in zip(entries, (source, destination), strict=True):
            if not bool(of.blocks[group].all()):
                right &= of.blocks[group][of.rows(flat)]
        return right

    def check_source(self, descriptors: RawDescriptors) -> None:
        """Raise `InvalidField` unless both ends of every descriptor lie in source blocks of the request: for reads into
        staging memory. Bytes between the ends may belong to other blocks, where units or planes are further apart than
        blocks; they are not copied on."""
        space, _ = descriptors.memory.spaces
        one = np.ones(descriptors.count, np.uint64)
        for ends in (descriptors.source, descriptors.source + descriptors.length - one):
            wrong = np.arange(descriptors.count, dtype=np.int64)
            for name, (theirs, _) in self._blocks.items():
                for slabs in self._map.source.get((name, space), ()):
                    known, _, _ = _find(theirs, slabs, ends[wrong], one[wrong])
                    wrong = wrong[~known]
            self._refuse(descriptors, wrong)

    def _refuse(self, raw: RawDescriptors, wrong: Int64s) -> None:
        if len(wrong):
            at = int(wrong[0])
            length, source, destination = (int(column[at]) for column in (raw.length, raw.source, raw.destination))
            value = f"{length} bytes at {source:#x} to {destination:#x}"
            raise InvalidField("descriptors", value, EXPECTED)


def _at(raw: RawDescriptors, chosen: Int64s) -> RawDescriptors:
    return RawDescriptors(raw.memory, raw.source[chosen], raw.destination[chosen], raw.length[chosen])


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

    def of(blocks: NeededBlocks, group: Group) -> _RequestBlocks:
        # A request has one block of state.
        return _RequestBlocks(blocks, 1 if group.kind is GroupKind.STATE else group.block_tokens)

    return {
        name: (of(wanted.source, source_groups[name]), of(wanted.destination, groups[name]))
        for name, wanted in needed.items()
    }
