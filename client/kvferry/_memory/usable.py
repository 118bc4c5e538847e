"""Checks of memory before it is registered.

Host memory has to be mapped and writable: NIXL registers any address, and the first read into a page that is not
mapped, or is read-only, fails halfway or kills the process.

Device memory has to stay where it is mapped. With ``expandable_segments:True``, torch maps physical memory into its
segments as they grow, with CUDA's functions for virtual memory. ``cuda_ipc`` cannot export such memory, so reads on one
host silently become several hundred times slower (NIXL, issue 1754). Pages that torch maps anew are not those that were
registered for RDMA; vLLM refuses the setting for every connector (vLLM 0.32.0, ``vllm/config/vllm.py``). The check asks
torch's list of segments, not the environment: the list also shows settings made in the program, and pools without such
segments, e.g. that of vLLM's sleep mode.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvferry.errors import InvalidField
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import ADDRESS_LIMIT, MemoryKind, Plane

MAPS = Path("/proc/self/maps")


def check_mapped(regions: Iterable[MemoryRegion], planes: Iterable[Plane]) -> None:
    """Raise `InvalidField`, naming a plane, for host memory that is not mapped readable and writable in this process.
    Device memory is not checked, nor is any memory on systems without ``/proc/self/maps``.

    The memory of a rank that only serves reads has to be writable as well: NIXL registers all memory for remote reads
    and writes, and devices that pin pages refuse read-only pages.
    """
    host = [region for region in regions if region.memory_kind is MemoryKind.DRAM]
    if not host:
        return
    usable = _usable()
    if usable is None:
        return
    for region in host:
        first, last = region.base, region.base + region.length
        at = bisect_right(usable, (first, ADDRESS_LIMIT)) - 1
        if at < 0 or last > usable[at][1]:
            within = next((plane.name for plane in planes if region.holds(plane)), "")
            name = f"memory of plane {within}" if within else "regions"
            raise InvalidField(name, f"[{first:#x}, {last:#x})", "memory of this process, mapped and writable")


def _usable() -> list[tuple[int, int]] | None:
    """Ranges of memory that may be read and written, rising, neighbours joined; None where the system has no map."""
    try:
        # Read as bytes: the names of mapped files may contain any byte but a newline.
        lines = MAPS.read_bytes().split(b"\n")
    except OSError:
        return None
    found: list[tuple[int, int]] = []
    for line in lines:
        addresses, _, rest = line.partition(b" ")
        if rest.startswith(b"rw"):
            first, last = (int(address, 16) for address in addresses.split(b"-"))
            # A range that grows while the list is read may occur twice.
            if found and first <= found[-1][1]:
                found[-1] = found[-1][0], max(last, found[-1][1])
            else:
                found.append((first, last))
    return found


def check_stable(regions: Iterable[MemoryRegion]) -> None:
    """Raise `InvalidField` for device memory in an expandable segment of torch. Other allocators are not checked."""
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
