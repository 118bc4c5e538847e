"""Device memory: copied, summed and cleared with torch, on the device; and the current device of a thread.

Each thread has a stream of its own there, and waits for this stream. The stream is ordered with nothing else on the
device, and needs no order:

- the bytes that it reads have arrived or were published, so nothing writes to them;
- the blocks that it writes belong to a read, and the engine runs no kernel on them before the read's end is reported;
- a kernel that the engine launches afterwards sees the written bytes, because the end of a kernel makes its writes
  visible to the whole device.

On the default stream a copy would wait for the engine's steps, and they for it. torch's other streams do not wait for
the default one, and so are no part of a graph that another thread captures. But torch has only 32 streams of each
priority, and gives them out in turns (c10/cuda/CUDAStream.cpp): one of the default priority may be the stream that an
engine captures on, and copies would become part of its graph. So kvferry's streams have a priority that engines leave
alone.

CUDA and HIP have a current device per thread, and torch's name for both is ``torch.cuda``. UCX takes the current
device's context when memory is registered and when peers are connected. Without one it silently leaves out
``cuda_ipc``, and with it NVLink. So the device is set on every thread that calls NIXL or gives the device work.

A thread of kvferry's own is also taken out of other threads' captures of CUDA graphs. While a thread captures a graph
in the mode "global", torch's default, CUDA refuses "potentially unsafe" calls on all threads, e.g. allocating memory
or querying an event, and such a call spoils the capture. This protects threads that may take part in the capture.
kvferry's take no part: they use streams of their own, which are never captured, and nothing captured needs them. A
thread leaves captures by calling ``cuThreadExchangeStreamCaptureMode`` with the mode "thread local" (CUDA driver API,
stream management; HIP has the same function).

The threads that copy, sum and clear are kvferry's own. None of this has run on a GPU yet; the tests play torch's
stream and allocator.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry._logs import Log
from kvferry._memory.access import StagingSpace, StillCopying, block_cells, bytes_per_unit, selection
from kvferry.errors import InvalidField, TransferFailed
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import Interval, MemoryKind, Plane
from kvferry.planner.checksum import Sums, padded, start, weights
from kvferry.planner.expansion import Copy
from kvferry.planner.rows import Cells
from kvferry.planner.token_line import AlikeBlocks

logger = Log(__name__)

BYTES_AT_ONCE = 16 << 20
"""Bytes that are gathered at a time to be summed; the sum takes five times this memory. Each step costs a launch, so
this is much more than on the host."""

Uploaded: TypeAlias = dict[int, tuple[npt.NDArray[Any], Any]]
"""Indices on the device, by the identity of their array, which is kept: no other array gets this identity."""

STREAM_PRIORITY = -2
"""The default is 0; programs that want a higher priority take -1, and NCCL, if configured so, takes the highest, -3."""

THREAD_LOCAL = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL``, and HIP's constant of the same meaning."""

CUDA = ("cuThreadExchangeStreamCaptureMode", ("libcuda.so.1",))
HIP = ("hipThreadExchangeStreamCaptureMode", ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"))
"""The function with which a thread leaves captures, and the libraries that may have it: torch's wheels and the system's
packages name HIP's library differently."""


class DeviceAccess:
    """`MemoryAccess` to the memory of one device. An address is found by the tensor in which it lies; `InvalidField` is
    raised for memory that lies in none. All methods raise `TransferFailed` if the device has no memory left; nothing
    writes to any memory then."""

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
        indices: Uploaded = {}
        with self._queue():
            for copy in copies:
                self._copy(copy, indices)

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

    def _copy(self, copy: Copy, indices: Uploaded) -> None:
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
        written[self._index(copy.ids, indices)] = read[self._index(copy.places, indices)]

    def _index(self, array: npt.NDArray[Any], indices: Uploaded) -> Any:
        """The index for these positions of an axis. Consecutive positions take no memory, and an array is uploaded
        once, however many copies share it."""
        selected = selection(array)
        if isinstance(selected, slice):
            return selected
        if id(array) not in indices:
            uploaded = self._torch.empty(len(array), dtype=self._torch.int64, device=self._device)
            indices[id(array)] = array, uploaded.copy_(self._torch.from_numpy(array))
        return indices[id(array)][1]

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
    def _queue(self) -> Iterator[None]:
        """The calling thread's stream as the current one. At the end, also after an error, waits for the work queued
        there; raises `StillCopying` if the device does not confirm the end of that work."""
        stream: Any = getattr(self._threads, "stream", None)
        if stream is None and self._device.type != "cpu":
            ignore_captures(hip=self._torch.version.hip is not None)
            stream = self._threads.stream = self._torch.cuda.Stream(self._device, priority=STREAM_PRIORITY)
        full = getattr(self._torch, "OutOfMemoryError", None) or self._torch.cuda.OutOfMemoryError
        try:
            with nullcontext() if stream is None else self._torch.cuda.stream(stream):
                yield
        except full as error:
            # torch's message has the sizes, and nothing else about the process.
            problem = str(error).splitlines()[0]
            raise TransferFailed(f"{self._device} has no memory left: {problem}") from None
        finally:
            try:
                if stream is not None:
                    stream.synchronize()
            except Exception as error:
                raise StillCopying(f"{self._device}: {error!r}") from error


def check_stable(regions: Iterable[MemoryRegion]) -> None:
    """Raise `InvalidField` for device memory in an expandable segment of torch. Other allocators are not checked.

    Device memory has to stay where it is mapped. With ``expandable_segments:True``, torch maps physical memory into its
    segments as they grow, with CUDA's functions for virtual memory. ``cuda_ipc`` cannot export such memory, so reads on
    one host silently become several hundred times slower (NIXL, issue 1754). Pages that torch maps anew are not those
    that were registered for RDMA; vLLM refuses the setting for every connector (vLLM 0.32.0, ``vllm/config/vllm.py``).
    torch's list of segments also shows settings made in the program, and pools without such segments, e.g. that of
    vLLM's sleep mode.
    """
    held = [region for region in regions if region.memory_kind is MemoryKind.VRAM]
    torch: Any = sys.modules.get("torch")
    if not held or torch is None or not torch.cuda.is_available():
        return
    if torch.cuda.get_allocator_backend() != "native":
        return
    for segment in torch.cuda.memory_snapshot():
        first, device = segment["address"], segment["device"]
        last = first + segment["total_size"]
        for region in held:
            inside = region.device == device and region.base < last and first < region.base + region.length
            if inside and segment.get("is_expandable", False):
                raise InvalidField(
                    "regions",
                    f"{region.length} bytes at {region.base:#x} of device {device}, in an expandable segment",
                    "memory that stays mapped: leave expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF",
                )


def device_of(regions: Iterable[MemoryRegion]) -> int | None:
    """The device on which the regions lie; None: all of them are host memory. Raises `InvalidField` if the regions lie
    on several devices, or torch, which sets the device, is missing."""
    devices = sorted({region.device for region in regions if region.memory_kind is MemoryKind.VRAM})
    if not devices:
        return None
    if len(devices) > 1:
        expected = "one device: a rank has one, and so has its agent"
        raise InvalidField("regions", f"memory of devices {devices}", expected)
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        problem = "is not imported" if torch is None else "has no CUDA and no ROCm here"
        raise InvalidField("regions", f"memory of device {devices[0]}", f"torch, to set the device; it {problem}")
    return devices[0]


def on_device(device: int | None) -> AbstractContextManager[object]:
    """Make a device the current one of the calling thread inside the context; None: change nothing."""
    torch: Any = sys.modules.get("torch")
    return nullcontext() if device is None else torch.cuda.device(device)


def enter_device(device: int | None) -> None:
    """Make a device the current one of the calling thread, which is kvferry's own, for good; None: change nothing."""
    if device is None:
        return
    torch: Any = sys.modules["torch"]
    torch.cuda.set_device(device)
    ignore_captures(hip=torch.version.hip is not None)


def ignore_captures(*, hip: bool) -> None:
    """Take the calling thread out of other threads' captures of graphs. Log a warning if the driver cannot do that."""
    function, libraries = HIP if hip else CUDA
    problem: object = ""
    for library in libraries:
        try:
            exchange = getattr(ctypes.CDLL(library), function)
        except (OSError, AttributeError) as error:
            problem = error
            continue
        problem = exchange(ctypes.byref(ctypes.c_int(THREAD_LOCAL)))
        break
    if problem:
        logger.warning("%s: %s; reads that run while a graph is captured may spoil the capture", function, problem)
