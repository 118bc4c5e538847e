"""Blocks summed, and cleared, where they lie: numpy for host memory, torch for device memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry._memory.permute import device_tensors, finish
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import AnyIds
from kvferry.geometry.model import Interval, MemoryKind, Plane
from kvferry.planner.checksum import Sums, padded, start, sums_of, weights
from kvferry.planner.summed_blocks import AlikeBlocks

HOST_BYTES = 256 << 10
"""Bytes that are gathered at a time in host memory: small enough for a processor's cache."""

DEVICE_BYTES = 64 << 20
"""The same on a device, where each step costs a launch."""


class Summer(Protocol):
    """Sums and clears what lies in one address space. Thread-safe."""

    def sums(self, plane: Plane, units: Interval, blocks: AlikeBlocks) -> Sums:
        """The sums of some units of some blocks of a plane, ``uint32[blocks, units]``."""

    def clear(self, plane: Plane, blocks: AlikeBlocks) -> None:
        """Write zeros over all units of some blocks of a plane; done when it returns."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The states of one run, within a page, of all units: a strided array of the plane's memory.

    Attributes:
        run: index of the run.
        offset: bytes from the beginning of a block to the first of them.
        count, stride: cells of a unit, and bytes from each to the next.
        size: contiguous bytes of a cell.
    """

    run: int
    offset: int
    count: int
    stride: int
    size: int


def cells_of(plane: Plane, units: Interval, blocks: AlikeBlocks) -> Iterator[Cells]:
    """The runs of alike blocks, cut where a page ends."""
    unit = (units.begin - plane.units.begin) * plane.unit_stride
    for index, run in enumerate(blocks.runs):
        first, end = run.first, run.first + run.count
        while first < end:
            page, at = divmod(first, plane.page_tokens)
            count = min(end - first, plane.page_tokens - at)
            offset = unit + page * plane.page_stride + at * plane.token_stride
            if count == 1 or plane.token_stride == plane.state_bytes:
                yield Cells(index, offset, 1, 0, count * plane.state_bytes)
            else:
                yield Cells(index, offset, count, plane.token_stride, plane.state_bytes)
            first += count


def _length(plane: Plane, blocks: AlikeBlocks) -> int:
    """Bytes that are summed of one unit of one block."""
    return sum(run.count for run in blocks.runs) * plane.state_bytes


class HostSummer:
    """Host memory, by address. What is read lies in registered memory: the ids are those of checked blocks."""

    def sums(self, plane: Plane, units: Interval, blocks: AlikeBlocks) -> Sums:
        """See `Summer`."""
        length, cells = _length(plane, blocks), tuple(cells_of(plane, units, blocks))
        rows = max(1, HOST_BYTES // (len(units) * padded(length)))
        found = np.empty((len(blocks.places), len(units)), np.uint32)
        views = [_host_view(plane, len(units), part, int(blocks.ids.max())) for part in cells]
        buffer = np.zeros((min(rows, len(found)), len(units), padded(length)), np.uint8)
        for first in range(0, len(found), rows):
            ids = blocks.ids[first : first + rows]
            if len(cells) == 1 and cells[0].count == 1 and length == padded(length):
                # Whatever is gathered is what is summed.
                gathered = np.ascontiguousarray(_chosen(views[0], ids[:, 0]))
                words = gathered.view(np.int64).reshape(len(ids), len(units), -1)
            else:
                at = 0
                for part, view in zip(cells, views, strict=True):
                    into = np.ndarray(
                        (len(ids), len(units), part.count), view.dtype, buffer, at, (*buffer.strides[:2], part.size)
                    )
                    into[...] = _chosen(view, ids[:, part.run])
                    at += part.count * part.size
                words = buffer[: len(ids)].view(np.int64)
            found[first : first + rows] = sums_of(words, length)
        return found

    def clear(self, plane: Plane, blocks: AlikeBlocks) -> None:
        """See `Summer`."""
        for cells in cells_of(plane, plane.units, blocks):
            view = _host_view(plane, len(plane.units), cells, int(blocks.ids.max()))
            view[blocks.ids[:, cells.run]] = np.zeros((), view.dtype)


def _host_view(plane: Plane, units: int, cells: Cells, last: int) -> npt.NDArray[Any]:
    """The cells of blocks 0 to `last` as opaque values, ``[blocks, units, cells]``."""
    shape = (last + 1, units, cells.count)
    strides = (plane.block_stride, plane.unit_stride, cells.stride)
    length = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True)) + cells.size
    memory = memoryview((ctypes.c_char * length).from_address(plane.base + cells.offset))
    # Of one opaque value each cell is copied by one memmove.
    return np.ndarray(shape, np.dtype((np.void, cells.size)), memory, 0, strides)


def _chosen(view: npt.NDArray[Any], ids: AnyIds) -> npt.NDArray[Any]:
    """The blocks of these ids; not copied where they lie one after the other."""
    first = int(ids[0])
    if int(ids[-1]) - first + 1 == len(ids) and bool((np.diff(ids) == 1).all()):
        return view[first : first + len(ids)]
    return view[ids]


class TorchSummer:
    """Memory of one device, by the tensors that it lies in. The sums are made on the device.

    Args:
        device: as torch names it.
        tensors: tensors on the device; everything that is summed lies in the storage of one of them.
    """

    def __init__(self, device: str, tensors: Iterable[Any]) -> None:
        self._torch: Any = sys.modules["torch"]
        self._device = self._torch.device(device)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._storages = tuple(storages.values())

    def sums(self, plane: Plane, units: Interval, blocks: AlikeBlocks) -> Sums:
        """See `Summer`."""
        torch = self._torch
        length, cells = _length(plane, blocks), tuple(cells_of(plane, units, blocks))
        rows = max(1, DEVICE_BYTES // (len(units) * padded(length)))
        views = [self._view(plane, len(units), part, int(blocks.ids.max())) for part in cells]
        ids = torch.from_numpy(blocks.ids.astype(np.int64)).to(self._device)
        whole, upper = (torch.tensor(of).to(self._device) for of in weights(padded(length) // 8))
        found = torch.empty((len(ids), len(units)), dtype=torch.int64, device=self._device)
        for first in range(0, len(ids), rows):
            chosen = ids[first : first + rows]
            buffer = torch.zeros((len(chosen), len(units), padded(length)), dtype=torch.uint8, device=self._device)
            at = 0
            for part, view in zip(cells, views, strict=True):
                size = part.count * part.size
                buffer[:, :, at : at + size] = view[chosen[:, part.run]].reshape(len(chosen), len(units), size)
                at += size
            words = buffer.view(torch.int64)
            total = (words * whole).sum(-1) + ((words >> 32) * upper).sum(-1) + start(length)
            found[first : first + rows] = (total >> 32) & 0xFFFFFFFF
        sums: Sums = found.cpu().numpy().astype(np.uint32)
        return sums

    def clear(self, plane: Plane, blocks: AlikeBlocks) -> None:
        """See `Summer`."""
        ids = self._torch.from_numpy(blocks.ids.astype(np.int64)).to(self._device)
        try:
            for cells in cells_of(plane, plane.units, blocks):
                view = self._view(plane, len(plane.units), cells, int(blocks.ids.max()))
                view[ids[:, cells.run]] = 0
        finally:
            # Also after an error: what was cleared before it is queued.
            finish(self._torch, self._device)

    def _view(self, plane: Plane, units: int, cells: Cells, last: int) -> Any:
        address = plane.base + cells.offset
        for storage in self._storages:
            if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                shape = (last + 1, units, cells.count, cells.size)
                strides = (plane.block_stride, plane.unit_stride, cells.stride, 1)
                bytes_of = self._torch.empty(0, dtype=self._torch.uint8, device=self._device)
                return bytes_of.set_(storage, address - storage.data_ptr(), shape, strides)
        raise InvalidField("plane", plane.name, f"memory of a tensor on {self._device}, to be summed there")


class Summers:
    """The summers of one rank's memory.

    Args:
        tensors: those that the rank was registered with.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._host = HostSummer()
        self._devices = {
            device: TorchSummer(str(members[0].device), members) for device, members in device_tensors(tensors).items()
        }

    def of(self, plane: Plane) -> Summer | None:
        """The summer of a plane's memory; None for device memory that is not a tensor's."""
        return self._host if plane.memory_kind is MemoryKind.DRAM else self._devices.get(plane.device)
