"""The planner's output for the data plane: descriptors as numpy arrays, and their division into chunks.

A descriptor is one contiguous ``(source address, destination address, length)``. Most reads have the same rows of bytes
in each of many blocks: a list of descriptors has rows, and runs of blocks, and a descriptor for each row and run. So
checking a list and dividing it into chunks takes as long as there are rows and runs; only NIXL gets each descriptor.

Pure: no I/O, no NIXL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.geometry.plane import MemoryKind

Addresses: TypeAlias = npt.NDArray[np.uint64]

_NO_OFFSET = np.zeros(1, np.uint64)
_ONCE = np.ones(1, np.uint64)
_NO_OFFSET.flags.writeable = _ONCE.flags.writeable = False


class MemoryPair(NamedTuple):
    """The two address spaces of a descriptor list, kind and device each; NIXL takes one pair per list."""

    source: tuple[MemoryKind, int]
    destination: tuple[MemoryKind, int]


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """Rows that each block has, as NIXL can prepare them once per peer; compared by identity. `source`, `destination`
    and `length` are those in block 0, ``uint64[rows]``; blocks have strides in bytes, and each side its number of
    blocks."""

    source: Addresses
    destination: Addresses
    length: Addresses
    source_stride: int
    destination_stride: int
    source_blocks: int
    destination_blocks: int

    @property
    def most_entries(self) -> int:
        """The number of rows of all blocks, on the side that has more."""
        return len(self.length) * max(self.source_blocks, self.destination_blocks)

    def whole(self, memory: MemoryPair) -> Descriptors:
        """The rows of the first block and of the last one of each side."""
        last = (self.source_blocks - 1) * self.source_stride, (self.destination_blocks - 1) * self.destination_stride
        runs = np.array([(0, last[0]), (0, last[1]), (1, 1)], np.uint64)
        return Descriptors(memory, self.source, self.destination, self.length, *runs)

    def list_of(self, memory: MemoryPair, side: Literal["source", "destination"]) -> Addresses:
        """The rows of one side as NIXL prepares them, ``uint64[rows, 5]``: address, length, device, stride, count."""
        rows = np.empty((len(self.length), 5), np.uint64)
        _, device = getattr(memory, side)
        rows[:, 0], rows[:, 1], rows[:, 2] = getattr(self, side), self.length, device
        rows[:, 3], rows[:, 4] = getattr(self, f"{side}_stride"), getattr(self, f"{side}_blocks")
        return rows


@dataclass(frozen=True, eq=False)
class Descriptors:
    """Descriptors between two address spaces, one for each row and each run of blocks, row after row. That of row r and
    run n has ``length[r] * repeats[n]`` bytes, from ``source[r] + source_offset[n]`` to
    ``destination[r] + destination_offset[n]``.

    Attributes:
        source, destination, length: ``uint64[rows]``; lengths are at least 1.
        source_offset, destination_offset, repeats: ``uint64[runs]``; without them each row is one descriptor.
        blocks: the rows are those of `blocks` from `first_row` on, and the runs single blocks; None: other rows.
    """

    memory: MemoryPair
    source: Addresses
    destination: Addresses
    length: Addresses
    source_offset: Addresses = field(default_factory=lambda: _NO_OFFSET)
    destination_offset: Addresses = field(default_factory=lambda: _NO_OFFSET)
    repeats: Addresses = field(default_factory=lambda: _ONCE)
    blocks: BlockRows | None = field(default=None, kw_only=True)
    first_row: int = field(default=0, kw_only=True)

    @property
    def count(self) -> int:
        """Number of descriptors, before NIXL merges any."""
        return len(self.length) * len(self.repeats)

    @cached_property
    def total_bytes(self) -> int:
        return int(self.length.sum()) * int(self.repeats.sum())

    @property
    def plain(self) -> bool:
        """Whether each row is one descriptor."""
        return self.repeats is _ONCE and self.source_offset is self.destination_offset is _NO_OFFSET

    def rows(self, chosen: slice) -> Descriptors:
        of = {name: getattr(self, name)[chosen] for name in ("source", "destination", "length")}
        return replace(self, **of, first_row=self.first_row + int(chosen.start))

    def runs(self, chosen: slice) -> Descriptors:
        of = {name: getattr(self, name)[chosen] for name in ("source_offset", "destination_offset", "repeats")}
        return replace(self, **of)

    def one_by_one(self) -> Descriptors:
        """The same descriptors, each a row of its own."""
        if self.plain:
            return self
        return Descriptors(
            self.memory,
            np.add.outer(self.source, self.source_offset).ravel(),
            np.add.outer(self.destination, self.destination_offset).ravel(),
            np.multiply.outer(self.length, self.repeats).ravel(),
        )

    def lists(self) -> tuple[Addresses, Addresses]:
        """The descriptors of the source, and of the destination, as NIXL's lists take them, ``uint64[n, 3]`` each:
        address, length, device."""
        both = np.empty((2, len(self.length), len(self.repeats), 3), np.uint64)
        np.add.outer(self.source, self.source_offset, out=both[0, :, :, 0])
        np.add.outer(self.destination, self.destination_offset, out=both[1, :, :, 0])
        both[:, :, :, 1] = np.multiply.outer(self.length, self.repeats)
        both[0, :, :, 2], both[1, :, :, 2] = self.memory.source[1], self.memory.destination[1]
        return both[0].reshape(-1, 3), both[1].reshape(-1, 3)


def joined(memory: MemoryPair, parts: Sequence[Descriptors]) -> Descriptors:
    """Several lists as one, of single descriptors."""
    single = [part.one_by_one() for part in parts]
    columns = zip(*((part.source, part.destination, part.length) for part in single), strict=True)
    return Descriptors(memory, *map(np.concatenate, columns))


def chunks(descriptors: Descriptors, chunk_bytes: int) -> Iterator[Descriptors]:
    """Divide descriptors into consecutive chunks of at most `chunk_bytes`: some rows with all runs, or some runs of one
    row. A descriptor longer than a chunk is split."""
    if 0 < descriptors.total_bytes <= chunk_bytes:
        yield descriptors
        return
    for rows in _slices(descriptors.length * descriptors.repeats.sum(), chunk_bytes):
        part = descriptors.rows(rows)
        if part.total_bytes <= chunk_bytes:
            yield part
            continue
        # The runs of a row are divided evenly: a small rest would be a chunk of its own.
        sizes, shares = part.length[0] * part.repeats, -(-part.total_bytes // chunk_bytes)
        for runs in _slices(sizes, min(chunk_bytes, part.total_bytes // shares + int(sizes.max()))):
            piece = part.runs(runs)
            yield from _split_long(piece, chunk_bytes) if piece.total_bytes > chunk_bytes else (piece,)


def _split_long(one: Descriptors, limit: int) -> Iterator[Descriptors]:
    """One descriptor in pieces of at most `limit` bytes."""
    single = one.one_by_one()
    for at in range(0, one.total_bytes, limit):
        length = np.array([min(limit, one.total_bytes - at)], np.uint64)
        yield Descriptors(one.memory, single.source + np.uint64(at), single.destination + np.uint64(at), length)


def _slices(sizes: Addresses, limit: int) -> Iterator[slice]:
    """Consecutive slices with sums of at most `limit`; a larger size is a slice of its own."""
    ends = np.cumsum(sizes)
    begin = taken = 0
    while begin < len(ends):
        end = max(begin + 1, int(np.searchsorted(ends, np.uint64(taken + limit), side="right")))
        yield slice(begin, end)
        begin, taken = end, int(ends[end - 1])
