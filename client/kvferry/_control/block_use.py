"""Records which blocks of an engine are published or written to by reads, and refuses conflicting uses.

Blocks are counted per pool, the space of block ids that groups share. A block may be in several publications, as shared
prefixes are. Only one read at a time may write to it, and none while it is published (R2, R4).

The record has only the uses of its own process: that of a scheduler's port has all reads of its engine; that of a cache
without a scheduler has the cache's own reads, and the publications of its process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import BadBlock
from kvferry.geometry.blocks import BlockIds, repeated
from kvferry.geometry.model import Group

Pool: TypeAlias = tuple[bool, str]
Counts: TypeAlias = npt.NDArray[np.int32]

ASKED_PER_BEGIN = 2
"""Number of reads that each new one asks whether they are quiet: more than one, so that quiet reads do not pile up."""


@dataclass(slots=True, eq=False)
class _Write:
    """The blocks that one read writes to; see `Writes.begin`."""

    read_id: str
    ids: Mapping[str, BlockIds]
    layers: frozenset[str] | None
    quiet: Callable[[], bool] | None


class BlockUse:
    """The uses of the blocks of one engine. Thread-safe; a call takes time proportional to its number of blocks."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self.lock = threading.Lock()
        self.groups = {group.name: group for group in groups}
        self._published: dict[Pool, Counts] = {}
        self._pins: dict[int, list[Mapping[str, BlockIds]]] = {}
        """Blocks of the steps of publications, by number."""
        self.writers: list[Writes] = []

    def writes(self, rank: int | None = None) -> Writes:
        """Make the record for the reads of one rank; None: for a scheduler, whose reads are those of all ranks."""
        made = Writes(self, rank)
        with self.lock:
            self.writers.append(made)
        return made

    def pin(self, ids: Mapping[str, BlockIds], more_of: int | None = None) -> None:
        """Pin blocks that are about to be published; `name` or `unpin` must follow. `ids` are of existing groups and in
        range; `more_of` is the number of the publication, if it has other blocks already. Raises `BadBlock` if a block
        is given twice, or a read is writing to it."""
        with self.lock:
            earlier = () if more_of is None else self._pins.get(more_of, ())
            self._check_once(ids, earlier)
            for writer in self.writers:
                writer.check(ids, None, "source")
            self._count(ids, 1)

    def name(self, ids: Mapping[str, BlockIds], number: int) -> None:
        """Assign pinned blocks to a publication."""
        with self.lock:
            self._pins.setdefault(number, []).append(ids)

    def unpin(self, ids: Mapping[str, BlockIds]) -> None:
        with self.lock:
            self._count(ids, -1)

    def released(self, numbers: Iterable[int]) -> None:
        with self.lock:
            for number in numbers:
                for ids in self._pins.pop(number, ()):
                    self._count(ids, -1)

    def pool(self, group: str) -> Pool:
        found = self.groups[group]
        return bool(found.pool), found.pool or found.name

    def counts(self, of: dict[Pool, Counts], group: str) -> Counts:
        """Return the number of uses of each block of a group's pool, ``int32[num_blocks]``; made on first use."""
        pool = self.pool(group)
        if pool not in of:
            of[pool] = np.zeros(max(g.num_blocks for n, g in self.groups.items() if self.pool(n) == pool), np.int32)
        return of[pool]

    def bad(self, group: str, side: str, block: int, problem: str) -> BadBlock:
        return BadBlock(group, side, block, self.groups[group].num_blocks, problem)

    def check_unpublished(self, ids: Mapping[str, BlockIds]) -> None:
        """Raise `BadBlock` if one of the blocks is published. Called with the lock held."""
        for group, listed in ids.items():
            counts = self.counts(self._published, group)[listed]
            if counts.any():
                block = int(listed[counts > 0][0])
                raise self.bad(group, "destination", block, f"publication {self._holder(group, block)} holds it")

    def _holder(self, group: str, block: int) -> int:
        pool = self.pool(group)
        for number, steps in self._pins.items():
            for pinned in steps:
                if any(self.pool(name) == pool and bool((ids == block).any()) for name, ids in pinned.items()):
                    return number
        return 0

    def _count(self, ids: Mapping[str, BlockIds], by: int) -> None:
        for group, listed in ids.items():
            # `_check_once` has refused repeated ids, which this would count once only.
            self.counts(self._published, group)[listed] += np.int32(by)

    def _check_once(self, ids: Mapping[str, BlockIds], earlier: Sequence[Mapping[str, BlockIds]]) -> None:
        lists: dict[Pool, list[tuple[str, BlockIds]]] = {}
        pools = {self.pool(group) for group, listed in ids.items() if len(listed)}
        # A long publication may have thousands of steps, and most blocks of the next one are in no publication.
        if earlier and not any(self.counts(self._published, group)[listed].any() for group, listed in ids.items()):
            earlier = ()
        for given in (*earlier, ids):
            for group, listed in given.items():
                if self.pool(group) in pools:
                    lists.setdefault(self.pool(group), []).append((group, listed))
        for found in lists.values():
            twice = repeated([listed for _, listed in found])
            if twice is not None:
                raise self.bad(found[-1][0], "source", twice, "it is given twice")


@dataclass(slots=True, eq=False)
class Writes:
    """Records the blocks that the reads of one rank, or of a scheduler, write to. Made by `BlockUse.writes`.
    Thread-safe."""

    use: BlockUse
    rank: int | None
    _counts: dict[Pool, Counts] = field(default_factory=dict)
    _last: dict[Pool, npt.NDArray[np.int64]] = field(default_factory=dict)
    """The key of the last read that claimed each block, whether or not that read still runs."""
    _under_way: OrderedDict[int, _Write] = field(default_factory=OrderedDict)
    _keys: Iterator[int] = field(default_factory=count)

    def begin(
        self,
        read_id: str,
        ids: Mapping[str, BlockIds],
        *,
        layers: frozenset[str] | None = None,
        quiet: Callable[[], bool] | None = None,
        allow_overlap: bool = False,
    ) -> int:
        """Claim blocks of some layers (None: all) for a read that is about to write to them, until it is quiet. Returns
        the key for `end`. `ids` are by group, of existing groups and in range.

        Args:
            quiet: returns whether no write to the blocks is possible any more; None: the caller calls `end` then.
            allow_overlap: if False, blocks that are published, or that another read writes to, raise `BadBlock`.
        """
        mine = _Write(read_id, ids, layers, quiet)
        with self.use.lock:
            key = next(self._keys)
            self._end_quiet(islice(self._under_way, ASKED_PER_BEGIN))
            if not allow_overlap:
                self.use.check_unpublished(ids)
                for other in self.use.writers:
                    if other.rank == self.rank or other.rank is None or self.rank is None:
                        other.check(ids, layers, "destination")
            for group, listed in ids.items():
                # A repeated id counts once, here and at the end. Whether it is an error is known only later, with the
                # blocks that are needed.
                self.use.counts(self._counts, group)[listed] += np.int32(1)
                self._last_of(group)[listed] = key
            self._under_way[key] = mine
        return key

    def end(self, key: int | None) -> None:
        """End the claim of a read that is quiet, or that never began; None: of a read without a claim. Idempotent."""
        if key is not None:
            with self.use.lock:
                self._end(key)

    def check(self, ids: Mapping[str, BlockIds], layers: frozenset[str] | None, side: str) -> None:
        """Raise `BadBlock` if a read writes to one of the blocks. Called with the lock held."""
        for group, listed in ids.items():
            counts = self.use.counts(self._counts, group)
            claimed = listed[counts[listed] > 0]
            if not len(claimed):
                continue
            # Engines soon use the blocks of a read again that has ended.
            self._end_quiet(np.unique(self._last_of(group)[claimed]).tolist())
            if not counts[claimed].any():
                continue
            # A conflict is rare, and so is a block that two reads may write to: this may search all reads.
            self._end_quiet(self._under_way)
            pool = self.use.pool(group)
            for write in self._under_way.values():
                if layers is not None and write.layers is not None and not layers & write.layers:
                    continue
                for name, written in write.ids.items():
                    both = np.intersect1d(listed, written) if self.use.pool(name) == pool else written[:0]
                    if len(both):
                        raise self.use.bad(group, side, int(both[0]), f"read {write.read_id} may still write to it")

    def _last_of(self, group: str) -> npt.NDArray[np.int64]:
        pool = self.use.pool(group)
        if pool not in self._last:
            self._last[pool] = np.zeros(len(self.use.counts(self._counts, group)), np.int64)
        return self._last[pool]

    def _end_quiet(self, keys: Iterable[int]) -> None:
        """End the claims of those of these reads that are quiet; the others are asked again after all others."""
        for key in tuple(keys):
            write = self._under_way.get(key)
            if write is None:
                continue
            if write.quiet is not None and write.quiet():
                self._end(key)
            else:
                self._under_way.move_to_end(key)

    def _end(self, key: int) -> None:
        write = self._under_way.pop(key, None)
        if write is not None:
            for group, listed in write.ids.items():
                self.use.counts(self._counts, group)[listed] -= np.int32(1)
