"""Device memory: copied, summed and cleared with torch, on the device.

Each thread has a stream of its own there, and waits for this stream. The stream is ordered with nothing else on the
device, and needs no order:

- the bytes that it reads have arrived or were published, so nothing writes to them;
- the blocks that it writes belong to a read, and the engine runs no kernel on them before the read's end is reported;
- a kernel that the engine launches afterwards sees the written bytes, because the end of a kernel makes its writes
  visible to the whole device.

On the default stream a copy would wait for the engine's steps, and they for it. torch's other streams do not wait for
the default one, and so are no part of a graph that another thread captures (`kvferry._memory.current_device`). But
torch has only 32 streams of each priority, and gives them out in turns (c10/cuda/CUDAStream.cpp): one of the default
priority may be the stream that an engine captures on, and copies would become part of its graph. So kvferry's streams
have a priority that engines leave alone.

The threads are kvferry's own: engines call none of this from theirs. None of this has run on a GPU yet; the tests play
torch's stream and allocator.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry._memory.access import StagingSpace, StillCopying, block_cells, bytes_per_unit, selection
from kvferry._memory.current_device import ignore_captures
from kvferry.errors import InvalidField, TransferFailed
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import Interval, MemoryKind, Plane
from kvferry.planner.checksum import Sums, padded, start, weights
from kvferry.planner.expansion import Copy
from kvferry.planner.rows import Cells
from kvferry.planner.token_line import AlikeBlocks

BYTES_AT_ONCE = 16 << 20
"""Bytes that are gathered at a time to be summed; the sum takes five times this memory. Each step costs a launch, so
this is much more than on the host."""

STREAM_PRIORITY = -2
"""The default is 0; programs that want a higher priority take -1, and NCCL, if configured so, takes the highest, -3."""


class DeviceAccess:
    """`MemoryAccess` to the memory of one device. An address is found by the tensor in which it lies.

    Raises:
        InvalidField: by `copy`, `sums` and `clear`, for memory that lies in none of the tensors.
        TransferFailed: by `allocate`, `copy`, `sums` and `clear`: the device has no memory left. Nothing writes to any
            memory then.
    """

    def __init__(self, device: str, tensors: Iterable[Any]) -> None:
        self._torch: Any = sys.modules["torch"]
        self._device = self._torch.device(device)
        self._threads = threading.local()
        self._storages: dict[int, Any] = {}
        """The tensors' storages, by address. Single steps change it, on any thread, so no lock guards it."""
        for tensor in tensors:
            self._keep(tensor)

    def allocate(self, size: int) -> StagingSpace:
        """See `MemoryAccess`. The memory is kept for as long as this object."""
        with self._queue():
            tensor = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
        kind = MemoryKind.DRAM if self._device.type == "cpu" else MemoryKind.VRAM
        region = MemoryRegion(kind, self._device.index or 0, tensor.data_ptr(), size)
        check_stable((region,))
        self._keep(tensor)
        return StagingSpace(region, self, tensor)

    def copy(self, copies: Iterable[Copy]) -> None:
        with self._queue() as queue:
            for copy in copies:
                self._copy(copy, queue)

    def sums(self, plane: Plane, units: Interval, blocks: AlikeBlocks) -> Sums:
        torch, length = self._torch, bytes_per_unit(plane, blocks)
        with self._queue():
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
        with self._queue():
            ids = self._torch.from_numpy(blocks.ids.astype(np.int64)).to(self._device)
            for run, cells in block_cells(plane, plane.units, blocks):
                self._bytes(cells)[ids[:, run]] = 0

    def _keep(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        known = self._storages.get(address)
        if known is None or known.nbytes() < storage.nbytes():
            self._storages[address] = storage

    def _copy(self, copy: Copy, queue: _Queue) -> None:
        source, destination = copy.source, copy.destination
        there, here = self._storage_of(source), self._storage_of(destination)
        # Both sides are copied in words of one size: the widest that divides all their steps and addresses.
        steps = [source.size, *source.strides, *destination.strides]
        steps += [source.address, there.data_ptr(), destination.address, here.data_ptr()]
        words = {8: self._torch.int64, 4: self._torch.int32, 2: self._torch.int16, 1: self._torch.uint8}
        size = next(size for size in words if not any(step % size for step in steps))
        read, written = (
            self._view(storage, cells, words[size], size) for storage, cells in ((there, source), (here, destination))
        )
        written[queue.index(copy.ids)] = read[queue.index(copy.places)]

    def _bytes(self, cells: Cells) -> Any:
        """Cells as a tensor of bytes, ``uint8[*cells.shape, cells.size]``."""
        return self._view(self._storage_of(cells), cells, self._torch.uint8, 1)

    def _view(self, storage: Any, cells: Cells, word: Any, size: int) -> Any:
        """Cells of a storage as a tensor of type `word`, of `size` bytes each."""
        offset = (cells.address - storage.data_ptr()) // size
        shape = (*cells.shape, cells.size // size)
        strides = (*(stride // size for stride in cells.strides), 1)
        return self._torch.empty(0, dtype=word, device=self._device).set_(storage, offset, shape, strides)

    def _storage_of(self, cells: Cells) -> Any:
        first, last = cells.address, cells.address + cells.length
        for storage in tuple(self._storages.values()):
            if storage.data_ptr() <= first and last <= storage.data_ptr() + storage.nbytes():
                return storage
        value = f"{cells.length} bytes at {cells.address:#x}"
        raise InvalidField("memory", value, f"memory of a tensor on {self._device}")

    @contextmanager
    def _queue(self) -> Iterator[_Queue]:
        """The calling thread's stream as the current one. Its work has ended when the context ends."""
        queue: _Queue | None = getattr(self._threads, "queue", None)
        if queue is None:
            queue = self._threads.queue = _Queue(self._torch, self._device)
        full = getattr(self._torch, "OutOfMemoryError", None) or self._torch.cuda.OutOfMemoryError
        try:
            with queue.current():
                yield queue
        except full as error:
            # torch's message has the sizes, and nothing else about the process.
            problem = str(error).splitlines()[0]
            raise TransferFailed(f"{self._device} has no memory left: {problem}") from None


class _Queue:
    """The work that one thread gives the device, on a stream of the thread's own."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._device = device
        self._stream: Any = None
        self._indices: dict[int, tuple[npt.NDArray[Any], Any]] = {}
        """The uploaded indices by the identity of their array, which is kept: no other array gets this identity."""
        if device.type != "cpu":
            ignore_captures(hip=torch.version.hip is not None)
            self._stream = torch.cuda.Stream(device, priority=STREAM_PRIORITY)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the stream the current one, and wait for it at the end, also after an error: the work queued before the
        error goes on. Raises `StillCopying` if the device does not confirm the end of that work."""
        try:
            with nullcontext() if self._stream is None else self._torch.cuda.stream(self._stream):
                yield
        finally:
            self._finish()

    def index(self, array: npt.NDArray[Any]) -> Any:
        """The index for these positions of an axis. Consecutive positions take no memory, and an array is uploaded
        once, however many copies share it."""
        selected = selection(array)
        if isinstance(selected, slice):
            return selected
        known = self._indices.get(id(array))
        if known is None:
            uploaded = self._torch.empty(len(array), dtype=self._torch.int64, device=self._device)
            known = self._indices[id(array)] = array, uploaded.copy_(self._torch.from_numpy(array))
        return known[1]

    def _finish(self) -> None:
        try:
            if self._stream is not None:
                self._stream.synchronize()
        except Exception as error:
            raise StillCopying(f"{self._device}: {error!r}") from error
        finally:
            self._indices.clear()


def check_stable(regions: Iterable[MemoryRegion]) -> None:
    """Raise `InvalidField` for device memory in an expandable segment of torch. Other allocators are not checked.

    Device memory has to stay where it is mapped. With ``expandable_segments:True``, torch maps physical memory into its
    segments as they grow, with CUDA's functions for virtual memory. ``cuda_ipc`` cannot export such memory, so reads on
    one host silently become several hundred times slower (NIXL, issue 1754). Pages that torch maps anew are not those
    that were registered for RDMA; vLLM refuses the setting for every connector (vLLM 0.32.0, ``vllm/config/vllm.py``).
    torch's list of segments also shows settings made in the program, and pools without such segments, e.g. that of
    vLLM's sleep mode.
    """
    on_device = [region for region in regions if region.memory_kind is MemoryKind.VRAM]
    torch: Any = sys.modules.get("torch")
    if not on_device or torch is None or not torch.cuda.is_available():
        return
    if torch.cuda.get_allocator_backend() != "native":
        return
    for segment in torch.cuda.memory_snapshot():
        first, device = segment["address"], segment["device"]
        last = first + segment["total_size"]
        for region in on_device:
            inside = region.device == device and region.base < last and first < region.base + region.length
            if inside and segment.get("is_expandable", False):
                raise InvalidField(
                    "regions",
                    f"{region.length} bytes at {region.base:#x} of device {device}, in an expandable segment",
                    "memory that stays mapped: leave expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF",
                )
