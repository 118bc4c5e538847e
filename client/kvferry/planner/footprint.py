"""Which blocks one request may touch, and whether its descriptors touch no others: the planner's answer, checked
backwards.

The planner goes from block ids to addresses. Here every address is divided back into a block id, which has to be one of
the request's, and both ends of a descriptor have to lie in blocks that hold the same tokens. Nothing of the planner's
arithmetic is used, so that an address that wrapped, into another block of the same region, is found (R7). What is not
found is a wrong place within the right block.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import InvalidField
from kvferry.geometry.model import ADDRESS_LIMIT, Group, GroupKind, MemoryKind, Plane
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

Int64s: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
_Space: TypeAlias = tuple[MemoryKind, int]

EXPECTED = "of the request's blocks, to the blocks of the same tokens"
NOWHERE = -(1 << 62)
"""In place of a token: far from all of them."""

AT_ONCE = 1 << 18
"""Descriptors times slabs that lie over each other, up to which checking them takes no longer than about 0.1 s. Where a
source's planes lie over each other a hundredfold, that of a long request takes 15 s and more (measured)."""

BY_ID_LIMIT = 1 << 23
"""Block ids below this are looked up in a table instead of searched for."""


@dataclass(frozen=True, slots=True, eq=False)
class _Slabs:
    """Stretches of memory that are apart, each cut into blocks: ``uint64[n]``, by rising address.

    Attributes:
        begin, end: addresses.
        stride: bytes from block to block.
        window: bytes of a step that are the block's.
        span: bytes from the first block to the end of the last, before they begin anew.
        turns: bytes after which the blocks begin anew, the longest first: of units, say, that lie outside the blocks;
            and how many of those bytes are used.
    """

    begin: Addresses
    end: Addresses
    stride: Addresses
    window: Addresses
    span: Addresses
    turns: tuple[tuple[Addresses, Addresses], ...]

    def blocks(self, address: Addresses, length: Addresses) -> tuple[Bools, Int64s, Int64s]:
        """Which ranges lie inside one slab and one turn, and the ids of their first and last block there."""
        place = self._place(address)
        begin = self.begin[place]
        # The ranges lie inside of regions (`kvferry._transport.bounds`): their ends do not wrap.
        inside = (address >= begin) & (address + length <= self.end[place])
        # What is not inside may wrap here, and is not looked at.
        first = address - begin
        last = first + length - np.uint64(1)
        for steps, used in self.turns:
            step = steps[place]
            inside &= first // step == last // step
            first, last = first % step, last % step
            inside &= last < used[place]
        stride = self.stride[place]
        first_block = first // stride
        # What lies between blocks may be blocks of other planes; only a range that begins in a block may end there.
        inside &= first - first_block * stride < self.window[place]
        return inside, first_block.astype(np.int64), (last // stride).astype(np.int64)

    def room(self, address: Addresses) -> Addresses:
        """Bytes from each address on that are blocks of one slab, before they end or begin anew; 0 for those that lie
        in none."""
        place = self._place(address)
        begin, span = self.begin[place], self.span[place]
        offset = address - begin
        for steps, _ in self.turns:
            offset = offset % steps[place]
        inside = (address >= begin) & (address < self.end[place]) & (offset < span)
        return np.where(inside, span - offset, np.uint64(0))

    def _place(self, address: Addresses) -> npt.NDArray[np.intp]:
        """The slab that each address lies in, or behind."""
        return np.maximum(np.searchsorted(self.begin, address, side="right"), 1) - 1

    def stride_at(self, address: Addresses) -> Addresses:
        """The stride of the slab that each address lies in, or behind."""
        stride: Addresses = self.stride[self._place(address)]
        return stride


class Ground:
    """Where the blocks of the planes lie that one rank reads from another; made once per plan."""

    def __init__(self, reads: Sequence[PlaneRead]) -> None:
        source: dict[tuple[str, _Space], dict[str, Plane]] = {}
        destination: dict[tuple[str, _Space], dict[str, Plane]] = {}
        for read in reads:
            for side, plane in ((source, read.source), (destination, read.destination)):
                space = (plane.memory_kind, plane.device)
                side.setdefault((read.destination.group, space), {})[plane.name] = plane
        self.source = {key: _layers(planes.values()) for key, planes in source.items()}
        self.destination = {key: _layers(planes.values()) for key, planes in destination.items()}
        self._groups = sorted({read.destination.group for read in reads})
        self.layers = sum(
            len(theirs) * len(mine)
            for (group, _), theirs in self.source.items()
            for (own_group, _), mine in self.destination.items()
            if own_group == group
        )
        """How often a descriptor by address is looked for at most."""
        self._tables: dict[DescriptorTable, _TableGround] = {}

    def table(self, table: DescriptorTable) -> _TableGround:
        """Whose blocks the rows of a table are; kept, as tables are."""
        known = self._tables.get(table)
        if known is None:
            memory = table.memory
            source_space = (memory.source_kind, memory.source_device)
            destination_space = (memory.destination_kind, memory.destination_device)
            known = self._tables[table] = _TableGround(
                _Entries.of(table.source, table.source_first),
                _Entries.of(table.destination, table.destination_first),
                {
                    group: (
                        _rows_of(self.source.get((group, source_space), ()), table.source),
                        _rows_of(self.destination.get((group, destination_space), ()), table.destination),
                    )
                    for group in self._groups
                },
            )
        return known


def _rows_of(layers: tuple[_Slabs, ...], rows: Addresses) -> Bools:
    """Which rows step from block to block of some slab, beginning with its block 0."""
    found = np.zeros(len(rows), np.bool_)
    for slabs in layers:
        inside, first, last = slabs.blocks(rows[:, 0], rows[:, 1])
        steps = (rows[:, 4] == 1) | (rows[:, 3] == slabs.stride_at(rows[:, 0]))
        found |= inside & (first == 0) & (last == 0) & steps
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Entries:
    """How the flat indices of one side of a table fall into rows: `count` entries each, or 0 where they differ."""

    first: Int64s
    count: int

    @classmethod
    def of(cls, rows: Addresses, first: Int64s) -> _Entries:
        count = int(rows[0, 4])
        return cls(first, count if bool((rows[:, 4] == rows[0, 4]).all()) else 0)

    def rows(self, flat: Indices) -> npt.NDArray[np.signedinteger[Any]]:
        """The row of each index."""
        count = self.count
        return np.floor_divide(flat, np.int32(count)) if count else np.searchsorted(self.first, flat, side="right") - 1

    def ids(self, flat: Indices) -> npt.NDArray[np.signedinteger[Any]]:
        """The block id of each index."""
        return np.remainder(flat, np.int32(self.count)) if self.count else flat - self.first[self.rows(flat)]


@dataclass(frozen=True, slots=True, eq=False)
class _TableGround:
    """How the indices of a table fall into rows, and which rows are of blocks of which group, on both sides."""

    source: _Entries
    destination: _Entries
    rows: Mapping[str, tuple[Bools, Bools]]


class _Places:
    """The blocks of a request on one side: the places of ids, counted in blocks."""

    def __init__(self, blocks: NeededBlocks, block_tokens: int) -> None:
        self._ids, self._place = np.unique(blocks.ids, return_index=True)
        self._first = blocks.first
        self.block_tokens = block_tokens
        self.unambiguous = len(self._ids) == len(blocks.ids)
        """No id stands at two places. A source may give one twice."""
        self._run = np.cumsum(np.concatenate((np.zeros(1, np.int64), np.diff(blocks.ids) != 1)))

    def find(self, first: Int64s, last: Int64s) -> tuple[Bools, Int64s, Int64s]:
        """Whether all ids from `first` to `last` are the request's, and where those two stand in `_ids`."""
        low = np.searchsorted(self._ids, first)
        high = low + (last - first)
        known = np.less_equal(first, last) & np.less(high, len(self._ids))
        low, high = np.where(known, low, 0), np.where(known, high, 0)
        # They rise and none occurs twice: if the last stands where it should, so do all before it.
        known &= np.equal(self._ids[high], last)
        return known, low, high

    def one_run(self, low: Int64s, high: Int64s) -> Bools:
        """Whether blocks follow each other in the request as they do in memory."""
        same: Bools = np.equal(self._run[self._place[low]], self._run[self._place[high]])
        return same

    def token(self, at: Int64s) -> Int64s:
        """The first token of blocks."""
        tokens: Int64s = (self._place[at].astype(np.int64) + self._first) * self.block_tokens
        return tokens

    def tokens_of(self, ids: npt.NDArray[np.signedinteger[Any]]) -> Int64s:
        """The first token of the blocks of these ids; below -2**62 for those that are not the request's."""
        if self._by_id is None:
            known, low, _ = self.find(ids.astype(np.int64), ids.astype(np.int64))
            return np.where(known, self.token(low), NOWHERE)
        found: Int64s = self._by_id[np.minimum(ids, len(self._by_id) - 1)]
        return found

    @cached_property
    def _by_id(self) -> Int64s | None:
        """`tokens_of` every id, where there are few."""
        if int(self._ids[-1]) >= BY_ID_LIMIT:
            return None
        tokens = np.full(int(self._ids[-1]) + 2, NOWHERE, np.int64)
        tokens[self._ids] = self.token(np.arange(len(self._ids), dtype=np.int64))
        return tokens

    def share_tokens(self, mine: Int64s, other: _Places, theirs: Int64s) -> Bools:
        """Whether pairs of blocks hold a token that both hold."""
        here, there = self.token(mine), other.token(theirs)
        return np.less(here, there + other.block_tokens) & np.less(there, here + self.block_tokens)


class RequestPlaces:
    """The blocks of one request on both sides, by group; shared by its footprints.

    Args:
        source_groups, groups: of both engines, by name.
        needed: what is moved, by group.
    """

    def __init__(
        self, source_groups: Mapping[str, Group], groups: Mapping[str, Group], needed: Mapping[str, GroupRequest]
    ) -> None:
        self.by_group = {
            name: (_places(wanted.source, source_groups[name]), _places(wanted.destination, groups[name]))
            for name, wanted in needed.items()
        }


class Footprint:
    """The blocks of one request that are read from one rank. Immutable, so thread-safe.

    Args:
        ground: of the plan, for that rank.
        places: the request's.
    """

    def __init__(self, ground: Ground, places: RequestPlaces) -> None:
        self._ground = ground
        self._places = places.by_group

    def effort(self, descriptors: Descriptors) -> int:
        """About how long `check` takes, see `AT_ONCE`."""
        # Indices are looked up, whatever lies over what.
        prepared = isinstance(descriptors, PreparedDescriptors)
        return descriptors.count // 16 if prepared else descriptors.count * self._ground.layers

    def check(self, descriptors: Descriptors) -> None:
        """Raise `InvalidField` unless every descriptor reads blocks of the request into the blocks of the same tokens.

        They lie inside of registered regions, as `kvferry._transport.bounds` has checked.
        """
        if isinstance(descriptors, PreparedDescriptors):
            self._check_prepared(descriptors)
        else:
            self._check_raw(descriptors)

    def _check_raw(self, raw: RawDescriptors) -> None:
        spaces = (
            (raw.memory.source_kind, raw.memory.source_device),
            (
                raw.memory.destination_kind,
                raw.memory.destination_device,
            ),
        )
        left = raw
        while True:
            left = _at(left, self._unknown(left, *spaces))
            if not left.count:
                return
            # A descriptor may run on from one plane into the next, where both sides do: piece by piece, then.
            room = np.minimum(
                _room(self._ground.source, self._places, spaces[0], left.source),
                _room(self._ground.destination, self._places, spaces[1], left.destination),
            )
            left = self._divided(left, room)

    def _unknown(self, raw: RawDescriptors, source_space: _Space, destination_space: _Space) -> Int64s:
        """Which of the descriptors do not go from blocks of the request to the blocks of the same tokens."""
        left = np.arange(raw.count, dtype=np.int64)
        for name, (theirs, mine) in self._places.items():
            for source in self._ground.source.get((name, source_space), ()):
                for destination in self._ground.destination.get((name, destination_space), ()):
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
        """Each descriptor as the piece that has room, and the rest; raises `InvalidField` where that is all of it."""
        self._refuse(raw, np.flatnonzero((room == 0) | (room >= raw.length)))
        return RawDescriptors(
            raw.memory,
            np.concatenate((raw.source, raw.source + room)),
            np.concatenate((raw.destination, raw.destination + room)),
            np.concatenate((room, raw.length - room)),
        )

    def _check_prepared(self, prepared: PreparedDescriptors) -> None:
        ground = self._ground.table(prepared.table)
        source, destination = prepared.source, prepared.destination
        for name, (theirs, mine) in self._places.items():
            if name not in ground.rows:
                continue
            of_source, of_destination = ground.rows[name]
            there = theirs.tokens_of(ground.source.ids(source))
            here = mine.tokens_of(ground.destination.ids(destination))
            right = here > NOWHERE
            if theirs.unambiguous:
                right &= np.less(here, there + theirs.block_tokens)
                right &= np.less(there, here + mine.block_tokens)
            else:
                right &= there > NOWHERE
            for entries, flat, rows in (
                (ground.source, source, of_source),
                (ground.destination, destination, of_destination),
            ):
                if not bool(rows.all()):
                    right &= rows[entries.rows(flat)]
            if bool(right.all()):
                return
            # What is not of this group may be of another.
            wrong = np.flatnonzero(~right)
            source, destination = source[wrong], destination[wrong]
        if len(source):
            value = f"index {int(source[0])} to index {int(destination[0])}"
            raise InvalidField("descriptors", value, EXPECTED)

    def check_source(self, descriptors: RawDescriptors) -> None:
        """The same, for both ends of what is read to other memory than the blocks. What lies between may
        be bytes of other blocks, where units or planes are further apart than blocks; nothing is made of them."""
        space = (descriptors.memory.source_kind, descriptors.memory.source_device)
        one = np.ones(descriptors.count, np.uint64)
        for ends in (descriptors.source, descriptors.source + descriptors.length - one):
            wrong = np.arange(descriptors.count, dtype=np.int64)
            for name, (theirs, _) in self._places.items():
                for slabs in self._ground.source.get((name, space), ()):
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
    grounds: Mapping[tuple[str, _Space], tuple[_Slabs, ...]],
    groups: Iterable[str],
    space: _Space,
    address: Addresses,
) -> Addresses:
    """Bytes from each address on that lie in one slab, of whichever group; 0 for those that lie in none."""
    least = np.full(len(address), ADDRESS_LIMIT, np.uint64)
    for name in groups:
        for slabs in grounds.get((name, space), ()):
            room = slabs.room(address)
            least = np.where(room > 0, np.minimum(least, room), least)
    return np.where(least == ADDRESS_LIMIT, np.uint64(0), least)


def _find(places: _Places, slabs: _Slabs, address: Addresses, length: Addresses) -> tuple[Bools, Int64s, Int64s]:
    inside, first, last = slabs.blocks(address, length)
    known, low, high = places.find(first, last)
    return inside & known, low, high


def _places(blocks: NeededBlocks, group: Group) -> _Places:
    # A request has one block of state.
    return _Places(blocks, 1 if group.kind is GroupKind.STATE else group.block_tokens)


def _layers(planes: Iterable[Plane]) -> tuple[_Slabs, ...]:
    """The slabs of planes. Those that lie over each other, as no engine's do, are in different layers."""
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


def _arrays(slabs: Sequence[_Slab]) -> _Slabs:
    begin, end, stride, window, span = (
        np.array([getattr(slab, name) for slab in slabs], np.uint64)
        for name in ("begin", "end", "stride", "window", "span")
    )
    # A slab of fewer turns than another never begins anew.
    turns = zip_longest(*(slab.used for slab in slabs), fillvalue=(ADDRESS_LIMIT, ADDRESS_LIMIT))
    columns = (zip(*column, strict=True) for column in turns)
    return _Slabs(
        begin,
        end,
        stride,
        window,
        span,
        tuple((np.array(steps, np.uint64), np.array(used, np.uint64)) for steps, used in columns),
    )


@dataclass(frozen=True, slots=True)
class _Slab:
    """One slab. `window`: bytes of a step that its planes use; `turns` with their counts."""

    begin: int
    end: int
    stride: int
    blocks: int
    window: int
    turns: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, plane: Plane) -> _Slab:
        begin, end = plane.extent
        if plane.num_blocks == 1:
            return cls(begin, end, end - begin, 1, end - begin, ())
        axes = (
            (plane.page_stride, plane.pages),
            (plane.unit_stride, len(plane.units)),
            (plane.token_stride, plane.page_tokens),
        )
        turns = sorted(((step, count) for step, count in axes if count > 1 and step > plane.block_stride), reverse=True)
        window = plane.block_extent - sum(step * (count - 1) for step, count in turns)
        return cls(begin, end, plane.block_stride, plane.num_blocks, window, tuple(turns))

    @property
    def span(self) -> int:
        """Bytes from the first block to the end of the last, before they begin anew."""
        return self.window + self.stride * (self.blocks - 1)

    @property
    def used(self) -> tuple[tuple[int, int], ...]:
        """The steps of the turns, and how many bytes of each hold blocks."""
        found, span = [], self.span
        for step, count in reversed(self.turns):
            found.append((step, span))
            span += step * (count - 1)
        return tuple(reversed(found))

    def joined(self, other: _Slab) -> _Slab | None:
        """Both as one, if the blocks of the other lie in the same steps."""
        window = max(self.window, other.begin - self.begin + other.window)
        blocks = max(self.blocks, other.blocks)
        if (self.stride, self.turns) != (other.stride, other.turns) or window > self.stride:
            return None
        both = _Slab(self.begin, max(self.end, other.end), self.stride, blocks, window, self.turns)
        return both if all(used <= step for step, used in both.used) else None


def _slabs(planes: Iterable[Plane]) -> Iterator[_Slab]:
    """Planes of one stride that lie within one another's steps, layers packed into one storage, share a slab."""
    last: _Slab | None = None
    for slab in sorted(map(_Slab.of, planes), key=lambda slab: (slab.stride, slab.turns, slab.begin)):
        joined = None if last is None else last.joined(slab)
        if joined is None and last is not None:
            yield last
        last = joined or slab
    if last is not None:
        yield last
