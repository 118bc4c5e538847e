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

from kvferry.errors import BadAgentMetadata, InvalidField
from kvferry.geometry.model import AgentInfo, MemoryRegion
from kvferry.geometry.plane import ADDRESS_LIMIT, MemoryKind
from kvferry.planner.descriptors import Addresses, BlockRows, Descriptors

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
        if len(address) <= FEW:
            # Python's integers do not wrap.
            bases, ends = self._lists.get((kind, device), ([], [0]))
            ranges = zip(address.tolist(), length.tolist(), strict=True)
            if all(count >= 1 and begin + count <= ends[bisect_right(bases, begin)] for begin, count in ranges):
                return
        end = self._ends_at(field, kind, device, address)
        if int(_least(length)) < 1:
            raise InvalidField(f"{field} length", 0, "at least 1")
        outside = length >= ADDRESS_LIMIT
        if not outside.any():
            # Both are below 2**63: their sum does not wrap.
            outside = address + length > end
        if outside.any():
            first = int(np.argmax(outside))
            value = f"{int(length[first])} bytes at {int(address[first]):#x}"
            raise InvalidField(field, value, f"inside one region registered by {self.owner}")

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


def check_descriptors(descriptors: Descriptors, local: RegionMap, remote: RegionMap) -> None:
    """Raise `InvalidField` unless every descriptor lies inside a region on both sides. An empty list passes."""
    _check_arrays("descriptors", descriptors.source, descriptors.destination, descriptors.length)
    if not descriptors.plain:
        _check_arrays("runs", descriptors.source_offset, descriptors.destination_offset, descriptors.repeats)
    if descriptors.count == 0:
        return
    sides = (descriptors.source, descriptors.source_offset), (descriptors.destination, descriptors.destination_offset)
    spaces = zip(("source", "destination"), (remote, local), descriptors.memory, sides, strict=True)
    for field, regions, (kind, device), (row, offset) in spaces:
        regions.check_ranges(field, kind, device, *_ranges(field, row, offset, descriptors))


def _ranges(field: str, row: Addresses, offset: Addresses, of: Descriptors) -> tuple[Addresses, Addresses]:
    """For each row, the range in which all its runs lie: address and length."""
    if of.plain:
        return row, of.length
    low, highest, most = int(_least(offset)), int(_most(row)), int(_most(of.length)) * int(_most(of.repeats))
    if min(int(_least(of.length)), int(_least(of.repeats))) < 1:
        raise InvalidField(f"{field} length", 0, "at least 1")
    if max(highest, int(_most(offset)) + most) >= ADDRESS_LIMIT:
        raise InvalidField(f"{field} address", hex(max(highest, int(_most(offset)) + most)), "below 2**63")
    # All numbers are below 2**63: no sum of two wraps.
    lengths = np.unique(of.length)
    reach = np.array([_most(offset + length * of.repeats) for length in lengths], np.uint64)
    return row + np.uint64(low), reach[np.searchsorted(lengths, of.length)] - np.uint64(low)


def check_blocks(descriptors: Descriptors, blocks: BlockRows) -> None:
    """Raise `InvalidField` unless the descriptors are rows of `blocks`, each of a single block, for indices into lists
    of all blocks. They lie inside regions if the first and the last block do (`BlockRows.whole`)."""
    first = descriptors.first_row
    rows = slice(first, first + len(descriptors.length))
    right = first >= 0 and bool((descriptors.repeats == 1).all())
    for name in ("source", "destination", "length"):
        right = right and np.array_equal(getattr(descriptors, name), getattr(blocks, name)[rows])
    for name in ("source", "destination"):
        block, rest = np.divmod(getattr(descriptors, f"{name}_offset"), np.uint64(getattr(blocks, f"{name}_stride")))
        right = right and not rest.any() and int(_most(block)) < getattr(blocks, f"{name}_blocks")
    if not right:
        raise InvalidField("descriptors", f"{descriptors.count} from row {first} on", "rows of single blocks")


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
    elif metadata.startswith(METADATA_HEADER):
        encoded = name.encode()
        if not metadata.startswith(METADATA_HEADER + len(encoded).to_bytes(8, sys.byteorder) + encoded):
            problem = "its metadata is another agent's"
    if problem:
        raise BadAgentMetadata(f"agent {name[:80]!r}: {problem}", agent=name[:80], problem=problem)


def _check_arrays(field: str, *arrays: Addresses) -> None:
    shapes = {array.shape for array in arrays}
    if any(array.dtype != np.uint64 or array.ndim != 1 for array in arrays) or len(shapes) != 1:
        found = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
        raise InvalidField(field, found, "uint64 arrays of one length")
