"""From the blocks of one request to descriptors: vectorised and merged.

Every address in an expansion is ``row address + id * block_stride`` with a checked id (`request_blocks`), and every
plane lies with all its blocks inside a registered region, so no address can wrap or lie outside the region. All rows
and runs are checked nevertheless (`footprint`), before they are joined.

Where a lane's path is staged, whole rows are read into staging memory, and permuted from there. A row (`RowExtent`) is
one contiguous range of a source block that holds all that a lane reads of one plane, or of several planes whose bytes
interleave. A batch is as many rows as fit a slot of staging memory: plane after plane, each with its blocks one behind
the other, so that consecutive blocks of the source merge and the permutation has long loops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.errors import InvalidField
from kvferry.geometry.blocks import split_runs
from kvferry.planner.descriptors import BlockRows, Descriptors, MemoryPair, joined
from kvferry.planner.footprint import Footprint
from kvferry.planner.lane import Lane, segments, span
from kvferry.planner.request_blocks import GroupRequest, NeededBlocks
from kvferry.planner.rows import Cells, Int64s, RowExtent
from kvferry.planner.token_line import Segment

LONG_RUN = 4
"""Mean run of blocks from which runs are merged here. Shorter runs are merged by NIXL, which makes a read of single
blocks in half the time (`BlockRows`)."""

OWN_LIST = 1024
"""Descriptors from which a list of rows and runs is worth its costs; fewer are listed one by one, beside others."""

OWN_LIST_RUNS = 16
"""Runs from which rows recur often enough to be a list of their own."""

MAX_DESCRIPTORS = 1 << 25
"""Descriptors of one read: 800 MB of arrays, and more than a minute for NIXL."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceDescriptors:
    """The reads from one source rank: `descriptors` straight into their destinations, `staged` through staging
    memory."""

    source_rank: int
    descriptors: tuple[Descriptors, ...]
    staged: tuple[StagedRead, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes read from the rank that reach the destination's blocks."""
        direct = sum(part.total_bytes for part in self.descriptors)
        return direct + sum(part.total_bytes for part in self.staged)


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


def expand(lanes: tuple[Lane, ...], staged: frozenset[Lane], needed: Mapping[str, GroupRequest]) -> Expansion:
    """The descriptors of the needed blocks; see `ReadPlan.expand`. `staged` lanes go through staging memory."""
    collector = _Collector({name: Footprint(wanted) for name, wanted in needed.items()})
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
    """Gathers the reads of a request, by source rank and list. `footprints` are given by group."""

    def __init__(self, footprints: Mapping[str, Footprint]) -> None:
        self._footprints = footprints
        self._few: dict[tuple[int, MemoryPair], list[Descriptors]] = defaultdict(list)
        """Lists that become one list of single descriptors."""
        self._lists: dict[int, list[Descriptors]] = defaultdict(list)
        self._staged: dict[int, list[StagedRead]] = defaultdict(list)
        self.pieces = self.descriptors = 0

    def add_staged(self, lane: Lane, found: Sequence[Segment]) -> None:
        read = staged_read(lane, found)
        if read is not None:
            self._footprints[lane.group.name].check_staged(lane.windows[0], lane.extents, read.blocks, read.pieces)
            self._staged[lane.source_rank].append(read)
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
            _jumps(needed.source, line.source_step, begin, end),
            _jumps(needed.destination, line.destination_step, begin, end),
        )
        starts = np.unique(np.concatenate((np.array([begin], np.int64), *jumps)))
        blocks = -(-end // line.destination_step) - begin // line.destination_step
        if len(starts) > 1 and len(starts) * LONG_RUN > blocks:
            return False
        counts = np.diff(np.concatenate((starts, [end])))
        source_block, source_at = np.divmod(starts, line.source_step)
        block, at = np.divmod(starts, line.destination_step)
        source = needed.source.ids[source_block - needed.source.first] * lane.source.block_stride
        destination = needed.destination.ids[block - needed.destination.first] * lane.destination.block_stride
        for members, state_bytes in zip(lane.planes, lane.linear_bytes, strict=True):
            rows = members.source_base, members.destination_base, np.full(len(members.source_base), state_bytes)
            runs = source + source_at * state_bytes, destination + at * state_bytes, counts
            made = Descriptors(lane.memory, *(column.view(np.uint64) for column in (*rows, *runs)))
            # Its runs are not of whole blocks.
            self._append(lane, made, is_own_list=False)
        edges = -(-end // line.source_step) - begin // line.source_step + blocks - 1
        both = -(-end // line.period) - begin // line.period - 1
        self.pieces += (edges - both) * len(lane.reads)
        return True

    def add(self, lane: Lane, segment: Segment) -> None:
        blocks = len(segment.source)
        self.pieces += lane.rows(segment.cut).unfused * blocks
        streams, others = lane.block_rows(segment.cut)
        starts, counts = split_runs(segment.source, segment.destination)
        if len(starts) * LONG_RUN <= blocks:
            self._add_rows(lane, streams, segment.source[starts], segment.destination[starts], counts)
        else:
            self._add_rows(lane, streams, segment.source, segment.destination)
        self._add_rows(lane, others, segment.source, segment.destination)

    def _add_rows(
        self, lane: Lane, rows: BlockRows, source: Int64s, destination: Int64s, repeats: Int64s | None = None
    ) -> None:
        """Add rows of these runs of blocks: the first ids, and the numbers of blocks; None: single blocks."""
        if not len(rows.length):
            return
        offsets = source * rows.source_stride, destination * rows.destination_stride
        counts = np.ones(len(source), np.int64) if repeats is None else repeats
        runs = (column.view(np.uint64) for column in (*offsets, counts))
        of = rows if repeats is None else None
        made = Descriptors(lane.memory, rows.source, rows.destination, rows.length, *runs, blocks=of)
        self._append(lane, made, is_own_list=made.count >= OWN_LIST and len(counts) >= OWN_LIST_RUNS)

    def _append(self, lane: Lane, made: Descriptors, *, is_own_list: bool) -> None:
        self.descriptors += made.count
        # Checked before the descriptors are made: blocks times rows soon exceed the memory.
        if self.descriptors > MAX_DESCRIPTORS:
            expected = f"at most {MAX_DESCRIPTORS}: fewer tokens at a time, or staging memory"
            raise InvalidField("number of descriptors of one read", self.descriptors, expected)
        self._footprints[lane.group.name].check(*lane.windows, made)
        if is_own_list:
            self._lists[lane.source_rank].append(made)
        else:
            self._few[lane.source_rank, lane.memory].append(made)

    def result(self) -> Expansion:
        found: dict[int, list[Descriptors]] = defaultdict(list)
        for (rank, memory), few in self._few.items():
            found[rank].append(joined(memory, few))
        for rank, lists in self._lists.items():
            found[rank] += lists
        sources = tuple(
            SourceDescriptors(rank, tuple(found[rank]), tuple(self._staged[rank]))
            for rank in sorted({*found, *self._staged})
        )
        return Expansion(sources, self.pieces, self.descriptors)


def _jumps(blocks: NeededBlocks, step: int, begin: int, end: int) -> Int64s:
    """Positions on a line, within ``(begin, end)``, where the next block is not the next in memory."""
    breaks = (np.flatnonzero(blocks.ids[1:] - blocks.ids[:-1] != 1) + (1 + blocks.first)) * step
    return breaks[(breaks > begin) & (breaks < end)]


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
