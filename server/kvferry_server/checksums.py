"""The sums of a publication's blocks, as its ranks sent them: kept for its readers until it is released. Pure.

What a sum is, only engines need to know (`kvferry.checksums`); here it is a number for (rank, plane, place, unit).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import InvalidField
from kvferry.geometry import Group, GroupKind, Interval

if TYPE_CHECKING:
    from kvferry_server.publications import Offer

Places: TypeAlias = npt.NDArray[np.int64]

PAGE_OVERHEAD = 512
"""Bytes that a page takes beside its places and sums."""

MAX_PAGES = 256
"""Pages of one plane of a publication: a new page is compared with all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """Sums of some blocks of one plane. Never changes.

    Attributes:
        rank, plane: what was summed.
        units: the units summed.
        places: of the blocks, rising, ``int64[n]``.
        sums: ``uint32[n, units]``.
    """

    rank: int
    plane: str
    units: Interval
    places: Places
    sums: npt.NDArray[np.uint32]

    @property
    def size(self) -> int:
        """About as many bytes as it takes in memory."""
        return PAGE_OVERHEAD + self.places.nbytes + self.sums.nbytes

    def overlaps(self, other: Page) -> bool:
        """Whether both have a sum for one block and unit."""
        if self.units.intersect(other.units) is None or not self.reaches(other.places):
            return False
        return bool(np.isin(self.places, other.places, assume_unique=True).any())

    def reaches(self, places: Places) -> bool:
        """Whether the page begins before these places end, and ends after they begin. Places rise."""
        return bool(self.places[0] <= places[-1] and places[0] <= self.places[-1])

    def equals(self, other: Page) -> bool:
        """Whether both say the same of the same blocks."""
        return (
            self.units == other.units
            and np.array_equal(self.places, other.places)
            and np.array_equal(self.sums, other.sums)
        )

    def part(self, units: Interval, places: Places) -> Page | None:
        """What the page has of these units and blocks; None if nothing."""
        both = self.units.intersect(units)
        if both is None or not self.reaches(places):
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
            overlapping = [other for other in others if page.overlaps(other)]
            if any(not page.equals(other) for other in overlapping):
                problem = "blocks that have other sums already, or are in another page"
                raise InvalidField("checksums", f"{page.plane}, rank {page.rank}", f"no {problem}")
            if overlapping:
                continue
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


def check_places(group: Group, steps: Sequence[Offer], page: Page) -> None:
    """Raise `InvalidField` if a page is about blocks that were not published."""
    offered = [blocks for step in steps for blocks in step.groups if blocks.group == group.name]
    if group.kind is GroupKind.STATE:
        first, end = 0, sum(blocks.blocks for blocks in offered)
    else:
        first = min((blocks.first_token // group.block_tokens for blocks in offered), default=0)
        end = max((-(-blocks.end_token // group.block_tokens) for blocks in offered), default=0)
    lowest, highest = int(page.places[0]), int(page.places[-1])
    if lowest < first or highest >= end:
        where = f"checksums of {page.plane}"
        raise InvalidField(where, f"places {lowest} to {highest}", f"those that were published, [{first}, {end})")
