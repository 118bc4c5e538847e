"""All memory of one rank: the host's, and that of each device on which the rank has tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry._memory.access import HostAccess, MemoryAccess
from kvferry._memory.device import DeviceAccess
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import MemoryKind, Plane
from kvferry.geometry.tensors import view_of


class RankMemory:
    """The memory of one rank, by address space. Thread-safe. Device memory is reached only through the rank's
    registered tensors; host memory needs none.

    Attributes:
        regions: the memory that the rank registers with NIXL. Contains the rank's planes.
        keep: the owner of this memory, referenced as long as a write to it is possible.
    """

    def __init__(
        self, regions: Sequence[MemoryRegion] = (), tensors: Sequence[Any] = (), *, keep: object = None
    ) -> None:
        self.regions = tuple(regions)
        self.keep = keep
        by_device: dict[int, list[Any]] = {}
        for tensor in tensors:
            if hasattr(tensor, "untyped_storage"):
                view = view_of(tensor)
                if view.memory_kind is MemoryKind.VRAM:
                    by_device.setdefault(view.device, []).append(tensor)
        self._host = HostAccess()
        self._devices = {device: DeviceAccess(str(members[0].device), members) for device, members in by_device.items()}

    @property
    def devices(self) -> frozenset[int]:
        return frozenset(self._devices)

    def at(self, kind: MemoryKind, device: int) -> MemoryAccess | None:
        """The memory of an address space; None for a device on which no tensor is known."""
        return self._host if kind is MemoryKind.DRAM else self._devices.get(device)

    def of(self, plane: Plane) -> MemoryAccess | None:
        """The memory in which a plane lies; None for a device on which no tensor is known."""
        return self.at(plane.memory_kind, plane.device)
