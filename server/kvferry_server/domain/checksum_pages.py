"""The sums of a publication's blocks, as its ranks sent them: kept for its readers until it is released. Pure.

What a sum is, only engines need to know (`kvferry.planner.checksum`); here it is a number for (rank, plane, place,
unit).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import InvalidField
from kvferry.geometry.model import Group, GroupKind, Interval
from kvferry_server.domain.steps import PublishedExtent

Places: TypeAlias = npt.NDArray[np.int64]

PAGE_OVERHEAD = 512
"""Bytes that a page takes beside its places and sums."""

MAX_PAGES = 256
"""Pages of one plane of a publication: a new page is compared with all of them."""

MERGED = 1 << 14
"""Places of pages that a new page is compared with at once."""

_NO_PLACES: Places = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """Sums of some blocks of one plane. Never changes.

    Attributes:
        rank, plane: what was summed.
        units: the units summed.
        places: of the blocks, rising, ``int64[n]``.
        sums: ``uint32[n, units]``.
        first, last: of the places.
    """

    rank: int
    plane: str
    units: Interval
    places: Places
    sums: npt.NDArray[np.uint32]
    first: int = field(init=False)
    last: int = field(init=False)

    def __post_init__(self) -> None:
        # As Python's numbers: a new page is compared with hundreds, and numpy's take ten times as long.
        object.__setattr__(self, "first", int(self.places[0]))
        object.__setattr__(self, "last", int(self.places[-1]))

    @property
    def size(self) -> int:
        """About as many bytes as it takes in memory."""
        return PAGE_OVERHEAD + self.places.nbytes + self.sums.nbytes

    def near(self, pages: Iterable[Page]) -> list[Page]:
        """Those of the pages that may have a sum for one block and unit with this one."""
        first, last, begin, end = self.first, self.last, self.units.begin, self.units.end
        return [
            other
            for other in pages
            if other.first <= last and first <= other.last and other.units.begin < end and begin < other.units.end
        ]

    def overlaps(self, near: Sequence[Page]) -> bool:
        """Whether one of the pages that are `near` has a sum for a block of this one."""
        if sum(len(other.places) for other in near) <= MERGED:
            # Many small ones at once.
            found = np.concatenate([_NO_PLACES, *(other.places for other in near)])
            return bool(np.isin(self.places, found).any())
        return any(bool(np.isin(self.places, other.places, assume_unique=True).any()) for other in near)

    def equals(self, other: Page) -> bool:
        """Whether both say the same of the same blocks."""
        return (
            self.units == other.units
            and (self.first, self.last) == (other.first, other.last)
            and np.array_equal(self.places, other.places)
            and np.array_equal(self.sums, other.sums)
        )

    def part(self, units: Interval, places: Places) -> Page | None:
        """What the page has of these units and blocks; None if nothing."""
        both = self.units.intersect(units)
        if both is None or self.first > places[-1] or places[0] > self.last:
            return None
        chosen = np.isin(self.places, places, assume_unique=True)
        if not bool(chosen.any()):
            return None
        sums = self.sums[chosen, both.begin - self.units.begin : both.end - self.units.begin]
        return Page(self.rank, self.plane, both, self.places[chosen], sums)


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """Asks for the sums of some blocks and units of planes of one rank; `places` rise."""

    rank: int
    planes: tuple[str, ...]
    units: Interval
    places: Places


@dataclass(slots=True, eq=False)
class Checksums:
    """The sums of one publication. Not thread-safe; its pages may be read anywhere.

    Attributes:
        done: ranks that send no more.
        size: about as many bytes as the pages take in memory.
    """

    done: set[int] = field(default_factory=set)
    size: int = 0
    _pages: dict[tuple[int, str], list[Page]] = field(default_factory=dict)

    def new(self, pages: Iterable[Page]) -> list[Page]:
        """Those pages that are not here yet.

        Raises:
            InvalidField: a page overlaps another one and is not the same, or there are too many of one plane.
        """
        found: dict[tuple[int, str], list[Page]] = {}
        for page in pages:
            key = page.rank, page.plane
            new = found.setdefault(key, [])
            others = [*self._pages.get(key, ()), *new]
            near = page.near(others)
            if any(page.equals(other) for other in near):
                continue
            if page.overlaps(near):
                problem = "blocks that have other sums already, or are in another page"
                raise InvalidField("checksums", f"{page.plane}, rank {page.rank}", f"no {problem}")
            if len(others) == MAX_PAGES:
                where = f"{page.plane}, rank {page.rank}"
                raise InvalidField("checksums", where, f"at most {MAX_PAGES} pages of a plane")
            new.append(page)
        return [page for new in found.values() for page in new]

    def add(self, pages: Iterable[Page]) -> None:
        """Keep pages that are `new`."""
        for page in pages:
            self._pages.setdefault((page.rank, page.plane), []).append(page)
            self.size += page.size

    def pages(self, query: Query) -> Sequence[Page]:
        """The pages in which the answer to a query is found."""
        return tuple(page for plane in query.planes for page in self._pages.get((query.rank, plane), ()))

    def clear(self) -> int:
        """Drop everything; returns the bytes that it took."""
        size, self.size = self.size, 0
        self._pages.clear()
        self.done.clear()
        return size


def answers(query: Query, pages: Iterable[Page]) -> Iterator[Page]:
    """What the pages of a query hold of it."""
    for page in pages:
        part = page.part(query.units, query.places)
        if part is not None:
            yield part


def check_places(group: Group, extents: Mapping[str, PublishedExtent], page: Page) -> None:
    """Raise `InvalidField` if a page is about blocks that were not published."""
    offered = extents.get(group.name)
    first = end = 0
    if offered is not None and group.kind is GroupKind.STATE:
        end = offered.blocks
    elif offered is not None:
        first, end = offered.first_token // group.block_tokens, -(-offered.end_token // group.block_tokens)
    if page.first < first or page.last >= end:
        where = f"checksums of {page.plane}"
        raise InvalidField(where, f"places {page.first} to {page.last}", f"those that were published, [{first}, {end})")
