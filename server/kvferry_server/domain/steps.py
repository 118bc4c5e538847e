"""What a source sends of a publication: its steps, with the rules that a step must keep (R7), and the checksums of its
blocks, which readers ask for. Checksums are kept until the release.

Only engines need to know how a checksum is computed (`kvferry.planner.checksum`). Here it is a number per (rank, plane,
block index, unit). A block index is a block's position in the request; for state groups, in the order of publication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import BadBlock, HomeRecovering, InvalidField
from kvferry.geometry.blocks import BlockRuns, Unfinished, check_published
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import Interval
from kvferry_server.domain.limits import CHECKSUM_BATCH, MAX_CHECKSUM_PAGES
from kvferry_server.domain.values import RouterKey

Indexes: TypeAlias = npt.NDArray[np.int64]

PAGE_OVERHEAD = 512  # Bytes of a page of checksums beside its block indexes and checksums, estimated


@dataclass(frozen=True, slots=True)
class PublicationStep:
    """One step of a publication, as its source sent it. Idempotent by publication and index."""

    number: int  # of the publication
    request_id: str
    index: int = 0  # from 0, without gaps
    groups: tuple[BlockRuns, ...] = ()  # blocks that groups gain with this step
    last: bool = True
    expected_reads: int = 1
    payload: bytes = field(default=b"", repr=False)  # opaque bytes for the readers; with the last step only
    checksums: bool = False  # every rank will send the checksums of its blocks
    router_key: RouterKey | None = None  # the key under which readers wait for the publication; in the first step only
    unfinished: Unfinished | None = None  # blocks that readers may read layer by layer; not in the last step
    mark_ends: tuple[int, ...] = ()  # ends of the prompt's marks, beside those of earlier steps
    hint_digest: bytes = b""  # of the hint in the reference, with the only step; empty: no hint
    encoded: bytes = field(default=b"", repr=False)  # part of an encoded ReadBlocksResponse, as readers get it
    size: int = field(init=False, repr=False, compare=False)  # estimated bytes in memory

    def __post_init__(self) -> None:
        groups, layers = self.groups, 0
        if self.unfinished is not None:
            groups += self.unfinished.groups
            # A character takes four bytes where one of the name is far from ASCII.
            layers = sum(144 + len(name) * (1 if name.isascii() else 4) for name in self.unfinished.layers)
        runs, marks = sum(len(blocks.starts) for blocks in groups), len(self.mark_ends)
        size = 512 + len(self.payload) + len(self.encoded) + 512 * len(groups) + 80 * runs + layers + 64 * marks
        # Computed once: a publication may have a hundred thousand steps, which are released together.
        object.__setattr__(self, "size", size)


@dataclass(frozen=True, slots=True)
class PublishedExtent:
    """The half-open range of tokens, and the number of blocks, of one group over all steps of a publication."""

    first_token: int
    end_token: int
    blocks: int


def check_step(groups: Mapping[str, Group], step: PublicationStep) -> None:
    """Check a step against the groups of its engine. Raises `InvalidField` if a group is unknown or named twice, its
    tokens and its number of blocks do not match, or the step has something that only the last step may have; and
    `BadBlock` if a block id is out of range, or the null block."""
    _check_groups(groups, "publish.groups", step.groups, last=step.last)
    if step.unfinished is not None:
        if step.last:
            raise InvalidField("publish.unfinished", f"layers {step.unfinished.layers[:3]}", "none in the last step")
        _check_groups(groups, "publish.unfinished.groups", step.unfinished.groups, last=False)


def _check_groups(groups: Mapping[str, Group], field: str, listed: Sequence[BlockRuns], *, last: bool) -> None:
    names = [blocks.group for blocks in listed]
    if len(set(names)) != len(names):
        raise InvalidField(field, names, "each group once")
    for blocks in listed:
        group = groups.get(blocks.group)
        if group is None:
            raise InvalidField(f"{field}.group", blocks.group, f"one of {sorted(groups)}")
        check_published(group, f"{field}[{group.name}]", blocks, last=last)
        _check_ids(group, blocks)


def _check_ids(group: Group, blocks: BlockRuns) -> None:
    """Check block ids as runs: a few bytes from a peer must not be expanded into a million ids."""
    null = group.null_block
    # The first test is enough for most steps. There may be many runs, and the event loop waits meanwhile.
    if max(blocks.starts, default=0) + max(blocks.counts, default=0) > group.num_blocks:
        runs = zip(blocks.starts, blocks.counts, strict=True)
        beyond = next((start for start, count in runs if start + count > group.num_blocks), None)
        if beyond is not None:
            block = max(beyond, group.num_blocks)
            raise BadBlock(group.name, "source", block, group.num_blocks, "out of range")
    if null is None:
        return
    starts, counts = np.array(blocks.starts, np.int64), np.array(blocks.counts, np.int64)
    if bool(((starts <= null) & (null < starts + counts)).any()):
        raise BadBlock(group.name, "source", null, group.num_blocks, "it is the null block, which holds no tokens")


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
