"""Strided arrays of equal cells in memory, by addresses alone: what a copy reads and writes, what a sum reads, what is
cleared. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvferry.geometry.plane import Interval, Plane
from kvferry.planner.staged_read import Copy
from kvferry.planner.summed_blocks import AlikeBlocks


class Cells(NamedTuple):
    """A strided array of cells.

    Attributes:
        address: of the first cell.
        shape: cells along each axis.
        strides: bytes from each cell to the next along each axis.
        size: contiguous bytes of a cell.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int

    @property
    def length(self) -> int:
        """Bytes from the first cell to the end of the last, holes included."""
        return sum((count - 1) * stride for count, stride in zip(self.shape, self.strides, strict=True)) + self.size


def source_cells(copy: Copy) -> Cells:
    """What a copy reads, from place 0 to its last place: ``[places, *axes]``."""
    return Cells(
        copy.source,
        (int(copy.places[-1]) + 1, *(count for count, _, _ in copy.axes)),
        (copy.source_stride, *(stride for _, stride, _ in copy.axes)),
        copy.cell,
    )


def destination_cells(copy: Copy) -> Cells:
    """What a copy writes, from block 0 to its highest block: ``[blocks, *axes]``."""
    return Cells(
        copy.destination,
        (int(copy.ids.max()) + 1, *(count for count, _, _ in copy.axes)),
        (copy.destination_stride, *(stride for _, _, stride in copy.axes)),
        copy.cell,
    )


def block_cells(plane: Plane, units: Interval, blocks: AlikeBlocks) -> Iterator[tuple[int, Cells]]:
    """The states of alike blocks, cut where a page ends: the index of each run, and its cells in all blocks from 0 to
    the highest: ``[blocks, units, cells of a unit]``."""
    count_of_blocks = int(blocks.ids.max()) + 1
    first_unit = plane.base + (units.begin - plane.units.begin) * plane.unit_stride
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
