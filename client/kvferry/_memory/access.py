"""Access to the memory of one address space, the host's or a device's, as strided arrays of equal cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvferry.geometry.blocks import AnyIds
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import Interval, Plane
from kvferry.planner.checksum import Sums
from kvferry.planner.rows import Cells
from kvferry.planner.staged_read import Copy
from kvferry.planner.token_line import AlikeBlocks


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

    def copy(self, copies: Iterable[Copy]) -> None:
        self.memory.copy(copies)


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
