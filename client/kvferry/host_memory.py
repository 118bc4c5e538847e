"""Allocates host memory for caches: in huge pages if the system has them.

UCX copies between processes of a node with process_vm_readv, which pins the source's pages one by one. With pages of
2 MiB instead of 4 KiB, reads of 64 KiB and more are about twice as fast (docs/nixl.md).
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry._arguments import integer
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import MemoryKind

HUGE_PAGE = 2 << 20
"""Bytes of a transparent huge page on x86-64, and on aarch64 with pages of 4 KiB."""


class HostMemory:
    """A contiguous range of host memory, zeroed and with all its pages allocated.

    The memory stays mapped as long as this object, or any view of `array`, is referenced. Pass this object as `keep` to
    `Client.register_cache`.

    Args:
        size: bytes.

    Attributes:
        array: the bytes, ``uint8[size]``. ``torch.from_numpy(memory.array).view(...)`` makes a tensor.
        region: address and size, for `Client.register_cache`.

    Raises:
        InvalidField: the size is not positive.
        OSError: the system does not have enough memory.
    """

    def __init__(self, size: int) -> None:
        size = integer("size", size, 1)
        # A huge page begins at a multiple of its size.
        mapped = mmap.mmap(-1, (1 - -size // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        everything = np.frombuffer(mapped, np.uint8)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Only a hint: the memory also works without huge pages.
            mapped.madvise(mmap.MADV_HUGEPAGE)
        skipped = -everything.ctypes.data % HUGE_PAGE
        self.array: npt.NDArray[np.uint8] = everything[skipped : skipped + size]
        self.region = MemoryRegion(MemoryKind.DRAM, 0, self.array.ctypes.data, size)
        # Allocate all pages now: a page fault during the first read costs four times the copy of the page.
        self.array[:: mmap.PAGESIZE] = 0

    def huge_bytes(self) -> int:
        """Return how many bytes of the memory lie in huge pages now, according to the system."""
        found, within = 0, False
        begin, end = self.region.base, self.region.base + self.region.length
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first, _, rest = line.partition(" ")
            if "-" in first and not first.endswith(":"):
                low, _, high = first.partition("-")
                within = int(low, 16) < end and int(high, 16) > begin
            elif within and first == "AnonHugePages:":
                found += int(rest.split()[0]) * 1024
        return min(found, self.region.length)
