"""The checksums of a publication's blocks, which its ranks send and its readers ask for. Kept until the release.

Only engines need to know how a checksum is computed (`kvferry.planner.checksum`). Here it is a number per (rank, plane,
block index, unit). A block index is a block's position in the request; for state groups, in the order of publication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import HomeRecovering, InvalidField
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import Interval
from kvferry_server.domain.limits import CHECKSUM_BATCH, MAX_CHECKSUM_PAGES
from kvferry_server.domain.steps import PublishedExtent

Indexes: TypeAlias = npt.NDArray[np.int64]

PAGE_OVERHEAD = 512  # Bytes of a page beside its block indexes and checksums, estimated


@dataclass(frozen=True, slots=True, eq=False)
class ChecksumPage:
    """Checksums of some blocks of one plane. Never changes."""

    rank: int
    plane: str
    units: Interval  # the units summed
    indexes: Indexes  # the block indexes, rising, ``int64[n]``
    sums: npt.NDArray[np.uint32]  # the checksums, ``uint32[n, units]``
    first: int = field(init=False)  # block index
    last: int = field(init=False)  # block index

    def __post_init__(self) -> None:
        # As Python ints: a new page is compared with hundreds, and comparing numpy scalars takes ten times as long.
        object.__setattr__(self, "first", int(self.indexes[0]))
        object.__setattr__(self, "last", int(self.indexes[-1]))

    @property
    def size(self) -> int:
        """Estimated bytes in memory."""
        return PAGE_OVERHEAD + self.indexes.nbytes + self.sums.nbytes

    def near(self, other: ChecksumPage) -> bool:
        """Whether both may have a checksum for the same block and unit."""
        near = self.first <= other.last and other.first <= self.last
        return near and self.units.begin < other.units.end and other.units.begin < self.units.end

    def overlaps(self, near: Sequence[ChecksumPage]) -> bool:
        """Whether one of the pages that are `near` has a checksum for a block of this page."""
        if sum(len(other.indexes) for other in near) <= CHECKSUM_BATCH:
            # Many small pages are compared in one step.
            found = np.concatenate([self.indexes[:0], *(other.indexes for other in near)])
            return bool(np.isin(self.indexes, found).any())
        return any(bool(np.isin(self.indexes, other.indexes, assume_unique=True).any()) for other in near)

    def equals(self, other: ChecksumPage) -> bool:
        if (self.first, self.last) != (other.first, other.last):
            return False
        equal = np.array_equal(self.indexes, other.indexes) and np.array_equal(self.sums, other.sums)
        return equal and self.units == other.units

    def part(self, units: Interval, indexes: Indexes) -> ChecksumPage | None:
        """Return the part of the page with these units and blocks; None: it has none of them."""
        both = self.units.intersect(units)
        if both is None or self.first > indexes[-1] or indexes[0] > self.last:
            return None
        chosen = np.isin(self.indexes, indexes, assume_unique=True)
        if not bool(chosen.any()):
            return None
        sums = self.sums[chosen, both.begin - self.units.begin : both.end - self.units.begin]
        return ChecksumPage(self.rank, self.plane, both, self.indexes[chosen], sums)


@dataclass(slots=True, eq=False)
class Checksums:
    """The checksums of one publication. Its pages may be read in any thread."""

    done: set[int] = field(default_factory=set)  # ranks that have sent all their checksums
    size: int = 0  # estimated bytes of the pages in memory
    _pages: dict[tuple[int, str], list[ChecksumPage]] = field(default_factory=dict)

    def has(self, page: ChecksumPage) -> bool:
        """Whether a page is here already. Raises `InvalidField` if it overlaps another page without being equal, or if
        its plane has too many pages."""
        others, where = self._pages.get((page.rank, page.plane), []), f"{page.plane}, rank {page.rank}"
        near = [other for other in others if page.near(other)]
        if any(map(page.equals, near)):
            return True
        if page.overlaps(near):
            raise InvalidField("checksums", where, "each block in one page, with the same checksums when repeated")
        if len(others) == MAX_CHECKSUM_PAGES:
            raise InvalidField("checksums", where, f"at most {MAX_CHECKSUM_PAGES} pages per plane")
        return False

    def add(self, page: ChecksumPage) -> None:
        self._pages.setdefault((page.rank, page.plane), []).append(page)
        self.size += page.size

    def pages(self, rank: int, planes: Iterable[str]) -> Sequence[ChecksumPage]:
        """Return the pages of a rank's planes, each once."""
        return tuple(page for plane in dict.fromkeys(planes) for page in self._pages.get((rank, plane), ()))

    def clear(self) -> int:
        """Drop all pages. Returns the bytes that they took, estimated."""
        size, self.size = self.size, 0
        self._pages.clear()
        self.done.clear()
        return size


def check_indexes(group: Group, extents: Mapping[str, PublishedExtent], page: ChecksumPage, *, complete: bool) -> None:
    """Raise `InvalidField` if a block of a page of checksums was not published, or `HomeRecovering` while its step may
    still arrive: the publication is not `complete`."""
    extent = extents.get(group.name)
    first = end = 0
    if extent is not None and group.kind is GroupKind.STATE:
        end = extent.blocks
    elif extent is not None:
        first, end = extent.first_token // group.block_tokens, -(-extent.end_token // group.block_tokens)
    if page.first < first or page.last >= end:
        where = f"checksums of {page.plane}"
        if not complete:
            raise HomeRecovering(f"{where}: the step with blocks {page.first} to {page.last} has not arrived yet")
        raise InvalidField(where, f"blocks {page.first} to {page.last}", f"published blocks, [{first}, {end})")
