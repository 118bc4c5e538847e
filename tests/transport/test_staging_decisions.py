"""Slots of staging memory, against readers that ask, land, fail and are cancelled in any order: every byte arrives, no
slot has two writers, none is lost, and waiting readers are called (R4, R10).

A copy stands in for NIXL's reads, at a moment that a test chooses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import cast
from unittest.mock import Mock

import numpy as np
import pytest

from kvferry._clock import now
from kvferry._memory.access import HostAccess, StillCopying
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.staging_pool import SLOTS_AT_ONCE, StagedWork, StagingOptions, StagingPool
from kvferry._transport.transfer import Chunk, Transfer, TransferState
from kvferry._transport.transport import TransferPart
from kvferry.errors import InvalidField, TransferFailed
from kvferry.planner import Path
from kvferry.planner.expansion import Batch, Copy
from tests.support.simulated_memories import copies
from tests.transport.sources import DRAM, Memory, local_source
from tests.transport.staged_parts import BLOCK_BYTES, BLOCKS, LAYERS, part, some

SLOT = 3 * BLOCK_BYTES
SIZE = LAYERS * BLOCKS * BLOCK_BYTES
OPTIONS = NixlOptions()


def staged_share(pool: StagingPool, of: TransferPart, name: str = "", *, deadline: float | None = None) -> StagedWork:
    """The work of a transfer of its own."""
    peer, planned = of
    size = sum(read.total_bytes for read in planned.staged)
    transfer = Transfer("t", size, deadline, now, lambda: None)
    info = replace(peer, name=name or peer.name)
    return StagedWork(transfer, info, planned.staged, pool, now())


def read(chunk: Chunk) -> None:
    """Read as NIXL does."""
    descriptors = chunk.descriptors
    assert descriptors.memory == DRAM
    for source, destination, length in copies(descriptors):
        ctypes.memmove(destination, source, length)


@dataclass
class Readers:
    """Shares of few slots, and the chunks under way."""

    turns: Random
    pool: StagingPool
    options: NixlOptions
    shares: list[StagedWork] = field(default_factory=list)
    asleep: set[int] = field(default_factory=set)
    flying: list[tuple[int, Chunk, int]] = field(default_factory=list)
    posted: dict[int, set[int]] = field(default_factory=dict)

    def ask(self) -> None:
        awake = [number for number in range(len(self.shares)) if number not in self.asleep]
        if not awake:
            return
        number = self.turns.choice(awake)
        share = self.shares[number]
        if share.owner.ended_at is not None:
            self.asleep.add(number)
            return
        chunk = share.next(self.options)
        if chunk is None:
            # It is called, or has no more.
            self.asleep.add(number)
            if share.blocked and self.turns.random() < 0.1:
                share.step_back()
                self.asleep.discard(number)
        elif chunk.owner.begin():
            at = int(chunk.descriptors.one_by_one().destination[0]) - self.pool.space.region.base
            slot = at // SLOT
            for _, other, taken in self.flying:
                assert other.owner is chunk.owner or taken != slot, "a slot has two writers"
            self.flying.append((number, chunk, slot))
            mine = {taken for holder, _, taken in self.flying if holder == number}
            assert len(mine) <= SLOTS_AT_ONCE
        else:
            assert share.owner.ended_at is not None

    def land(self) -> None:
        if self.flying:
            _, chunk, _ = self.flying.pop(self.turns.randrange(len(self.flying)))
            read(chunk)
            chunk.owner.landed(chunk.descriptors.total_bytes)

    def lose(self) -> None:
        if self.flying:
            number, chunk, _ = self.flying.pop(self.turns.randrange(len(self.flying)))
            chunk.owner.fail(TransferFailed("the peer died"))
            assert self.shares[number].owner.ended_at is not None
            chunk.owner.fenced()

    def cancel(self) -> None:
        share = self.turns.choice(self.shares)
        # The engine's blocks are quiet even while chunks are under way into the slots.
        assert share.owner.cancel()
        share.owner.settle(now())

    def called(self) -> None:
        self.asleep.clear()


@pytest.mark.parametrize("seed", range(12))
def test_slots_are_shared_by_many_readers_without_two_writers(seed: int) -> None:
    turns = Random(seed)
    memory, sources = Memory(4 * SIZE), [local_source(name) for name in ("one", "other")]
    slots = turns.choice([1, 2, 3, 8])
    options = NixlOptions(chunk_bytes=turns.choice([1 << 20, BLOCK_BYTES + 100]))
    space = HostAccess().allocate(slots * SLOT + 100)
    readers = Readers(turns, StagingPool(space, SLOT, lambda: readers.called()), options)
    for number in range(4):
        asked = part(turns.choice(sources), memory, some(number, 9), some(9 + number, 9), number * SIZE)
        readers.shares.append(staged_share(readers.pool, asked))
    weights = (8, 8, *((0, 0) if seed % 3 == 0 else (0.2, 0.1)))
    transfers = [share.owner for share in readers.shares]
    for _ in range(4000):
        turns.choices([readers.ask, readers.land, readers.lose, readers.cancel], weights)[0]()
    while readers.flying or len(readers.asleep) < len(readers.shares):
        readers.ask()
        readers.land()
    assert all(transfer.state.final for transfer in transfers), "one waits for ever"
    assert all(transfer.quiet for transfer in transfers)
    assert readers.pool.in_use == 0
    if seed % 3 == 0:
        assert [transfer.state for transfer in transfers] == [TransferState.DONE] * 4
    for number, transfer in enumerate(transfers):
        mine = slice(number * SIZE, (number + 1) * SIZE)
        if transfer.state is TransferState.DONE:
            assert np.array_equal(memory.bytes[mine], memory.expected[mine])
    # Every slot is there, and lies within the memory.
    region = readers.pool.space.region
    found = [readers.pool.borrow() for _ in range(slots + 1)]
    assert sorted(slot for slot in found if slot is not None) == [region.base + n * SLOT for n in range(slots)]


def pool_of(slots: int, woken: list[str] | None = None) -> StagingPool:
    space = HostAccess().allocate(slots * SLOT)
    return StagingPool(space, SLOT, lambda: None if woken is None else woken.append("woken"))


def test_a_source_has_a_quarter_of_the_slots_and_more_than_one_only_while_half_are_free() -> None:
    pool, memory, source = pool_of(16), Memory(SIZE), local_source()
    asked = part(source, memory, [1], [2])

    def taken(name: str) -> int:
        """How many slots a source gets now."""
        for got in range(17):
            share = staged_share(pool, asked, name)
            if pool.acquire(share) is None:
                pool.leave(share)
                return got
        raise AssertionError("more than there are")

    single = staged_share(pool, asked, "c")
    slot = pool.acquire(single)
    assert slot is not None
    assert taken("a") == 4
    assert taken("b") == 3
    assert [taken(f"other {number}") for number in range(10)] == [1] * 8 + [0] * 2
    assert pool.in_use == 16
    pool.release(slot)
    assert pool.in_use == 15
    # No source holds the slot now, so any source may have it.
    assert taken("c") == 1


def test_a_slot_is_lent_only_where_nobody_waits() -> None:
    woken: list[str] = []
    pool, memory = pool_of(1, woken), Memory(SIZE)
    asked = part(local_source(), memory, [1], [2])
    slot = pool.borrow()
    assert slot == pool.space.region.base
    assert (pool.borrow(), pool.in_use) == (None, 1)
    waiting = staged_share(pool, asked)
    assert waiting.next(OPTIONS) is None
    assert waiting.next(OPTIONS) is None
    pool.release(slot)
    assert woken == ["woken"]
    assert (pool.borrow(), pool.in_use) == (None, 0)
    assert waiting.next(OPTIONS) is not None
    waiting.owner.fail(TransferFailed("it ends"))
    waiting.owner.settle(now())
    assert pool.borrow() == slot
    assert woken == ["woken"]


def test_a_reader_with_all_its_slots_is_called_when_one_has_been_permuted() -> None:
    woken: list[str] = []
    pool, memory = pool_of(8, woken), Memory(SIZE)
    share = staged_share(pool, part(local_source(), memory, some(1), some(2)))
    first, second = share.next(OPTIONS), share.next(OPTIONS)
    assert first is not None
    assert second is not None
    assert (share.next(OPTIONS), share.blocked, pool.in_use) == (None, True, 2)
    # On any thread.
    assert first.owner.begin()
    read(first)
    first.owner.landed(first.descriptors.total_bytes)
    assert woken == ["woken"]
    assert share.next(OPTIONS) is not None


def test_a_reader_that_steps_back_lets_later_readers_pass() -> None:
    woken: list[str] = []
    pool, memory = pool_of(1, woken), Memory(SIZE)
    first, second = (staged_share(pool, part(local_source(), memory, [1], [2])) for _ in range(2))
    slot = pool.borrow()
    assert slot is not None
    assert (first.next(OPTIONS), second.next(OPTIONS)) == (None, None)
    # While there is no slot, there is nothing to look for.
    first.step_back()
    assert woken == []
    second.step_back()
    assert (first.next(OPTIONS), second.next(OPTIONS)) == (None, None)
    pool.release(slot)
    # The second came later.
    assert second.next(OPTIONS) is None
    woken.clear()
    first.step_back()
    assert woken == ["woken"]
    chunk = second.next(OPTIONS)
    assert chunk is not None
    assert first.next(OPTIONS) is None
    # A share that does not wait wakes no other.
    second.step_back()
    assert woken == ["woken"]


def test_a_batch_that_cannot_be_read_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, memory = pool_of(2), Memory(SIZE)
    asked = part(local_source(), memory, [1, 5], [2, 4])
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "descriptors", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            staged_share(pool, asked).next(OPTIONS)
    assert pool.in_use == 0
    assert staged_share(pool, asked).next(OPTIONS) is not None


class Device(HostAccess):
    """Memory whose copies a test controls."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.copies = 0

    def copy(self, copies: Iterable[Copy]) -> None:
        self.copies += 1
        if self.error is not None:
            raise self.error
        super().copy(copies)


@pytest.mark.parametrize(("error", "quiet"), [(RuntimeError("a device's"), True), (StillCopying("lost"), False)])
def test_a_permutation_that_failed_fails_the_read(error: Exception, *, quiet: bool) -> None:
    device = Device(error)
    pool, memory = StagingPool(device.allocate(2 * SLOT), SLOT, lambda: None), Memory(SIZE)
    share = staged_share(pool, part(local_source(), memory, [1], [2]))
    chunk = share.next(OPTIONS)
    assert chunk is not None
    assert chunk.owner.begin()
    chunk.owner.landed(chunk.descriptors.total_bytes)
    transfer = share.owner
    assert isinstance(transfer.error, TransferFailed)
    assert repr(error) in str(transfer.error)
    # A device that cannot be waited for may write to the blocks, and read the slot, for ever.
    assert (transfer.quiet, pool.in_use) == (quiet, 0 if quiet else 1)


def test_bytes_that_arrive_after_the_end_are_not_copied_into_the_blocks() -> None:
    device = Device()
    pool, memory = StagingPool(device.allocate(2 * SLOT), SLOT, lambda: None), Memory(SIZE)
    share = staged_share(pool, part(local_source(), memory, [1], [2]))
    chunk = share.next(OPTIONS)
    assert chunk is not None
    assert chunk.owner.begin()
    transfer = share.owner
    assert transfer.cancel()
    # Also before the callbacks of its end have run.
    chunk.owner.landed(chunk.descriptors.total_bytes)
    assert (device.copies, pool.in_use) == (0, 0)
    assert memory.untouched()


def test_a_staged_chunk_shares_the_end_of_its_transfer() -> None:
    pool, memory = pool_of(2), Memory(SIZE)
    share = staged_share(pool, part(local_source(), memory, [1], [2]), deadline=now() - 1)
    chunk = share.next(OPTIONS)
    assert chunk is not None
    account = chunk.owner
    assert account.ended_at is None
    account.settle(now())
    assert account.ended_at is not None
    assert account.ended_at == share.owner.ended_at
    assert share.owner.state is TransferState.EXPIRED
    assert not account.begin()
    assert pool.in_use == 0


def test_options_that_make_no_sense_are_refused() -> None:
    smallest = StagingOptions(slot_bytes=4096, slots=1)
    assert (smallest.slot_bytes, smallest.slots, smallest.chosen) == (4096, 1, None)
    assert [StagingOptions(path=path).chosen for path in ("staged", "direct")] == [Path.STAGED, Path.DIRECT]
    assert type(StagingOptions(slots=cast(int, np.int64(2))).slots) is int
    for wrong in ({"slot_bytes": 4095}, {"slots": 0}, {"slot_bytes": 4095, "slots": 0}, {"path": "both"}):
        with pytest.raises(InvalidField):
            StagingOptions(**wrong)
