"""Access to the memory of one address space, as strided arrays of equal cells: to the host's with numpy, and to a
device's as in `kvferry._memory.device`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.geometry.blocks import AnyIds
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import Interval, MemoryKind, Plane
from kvferry.planner.checksum import Sums, padded, sums_of
from kvferry.planner.expansion import Copy
from kvferry.planner.rows import Cells
from kvferry.planner.token_line import AlikeBlocks

ALIGNMENT = 2 << 20
"""Alignment of staging memory: to a huge page, so that the memory lies in as few huge pages as possible."""

BYTES_AT_ONCE = 256 << 10
"""Bytes that are gathered at a time to be summed: they fit into a processor's cache."""


class StillCopying(Exception):
    """A device did not confirm the end of its copies, so its memory may still be written."""


class MemoryAccess(Protocol):
    """The memory of one address space, by address. Thread-safe."""

    def allocate(self, size: int) -> StagingSpace:
        """New memory of `size` bytes, which `copy` can read and write."""

    def copy(self, copies: Iterable[Copy]) -> None:
        """Make copies. They have ended when this returns or raises, unless it raises `StillCopying`."""

    def sums(self, plane: Plane, units: Interval, blocks: AlikeBlocks) -> Sums:
        """The sums of these units of these blocks of a plane, ``uint32[blocks, units]``."""

    def clear(self, plane: Plane, blocks: AlikeBlocks) -> None:
        """Write zeros over all units of these blocks of a plane. This ends as `copy` does."""


@dataclass(frozen=True, slots=True, eq=False)
class StagingSpace:
    """Staging memory in one address space, kept by `owner`, an array or a tensor, while this object is referenced."""

    region: MemoryRegion
    memory: MemoryAccess
    owner: object = field(repr=False)


def selection(indices: AnyIds) -> slice | AnyIds:
    """The index for these positions of an axis: a slice, which copies nothing, if they are consecutive."""
    first, last = int(indices[0]), int(indices[-1])
    is_run = last - first + 1 == len(indices) and bool((np.diff(indices) == 1).all())
    return slice(first, last + 1) if is_run else indices


def block_cells(plane: Plane, units: Interval, blocks: AlikeBlocks) -> Iterator[tuple[int, Cells]]:
    """The states of alike blocks, cut where a page ends: the index of each run, and the run's cells in all blocks from
    0 to the highest: ``[blocks, units, cells of a unit]``."""
    count_of_blocks = int(blocks.ids.max()) + 1
    first_unit = plane.unit_address(units.begin)
    for index, run in enumerate(blocks.runs):
        first, end = run.first, run.first + run.count
        while first < end:
            page, at = divmod(first, plane.page_tokens)
            count = min(end - first, plane.page_tokens - at)
            address = first_unit + page * plane.page_stride + at * plane.token_stride
            if count == 1 or plane.token_stride == plane.state_bytes:
                cells, stride, size = 1, 0, count * plane.state_bytes
            else:
                cells, stride, size = count, plane.token_stride, plane.state_bytes
            shape = (count_of_blocks, len(units), cells)
            yield index, Cells(address, shape, (plane.block_stride, plane.unit_stride, stride), size)
            first += count


def bytes_per_unit(plane: Plane, blocks: AlikeBlocks) -> int:
    """Bytes of the states of one unit of one block."""
    return sum(run.count for run in blocks.runs) * plane.state_bytes


class HostAccess:
    """`MemoryAccess` to the host's memory. Callers have checked that all blocks lie in registered memory."""

    def allocate(self, size: int) -> StagingSpace:
        """See `MemoryAccess`. The memory takes no room until it is used."""
        # With numpy's own alignment, 16 bytes, the kernel's copies into the memory (CMA) are 2.4 times as slow.
        array = np.empty(size + ALIGNMENT, np.uint8)
        array = array[-array.ctypes.data % ALIGNMENT :][:size]
        return StagingSpace(MemoryRegion(MemoryKind.DRAM, 0, array.ctypes.data, size), self, array)

    def copy(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            _view(copy.destination)[copy.ids] = _view(copy.source)[selection(copy.places)]

    def sums(self, plane: Plane, units: Interval, blocks: AlikeBlocks) -> Sums:
        length = bytes_per_unit(plane, blocks)
        parts = [(run, cells, _view(cells)) for run, cells in block_cells(plane, units, blocks)]
        rows = max(1, BYTES_AT_ONCE // (len(units) * padded(length)))
        found = np.empty((len(blocks.places), len(units)), np.uint32)
        buffer = np.zeros((min(rows, len(found)), len(units), padded(length)), np.uint8)
        # A block of one contiguous cell of whole words is summed as gathered, without the buffer.
        as_gathered = len(parts) == 1 and parts[0][1].size == length == padded(length)
        for first in range(0, len(found), rows):
            ids = blocks.ids[first : first + rows]
            if as_gathered:
                gathered = np.ascontiguousarray(parts[0][2][selection(ids[:, 0])])
                words = gathered.view(np.int64).reshape(len(ids), len(units), -1)
            else:
                at = 0
                for run, cells, view in parts:
                    count = cells.shape[-1]
                    strides = (*buffer.strides[:2], cells.size)
                    into = np.ndarray((len(ids), len(units), count), view.dtype, buffer, at, strides)
                    into[...] = view[selection(ids[:, run])]
                    at += count * cells.size
                words = buffer[: len(ids)].view(np.int64)
            found[first : first + rows] = sums_of(words, length)
        return found

    def clear(self, plane: Plane, blocks: AlikeBlocks) -> None:
        for run, cells in block_cells(plane, plane.units, blocks):
            view = _view(cells)
            view[blocks.ids[:, run]] = np.zeros((), view.dtype)


def _view(cells: Cells) -> npt.NDArray[Any]:
    """Cells as an array of numbers or opaque values."""
    memory = memoryview((ctypes.c_char * cells.length).from_address(cells.address))
    # One opaque value of any size is copied by one memmove; integers are faster only up to a word.
    kind = np.dtype(f"u{cells.size}") if cells.size in (1, 2, 4, 8) else np.dtype((np.void, cells.size))
    return np.ndarray(cells.shape, kind, memory, 0, cells.strides)
