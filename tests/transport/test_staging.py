"""Reads through staging memory: right for many readers of little memory, and safe to abandon."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry._clock import now
from kvferry._memory.access import HostAccess, StagingSpace
from kvferry._memory.rank_memory import RankMemory
from kvferry._transport import calibration
from kvferry._transport.calibration import measure
from kvferry._transport.nixl_agent import NixlOptions
from kvferry._transport.staging_pool import StagedWork, StagingOptions, StagingPool
from kvferry._transport.transport import Transfer, TransferPart, TransferState, Transport
from kvferry.errors import TransferExpired, TransferFailed
from kvferry.geometry import MemoryKind
from kvferry.planner import Costs
from kvferry.planner.expansion import Copy
from tests.support.simulated_memories import addresses
from tests.support.waiting import until as wait_for
from tests.transport.conftest import MakeSource
from tests.transport.sources import SOON, Memory, Source
from tests.transport.staged_parts import BLOCK_BYTES, BLOCKS, LAYERS, part, some

MakeStaged = Callable[..., Transport]


@pytest.fixture
def staged(memory: Memory) -> Iterator[MakeStaged]:
    """Makes transports into `memory` with little staging memory."""
    made: list[Transport] = []

    def make(ucx_tls: str = "", *, slots: int = 2, slot_blocks: int = 3, **options: Any) -> Transport:
        staging = StagingOptions(path="staged", slots=slots, slot_bytes=slot_blocks * BLOCK_BYTES)
        patient = {"warm_up_timeout": SOON, **options}
        made.append(Transport(RankMemory([memory.region]), NixlOptions(ucx_tls=ucx_tls, **patient), staging=staging))
        return made[-1]

    yield make
    assert [one.close(SOON) for one in made] == [True] * len(made), "a transport did not become quiet"
    assert [one.gauges().staging_slots for one in made] == [0] * len(made), "a slot was lost"


def ended(transfer: Transfer) -> TransferState:
    assert transfer.wait(SOON)
    return transfer.state


def test_rows_are_read_and_permuted(ucx_tls: str, source: Source, memory: Memory, staged: MakeStaged) -> None:
    read = staged(ucx_tls)
    transfer = read.start([part(source, memory, some(1), some(2))], deadline=now() + SOON, label="staged")
    assert ended(transfer) is TransferState.DONE
    assert transfer.quiet
    assert memory.right()
    assert transfer.bytes_done == 20 * LAYERS * BLOCK_BYTES


@pytest.mark.parametrize("slots", [1, 3])
def test_many_readers_share_little_memory(
    ucx_tls: str, source: Source, new_source: MakeSource, memory: Memory, staged: MakeStaged, slots: int
) -> None:
    # Several transfers on two threads, batches of several chunks, and far fewer slots than would be wanted.
    other = new_source(ucx_tls)
    read = staged(ucx_tls, slots=slots, reading_agents=2, chunk_bytes=BLOCK_BYTES + 1000)
    size = LAYERS * BLOCKS * BLOCK_BYTES
    transfers = []
    for index in range(memory.bytes.size // size):
        theirs, mine = some(index), some(100 + index)
        parts = [
            part(source, memory, theirs[:9], mine[:9], index * size),
            part(other, memory, theirs[9:], mine[9:], index * size),
        ]
        transfers.append(read.start(parts, deadline=now() + SOON, label=f"read {index}"))
    assert [ended(transfer) for transfer in transfers] == [TransferState.DONE] * len(transfers)
    assert memory.right()


@pytest.mark.parametrize("chunk_bytes", [16 << 20, BLOCK_BYTES], ids=["a chunk per slot", "several chunks per slot"])
def test_a_cancelled_read_is_quiet_at_once_and_its_slots_when_nothing_writes_to_them(
    source: Source, new_source: MakeSource, memory: Memory, staged: MakeStaged, chunk_bytes: int
) -> None:
    stopped = new_source("tcp")
    # Two chunks in flight at most: of several chunks per slot, some are not posted when the read is cancelled.
    read = staged("tcp", slots=1, chunk_bytes=chunk_bytes, bytes_in_flight=1)
    for each in (source, stopped):
        warm = read.start([part(each, memory, [0], [0])], deadline=now() + SOON, label="warm")
        assert ended(warm) is TransferState.DONE
    before = memory.bytes.copy()
    stopped.stop()
    transfer = read.start([part(stopped, memory, some(1), some(2))], deadline=now() + SOON, label="stopped")
    wait_for(lambda: read.gauges().chunks_in_flight == (2 if chunk_bytes == BLOCK_BYTES else 1))
    # The engine's blocks were never NIXL's destination, so that the engine may use them now.
    assert transfer.cancel()
    assert transfer.quiet
    # But the slots are still being written to: no other read gets them.
    other = read.start([part(source, memory, some(3), some(4))], deadline=now() + 0.3, label="other")
    assert ended(other) is TransferState.EXPIRED
    stopped.resume()
    wait_for(lambda: read.gauges().staging_slots == 0)
    assert np.array_equal(memory.bytes, before)
    memory.expected[:] = before
    last = read.start([part(source, memory, some(5), some(6))], deadline=now() + SOON, label="last")
    assert ended(last) is TransferState.DONE
    assert memory.right()


def test_a_read_that_waits_for_a_slot_ends_at_its_deadline(
    source: Source, new_source: MakeSource, memory: Memory, staged: MakeStaged
) -> None:
    stuck = new_source("tcp")
    read = staged("tcp", slots=1, reading_agents=2)
    for each in (source, stuck):
        assert (
            ended(read.start([part(each, memory, [0], [0])], deadline=now() + SOON, label="warm")) is TransferState.DONE
        )
    stuck.stop()
    holder = read.start([part(stuck, memory, some(1), some(2))], deadline=None, label="holder")
    wait_for(lambda: read.gauges().staging_slots == 1)
    waiting = read.start([part(source, memory, some(3), some(4))], deadline=now() + 0.3, label="waiting")
    assert ended(waiting) is TransferState.EXPIRED
    assert isinstance(waiting.error, TransferExpired)
    assert waiting.quiet
    # The slot goes on to the next one, though the first in the queue is gone.
    next_one = read.start([part(source, memory, some(5), some(6))], deadline=now() + SOON, label="next")
    stuck.resume()
    assert [ended(holder), ended(next_one)] == [TransferState.DONE] * 2


def test_a_killed_source_fails_the_read_and_keeps_no_slot(
    ucx_tls: str, new_source: MakeSource, memory: Memory, staged: MakeStaged
) -> None:
    source = new_source(ucx_tls)
    read = staged(ucx_tls, fence_time=0.1)
    assert (
        ended(read.start([part(source, memory, [0], [0])], deadline=now() + SOON, label="warm")) is TransferState.DONE
    )
    parts = [part(source, memory, some(1), some(2))]
    source.kill()
    transfer = read.start(parts, deadline=now() + SOON, label="killed")
    assert ended(transfer) is TransferState.FAILED
    assert isinstance(transfer.error, TransferFailed)
    assert transfer.quiet
    wait_for(lambda: read.gauges().staging_slots == 0)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_constants_are_measured_and_slots_given_back(
    ucx_tls: str, new_source: MakeSource, staged: MakeStaged, slots: int
) -> None:
    source, read = new_source(ucx_tls, size=16 << 20), staged(ucx_tls, slots=slots, slot_blocks=256)
    costs = measure(read, source.info, read.pool(MemoryKind.DRAM, 0), now() + SOON)
    assert costs is not None
    # Neither the defaults nor nonsense: reads and copies of this machine take some time, and less than a millisecond.
    assert all(0 < cost < 1e-3 for cost in (costs.descriptor, costs.byte, costs.staged_byte, costs.cell))
    assert costs.descriptor != Costs().descriptor
    # A slot is given back by the thread that reads, which may be late.
    wait_for(lambda: read.gauges().staging_slots == 0)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("slot_blocks", [64, 75, 100, 130, 255])
def test_measuring_writes_to_no_memory_but_the_slots_that_it_has(
    source: Source, staged: MakeStaged, monkeypatch: pytest.MonkeyPatch, slots: int, slot_blocks: int
) -> None:
    """Other reads' slots hold bytes about to be permuted into blocks; behind the last slot lies other memory."""
    read = staged(slots=slots, slot_blocks=slot_blocks)
    pool = read.pool(MemoryKind.DRAM, 0)
    begin, size = pool.space.region.base, pool.slot_bytes
    touched: list[tuple[int, int]] = []

    def copy(_: HostAccess, copies: Iterable[Copy]) -> None:
        for one in copies:
            for cells, places in ((one.source, one.places), (one.destination, one.ids)):
                for place in places.tolist():
                    found = [address - begin for address in addresses(cells, place)]
                    touched.append((min(found), max(found) + cells.size - 1))

    monkeypatch.setattr(HostAccess, "copy", copy)
    measure(read, source.info, pool, now() + SOON)
    assert touched
    every = [(slot * size, (slot + 1) * size) for slot in range(slots)]
    assert all(any(low <= first <= last < end for low, end in every) for first, last in set(touched))
    # When the measured read is quiet.
    wait_for(lambda: read.gauges().staging_slots == 0)


def test_memory_too_small_to_be_measured_is_not_read(new_source: MakeSource, staged: MakeStaged) -> None:
    source, read = new_source(size=512 << 10), staged(slots=4, slot_blocks=256)
    assert measure(read, source.info, read.pool(MemoryKind.DRAM, 0), now() + SOON) is None
    assert read.gauges().bytes_moved == 0


def test_measuring_takes_one_turn_over_a_slow_network(
    new_source: MakeSource, staged: MakeStaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, moved = new_source("tcp", size=16 << 20), []
    for enough in (60.0, -1.0):
        monkeypatch.setattr(calibration, "ENOUGH", enough)
        read = staged("tcp", slots=4, slot_blocks=256)
        assert measure(read, source.info, read.pool(MemoryKind.DRAM, 0), now() + SOON) is not None
        # The gauge follows the end of a read; it is final when the thread has ended.
        assert read.close(SOON)
        moved.append(read.gauges().bytes_moved)
    # But for the first read, which is small, and belongs to no turn.
    assert moved[0] / moved[1] == pytest.approx(calibration.TIMES, rel=0.03)


def test_a_source_that_stops_while_it_is_measured_keeps_one_slot(
    new_source: MakeSource, memory: Memory, staged: MakeStaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, other = new_source("tcp", size=16 << 20), new_source("tcp", size=4 << 20)
    read = staged("tcp", slots=4, slot_blocks=256)
    warm = read.start([part(stopped, memory, [0], [0])], deadline=now() + SOON, label="warm")
    assert ended(warm) is TransferState.DONE
    stopped.stop()
    begin = read.start

    def begin_in_time(
        parts: Sequence[TransferPart], *, deadline: float | None, label: str, spaces: Sequence[StagingSpace]
    ) -> Transfer:
        """The time of the measurement is not over before its read is posted."""
        transfer = begin(parts, deadline=None, label=label, spaces=spaces)
        wait_for(lambda: read.gauges().chunks_in_flight == 1)
        return transfer

    with monkeypatch.context() as patch:
        patch.setattr(read, "start", begin_in_time)
        assert measure(read, stopped.info, read.pool(MemoryKind.DRAM, 0), now() + 0.3) is None
    # The read may still write to this slot; the other slots are free for all.
    assert read.gauges().staging_slots == 1
    transfer = read.start([part(other, memory, some(3), some(4))], deadline=now() + SOON, label="other")
    assert ended(transfer) is TransferState.DONE
    stopped.resume()
    wait_for(lambda: read.gauges().staging_slots == 0)


def test_constants_of_a_dead_source_are_not_waited_for(new_source: MakeSource, staged: MakeStaged) -> None:
    source = new_source(size=16 << 20)
    info = source.info
    source.kill()
    read = staged(fence_time=0.1, slot_blocks=256)
    assert measure(read, info, read.pool(MemoryKind.DRAM, 0), now() + SOON) is None


def test_a_stopped_source_leaves_slots_for_others(new_source: MakeSource, memory: Memory, staged: MakeStaged) -> None:
    read = staged("tcp", slots=8)
    stopped, others = new_source("tcp", size=4 << 20), [new_source("tcp", size=4 << 20) for _ in range(2)]
    for source in (stopped, *others):
        warm = read.start([part(source, memory, [0], [0])], deadline=now() + SOON, label="warm")
        assert ended(warm) is TransferState.DONE
    stopped.stop()
    # As many reads as could take every slot, two each.
    late = [read.start([part(stopped, memory, some(1), some(2))], deadline=None, label="late") for _ in range(6)]
    wait_for(lambda: read.gauges().chunks_in_flight > 0)
    for source in others:
        transfer = read.start([part(source, memory, some(3), some(4))], deadline=now() + SOON, label="other")
        assert ended(transfer) is TransferState.DONE, transfer.error
    assert not any(transfer.state.final for transfer in late)
    stopped.resume()
    assert [ended(transfer) for transfer in late] == [TransferState.DONE] * len(late)


def test_several_stopped_sources_leave_a_slot_for_another(
    new_source: MakeSource, memory: Memory, staged: MakeStaged
) -> None:
    read = staged("tcp", slots=8)
    sources = [new_source("tcp", size=4 << 20) for _ in range(4)]
    for source in sources:
        warm = read.start([part(source, memory, [0], [0])], deadline=now() + SOON, label="warm")
        assert ended(warm) is TransferState.DONE
    *stopped, running = sources
    for source in stopped:
        source.stop()
    late = [
        read.start([part(source, memory, some(1), some(2))], deadline=None, label="late")
        for source in stopped
        for _ in range(3)
    ]
    wait_for(lambda: read.gauges().staging_slots >= len(stopped))
    transfer = read.start([part(running, memory, some(3), some(4))], deadline=now() + SOON, label="running")
    assert ended(transfer) is TransferState.DONE, transfer.error
    for source in stopped:
        source.resume()
    assert [ended(transfer) for transfer in late] == [TransferState.DONE] * len(late)


def shares_of_one_slot(source: Source, memory: Memory, woken: list[str]) -> Callable[[str], StagedWork]:
    """Makes shares, each of its own source, that want the one slot of a pool; `woken` tells when they are called."""
    pool = StagingPool(HostAccess().allocate(1 << 16), 1 << 16, lambda: woken.append("woken"))

    def share(name: str) -> StagedWork:
        transfer = Transfer(name, 10, None, now, lambda: None)
        info = replace(source.info, name=name)
        return StagedWork(transfer, info, part(source, memory, [1], [2])[1].staged, pool, now())

    return share


def test_a_read_that_ends_while_it_waits_leaves_the_slot_to_others(source: Source, memory: Memory) -> None:
    woken: list[str] = []
    share = shares_of_one_slot(source, memory, woken)
    one, two, three, four = (share(name) for name in ("one", "two", "three", "four"))
    options = NixlOptions()
    assert one.next(options) is not None
    assert two.next(options) is None
    one.owner.fail(TransferFailed("one ends"))
    # The slot is free for two, which was called; three is put behind it, and is not called.
    assert three.next(options) is None
    woken.clear()
    two.owner.fail(TransferFailed("two ends before it asks"))
    assert woken, "nobody calls three, which waits for ever"
    # Also where another share asks first.
    assert four.next(options) is None
    assert three.next(options) is not None
    three.owner.fail(TransferFailed("three ends"))
    assert four.next(options) is not None


def test_a_share_that_moved_on_is_called_when_its_batch_arrives_on_the_old_agent(
    source: Source, memory: Memory
) -> None:
    """A share keeps two slots at most. The batch for which it waits may arrive on another thread than its own."""
    woken: list[str] = []
    pool = StagingPool(HostAccess().allocate(12 * BLOCK_BYTES), BLOCK_BYTES, lambda: woken.append("woken"))
    transfer = Transfer("one", 10 * LAYERS * BLOCK_BYTES, None, now, lambda: None)
    share = StagedWork(transfer, source.info, part(source, memory, some(1)[:10], some(2)[:10])[1].staged, pool, now())
    posted = []
    while (chunk := share.next(NixlOptions())) is not None:
        assert chunk.owner.begin()
        posted.append(chunk)
    assert share.blocked
    assert pool.in_use == 2
    assert not woken
    memory.bytes[:] = 0
    posted[0].owner.landed(posted[0].descriptors.total_bytes)
    assert woken, "nobody calls the share, which waits for ever"
    assert share.next(NixlOptions()) is not None


def test_a_read_without_room_leaves_the_slot_to_others(source: Source, memory: Memory) -> None:
    woken: list[str] = []
    share = shares_of_one_slot(source, memory, woken)
    one, two, three = share("one"), share("two"), share("three")
    options = NixlOptions()
    assert one.next(options) is not None
    for waits in (two, three):
        assert waits.next(options) is None
        assert waits.blocked
    one.owner.fail(TransferFailed("one ends, nothing of it was posted"))
    assert woken == ["woken"]
    # First come, first served; but a share that has no room to read lets others go before.
    assert three.next(options) is None
    two.step_back()
    assert woken == ["woken", "woken"]
    assert three.next(options) is not None
    assert two.next(options) is None
    three.owner.fail(TransferFailed("three ends"))
    assert two.next(options) is not None
    two.owner.fail(TransferFailed("two ends"))
    assert share("four").next(options) is not None
