"""All memory of one rank: the host's, and that of each device on which the rank has tensors; and the tails of its
reads, see `Tails`."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvferry._memory.access import HostAccess, MemoryAccess
from kvferry._memory.device import DeviceAccess
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import Blocks
from kvferry.geometry.model import Group, GroupKind, MemoryRegion
from kvferry.geometry.plane import MemoryKind, Plane
from kvferry.geometry.tensors import view_of
from kvferry.planner.request_blocks import GroupRequest
from kvferry.planner.token_line import AlikeBlocks, StateLayout, states_in_blocks, whole_granules


class RankMemory:
    """The memory of one rank, by address space. Thread-safe. Device memory is reached only through the rank's
    registered tensors; host memory needs none. `regions`, which contain the rank's planes, are what the rank registers
    with NIXL; `keep`, their owner, is referenced as long as a write to them is possible."""

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


class Tails(enum.Enum):
    """Whether the tokens of a read's blocks that the read did not move are kept or cleared: those behind the last token
    moved, and, in the block in which a window begins, those before the first."""

    KEEP = "keep"
    """These tokens stay as they were."""
    ZERO = "zero"
    """They are cleared once every byte has arrived: for kernels that read whole blocks, since old bytes may be NaNs."""


def clear_tails(
    planes: Iterable[Plane],
    groups: Mapping[str, Group],
    blocks: Mapping[str, Blocks],
    moved: Mapping[str, GroupRequest],
    memory: RankMemory,
) -> None:
    """Clear the tails of a read. A group of which nothing was moved has no tail. Raises `InvalidField` if a plane lies
    in device memory that is not backed by a registered tensor."""
    for plane in planes:
        group = groups[plane.group]
        if plane.group not in moved or group.kind is GroupKind.STATE:
            continue
        for alike in _unmoved(plane, group, blocks[plane.group], moved[plane.group]):
            access = memory.of(plane)
            if access is None:
                raise InvalidField("tails", plane.name, "host memory, or a tensor's, to be cleared")
            access.clear(plane, alike)


def _unmoved(plane: Plane, group: Group, blocks: Blocks, moved: GroupRequest) -> Iterator[AlikeBlocks]:
    """The states of a plane that the read's blocks hold and the read does not write, in whole granules: in the block of
    the read's first token those before this token, and all behind its last token."""
    layout = StateLayout.of(plane, group)
    per_block, first_block = layout.held_per_block, blocks.first_token // group.block_tokens
    begin, _ = whole_granules(layout, plane, moved.begin)
    _, floor = whole_granules(layout, plane, moved.floor)
    _, end = whole_granules(layout, plane, moved.end)
    null_block = -1 if group.null_block is None else group.null_block
    for first, last in (
        (max(floor, moved.begin // group.block_tokens * per_block), begin),
        (max(end, first_block * per_block), (first_block + len(blocks.ids)) * per_block),
    ):
        yield from states_in_blocks(layout, group, blocks, (first, last), lambda _, ids: ids != null_block)
