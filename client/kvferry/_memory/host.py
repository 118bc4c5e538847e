"""Host memory: copied, summed and cleared with numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry._memory.access import StagingSpace, block_cells, bytes_per_unit, selection
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import Interval, MemoryKind, Plane
from kvferry.planner.checksum import Sums, padded, sums_of
from kvferry.planner.rows import Cells
from kvferry.planner.staged_read import Copy
from kvferry.planner.token_line import AlikeBlocks

ALIGNMENT = 2 << 20
"""Alignment of staging memory: to a huge page, so that the memory lies in as few huge pages as possible."""

BYTES_AT_ONCE = 256 << 10
"""Bytes that are gathered at a time to be summed: they fit into a processor's cache."""


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
