"""Staging memory: a bounded number of slots that all reads of a rank use.

Staged work reads batch after batch into slots. When all of a batch has arrived, the reading thread permutes the batch
into the destination's blocks and gives the slot back. NIXL never writes to the blocks themselves: they are quiet as
soon as the transfer has ended, while a slot is given back only when nothing can write to it any more (R4).

Threading: a pool may be used from any thread. Staged work, as all `PeerWork`, belongs to one reading thread at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from kvferry._arguments import check_fields
from kvferry._memory.access import StagingSpace, StillCopying
from kvferry._transport.nixl_agent import AgentInfo
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.transfer import Chunk, PeerWork, Transfer, as_kvferry_error, divide
from kvferry.errors import InvalidField, KvferryError
from kvferry.planner.descriptors import MemoryPair
from kvferry.planner.expansion import Batch, StagedRead
from kvferry.planner.path_choice import Costs, Path

SLOTS_AT_ONCE = 2
"""Slots that one piece of work holds at most: one slot is read into while the other is permuted."""


@dataclass(frozen=True, slots=True)
class StagingOptions:
    """How small pieces are read.

    Attributes:
        path: "auto": the cheaper path; "direct" or "staged": that path wherever possible.
        costs: the constants of the choice; None: measured when small pieces are first read from a host.
        slot_bytes: bytes of a slot. Small enough for the processor's cache, large enough for long descriptors.
        slots: number of slots, which bounds the staging memory of a rank.
    """

    path: Literal["auto", "direct", "staged"] = "auto"
    costs: Costs | None = None
    slot_bytes: int = 4 << 20
    slots: int = 8

    def __post_init__(self) -> None:
        check_fields(self)
        if self.path not in ("auto", "direct", "staged"):
            raise InvalidField("path", self.path, "auto, direct or staged")
        if self.slot_bytes < 4096 or self.slots < 1:
            raise InvalidField("staging", (self.slot_bytes, self.slots), "at least 1 slot of at least 4096 bytes")

    @property
    def chosen(self) -> Path | None:
        """The configured path; None: the cheaper path."""
        return None if self.path == "auto" else Path(self.path)


class StagingPool:
    """The slots in one address space.

    A source that has stopped answering keeps the slots that are being read from it. To leave slots for others (R10), a
    source has at most a quarter of the slots, and more than one only while more than half of them are free.

    `freed` is called when a slot has become free for which some work waits: the work asks again. `slots` counts all
    slots, free or not. `lock` guards the slots, and the batches in them; no other lock is taken under it.
    """

    def __init__(self, space: StagingSpace, slot_bytes: int, freed: Callable[[], None]) -> None:
        self.space = space
        self.slot_bytes = slot_bytes
        self.freed = freed
        self.lock = threading.Lock()
        base = space.region.base
        self._free = [base + at for at in range(0, space.region.length - slot_bytes + 1, slot_bytes)]
        self.slots = len(self._free)
        self._holders: dict[int, str] = {}
        """The source of each slot in use."""
        self._waiting: deque[StagedWork] = deque()

    def acquire(self, work: StagedWork) -> int | None:
        """A slot's address; None if no slot is free for the work's source, or other work came before.

        Work that got None waits: it asks again when `freed` was called, or steps back (`leave`).
        """
        with self.lock:
            # A transfer that has ended needs no slot; its work is about to leave.
            wanting = (other for other in (*self._waiting, work) if other.owner.ended_at is None)
            first = next((other for other in wanting if self._may_have(other.info.name)), None)
            if first is work:
                if work in self._waiting:
                    self._waiting.remove(work)
                slot = self._free.pop()
                self._holders[slot] = work.info.name
                return slot
            if work not in self._waiting and work.owner.ended_at is None:
                self._waiting.append(work)
            return None

    def leave(self, work: StagedWork) -> None:
        """Wait no longer, at least for now: later work goes first, and `freed` is called for it."""
        with self.lock:
            if work not in self._waiting:
                return
            self._waiting.remove(work)
            wanted = bool(self._free and self._waiting)
        if wanted:
            self.freed()

    def _may_have(self, source: str) -> bool:
        held = sum(holder == source for holder in self._holders.values())
        if held == 0:
            return bool(self._free)
        return held < self.slots // 4 and 2 * len(self._free) > self.slots

    def release(self, slot: int) -> None:
        """Give back a slot to which nothing writes any more."""
        with self.lock:
            wanted = self.put_back(slot)
        if wanted:
            self.freed()

    def put_back(self, slot: int) -> bool:
        """`release` with the lock held. Returns whether `freed` is to be called, without the lock."""
        self._free.append(slot)
        self._holders.pop(slot, None)
        return bool(self._waiting)

    def borrow(self) -> int | None:
        """A slot's address if a slot is free and no work waits, else None."""
        with self.lock:
            return self._free.pop() if self._free and not self._waiting else None

    @property
    def in_use(self) -> int:
        """Slots that are read into or permuted, or may still be written to."""
        return self.slots - len(self._free)


class StagedWork(PeerWork):
    """What one transfer reads from one peer through staging memory."""

    def __init__(
        self, transfer: Transfer, info: AgentInfo, reads: Iterable[StagedRead], pool: StagingPool, since: float
    ) -> None:
        super().__init__(transfer, info, (), since, (pool.space,))
        self.pool = pool
        self._batches = (batch for read in reads for batch in read.batches(pool.slot_bytes))
        self._next: Batch | None = None
        """The batch for which a slot is needed."""
        self._parts: deque[Chunk] = deque()
        self.arrivals: set[_Arrival] = set()
        """The batches in slots."""
        transfer.add_done_callback(self._ended)

    def next(self, options: NixlOptions) -> Chunk | None:
        self.blocked = False
        if self._parts:
            return self._parts.popleft()
        self._next = self._next or next(self._batches, None)
        if self._next is None:
            return None
        with self.pool.lock:
            self.blocked = len(self.arrivals) >= SLOTS_AT_ONCE
        slot = None if self.blocked else self.pool.acquire(self)
        if slot is None:
            self.blocked = True
            return None
        batch, self._next = self._next, None
        region = self.pool.space.region
        into = MemoryPair(batch.read.lane.memory.source, (region.memory_kind, region.device))
        try:
            descriptors = batch.descriptors(slot, into)
            whole = batch.staged_bytes <= options.chunk_bytes and descriptors.count <= options.chunk_descriptors
            parts = [descriptors] if whole else list(divide(descriptors, options))
        except BaseException:
            self.pool.release(slot)
            raise
        arrival = _Arrival(self, batch, slot, len(parts))
        with self.pool.lock:
            self.arrivals.add(arrival)
        self._parts.extend(Chunk(part, arrival) for part in parts)
        return self._parts.popleft()

    def step_back(self) -> None:
        if self.blocked:
            self.pool.leave(self)

    def _ended(self, _: Transfer) -> None:
        with self.pool.lock:
            arrivals = tuple(self.arrivals)
        for arrival in arrivals:
            arrival.give_up()
        self.pool.leave(self)


class _Arrival:
    """One batch of staged work in its slot: the `ChunkOwner` of the chunks that read it. Thread-safe.

    The slot is given back once, when nothing can write to it any more and its content is not to be permuted.
    """

    def __init__(self, work: StagedWork, batch: Batch, slot: int, chunks: int) -> None:
        self._work = work
        self._pool = work.pool
        self._transfer = work.owner
        self._batch = batch
        self._slot = slot
        # The pool's lock guards the rest.
        self._missing = chunks
        """Chunks that have not landed."""
        self._using = 0
        """Chunks that may write to the slot, and the permutation."""
        self._given_up = False

    @property
    def ended_at(self) -> float | None:
        return self._transfer.ended_at

    def begin(self) -> bool:
        if self._transfer.goes_on():
            with self._pool.lock:
                if not self._given_up:
                    self._using += 1
                    return True
        self.give_up()
        return False

    def landed(self, size: int) -> None:
        """Record a chunk that has arrived in the slot. After the last chunk, permute the batch into the blocks."""
        with self._pool.lock:
            self._missing -= 1
            complete = self._missing == 0 and not self._given_up
        # Only the permutation writes to the destination's blocks, so they are quiet up to here.
        if complete and self._transfer.begin():
            try:
                self._pool.space.memory.copy(self._batch.copies(self._slot))
            except Exception as error:
                # An error of numpy or of the device: the batch did not reach its blocks.
                self._transfer.fail(as_kvferry_error(error, f"transfer {self._transfer.label!r}: the permutation"))
                if isinstance(error, StillCopying):
                    # Neither blocks nor slot ever become quiet: the device may write to them at any time.
                    return
                self._transfer.fenced()
            else:
                self._transfer.landed(self._batch.total_bytes)
        self._unused(1, given_up=complete)

    def fenced(self) -> None:
        self._unused(1, given_up=True)

    def fail(self, error: KvferryError) -> None:
        self._transfer.fail(error)
        self.give_up()

    def settle(self, now: float) -> None:
        self._transfer.settle(now)

    def give_up(self) -> None:
        """Post no more chunks and do not permute."""
        self._unused(0, given_up=True)

    def _unused(self, count: int, *, given_up: bool) -> None:
        """Record that this many chunks no longer use the slot, and whether its content is no longer needed."""
        with self._pool.lock:
            self._using -= count
            self._given_up |= given_up
            if self._using or not self._given_up or self not in self._work.arrivals:
                return
            self._work.arrivals.discard(self)
            wanted = self._pool.put_back(self._slot)
            # The batch may have landed on another thread than the work's own: on the thread of a retired agent.
            wanted |= self._work.blocked
        if wanted:
            self._pool.freed()
