"""Whether memory that is about to be registered is there, and may be written: NIXL registers what it is told, and the
first read into a page that is not there, or is read-only, fails in the middle or kills the process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvferry.errors import InvalidField
from kvferry.geometry import MemoryKind, MemoryRegion, Plane

MAPS = Path("/proc/self/maps")


def check_mapped(regions: Iterable[MemoryRegion], planes: Iterable[Plane]) -> None:
    """Raise `InvalidField` for host memory of this process that is not mapped readable and writable, naming a plane
    that lies in it. Where the system does not tell, and for device memory, nothing is checked.

    The memory of a rank that is only read from has to be writable as well: NIXL registers all memory for remote reads
    and writes, and devices that pin pages refuse others.
    """
    host = [region for region in regions if region.memory_kind is MemoryKind.DRAM]
    if not host:
        return
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return
    usable: list[tuple[int, int]] = []
    for line in lines:
        addresses, permissions = line.split(maxsplit=2)[:2]
        if permissions.startswith("rw"):
            first, last = (int(address, 16) for address in addresses.split("-"))
            if usable and usable[-1][1] == first:
                usable[-1] = usable[-1][0], last
            else:
                usable.append((first, last))
    for region in host:
        first, last = region.base, region.base + region.length
        if not any(begin <= first and last <= end for begin, end in usable):
            within = next((plane.name for plane in planes if region.holds(plane)), "")
            name = f"memory of plane {within}" if within else "regions"
            raise InvalidField(name, f"[{first:#x}, {last:#x})", "memory of this process, mapped and writable")
