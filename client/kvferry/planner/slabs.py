"""From addresses back to blocks: the memory of planes as slabs, which are stretches of blocks of one stride. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.geometry.plane import ADDRESS_LIMIT, Plane
from kvferry.planner.descriptors import Addresses
from kvferry.planner.rows import Int64s

Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Slabs:
    """Slabs that do not overlap, by rising address: ``uint64[n]`` each.

    Of the `stride` from block to block, `window` bytes belong to the block. Where an axis of a plane, its units for
    example, steps further than from block to block, the same blocks occur again and again in the slab: once per *cycle*
    of that axis. `span` is the bytes from the first block to the end of the last, within one cycle; `cycles` has
    (bytes, used bytes) of a cycle of each such axis, the longest first.
    """

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
    columns = (zip(*column, strict=True) for column in cycles)
    pairs = tuple((np.array(steps, np.uint64), np.array(used, np.uint64)) for steps, used in columns)
    return Slabs(begin, end, stride, window, span, pairs)


@dataclass(frozen=True, slots=True)
class _Slab:
    """One slab, see `Slabs`. `cycles`: (bytes, number) of each axis."""

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
