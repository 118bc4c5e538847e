"""Checks every descriptor against the registered regions before it reaches NIXL (R7). Pure, vectorised.

The planner checks block ids; this module checks the addresses computed from them. NIXL's own check adds address and
length and wraps: a length of 2**64 - 4096 kills the process, a stride of that size reads below the region and reports
success (both measured). Here two numbers are added only when their sum is known not to wrap.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvferry.errors import BadAgentMetadata, InvalidField
from kvferry.geometry.model import AgentInfo, MemoryRegion
from kvferry.geometry.plane import ADDRESS_LIMIT, MemoryKind
from kvferry.planner.descriptors import Addresses, Descriptors, DescriptorTable, PreparedDescriptors, RawDescriptors

METADATA_LIMIT = 16 << 20
"""Bytes of agent metadata. A region takes 44 on CPU, some hundreds with RDMA keys; the connection takes 335."""

REGIONS_LIMIT = 1 << 16
NAME_LIMIT = 512
METADATA_HEADER = b"nixlSerDes|Agent"
"""NIXL's metadata begin with this header, then the length of the agent's name, then the name."""

FEW = 32
"""Ranges up to which a loop is faster than numpy: after a copy of megabytes, each numpy function has to be loaded from
memory again."""

# The methods of arrays find these functions through Python, which takes longer than the search of a short array.
_least, _most = np.minimum.reduce, np.maximum.reduce

INDEX_LIMIT = 1 << 31
"""NIXL takes int32 indices, and truncates larger ones silently."""


class RegionMap:
    """The regions of one agent; checks that ranges lie inside one region each. Immutable, so thread-safe.

    Regions that touch are not joined: NIXL refuses a descriptor that spans two.
    """

    def __init__(self, owner: str, regions: Iterable[MemoryRegion]) -> None:
        self.owner = owner
        self.regions = tuple(regions)
        spaces: dict[tuple[MemoryKind, int], list[tuple[int, int]]] = {}
        for region in self.regions:
            space = spaces.setdefault((region.memory_kind, region.device), [])
            space.append((region.base, region.base + region.length))
        self._ranges: dict[tuple[MemoryKind, int], tuple[Addresses, Addresses]] = {}
        """By address space: where its regions begin, and for each begin the furthest end of all regions that begin
        there or before, which is right also where regions overlap. The first end, 0, is for addresses below every
        region."""
        for key, ranges in spaces.items():
            both = np.array(sorted(ranges), np.uint64)
            ends = np.concatenate((np.zeros(1, np.uint64), np.maximum.accumulate(both[:, 1])))
            self._ranges[key] = both[:, 0].copy(), ends
        self._lists = {key: (bases.tolist(), ends.tolist()) for key, (bases, ends) in self._ranges.items()}

    def check_ranges(self, field: str, kind: MemoryKind, device: int, address: Addresses, length: Addresses) -> None:
        """Raise `InvalidField` unless every ``[address, address + length)`` lies inside a region."""
        if len(address) <= FEW and self._hold_few(kind, device, address, length):
            return
        end = self._ends_at(field, kind, device, address)
        if int(_least(length)) < 1:
            raise InvalidField(f"{field} length", 0, "at least 1")
        if int(_most(length)) >= ADDRESS_LIMIT:
            self._refuse(field, length >= ADDRESS_LIMIT, address, length)
        # Both are below 2**63: their sum does not wrap.
        outside = address + length > end
        if outside.any():
            self._refuse(field, outside, address, length)

    def _hold_few(self, kind: MemoryKind, device: int, address: Addresses, length: Addresses) -> bool:
        """Whether every range lies inside a region; in Python's integers, which do not wrap."""
        bases, ends = self._lists.get((kind, device), ([], [0]))
        return all(
            count >= 1 and begin + count <= ends[bisect_right(bases, begin)]
            for begin, count in zip(address.tolist(), length.tolist(), strict=True)
        )

    def check_rows(self, field: str, kind: MemoryKind, device: int, rows: Addresses) -> None:
        """Raise `InvalidField` unless all entries of each strided row lie inside one region."""
        address, length, devices, stride, count = (rows[:, column] for column in range(5))
        if bool((devices != device).any()):
            raise InvalidField(f"{field} device", sorted(set(devices.tolist())), str(device))
        self.check_ranges(field, kind, device, address, length)
        if int(count.min()) < 1 or int(count.max()) >= INDEX_LIMIT or int(count.sum()) >= INDEX_LIMIT:
            raise InvalidField(f"{field} count", int(count.sum()), "at least 1 in every row, below 2**31 in all")
        several = count > 1
        if bool((several & (stride < 1)).any()):
            raise InvalidField(f"{field} stride", 0, "at least 1")
        # Divided instead of multiplied: (count - 1) * stride could wrap.
        room = self._ends_at(field, kind, device, address) - address - length
        self._refuse(field, several & (room // np.maximum(stride, 1) < count - 1), address, length)

    def _ends_at(self, field: str, kind: MemoryKind, device: int, address: Addresses) -> Addresses:
        """For each address the end of the region in which it lies; 0 if it lies in none."""
        if (kind, device) not in self._ranges:
            raise InvalidField(f"{field} memory", f"{kind.name} {device}", f"memory registered by {self.owner}")
        bases, ends = self._ranges[kind, device]
        highest = int(_most(address))
        if highest >= ADDRESS_LIMIT:
            raise InvalidField(f"{field} address", hex(highest), "below 2**63")
        if len(bases) == 1 and int(_least(address)) >= int(bases[0]):
            return ends[1:]
        found: Addresses = ends[np.searchsorted(bases, address, side="right")]
        return found

    def _refuse(self, field: str, outside: npt.NDArray[np.bool_], address: Addresses, length: Addresses) -> None:
        if bool(outside.any()):
            first = int(np.argmax(outside))
            value = f"{int(length[first])} bytes at {int(address[first]):#x}"
            raise InvalidField(field, value, f"inside one region registered by {self.owner}")


def check_descriptors(descriptors: Descriptors, local: RegionMap, remote: RegionMap) -> None:
    """Raise `InvalidField` unless every descriptor lies inside a region on both sides."""
    if isinstance(descriptors, PreparedDescriptors):
        check_table(descriptors.table, local, remote)
        check_indices(descriptors)
    else:
        check_raw(descriptors, local, remote)


def check_raw(raw: RawDescriptors, local: RegionMap, remote: RegionMap) -> None:
    """`check_descriptors` for descriptors by address. An empty list passes."""
    _check_arrays("descriptors", np.uint64, raw.source, raw.destination, raw.length)
    if raw.count == 0:
        return
    memory = raw.memory
    remote.check_ranges("source", memory.source_kind, memory.source_device, raw.source, raw.length)
    local.check_ranges("destination", memory.destination_kind, memory.destination_device, raw.destination, raw.length)


def check_table(table: DescriptorTable, local: RegionMap, remote: RegionMap) -> None:
    """`check_descriptors` for the rows of a table."""
    for field, rows in (("source rows", table.source), ("destination rows", table.destination)):
        if rows.dtype != np.uint64 or rows.ndim != 2 or rows.shape[1] != 5 or not len(rows):
            raise InvalidField(field, f"{rows.dtype}{list(rows.shape)}", "uint64[rows, 5], not empty")
        if table.entry_bytes < 1 or bool((rows[:, 1] != table.entry_bytes).any()):
            raise InvalidField(f"{field} length", rows[:, 1].max(), f"entry_bytes, {table.entry_bytes}, in every row")
    memory = table.memory
    remote.check_rows("source rows", memory.source_kind, memory.source_device, table.source)
    local.check_rows("destination rows", memory.destination_kind, memory.destination_device, table.destination)


def check_indices(prepared: PreparedDescriptors) -> None:
    """Raise `InvalidField` unless every index is within its table. An empty list passes."""
    _check_arrays("indices", np.int32, prepared.source, prepared.destination)
    if prepared.count == 0:
        return
    for field, indices, rows in (
        ("source index", prepared.source, prepared.table.source),
        ("destination index", prepared.destination, prepared.table.destination),
    ):
        size = int(rows[:, 4].sum())
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= size:
            raise InvalidField(field, low if low < 0 else high, f"0 to {size - 1}")


def check_agent(agent: AgentInfo) -> None:
    """Raise `BadAgentMetadata` unless the metadata are the announced ones.

    NIXL cannot check this: one flipped bit can kill the process, and after truncated metadata the agent's name cannot
    be used again in this process (both measured). NIXL takes the name from the metadata, so damaged metadata of one
    agent, announced under another's name, would make the first agent's name unusable.
    """
    name, metadata, regions = agent.name, agent.metadata, agent.regions
    problem = ""
    if not 1 <= len(name.encode()) <= NAME_LIMIT:
        problem = f"its name has {len(name.encode())} bytes"
    elif not 1 <= len(metadata) <= METADATA_LIMIT:
        problem = f"its metadata has {len(metadata)} bytes"
    elif not 1 <= len(regions) <= REGIONS_LIMIT:
        problem = f"it has {len(regions)} regions"
    elif hashlib.sha256(metadata).digest() != agent.metadata_sha256:
        problem = "its metadata is damaged: the digest is another"
    elif metadata.startswith(METADATA_HEADER) and not metadata.startswith(_header(name)):
        problem = "its metadata is another agent's"
    if problem:
        raise BadAgentMetadata(f"agent {name[:80]!r}: {problem}", agent=name[:80], problem=problem)


def _header(name: str) -> bytes:
    encoded = name.encode()
    return METADATA_HEADER + len(encoded).to_bytes(8, sys.byteorder) + encoded


def _check_arrays(field: str, dtype: type[np.generic], *arrays: npt.NDArray[np.generic]) -> None:
    shapes = {array.shape for array in arrays}
    if any(array.dtype != dtype or array.ndim != 1 for array in arrays) or len(shapes) != 1:
        found = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
        raise InvalidField(field, found, f"{dtype.__name__} arrays of one length")
