"""Device memory: copied, summed and cleared with torch, on the device."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvferry._memory.access import StagingSpace, StillCopying
from kvferry._memory.cells import Cells, block_cells, bytes_per_unit, destination_cells, source_cells
from kvferry.errors import InvalidField
from kvferry.geometry.model import Interval, MemoryKind, MemoryRegion, Plane
from kvferry.planner.checksum import Sums, padded, start, weights
from kvferry.planner.staged_read import Copy
from kvferry.planner.summed_blocks import AlikeBlocks

BYTES_AT_ONCE = 64 << 20
"""Bytes that are gathered at a time to be summed. Each step costs a launch, so this is much more than on the host."""


class DeviceAccess:
    """Access to the memory of one device. An address is found by the tensor that it lies in.

    Args:
        device: as torch names it.
        tensors: tensors on the device.

    Raises:
        InvalidField: by `copy`, `sums` and `clear`, for memory that lies in none of the tensors.
    """

    def __init__(self, device: str, tensors: Iterable[Any]) -> None:
        self._torch: Any = sys.modules["torch"]
        self._device = self._torch.device(device)
        self._lock = threading.Lock()
        self._storages: dict[int, Any] = {}
        """What the tensors are made of, by address. Replaced, never changed, so that it is read without the lock."""
        for tensor in tensors:
            self._keep(tensor)

    def allocate(self, size: int) -> StagingSpace:
        """See `MemoryAccess`. Allocated at once, and kept for as long as this object."""
        tensor = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
        self._keep(tensor)
        kind = MemoryKind.DRAM if self._device.type == "cpu" else MemoryKind.VRAM
        return StagingSpace(MemoryRegion(kind, self._device.index or 0, tensor.data_ptr(), size), self, tensor)

    def copy(self, copies: Iterable[Copy]) -> None:
        """See `MemoryAccess`."""
        try:
            for copy in copies:
                self._copy(copy)
        finally:
            # Also after an error: the copies before it are queued.
            self._finish()

    def sums(self, plane: Plane, units: Interval, blocks: AlikeBlocks) -> Sums:
        """See `MemoryAccess`."""
        torch = self._torch
        length = bytes_per_unit(plane, blocks)
        parts = [(run, self._bytes(cells)) for run, cells in block_cells(plane, units, blocks)]
        rows = max(1, BYTES_AT_ONCE // (len(units) * padded(length)))
        ids = torch.from_numpy(blocks.ids.astype(np.int64)).to(self._device)
        whole, upper = (torch.tensor(of).to(self._device) for of in weights(padded(length) // 8))
        found = torch.empty((len(ids), len(units)), dtype=torch.int64, device=self._device)
        for first in range(0, len(ids), rows):
            chosen = ids[first : first + rows]
            buffer = torch.zeros((len(chosen), len(units), padded(length)), dtype=torch.uint8, device=self._device)
            at = 0
            for run, view in parts:
                gathered = view[chosen[:, run]].reshape(len(chosen), len(units), -1)
                buffer[:, :, at : at + gathered.shape[2]] = gathered
                at += gathered.shape[2]
            words = buffer.view(torch.int64)
            total = (words * whole).sum(-1) + ((words >> 32) * upper).sum(-1) + start(length)
            found[first : first + rows] = (total >> 32) & 0xFFFFFFFF
        sums: Sums = found.cpu().numpy().astype(np.uint32)
        return sums

    def clear(self, plane: Plane, blocks: AlikeBlocks) -> None:
        """See `MemoryAccess`."""
        ids = self._torch.from_numpy(blocks.ids.astype(np.int64)).to(self._device)
        try:
            for run, cells in block_cells(plane, plane.units, blocks):
                self._bytes(cells)[ids[:, run]] = 0
        finally:
            # Also after an error: what was cleared before it is queued.
            self._finish()

    def _keep(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        with self._lock:
            known = self._storages.get(address)
            if known is None or known.nbytes() < storage.nbytes():
                self._storages = {**self._storages, address: storage}

    def _copy(self, copy: Copy) -> None:
        places = self._torch.from_numpy(copy.places).to(self._device)
        ids = self._torch.from_numpy(copy.ids).to(self._device)
        source, destination = source_cells(copy), destination_cells(copy)
        there, here = self._storage_of(source), self._storage_of(destination)
        # One word for both sides: the widest that divides every step of them.
        steps = [copy.cell, *source.strides, *destination.strides]
        steps += [source.address, there.data_ptr(), destination.address, here.data_ptr()]
        words = {8: self._torch.int64, 4: self._torch.int32, 2: self._torch.int16, 1: self._torch.uint8}
        size = next(size for size in words if not any(step % size for step in steps))
        self._view(here, destination, words[size], size)[ids] = self._view(there, source, words[size], size)[places]

    def _bytes(self, cells: Cells) -> Any:
        """Cells as a tensor of bytes, ``uint8[*cells.shape, cells.size]``."""
        return self._view(self._storage_of(cells), cells, self._torch.uint8, 1)

    def _view(self, storage: Any, cells: Cells, word: Any, size: int) -> Any:
        """Cells of a storage as a tensor of words of `size` bytes."""
        offset = (cells.address - storage.data_ptr()) // size
        shape = (*cells.shape, cells.size // size)
        strides = (*(stride // size for stride in cells.strides), 1)
        return self._torch.empty(0, dtype=word, device=self._device).set_(storage, offset, shape, strides)

    def _storage_of(self, cells: Cells) -> Any:
        first, last = cells.address, cells.address + cells.length
        for storage in self._storages.values():
            if storage.data_ptr() <= first and last <= storage.data_ptr() + storage.nbytes():
                return storage
        value = f"{cells.length} bytes at {cells.address:#x}"
        raise InvalidField("memory", value, f"memory of a tensor on {self._device}")

    def _finish(self) -> None:
        """Wait until the device has done what this thread gave it; raises `StillCopying` if it does not say so."""
        if self._device.type == "cpu":
            return
        try:
            self._torch.cuda.current_stream(self._device).synchronize()
        except Exception as error:
            raise StillCopying(f"{self._device}: {error!r}") from error
