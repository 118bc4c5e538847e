"""Copies out of staging memory, on the device of the cache: numpy for host memory, torch for device memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import InvalidField
from kvferry.geometry.model import MemoryKind, MemoryRegion
from kvferry.geometry.tensors import view_of
from kvferry.planner.staged_read import Copy


class StillCopying(Exception):
    """It is not known whether copies have ended: what was to be written may still be."""


class Space(Protocol):
    """One address space in which bytes are permuted. Its calls run on the reading threads."""

    @property
    def region(self) -> MemoryRegion:
        """The staging memory, mapped for as long as the space is referenced."""

    def copy(self, copies: Iterable[Copy]) -> None:
        """Make copies; they have ended when it returns, and when it raises, unless it raises `StillCopying`."""


class HostSpace:
    """Host memory, by address.

    Args:
        size: bytes of staging memory. They take no room until they are used.
    """

    def __init__(self, size: int) -> None:
        self._staging = np.empty(size, np.uint8)
        self.region = MemoryRegion(MemoryKind.DRAM, 0, self._staging.ctypes.data, size)

    def copy(self, copies: Iterable[Copy]) -> None:
        """See `Space`."""
        for copy in copies:
            places, ids = copy.places, copy.ids
            inner = [axis[0] for axis in copy.axes]
            source = _host_view(
                copy.source,
                (int(places[-1]) + 1, *inner),
                (copy.source_stride, *(axis[1] for axis in copy.axes)),
                copy.cell,
            )
            destination = _host_view(
                copy.destination,
                (int(ids.max()) + 1, *inner),
                (copy.destination_stride, *(axis[2] for axis in copy.axes)),
                copy.cell,
            )
            first, last = int(places[0]), int(places[-1])
            # A slice is a view, where indices would copy once more.
            chosen = source[first : last + 1] if last - first + 1 == len(places) else source[places]
            destination[ids] = chosen


class TorchSpace:
    """Device memory, by the tensors that it lies in.

    Args:
        size: bytes of staging memory, allocated at once.
        device: as torch names it.
        tensors: tensors on the device; everything that is copied to lies in the storage of one of them.
    """

    def __init__(self, size: int, device: str, tensors: Iterable[Any]) -> None:
        self._torch: Any = sys.modules["torch"]
        self._device = self._torch.device(device)
        self._staging = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
        kind = MemoryKind.DRAM if self._device.type == "cpu" else MemoryKind.VRAM
        self.region = MemoryRegion(kind, self._device.index or 0, self._staging.data_ptr(), size)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._storages = [*storages.values(), self._staging.untyped_storage()]
        self._words = (
            (8, self._torch.int64),
            (4, self._torch.int32),
            (2, self._torch.int16),
            (1, self._torch.uint8),
        )

    def copy(self, copies: Iterable[Copy]) -> None:
        """See `Space`."""
        try:
            for copy in copies:
                self._copy(copy)
        finally:
            # Also after an error: the copies before it are queued.
            finish(self._torch, self._device)

    def _copy(self, copy: Copy) -> None:
        places = self._torch.from_numpy(copy.places).to(self._device)
        ids = self._torch.from_numpy(copy.ids).to(self._device)
        counts = [axis[0] for axis in copy.axes]
        source = self._view(copy, copy.source, (int(copy.places[-1]) + 1, *counts), copy.source_stride, 1)
        destination = self._view(copy, copy.destination, (int(copy.ids.max()) + 1, *counts), copy.destination_stride, 2)
        destination[ids] = source[places]

    def _view(self, copy: Copy, address: int, shape: tuple[int, ...], stride: int, side: int) -> Any:
        storage = self._storage_of(address)
        offset = address - storage.data_ptr()
        strides = (stride, *(axis[side] for axis in copy.axes))
        # One word for both sides: the widest that divides every step of them.
        steps = [copy.cell, copy.source_stride, copy.destination_stride, copy.source, copy.destination]
        steps += [step for axis in copy.axes for step in axis[1:]]
        size, word = next((size, word) for size, word in self._words if not any(step % size for step in steps))
        return self._torch.empty(0, dtype=word, device=self._device).set_(
            storage, offset // size, (*shape, copy.cell // size), (*(step // size for step in strides), 1)
        )

    def _storage_of(self, address: int) -> Any:
        for storage in self._storages:
            if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                return storage
        raise InvalidField("destination", hex(address), f"memory of a tensor on {self._device}")


def finish(torch: Any, device: Any) -> None:
    """Wait until a device has done what this thread gave it; raises `StillCopying` if it does not say so."""
    if device.type == "cpu":
        return
    try:
        torch.cuda.current_stream(device).synchronize()
    except Exception as error:
        raise StillCopying(f"{device}: {error!r}") from error


def device_tensors(tensors: Iterable[Any]) -> dict[int, list[Any]]:
    """Those that are torch tensors in device memory, by device."""
    found: dict[int, list[Any]] = {}
    for tensor in tensors:
        if hasattr(tensor, "untyped_storage"):
            view = view_of(tensor)
            if view.memory_kind is MemoryKind.VRAM:
                found.setdefault(view.device, []).append(tensor)
    return found


def _host_view(address: int, shape: tuple[int, ...], strides: tuple[int, ...], cell: int) -> npt.NDArray[Any]:
    """Memory at an address as an array of cells. The planner has checked that it lies in registered memory."""
    length = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True)) + cell
    memory = memoryview((ctypes.c_char * length).from_address(address))
    # As one opaque value a cell of any size is copied by one memmove; integers are faster only up to a word.
    kind = np.dtype(f"u{cell}") if cell in (1, 2, 4, 8) else np.dtype((np.void, cell))
    return np.ndarray(shape, kind, memory, 0, strides)
