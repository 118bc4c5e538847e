"""Allocates host memory for caches: in huge pages if the system has them, optionally shared between processes, and
optionally on one NUMA node.

UCX copies between processes of a node with process_vm_readv, which pins the source's pages one by one. With pages of
2 MiB instead of 4 KiB, reads of 64 KiB and more are about twice as fast (docs/nixl.md).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry._arguments import flag, integer
from kvferry.errors import InvalidField, WrongState
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import MemoryKind

HUGE_PAGE = 2 << 20
"""Bytes of a transparent huge page on x86-64, and on aarch64 with pages of 4 KiB."""

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Numbers of the system call: libc has no function for it, and libnuma is not installed everywhere."""

_MPOL_BIND = 2


class HostMemory:
    """A contiguous range of host memory, zeroed and with all its pages allocated.

    The memory stays mapped as long as this object, or any view of `array`, is referenced. Pass this object as `keep` to
    `Client.register_cache`.

    Args:
        size: bytes.
        shared: other processes can map the memory, see `fd` and `attach`.
        numa_node: index of the NUMA node to bind the memory to; None: the system chooses.

    Attributes:
        array: the bytes, ``uint8[size]``. ``torch.from_numpy(memory.array).view(...)`` makes a tensor.
        region: address and size, for `Client.register_cache`.

    Raises:
        InvalidField: the size is not positive, or this machine has no such NUMA node.
        OSError: the system does not have enough memory.
    """

    def __init__(self, size: int, *, shared: bool = False, numa_node: int | None = None) -> None:
        size, shared = integer("size", size, 1), flag("shared", shared)
        if numa_node is not None:
            numa_node = integer("numa_node", numa_node, 0)
        self._fd = -1
        if shared:
            self._fd = os.memfd_create("kvferry-cache", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, _whole(size))
        self._map(self._fd, size, numa_node)
        # Allocate all pages now: a page fault during the first read costs four times the copy of the page.
        self.array[:: mmap.PAGESIZE] = 0

    @classmethod
    def attach(cls, fd: int, size: int) -> HostMemory:
        """Map the shared memory of another process.

        Args:
            fd: file descriptor of `HostMemory.fd` in this process: inherited by a fork or spawn, or received over a
                UNIX socket. The caller may close it afterwards.
            size: bytes; the `size` of the `HostMemory`.

        Raises:
            InvalidField: the memory is smaller.
            OSError: there is no such file descriptor.
        """
        fd, size = integer("fd", fd, 0), integer("size", size, 1)
        there = os.fstat(fd).st_size
        if _whole(size) > there:
            raise InvalidField("size", size, f"at most the {there} bytes that are there")
        found = cls.__new__(cls)
        found._map(os.dup(fd), size, None)
        return found

    @property
    def fd(self) -> int:
        """The file descriptor of shared memory, for `attach` in another process; raises `WrongState` if the memory is
        not shared."""
        if self._fd < 0:
            raise WrongState("this memory is not shared: make it with shared=True to attach it in another process")
        return self._fd

    def huge_bytes(self) -> int:
        """Return how many bytes of the memory lie in huge pages now, according to the system."""
        found, within = 0, False
        begin, end = self._mapped, self._mapped + self._length
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first, _, rest = line.partition(" ")
            if "-" in first and not first.endswith(":"):
                low, _, high = first.partition("-")
                within = int(low, 16) < end and int(high, 16) > begin
            elif within and first in ("AnonHugePages:", "ShmemPmdMapped:"):
                found += int(rest.split()[0]) * 1024
        return min(found, self._length)

    def _map(self, fd: int, size: int, numa_node: int | None) -> None:
        self._fd = fd
        # A huge page begins at a multiple of its size; the system aligns shared memory itself.
        self._length = _whole(size) + (HUGE_PAGE if fd < 0 else 0)
        flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = mmap.mmap(fd, self._length, flags=flags)
        everything = np.frombuffer(mapped, np.uint8)
        self._mapped = everything.ctypes.data
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Only a hint: the memory also works without huge pages.
            mapped.madvise(mmap.MADV_HUGEPAGE)
        if numa_node is not None:
            _bind(self._mapped, self._length, numa_node)
        skipped = -self._mapped % HUGE_PAGE if fd < 0 else 0
        self.array: npt.NDArray[np.uint8] = everything[skipped : skipped + size]
        self.region = MemoryRegion(MemoryKind.DRAM, 0, self.array.ctypes.data, size)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


def _whole(size: int) -> int:
    return -(-size // HUGE_PAGE) * HUGE_PAGE


def _bind(address: int, length: int, node: int) -> None:
    number = _MBIND.get(platform.machine())
    if number is None or not Path(f"/sys/devices/system/node/node{node}").exists():
        raise InvalidField("numa_node", node, "a NUMA node of this machine")
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    call = (ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(length), ctypes.c_int(_MPOL_BIND))
    if libc.syscall(*call, words, ctypes.c_ulong(64 * len(words) + 1), ctypes.c_uint(0)) != 0:
        problem = os.strerror(ctypes.get_errno())
        raise InvalidField("numa_node", node, f"a NUMA node that memory can be bound to: {problem}")
