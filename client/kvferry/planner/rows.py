"""The bytes of one block as contiguous rows: every plane's cells, by the address formula, then fused.

Rows are for block id 0 on both sides; a request adds ``id * block_stride``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.geometry.plane import Plane
from kvferry.planner.coverage import PlaneRead

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """The states of a block that are read: `count` held states, from state `source` of the source's block, into the
    destination's block from state `destination`. A request of any length has few different cuts."""

    source: int
    destination: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Contiguous pieces of one block by rising source address: addresses and bytes, ``int64[rows]`` each. `unfused` is
    the number of contiguous pieces before planes are fused with each other."""

    source: Int64s
    destination: Int64s
    length: Int64s
    unfused: int

    def __len__(self) -> int:
        return len(self.length)


_strides = attrgetter("unit_stride", "page_tokens", "page_stride", "token_stride")
"""The fields of a plane that with its base give every cell's address."""


@dataclass(frozen=True, slots=True, eq=False)
class AlikePlanes:
    """Plane reads that differ only in their base addresses, so that their cells of `state_bytes` are enumerated once.
    `source` and `destination` are the planes of the first of them; the bases are the addresses of the first unit read,
    ``int64[planes]``."""

    source: Plane
    destination: Plane
    units: int
    state_bytes: int
    source_base: Int64s
    destination_base: Int64s

    def rows(self, cut: Cut) -> Rows:
        """The rows of a cut, fused within each plane."""
        source = _offsets(self.source, cut.source, cut.count)
        destination = _offsets(self.destination, cut.destination, cut.count)
        length = np.full(cut.count, self.state_bytes, np.int64)
        source, destination, length = _fuse(source, destination, length)
        unit = np.arange(self.units, dtype=np.int64)[:, None]
        cells_source = (unit * self.source.unit_stride + source).ravel()
        cells_destination = (unit * self.destination.unit_stride + destination).ravel()
        source, destination, length = _fuse(cells_source, cells_destination, np.tile(length, self.units))
        planes = len(self.source_base)
        source, destination = self.source_base[:, None] + source, self.destination_base[:, None] + destination
        return Rows(source.ravel(), destination.ravel(), np.tile(length, planes), len(length) * planes)


@dataclass(frozen=True, slots=True)
class RowExtent:
    """Contiguous bytes of a source block that hold all reads of one plane, or of several whose bytes interleave.
    `source` is the address in block 0; `planes` are (index of the `AlikePlanes`, index of the plane in them)."""

    source: int
    length: int
    planes: tuple[tuple[int, int], ...]


def alike(reads: Iterable[PlaneRead]) -> tuple[AlikePlanes, ...]:
    """Gather plane reads by their strides."""
    gathered: dict[tuple[object, ...], list[PlaneRead]] = {}
    for read in reads:
        key = (_strides(read.source), _strides(read.destination), len(read.units), read.source.state_bytes)
        gathered.setdefault(key, []).append(read)
    return tuple(
        AlikePlanes(
            members[0].source,
            members[0].destination,
            len(members[0].units),
            members[0].source.state_bytes,
            source_base=np.array([read.source.unit_address(read.units.begin) for read in members], np.int64),
            destination_base=np.array([read.destination.unit_address(read.units.begin) for read in members], np.int64),
        )
        for members in gathered.values()
    )


def _offsets(plane: Plane, first: int, count: int) -> Int64s:
    """Offsets of `count` consecutive held states of a block, ``int64[count]``."""
    page, at = np.divmod(np.arange(first, first + count, dtype=np.int64), plane.page_tokens)
    offsets: Int64s = page * plane.page_stride + at * plane.token_stride
    return offsets


def extents_of(planes: Sequence[AlikePlanes], states: int) -> tuple[RowExtent, ...]:
    """The extents of a source block of `states` held states. Planes whose bytes interleave share an extent; planes that
    only touch do not, since they may be registered separately."""
    found: list[RowExtent] = []
    places: list[tuple[int, int, int, int]] = []
    for alike, members in enumerate(planes):
        last_state = int(_offsets(members.source, 0, states).max())
        length = (members.units - 1) * members.source.unit_stride + last_state + members.state_bytes
        places += [(base, base + length, alike, plane) for plane, base in enumerate(members.source_base.tolist())]
    for begin, end, alike, plane in sorted(places):
        last = found[-1] if found else None
        if last is not None and begin < last.source + last.length:
            found[-1] = RowExtent(last.source, max(last.length, end - last.source), (*last.planes, (alike, plane)))
        else:
            found.append(RowExtent(begin, end - begin, ((alike, plane),)))
    return tuple(found)


def rows_of(planes: Iterable[AlikePlanes], cut: Cut, *, across: bool) -> Rows:
    """The rows of a cut over all planes. `across`: also fuse planes that touch on both sides."""
    parts = [members.rows(cut) for members in planes]
    source, destination, length = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("source", "destination", "length")
    )
    if across:
        source, destination, length = _fuse(source, destination, length)
    return Rows(source, destination, length, sum(part.unfused for part in parts))


class Cells(NamedTuple):
    """A strided array of cells of `size` contiguous bytes each; strides are in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int

    @property
    def length(self) -> int:
        """Bytes from the first cell to the end of the last, holes included."""
        return sum((count - 1) * stride for count, stride in zip(self.shape, self.strides, strict=True)) + self.size

    def times(self, count: int, stride: int, base: int) -> Cells:
        """The cells behind `base`, repeated along another axis, the first."""
        return Cells(base + self.address, (count, *self.shape), (stride, *self.strides), self.size)


def loops_of(members: AlikePlanes, cut: Cut) -> tuple[tuple[Cells, Cells], ...]:
    """The cells of a cut in one plane and block, of both sides, by offset: one pair, unless the strides between its
    states differ. The axes with the longest destination strides come first."""
    source = _offsets(members.source, cut.source, cut.count)
    destination = _offsets(members.destination, cut.destination, cut.count)
    steps = list(zip(np.diff(source).tolist(), np.diff(destination).tolist(), strict=True))
    found = []
    first = 0
    while first < cut.count:
        last = first
        while last + 1 < cut.count and steps[last] == steps[first]:
            last += 1
        count, cell = last - first + 1, members.state_bytes
        axes: list[tuple[int, int, int]] = []
        step = steps[first] if count > 1 else (cell, cell)
        if step == (cell, cell):
            cell *= count
        else:
            axes.append((count, *step))
        units = (members.units, members.source.unit_stride, members.destination.unit_stride)
        if members.units > 1 and not axes and units[1:] == (cell, cell):
            cell *= members.units
        elif members.units > 1:
            axes.append(units)
        axes.sort(key=lambda axis: -axis[2])
        counts, there, here = (tuple(column) for column in zip(*axes, strict=True)) if axes else ((), (), ())
        found.append(
            (Cells(int(source[first]), counts, there, cell), Cells(int(destination[first]), counts, here, cell))
        )
        first = last + 1
    return tuple(found)


def places_by_value(values: Int64s) -> list[npt.NDArray[np.intp]]:
    """The indices, rising, of each distinct value; by rising value."""
    order = np.argsort(values, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(values[order])) + 1)


def _fuse(source: Int64s, destination: Int64s, length: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Pieces by rising source address, with pieces that touch on both sides joined."""
    if bool((source[1:] < source[:-1]).any()):
        order = np.argsort(source, kind="stable")
        source, destination, length = source[order], destination[order], length[order]
    touches = (source[1:] == source[:-1] + length[:-1]) & (destination[1:] == destination[:-1] + length[:-1])
    first = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(~touches) + 1))
    return source[first], destination[first], np.add.reduceat(length, first)
