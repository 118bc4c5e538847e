"""Descriptor tables: rows that NIXL prepares once per peer, for all cuts that the whole blocks of a long request need.

NIXL takes int32 indices and silently truncates larger ones, so every table has fewer than 2**31 entries; more rows go
into another table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvferry.geometry.model import GroupKind
from kvferry.planner.descriptors import Addresses, DescriptorTable, Indices, MemoryPair
from kvferry.planner.lane import ROWS_KEPT, Lane
from kvferry.planner.rows import Cut, Int64s

TABLE_LIMIT = 1 << 31
"""Entries of a table, on either side, stay below this."""

RECURRING_LIMIT = 512
"""Pieces per period up to which a lane's cuts get table rows. With more, descriptors are made by address."""

RECURRING_CELLS = 1 << 23
"""States times units per period, over all planes of a lane, up to which its cuts get table rows."""

RECURRING_BLOCKS = 1 << 22
"""Blocks per plane up to which a lane's cuts get table rows: with more, a table has room for less than 512 rows."""


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """The positions of a cut's rows in the table of index `table`: `rows` are indices within the cut, ``int64[r]``;
    `source` and `destination` the flat index of each row's block 0, ``int32[r]``."""

    table: int
    rows: Int64s
    source: Indices
    destination: Indices


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The tables of a plan. `at` returns the positions of the rows of a cut of a lane; empty: in no table."""

    tables: tuple[DescriptorTable, ...]
    at: Callable[[Lane, Cut], tuple[TableRows, ...]]


def part_of_tables(whole_tables: Tables, whole_lanes: Mapping[Lane, Lane]) -> Tables:
    """The positions of the rows of a part of a plan in the tables of the whole plan: the part needs no tables of its
    own, which NIXL would have to prepare. `whole_lanes` has, for each lane of the part, the lane of the whole plan."""

    # Computed when needed: most parts read too little for a table.
    @lru_cache(ROWS_KEPT)
    def find(lane: Lane, cut: Cut) -> tuple[TableRows, ...]:
        whole_lane = whole_lanes[lane]
        places = whole_tables.at(whole_lane, cut)
        if not places:
            return ()
        whole, rows = whole_lane.rows(cut), lane.rows(cut)
        order = np.argsort(whole.source)
        at = order[np.minimum(np.searchsorted(whole.source, rows.source, sorter=order), len(order) - 1)]
        # Rows that the whole plan has fused with rows of other layers are in no table.
        same = (whole.source[at] == rows.source) & (whole.destination[at] == rows.destination)
        same &= whole.length[at] == rows.length
        found = []
        for place in places:
            row_at = np.full(len(whole), -1)
            row_at[place.rows] = np.arange(len(place.rows))
            chosen = np.flatnonzero(same & (row_at[at] >= 0))
            if len(chosen):
                there = row_at[at[chosen]]
                found.append(TableRows(place.table, chosen, place.source[there], place.destination[there]))
        return tuple(found)

    return Tables(whole_tables.tables, find)


class _Builder:
    """Builds a table: rows of one source rank, memory pair and length. Lists are in pairs: source, destination."""

    def __init__(self, memory: MemoryPair, entry_bytes: int) -> None:
        self._memory, self._entry_bytes = memory, entry_bytes
        self._sizes = [0, 0]
        self._rows: tuple[list[Addresses], list[Addresses]] = ([], [])
        self._first: tuple[list[Int64s], list[Int64s]] = ([], [])

    def room(self, lane: Lane) -> int:
        """The number of rows of a lane that still fit."""
        source, destination = (TABLE_LIMIT - 1 - size for size in self._sizes)
        return min(source // lane.source.num_blocks, destination // lane.destination.num_blocks)

    def add(self, lane: Lane, source: Int64s, destination: Int64s) -> list[Indices]:
        """Add rows; returns the flat indices of their blocks 0."""
        devices = self._memory.source_device, self._memory.destination_device
        found = []
        for side, (address, layout) in enumerate(((source, lane.source), (destination, lane.destination))):
            rows = np.empty((len(address), 5), np.uint64)
            rows[:, 0] = address
            rows[:, 1:] = (self._entry_bytes, devices[side], layout.block_stride, layout.num_blocks)
            first = self._sizes[side] + np.arange(len(address), dtype=np.int64) * layout.num_blocks
            self._rows[side].append(rows)
            self._first[side].append(first)
            self._sizes[side] += len(address) * layout.num_blocks
            found.append(first.astype(np.int32))
        return found

    def build(self) -> DescriptorTable:
        source, destination = map(np.concatenate, self._rows)
        source_first, destination_first = map(np.concatenate, self._first)
        return DescriptorTable(self._memory, source, destination, source_first, destination_first, self._entry_bytes)


def prepare_tables(lanes: Iterable[Lane]) -> Tables:
    """The tables of lanes that are read directly; flat indices are checked here, once."""
    builders: list[_Builder] = []
    current: dict[tuple[int, MemoryPair, int], int] = {}
    places: dict[tuple[Lane, Cut], tuple[TableRows, ...]] = {}
    for lane in lanes:
        for cut in recurring_cuts(lane):
            rows = lane.rows(cut)
            found = []
            for length in np.unique(rows.length).tolist():
                key = (lane.source_rank, lane.memory, length)
                chosen = np.flatnonzero(rows.length == length)
                while len(chosen):
                    if key not in current or builders[current[key]].room(lane) == 0:
                        current[key] = len(builders)
                        builders.append(_Builder(lane.memory, length))
                    builder = builders[current[key]]
                    fitting, chosen = np.split(chosen, [builder.room(lane)])
                    firsts = builder.add(lane, rows.source[fitting], rows.destination[fitting])
                    found.append(TableRows(current[key], fitting, *firsts))
            places[lane, cut] = tuple(found)
    return Tables(tuple(builder.build() for builder in builders), lambda lane, cut: places.get((lane, cut), ()))


def recurring_cuts(lane: Lane) -> tuple[Cut, ...]:
    """The cuts of the whole blocks of a long request; empty if there are too many cuts."""
    if lane.group.kind is GroupKind.STATE:
        return (lane.whole_block,)
    if not _recurs(lane) or max(lane.source.num_blocks, lane.destination.num_blocks) > RECURRING_BLOCKS:
        return ()
    return tuple(alike.cut for alike in lane.line.period_pieces)


def sample(lane: Lane, most: int = RECURRING_LIMIT) -> int:
    """The end of a stretch of a lane's line that is typical of all of it: a period; if that is too long, a block of the
    destination; if even that has more than `most` pieces, the beginning of a block."""
    line = lane.line
    if _recurs(lane) and line.pieces_per_period <= most:
        return line.period
    return min(line.destination_step, most * line.steps[0])


def _recurs(lane: Lane) -> bool:
    cells = lane.line.period * sum(len(read.units) for read in lane.reads)
    return lane.line.pieces_per_period <= RECURRING_LIMIT and cells <= RECURRING_CELLS
