"""What can be done with the memory of one address space, the host's or a device's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import Interval, Plane
from kvferry.planner.checksum import Sums
from kvferry.planner.staged_read import Copy
from kvferry.planner.summed_blocks import AlikeBlocks


class StillCopying(Exception):
    """A device did not say whether its copies have ended, so its memory may still be written."""


class MemoryAccess(Protocol):
    """The memory of one address space, by address. Thread-safe."""

    def allocate(self, size: int) -> StagingSpace:
        """New memory of `size` bytes, which `copy` can read and write."""

    def copy(self, copies: Iterable[Copy]) -> None:
        """Make copies. They have ended when this returns or raises, unless it raises `StillCopying`."""

    def sums(self, plane: Plane, units: Interval, blocks: AlikeBlocks) -> Sums:
        """The sums of some units of some blocks of a plane, ``uint32[blocks, units]``."""

    def clear(self, plane: Plane, blocks: AlikeBlocks) -> None:
        """Write zeros over all units of some blocks of a plane. They are written when this returns or raises, unless it
        raises `StillCopying`."""


@dataclass(frozen=True, slots=True, eq=False)
class StagingSpace:
    """Staging memory in one address space, mapped for as long as this is referenced.

    Attributes:
        region: its address and length.
        memory: the address space.
        owner: the array or tensor that it is made of.
    """

    region: MemoryRegion
    memory: MemoryAccess
    owner: object = field(repr=False)

    def copy(self, copies: Iterable[Copy]) -> None:
        """See `MemoryAccess.copy`."""
        self.memory.copy(copies)
