"""From the block ids of one request to descriptors: checked once (R7), vectorised, raw or prepared by run length.

Every address in an expansion is ``row address + id * block_stride`` with a checked id, and every plane lies inside a
registered region with all its blocks, so nothing that overflows, wraps or runs past a region can be expressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.blocks import BlockIds, Blocks, check_ids, check_unique
from kvferry.descriptors import Descriptors, DescriptorTable, Indices, MemoryPair, PreparedDescriptors, RawDescriptors
from kvferry.errors import BlocksShort, InvalidField
from kvferry.geometry import EngineGeometry, Group, GroupKind
from kvferry.lanes import Cut, Int64s, Lane, Rows
from kvferry.segments import Segment, segments

RAW_MIN_RUN = 4
"""Mean run of blocks from which merged raw descriptors are cheaper than prepared indices (notes: 524,288 pieces take
0.08 against 0.48 ms at runs of 256, but 45 against 22 ms at runs of 1)."""

PREPARED_MIN_COUNT = 256
"""Fewer short descriptors than this are not worth preparing a table at the peer."""

TABLE_LIMIT = 1 << 31
"""NIXL takes int32 indices and truncates larger ones silently."""

RECURRING_LIMIT = 64
"""Cuts per lane that get table rows; block sizes with more of them (lcm far above both) stay raw."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceDescriptors:
    """What is read from one source rank."""

    source_rank: int
    descriptors: tuple[Descriptors, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes read from the rank."""
        return sum(part.total_bytes for part in self.descriptors)


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """One request of one destination rank.

    Attributes:
        sources: by rising source rank; empty if there is nothing to read.
        pieces: contiguous pieces of single planes and blocks, before fusing and merging.
        descriptors: descriptors after it.
    """

    sources: tuple[SourceDescriptors, ...]
    pieces: int
    descriptors: int

    @property
    def total_bytes(self) -> int:
        """Bytes read from all ranks."""
        return sum(source.total_bytes for source in self.sources)


@dataclass(frozen=True, slots=True, eq=False)
class _TableRows:
    """Where the rows of a cut stand in a table.

    Attributes:
        table: index of the table.
        rows: which rows of the cut, ``int64[r]``.
        source, destination: flat index of each row's block 0, ``int32[r]``.
    """

    table: int
    rows: Int64s
    source: Indices
    destination: Indices


@dataclass(frozen=True, slots=True, eq=False)
class LaneTables:
    """The tables of a plan, and where each lane's recurring cuts stand in them."""

    tables: tuple[DescriptorTable, ...]
    places: Mapping[tuple[int, Cut], tuple[_TableRows, ...]]


class _TableBuilder:
    """Collects the rows of one source rank, memory pair and length."""

    def __init__(self, memory: MemoryPair, entry_bytes: int) -> None:
        self.memory = memory
        self.entry_bytes = entry_bytes
        self.source: list[tuple[int, int, int, int, int]] = []
        self.destination: list[tuple[int, int, int, int, int]] = []
        self.source_size = 0
        self.destination_size = 0

    def room(self, lane: Lane, rows: int) -> bool:
        more_source, more_destination = lane.source.num_blocks * rows, lane.destination.num_blocks * rows
        return max(self.source_size + more_source, self.destination_size + more_destination) < TABLE_LIMIT

    def add(self, lane: Lane, source: Int64s, destination: Int64s) -> tuple[Indices, Indices]:
        blocks, own_blocks = lane.source.num_blocks, lane.destination.num_blocks
        first = self.source_size + np.arange(len(source), dtype=np.int64) * blocks
        own_first = self.destination_size + np.arange(len(source), dtype=np.int64) * own_blocks
        for theirs, mine in zip(source.tolist(), destination.tolist(), strict=True):
            strides = lane.source.block_stride, lane.destination.block_stride
            self.source.append((theirs, self.entry_bytes, self.memory.source_device, strides[0], blocks))
            self.destination.append((mine, self.entry_bytes, self.memory.destination_device, strides[1], own_blocks))
        self.source_size += len(source) * blocks
        self.destination_size += len(source) * own_blocks
        return first.astype(np.int32), own_first.astype(np.int32)

    def build(self) -> DescriptorTable:
        source, destination = np.array(self.source, np.uint64), np.array(self.destination, np.uint64)
        return DescriptorTable(
            memory=self.memory,
            source=source,
            destination=destination,
            source_first=_firsts(source),
            destination_first=_firsts(destination),
            entry_bytes=self.entry_bytes,
        )


def _firsts(rows: npt.NDArray[np.uint64]) -> Int64s:
    counts = rows[:, 4].astype(np.int64)
    return np.cumsum(counts) - counts


def prepare_tables(lanes: tuple[Lane, ...]) -> LaneTables:
    """Table rows for everything that whole blocks of a long request need; flat indices are checked here (2**31)."""
    builders: list[_TableBuilder] = []
    current: dict[tuple[int, MemoryPair, int], int] = {}
    places: dict[tuple[int, Cut], tuple[_TableRows, ...]] = {}
    for index, lane in enumerate(lanes):
        cuts = lane.recurring_cuts()
        for cut in cuts if len(cuts) <= RECURRING_LIMIT else ():
            rows = lane.rows(cut)
            found = []
            for length in np.unique(rows.length).tolist():
                chosen = np.flatnonzero(rows.length == length)
                key = (lane.source_rank, lane.memory, length)
                if key not in current or not builders[current[key]].room(lane, len(chosen)):
                    current[key] = len(builders)
                    builders.append(_TableBuilder(lane.memory, length))
                builder = builders[current[key]]
                if builder.room(lane, len(chosen)):
                    places_of = builder.add(lane, rows.source[chosen], rows.destination[chosen])
                    found.append(_TableRows(current[key], chosen, *places_of))
            places[index, cut] = tuple(found)
    return LaneTables(tuple(builder.build() for builder in builders if builder.source), places)


class _Collector:
    """Gathers what a request reads, by source rank and list."""

    def __init__(self, tables: LaneTables) -> None:
        self._tables = tables
        self._raw: dict[tuple[int, MemoryPair], list[tuple[Int64s, Int64s, Int64s]]] = {}
        self._prepared: dict[tuple[int, int], list[tuple[Indices, Indices]]] = {}
        self.pieces = 0
        self.descriptors = 0

    def add(self, index: int, lane: Lane, segment: Segment) -> None:
        rows = lane.rows(segment.cut)
        blocks = len(segment.source)
        self.pieces += rows.unfused * blocks
        stride = lane.source.block_stride
        # A row as long as both strides goes on in the next block: consecutive ids are one run.
        streams = (rows.length == stride) & (lane.destination.block_stride == stride)
        if bool(streams.any()):
            starts, counts = _runs(segment)
            if len(starts) * RAW_MIN_RUN <= blocks:
                self._add_raw(lane, segment.source[starts], segment.destination[starts], rows, streams, counts)
                rest = ~streams
            else:
                rest = np.ones(len(rows), np.bool_)
        else:
            rest = np.ones(len(rows), np.bool_)
        if bool(rest.any()):
            self._add_pieces(index, lane, segment, rest)

    def _add_pieces(self, index: int, lane: Lane, segment: Segment, rest: npt.NDArray[np.bool_]) -> None:
        rows = lane.rows(segment.cut)
        blocks = len(segment.source)
        if int(np.count_nonzero(rest)) * blocks >= PREPARED_MIN_COUNT:
            rest = rest.copy()
            for place in self._tables.places.get((index, segment.cut), ()):
                wanted = rest[place.rows]
                if not bool(wanted.any()):
                    continue
                source = (place.source[wanted][:, None] + segment.source).ravel()
                destination = (place.destination[wanted][:, None] + segment.destination).ravel()
                self._prepared.setdefault((lane.source_rank, place.table), []).append((source, destination))
                self.descriptors += len(source)
                rest[place.rows[wanted]] = False
        if bool(rest.any()):
            ones = np.ones(blocks, np.int64)
            self._add_raw(lane, segment.source, segment.destination, rows, rest, ones)

    def _add_raw(
        self,
        lane: Lane,
        source_ids: BlockIds,
        destination_ids: BlockIds,
        rows: Rows,
        chosen: npt.NDArray[np.bool_],
        run: Int64s,
    ) -> None:
        source = rows.source[chosen][:, None] + source_ids.astype(np.int64) * lane.source.block_stride
        destination = (
            rows.destination[chosen][:, None] + destination_ids.astype(np.int64) * lane.destination.block_stride
        )
        length = rows.length[chosen][:, None] * run
        part = (source.ravel(), destination.ravel(), length.ravel())
        self._raw.setdefault((lane.source_rank, lane.memory), []).append(part)
        self.descriptors += source.size

    def result(self) -> Expansion:
        found: dict[int, list[Descriptors]] = {}
        for (rank, memory), parts in self._raw.items():
            columns = [np.concatenate(column).view(np.uint64) for column in zip(*parts, strict=True)]
            found.setdefault(rank, []).append(RawDescriptors(memory, *columns))
        for (rank, table), pairs in self._prepared.items():
            source, destination = (np.concatenate(column) for column in zip(*pairs, strict=True))
            found.setdefault(rank, []).append(PreparedDescriptors(self._tables.tables[table], source, destination))
        sources = tuple(SourceDescriptors(rank, tuple(found[rank])) for rank in sorted(found))
        return Expansion(sources, self.pieces, self.descriptors)


def _runs(segment: Segment) -> tuple[Int64s, Int64s]:
    """First positions and lengths of the runs in which both ids rise by one."""
    breaks = np.flatnonzero((np.diff(segment.source) != 1) | (np.diff(segment.destination) != 1)) + 1
    starts = np.concatenate((np.zeros(1, np.int64), breaks))
    return starts, np.diff(np.concatenate((starts, [len(segment.source)])))


def expand(
    lanes: tuple[Lane, ...],
    tables: LaneTables,
    groups: Iterable[Group],
    source_engine: EngineGeometry,
    source: Mapping[str, Blocks],
    destination: Mapping[str, Blocks],
    tokens: tuple[int, int] | None,
) -> Expansion:
    """See `ReadPlan.expand`."""
    if tokens is not None and not 0 <= tokens[0] <= tokens[1]:
        raise InvalidField("tokens", tokens, "0 <= a <= b")
    ranges: dict[str, tuple[int, int]] = {}
    pools: dict[str, list[BlockIds]] = {}
    for group in groups:
        if group.name not in destination:
            raise InvalidField("destination blocks", sorted(destination), f"blocks for group {group.name!r}")
        if group.name not in source:
            raise BlocksShort(group.name, "source", "blocks", "none of this group")
        theirs, mine = source[group.name], destination[group.name]
        source_group = source_engine.group(group.name)
        check_ids(group.name, "source", theirs.ids, source_group.num_blocks, source_group.null_block)
        check_ids(group.name, "destination", mine.ids, group.num_blocks, group.null_block)
        pools.setdefault(group.pool or group.name, []).append(mine.ids)
        if group.kind is GroupKind.STATE:
            _check_state(group, theirs, mine)
        else:
            ranges[group.name] = _needed(group, source_group, theirs, mine, tokens)
    for pool, ids in pools.items():
        check_unique(pool, ids)
    collector = _Collector(tables)
    for index, lane in enumerate(lanes):
        name = lane.group.name
        wanted = ranges.get(name, (0, 1))
        if wanted[0] < wanted[1]:
            asked_from = max(destination[name].first_token, tokens[0] if tokens else 0)
            for segment in segments(lane, source[name], destination[name], wanted, asked_from):
                collector.add(index, lane, segment)
    return collector.result()


def _check_state(group: Group, theirs: Blocks, mine: Blocks) -> None:
    for side, blocks in (("source", theirs), ("destination", mine)):
        if len(blocks.ids) != 1:
            raise InvalidField(f"{side} blocks of state group {group.name!r}", len(blocks.ids), "one block")
    if theirs.state_token != mine.state_token:
        raise BlocksShort(group.name, "source", f"a state at token {mine.state_token}", f"one at {theirs.state_token}")


def _needed(
    group: Group, source_group: Group, theirs: Blocks, mine: Blocks, tokens: tuple[int, int] | None
) -> tuple[int, int]:
    """The tokens to move, checked to be held by both sides' blocks."""
    offered = _span(source_group, "source", theirs)
    wanted = _span(group, "destination", mine)
    begin = max(mine.first_token, tokens[0] if tokens else 0)
    end = tokens[1] if tokens else (mine.end_token if mine.end_token is not None else offered[1])
    if group.kind is GroupKind.WINDOW:
        # The next token, at position `end`, attends to the window's tokens up to and including itself.
        begin = max(begin, end - group.window_tokens + 1)
    if begin >= end:
        return end, end
    for side, held in (("source", offered), ("destination", wanted)):
        if begin < held[0] or end > held[1]:
            raise BlocksShort(group.name, side, f"tokens [{begin}, {end})", f"tokens [{held[0]}, {held[1]})")
    return begin, end


def _span(group: Group, side: str, blocks: Blocks) -> tuple[int, int]:
    """Tokens that the blocks hold: what they say, but never more than there are blocks for."""
    room = (blocks.first_token // group.block_tokens + len(blocks.ids)) * group.block_tokens
    end = room if blocks.end_token is None else blocks.end_token
    if end > room:
        raise BlocksShort(
            group.name,
            side,
            f"tokens [{blocks.first_token}, {end})",
            f"{len(blocks.ids)} blocks of {group.block_tokens}",
        )
    return blocks.first_token, end
