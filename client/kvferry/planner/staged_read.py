"""Reads through staging memory: the rows read from the source's blocks, and their permutation into the destination's.

A row (`RowExtent`) is one contiguous range of a source block that holds all that a lane reads of one plane, or of
several planes whose bytes interleave. A batch is as many rows as fit a slot of staging memory: plane after plane, each
with its blocks one behind the other, so that consecutive blocks of the source merge and the permutation has long loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.geometry.blocks import split_runs
from kvferry.planner.descriptors import Descriptors, MemoryPair
from kvferry.planner.lane import Lane
from kvferry.planner.rows import Cells, Int64s, RowExtent
from kvferry.planner.token_line import Segment


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Cells to copy on the destination's device: for every i, those at index ``places[i]`` (rising) of `source`,
    ``[places, ...]``, to index ``ids[i]`` of `destination`, ``[blocks, ...]``. `places` and `ids` are ``int64[n]``."""

    source: Cells
    places: Int64s
    destination: Cells
    ids: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class StagedRead:
    """The reads of one request of one lane through staging memory: the source blocks, ``int64[n]``, rising, and the
    destinations of their bytes, of which `Segment.source` are indices into `blocks`, rising."""

    lane: Lane
    blocks: Int64s
    pieces: tuple[Segment, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes that reach the destination's blocks."""
        cells = sum(len(read.units) * read.source.state_bytes for read in self.lane.reads)
        return sum(cells * piece.cut.count * len(piece.source) for piece in self.pieces)

    @property
    def count(self) -> int:
        """Descriptors, merged."""
        runs, stride = len(split_runs(self.blocks)[0]), self.lane.source.block_stride
        return sum(runs if extent.length == stride else len(self.blocks) for extent in self.lane.extents)

    def batches(self, slot_bytes: int) -> Iterator[Batch]:
        """All rows in batches of at most `slot_bytes`; no row is longer (`kvferry.planner.path_choice`)."""
        stride = self.lane.source.block_stride
        rows: list[_Rows] = []
        filled = 0
        for extent in self.lane.extents:
            first = 0
            while first < len(self.blocks):
                fitting = (slot_bytes - filled) // extent.length
                if fitting == 0:
                    yield Batch(self, tuple(rows), filled)
                    rows, filled = [], 0
                    continue
                end = min(len(self.blocks), first + fitting)
                blocks = self.blocks[first:end]
                # Rows of whole blocks go on in the next block.
                starts = split_runs(blocks)[0] if extent.length == stride else np.arange(len(blocks), dtype=np.int64)
                offset = np.append(starts, len(blocks)) * extent.length + filled
                merged = extent.source + blocks[starts] * stride, offset[:-1], np.diff(offset)
                rows.append(_Rows(extent, first, end, filled, merged))
                # Rows of the next plane begin at a cache line.
                filled = min(slot_bytes, -(-(filled + (end - first) * extent.length) // 64) * 64)
                first = end
        if rows:
            yield Batch(self, tuple(rows), filled)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of one extent: of the blocks ``[first, end)`` of a read, `offset` bytes into the slot. `merged` are those of
    consecutive blocks as one: address, bytes into the slot, bytes; ``int64[n]`` each."""

    extent: RowExtent
    first: int
    end: int
    offset: int
    merged: tuple[Int64s, Int64s, Int64s]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The content of a slot of staging memory at one time: rows of a read, in `staged_bytes` of the slot."""

    read: StagedRead
    rows: tuple[_Rows, ...]
    staged_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that reach the destination's blocks."""
        planes = self.read.lane.planes
        return sum(
            sum(planes[alike].units * planes[alike].state_bytes for alike, _ in rows.extent.planes)
            * sum(piece.cut.count * len(piece.source[_within(piece.source, rows)]) for piece in self.read.pieces)
            for rows in self.rows
        )

    def descriptors(self, slot: int, memory: MemoryPair) -> Descriptors:
        """The descriptors that read the rows to the address `slot`."""
        columns = zip(*(of.merged for of in self.rows), strict=True)
        source, offset, length = (np.concatenate(column) for column in columns)
        return Descriptors(memory, *(column.view(np.uint64) for column in (source, offset + slot, length)))

    def copies(self, slot: int) -> Iterator[Copy]:
        """The copies from the address `slot` into the destination's blocks."""
        lane = self.read.lane
        for rows in self.rows:
            for piece in self.read.pieces:
                chosen = _within(piece.source, rows)
                places, ids = piece.source[chosen] - rows.first, piece.destination[chosen]
                if len(places) == 0:
                    continue
                for alike, plane in rows.extent.planes:
                    members = lane.planes[alike]
                    source = slot + rows.offset + int(members.source_base[plane]) - rows.extent.source
                    destination = int(members.destination_base[plane])
                    for there, here in lane.loops(alike, piece.cut):
                        read = there.times(int(places[-1]) + 1, rows.extent.length, source)
                        written = here.times(int(ids.max()) + 1, lane.destination.block_stride, destination)
                        yield Copy(read, places, written, ids)


def staged_read(lane: Lane, found: Sequence[Segment]) -> StagedRead | None:
    """The segments of a lane as a read through staging memory; None if there are none."""
    if not found:
        return None
    blocks, places = np.unique(np.concatenate([segment.source for segment in found]), return_inverse=True)
    ends = np.cumsum([len(segment.source) for segment in found])
    pieces = []
    for segment, of in zip(found, np.split(places.reshape(-1).astype(np.int64), ends[:-1]), strict=True):
        order = np.argsort(of, kind="stable")
        pieces.append(Segment(segment.cut, of[order], segment.destination[order]))
    return StagedRead(lane, blocks, tuple(pieces))


def _within(blocks: Int64s, rows: _Rows) -> slice:
    """The range of these rising block indices that lies in `rows`."""
    begin, end = np.searchsorted(blocks, (rows.first, rows.end))
    return slice(int(begin), int(end))
