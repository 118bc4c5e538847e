"""From the blocks of one request to descriptors: vectorised, merged, raw or prepared by run length.

Every address in an expansion is ``row address + id * block_stride`` with a checked id (`request_blocks`), and every
plane lies with all its blocks inside a registered region, so no address can wrap or lie outside the region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.errors import InvalidField
from kvferry.geometry.blocks import split_runs
from kvferry.planner.descriptors import Descriptors, Indices, MemoryPair, PreparedDescriptors, RawDescriptors
from kvferry.planner.footprint import Footprint
from kvferry.planner.lane import Lane, Segment, segments, span
from kvferry.planner.prepared_tables import Tables
from kvferry.planner.request_blocks import GroupRequest
from kvferry.planner.rows import Int64s, Rows
from kvferry.planner.staged_read import StagedRead, staged_read

RAW_MIN_RUN = 4
"""Mean run of blocks from which merged raw descriptors are cheaper than prepared indices (524,288 pieces take
0.08 against 0.48 ms at runs of 256, but 45 against 22 ms at runs of 1)."""

PREPARED_MIN_COUNT = 256
"""Fewer short descriptors than this are not worth preparing a table at the peer."""

MAX_DESCRIPTORS = 1 << 25
"""Descriptors of one read: 800 MB of arrays, and more than a minute for NIXL."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceDescriptors:
    """The reads from one source rank: `descriptors` straight into their destinations, `staged` through staging memory.
    `footprint` has the blocks that the reads may touch; a plan always gives it."""

    source_rank: int
    descriptors: tuple[Descriptors, ...]
    staged: tuple[StagedRead, ...] = ()
    footprint: Footprint | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes read from the rank that reach the destination's blocks."""
        return sum(part.total_bytes for part in (*self.descriptors, *self.staged))


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """One request of one destination rank. `sources`, by rising source rank, are empty if there is nothing to read;
    where layers are read separately, a rank may have several. `pieces` are the contiguous pieces of single planes and
    blocks before fusing and merging, `descriptors` those after it."""

    sources: tuple[SourceDescriptors, ...]
    pieces: int
    descriptors: int

    @property
    def total_bytes(self) -> int:
        return sum(source.total_bytes for source in self.sources)


def together(parts: Sequence[Expansion]) -> Expansion:
    """Several expansions, which write to different memory, as one."""
    if len(parts) == 1:
        return parts[0]
    sources = sorted((source for part in parts for source in part.sources), key=lambda source: source.source_rank)
    return Expansion(tuple(sources), sum(part.pieces for part in parts), sum(part.descriptors for part in parts))


def expand(
    lanes: tuple[Lane, ...], tables: Tables, staged: frozenset[Lane], needed: Mapping[str, GroupRequest]
) -> Expansion:
    """The descriptors of the needed blocks; see `ReadPlan.expand`. `staged` lanes go through staging memory."""
    collector = _Collector(tables)
    for lane in lanes:
        wanted = needed.get(lane.group.name)
        if wanted is None:
            continue
        if lane in staged:
            collector.add_staged(lane, segments(lane, wanted))
        elif not collector.add_stream(lane, wanted):
            for segment in segments(lane, wanted):
                collector.add(lane, segment)
    return collector.result()


class _Collector:
    """Gathers the reads of a request, by source rank and list."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._raw: dict[tuple[int, MemoryPair], list[tuple[Int64s, Int64s, Int64s]]] = {}
        self._prepared: dict[tuple[int, int], list[tuple[Indices, Indices]]] = {}
        self._staged: dict[int, list[StagedRead]] = {}
        self.pieces = 0
        self.descriptors = 0

    def add_staged(self, lane: Lane, found: Sequence[Segment]) -> None:
        read = staged_read(lane, found)
        if read is not None:
            self._staged.setdefault(lane.source_rank, []).append(read)
            self.pieces += sum(lane.rows(segment.cut).unfused * len(segment.source) for segment in found)
            self.descriptors += read.count

    def add_stream(self, lane: Lane, needed: GroupRequest) -> bool:
        """Add a linear lane as runs that cross blocks of any size; False if it is not linear or its runs are short."""
        if not lane.linear_bytes:
            return False
        begin, end = span(lane, needed)
        if begin >= end:
            return True
        line = lane.line
        jumps = (
            _jumps(needed.source.ids, needed.source.first, line.source_step, begin, end),
            _jumps(needed.destination.ids, needed.destination.first, line.destination_step, begin, end),
        )
        starts = np.unique(np.concatenate((np.array([begin], np.int64), *jumps)))
        blocks = -(-end // line.destination_step) - begin // line.destination_step
        if len(starts) > 1 and len(starts) * RAW_MIN_RUN > blocks:
            return False
        counts = np.diff(np.concatenate((starts, [end])))
        source_block, source_at = np.divmod(starts, line.source_step)
        block, at = np.divmod(starts, line.destination_step)
        source = needed.source.ids[source_block - needed.source.first] * lane.source.block_stride
        destination = needed.destination.ids[block - needed.destination.first] * lane.destination.block_stride
        for members, state_bytes in zip(lane.planes, lane.linear_bytes, strict=True):
            rows = members.source_base[:, None], members.destination_base[:, None]
            self._append(
                lane,
                rows[0] + (source + source_at * state_bytes),
                rows[1] + (destination + at * state_bytes),
                np.broadcast_to(counts * state_bytes, (len(members.source_base), len(starts))),
            )
        edges = -(-end // line.source_step) - begin // line.source_step + blocks - 1
        both = -(-end // line.period) - begin // line.period - 1
        self.pieces += (edges - both) * len(lane.reads)
        return True

    def add(self, lane: Lane, segment: Segment) -> None:
        rows = lane.rows(segment.cut)
        blocks = len(segment.source)
        self.pieces += rows.unfused * blocks
        stride = lane.source.block_stride
        rest = np.ones(len(rows), np.bool_)
        # A row as long as both strides continues in the next block: consecutive ids are one run.
        streams = (rows.length == stride) & (lane.destination.block_stride == stride)
        if bool(streams.any()):
            starts, counts = split_runs(segment.source, segment.destination)
            if len(starts) * RAW_MIN_RUN <= blocks:
                self._add_raw(lane, rows, streams, segment.source[starts], segment.destination[starts], counts)
                rest = ~streams
        count = int(np.count_nonzero(rest)) * blocks
        # Checked before the descriptors are made: blocks times rows soon exceed the memory.
        if self.descriptors + count > MAX_DESCRIPTORS:
            expected = f"at most {MAX_DESCRIPTORS}: fewer tokens at a time, or staging memory"
            raise InvalidField("number of descriptors of one read", self.descriptors + count, expected)
        if count >= PREPARED_MIN_COUNT:
            rest = self._add_prepared(lane, segment, rest)
        if bool(rest.any()):
            self._add_raw(lane, rows, rest, segment.source, segment.destination, np.ones(1, np.int64))

    def _add_prepared(self, lane: Lane, segment: Segment, rest: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Add the rows that are in a table; returns the others."""
        rest = rest.copy()
        for found in self._tables.at(lane, segment.cut):
            wanted = rest[found.rows]
            if not bool(wanted.any()):
                continue
            # Neither sum can wrap: tables have fewer than 2**31 entries.
            source = found.source[wanted][:, None] + segment.source.astype(np.int32)
            destination = found.destination[wanted][:, None] + segment.destination.astype(np.int32)
            self._prepared.setdefault((lane.source_rank, found.table), []).append((source, destination))
            self.descriptors += source.size
            rest[found.rows[wanted]] = False
        return rest

    def _add_raw(
        self, lane: Lane, rows: Rows, chosen: npt.NDArray[np.bool_], source_ids: Int64s, ids: Int64s, run: Int64s
    ) -> None:
        """Add rows by address; a run of `run` blocks begins at each pair of ids, of the source and the destination."""
        source = rows.source[chosen][:, None] + source_ids * lane.source.block_stride
        destination = rows.destination[chosen][:, None] + ids * lane.destination.block_stride
        self._append(lane, source, destination, np.broadcast_to(rows.length[chosen][:, None] * run, source.shape))

    def _append(self, lane: Lane, source: Int64s, destination: Int64s, length: Int64s) -> None:
        part = (source.ravel(), destination.ravel(), length.ravel())
        self._raw.setdefault((lane.source_rank, lane.memory), []).append(part)
        self.descriptors += source.size

    def result(self) -> Expansion:
        found: dict[int, list[Descriptors]] = {}
        for (rank, memory), parts in self._raw.items():
            columns = [np.concatenate(column).view(np.uint64) for column in zip(*parts, strict=True)]
            found.setdefault(rank, []).append(RawDescriptors(memory, *columns))
        for (rank, table), pairs in self._prepared.items():
            source, destination = (
                np.concatenate([grid.ravel() for grid in side]) if len(side) > 1 else side[0].ravel()
                for side in zip(*pairs, strict=True)
            )
            grids = tuple((len(grid), grid.shape[1]) for grid, _ in pairs)
            prepared = PreparedDescriptors(self._tables.tables[table], source, destination, grids)
            found.setdefault(rank, []).append(prepared)
        sources = tuple(
            SourceDescriptors(rank, tuple(found.get(rank, ())), tuple(self._staged.get(rank, ())))
            for rank in sorted({*found, *self._staged})
        )
        return Expansion(sources, self.pieces, self.descriptors)


def _jumps(ids: Int64s, first: int, step: int, begin: int, end: int) -> Int64s:
    """Positions on a line, within ``(begin, end)``, where the next block is not the next in memory."""
    breaks = (np.flatnonzero(ids[1:] - ids[:-1] != 1) + (1 + first)) * step
    return breaks[(breaks > begin) & (breaks < end)]
