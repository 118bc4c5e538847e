"""Which of an engine's blocks are written by reads under way, and which it has published: nobody else may write either.

Blocks are counted per pool, the space of block ids that groups share. A block may be in several publications, as
prefixes are, but is written by one read at a time, and not while it is published (R2, R4).

What other processes of the engine do is not known here: a scheduler's port knows of all reads of its engine, a cache
that reads by itself of its own reads, and of what its own process publishes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.errors import BadBlock
from kvferry.geometry.blocks import BlockIds
from kvferry.geometry.model import Group

Pool: TypeAlias = tuple[bool, str]
Counts: TypeAlias = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Pin:
    """Blocks of one step of a publication. Made by `BlockUse.pin`."""

    ids: Mapping[str, BlockIds]
    number: int = 0
    step: int = 0


@dataclass(slots=True, eq=False)
class _Write:
    """Blocks of one read.

    Attributes:
        read_id: of the read.
        ids: by group.
        layers: the layers that are written; None: all.
        quiet: whether nothing can write to them any more; None: `Writes.end` says so.
    """

    read_id: str
    ids: Mapping[str, BlockIds]
    layers: frozenset[str] | None
    quiet: Callable[[], bool] | None


class BlockUse:
    """The blocks of one engine. Thread-safe; a call costs a pass over its blocks, and waits for no other's work."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self.lock = threading.Lock()
        self.groups = {group.name: group for group in groups}
        self._published: dict[Pool, Counts] = {}
        self._pins: dict[int, list[Pin]] = {}
        self.writers: list[Writes] = []

    def writes(self, rank: int | None = None) -> Writes:
        """For the reads of one rank; None: of a scheduler, whose reads are those of all ranks."""
        made = Writes(self, rank)
        with self.lock:
            self.writers.append(made)
        return made

    def pin(self, ids: Mapping[str, BlockIds], more_of: int | None = None) -> Pin:
        """The blocks are about to be published; `name` says as what, or `unpin` that they are not.

        Args:
            ids: by group; of groups and within ranges that exist.
            more_of: number of the publication that they belong to, if it has others already.

        Raises:
            BadBlock: one of them is given twice, or a read is writing to it.
        """
        with self.lock:
            earlier = [pin.ids for pin in self._pins.get(more_of, [])] if more_of is not None else []
            self._check_once(ids, earlier)
            for writer in self.writers:
                writer.check(ids, None, "source")
            self._count(ids, 1)
        return Pin(ids)

    def name(self, pin: Pin, number: int, step: int) -> None:
        """The pinned blocks are published."""
        pin.number, pin.step = number, step
        with self.lock:
            self._pins.setdefault(number, []).append(pin)

    def unpin(self, pin: Pin) -> None:
        """The blocks were not published."""
        with self.lock:
            self._count(pin.ids, -1)

    def refused(self, number: int, step: int) -> None:
        """A step of a publication never was."""
        with self.lock:
            pins = self._pins.get(number, [])
            for pin in [pin for pin in pins if pin.step == step]:
                pins.remove(pin)
                self._count(pin.ids, -1)
            if not pins:
                self._pins.pop(number, None)

    def released(self, numbers: Iterable[int]) -> None:
        """The engine was told that these publications are released."""
        with self.lock:
            for number in numbers:
                for pin in self._pins.pop(number, []):
                    self._count(pin.ids, -1)

    def pool(self, group: str) -> Pool:
        """The pool of a group."""
        found = self.groups[group]
        return bool(found.pool), found.pool or found.name

    def counts(self, of: dict[Pool, Counts], group: str) -> Counts:
        """How often each block of a group's pool is used; made when it is first needed."""
        pool = self.pool(group)
        if pool not in of:
            of[pool] = np.zeros(max(g.num_blocks for n, g in self.groups.items() if self.pool(n) == pool), np.int32)
        return of[pool]

    def bad(self, group: str, side: str, block: int, problem: str) -> BadBlock:
        """The error for a block."""
        return BadBlock(group, side, block, self.groups[group].num_blocks, problem)

    def check_unpublished(self, ids: Mapping[str, BlockIds]) -> None:
        """Raise `BadBlock` for a block that is published. With the lock held."""
        for group, listed in ids.items():
            counts = self.counts(self._published, group)[listed]
            if counts.any():
                block = int(listed[counts > 0][0])
                raise self.bad(group, "destination", block, f"publication {self._holder(group, block)} holds it")

    def _holder(self, group: str, block: int) -> int:
        pool = self.pool(group)
        for number, pins in self._pins.items():
            for pin in pins:
                if any(self.pool(name) == pool and bool((ids == block).any()) for name, ids in pin.ids.items()):
                    return number
        return 0

    def _count(self, ids: Mapping[str, BlockIds], by: int) -> None:
        for group, listed in ids.items():
            # Without repeats, by `_check_once`: each of the indices is counted.
            self.counts(self._published, group)[listed] += np.int32(by)

    def _check_once(self, ids: Mapping[str, BlockIds], earlier: list[Mapping[str, BlockIds]]) -> None:
        lists: dict[Pool, list[tuple[str, BlockIds]]] = {}
        for given in (*earlier, ids):
            for group, listed in given.items():
                lists.setdefault(self.pool(group), []).append((group, listed))
        for found in lists.values():
            every = found[0][1] if len(found) == 1 else np.concatenate([listed for _, listed in found])
            if bool((every[1:] > every[:-1]).all()):
                continue
            every = np.sort(every)
            twice = every[1:][every[1:] == every[:-1]]
            if len(twice):
                raise self.bad(found[-1][0], "source", int(twice[0]), "it is given twice")


@dataclass(slots=True, eq=False)
class Writes:
    """The blocks that some reads write. Made by `BlockUse.writes`; thread-safe."""

    use: BlockUse
    rank: int | None
    _counts: dict[Pool, Counts] = field(default_factory=dict)
    _under_way: dict[object, _Write] = field(default_factory=dict)

    def begin(
        self,
        read_id: str,
        ids: Mapping[str, BlockIds],
        *,
        layers: frozenset[str] | None = None,
        quiet: Callable[[], bool] | None = None,
        allow_overlap: bool = False,
    ) -> object:
        """A read is about to write to these blocks, until it is quiet.

        Args:
            read_id: for errors.
            ids: by group; of groups and within ranges that exist.
            layers: the layers that are written; None: all.
            quiet: whether nothing can write to them any more; None: `end` will say so.
            allow_overlap: also where they are published, or written by another read.

        Returns:
            The key for `end`.

        Raises:
            BadBlock: another read writes to one of them, or it is published.
        """
        mine = _Write(read_id, ids, layers, quiet)
        key = object()
        with self.use.lock:
            self._sweep()
            if not allow_overlap:
                self.use.check_unpublished(ids)
                for other in self.use.writers:
                    if other.rank == self.rank or other.rank is None or self.rank is None:
                        other.check(ids, layers, "destination")
            for group, listed in ids.items():
                # One that is given twice counts once, here and when it ends: whether that is right is known when the
                # blocks that are needed are.
                self.use.counts(self._counts, group)[listed] += np.int32(1)
            self._under_way[key] = mine
        return key

    def end(self, key: object) -> None:
        """The read is quiet, or never began. Twice does no harm."""
        with self.use.lock:
            self._end(key)

    def check(self, ids: Mapping[str, BlockIds], layers: frozenset[str] | None, side: str) -> None:
        """Raise `BadBlock` for a block that a read writes. With the lock held."""
        for group, listed in ids.items():
            if not self.use.counts(self._counts, group)[listed].any():
                continue
            # Rare, so it may look at every read.
            self._sweep()
            pool = self.use.pool(group)
            for write in self._under_way.values():
                if layers is not None and write.layers is not None and not layers & write.layers:
                    continue
                for name, written in write.ids.items():
                    both = np.intersect1d(listed, written) if self.use.pool(name) == pool else written[:0]
                    if len(both):
                        raise self.use.bad(group, side, int(both[0]), f"read {write.read_id} may still write to it")

    def _sweep(self) -> None:
        for key in [key for key, write in self._under_way.items() if write.quiet is not None and write.quiet()]:
            self._end(key)

    def _end(self, key: object) -> None:
        write = self._under_way.pop(key, None)
        if write is not None:
            for group, listed in write.ids.items():
                self.use.counts(self._counts, group)[listed] -= np.int32(1)
