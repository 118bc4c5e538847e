"""Bytes that are read arrive where they belong, and nothing else changes."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry._clock import now
from kvferry._transport import nixl_binding
from kvferry._transport.nixl_agent import ReadHandle, ReadingAgent
from kvferry._transport.transport import Transfer, TransferState, Transport
from kvferry.planner.descriptors import BlockRows, Descriptors
from tests.transport.conftest import MakeSource, MakeTransport
from tests.transport.sources import DRAM, SOON, Memory, Source, raw_part
from tests.transport.transfers import until

BLOCK = 4096


def ended(transfer: Transfer) -> TransferState:
    assert transfer.wait(SOON)
    return transfer.state


def test_raw_descriptors_of_any_length_arrive_byte_for_byte(
    ucx_tls: str, source: Source, memory: Memory, transport: MakeTransport
) -> None:
    random = np.random.default_rng(7)
    cells = random.permutation(512)
    pieces = [
        (int(random.integers(source.size - 16384)), int(cell) * 16384 + int(random.integers(64)), length)
        for cell, length in zip(cells, [1, 3, 64, 4095, 4096, 9999, 16320] * 70, strict=False)
    ]
    transfer = transport(ucx_tls, chunk_bytes=100_000).start(
        [raw_part(source.info, [memory.pieces(source, pieces)])], deadline=now() + SOON, label="raw"
    )
    assert ended(transfer) is TransferState.DONE
    assert transfer.quiet
    assert memory.right()
    assert transfer.bytes_done == transfer.bytes_total == sum(length for _, _, length in pieces)
    assert transfer.chunks > 10


def test_a_descriptor_longer_than_a_chunk_is_divided(
    ucx_tls: str, source: Source, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(ucx_tls, chunk_bytes=1 << 20)
    transfer = read.start([raw_part(source.info, [memory.all_of(source)])], deadline=now() + SOON, label="long")
    assert ended(transfer) is TransferState.DONE
    assert transfer.chunks == source.size >> 20
    assert memory.right()


@pytest.mark.parametrize("prepared", [False, True])
def test_rows_and_runs_are_read(
    ucx_tls: str,
    source: Source,
    memory: Memory,
    transport: MakeTransport,
    monkeypatch: pytest.MonkeyPatch,
    prepared: bool,
) -> None:
    # Two planes on each side, interleaved at the source (stride of two blocks), apart at the destination.
    count, made, make = 512, list[int](), ReadingAgent._make_prepared

    def noted(agent: ReadingAgent, peer: str, descriptors: Descriptors, blocks: BlockRows) -> ReadHandle:
        made.append(descriptors.count)
        return make(agent, peer, descriptors, blocks)

    monkeypatch.setattr(ReadingAgent, "_make_prepared", noted)
    random = np.random.default_rng(11)
    ids, own = random.permutation(count)[:100], random.permutation(count)[:100]
    lengths = BLOCK, BLOCK // 2
    for plane, length in enumerate(lengths):
        for block, own_block in zip(ids.tolist(), own.tolist(), strict=True):
            begin, own_begin = (2 * block + plane) * BLOCK, plane * (8 << 20) + 64 + own_block * BLOCK
            memory.expected[own_begin : own_begin + length] = source.bytes[begin : begin + length]
    rows = BlockRows(
        source=np.array([source.base, source.base + BLOCK], np.uint64),
        destination=np.array([memory.base + 64, memory.base + 64 + (8 << 20)], np.uint64),
        length=np.array(lengths, np.uint64),
        source_stride=2 * BLOCK,
        destination_stride=BLOCK,
        source_blocks=count,
        destination_blocks=count,
    )
    runs = ((some * stride).astype(np.uint64) for some, stride in ((ids, 2 * BLOCK), (own, BLOCK), (ids * 0 + 1, 1)))
    of = rows if prepared else None
    some = Descriptors(DRAM, rows.source, rows.destination, rows.length, *runs, blocks=of)
    read = transport(ucx_tls, chunk_bytes=16 * BLOCK)
    # Twice, because the second time the lists are prepared already.
    for _ in range(2):
        transfer = read.start([raw_part(source.info, [some])], deadline=now() + SOON, label="rows and runs")
        assert ended(transfer) is TransferState.DONE
        assert memory.right()
        memory.bytes[:] = 0xA5
    assert sum(made) == (2 * some.count if prepared else 0)


def test_a_transfer_reads_from_several_sources(
    ucx_tls: str, source: Source, new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    other = new_source(ucx_tls, size=4 << 20)
    # Two reading agents, so that the parts may end on different threads.
    read = transport(ucx_tls, reading_agents=2, chunk_bytes=1 << 20)
    parts = [
        raw_part(source.info, [memory.all_of(source)]),
        raw_part(other.info, [memory.pieces(other, [(0, source.size + 1, other.size)])]),
        raw_part(source.info, [memory.pieces(source, [(17, source.size + other.size + 5, 1000)])]),
    ]
    assert ended(read.start(parts, deadline=now() + SOON, label="both")) is TransferState.DONE
    assert memory.right()


def test_an_empty_read_is_done_at_once_and_makes_no_agent(source: Source, transport: MakeTransport) -> None:
    read = transport()
    assert read.start([], deadline=None, label="nothing").state is TransferState.DONE
    transfer = read.start([raw_part(source.info, [])], deadline=now() - 1, label="no descriptors")
    assert transfer.state is TransferState.DONE
    assert transfer.quiet
    assert read.gauges().agents == 0


def test_small_transfers_do_not_wait_for_all_of_a_huge_one(
    ucx_tls: str, new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    slow = new_source(ucx_tls)
    read = transport(ucx_tls, chunk_bytes=64 << 10, bytes_in_flight=256 << 10)
    order: list[str] = []
    slow.info  # noqa: B018 (it has to run before it is stopped)
    # Stopped, so that all are waiting for its first answer before any of them begins.
    slow.stop()
    huge = read.start([raw_part(slow.info, [memory.all_of(slow)])], deadline=now() + SOON, label="huge")
    small = [
        read.start(
            [raw_part(slow.info, [memory.pieces(slow, [(i * 100, slow.size + i * 100, 100)])])],
            deadline=now() + SOON,
            label=f"small {i}",
        )
        for i in range(40)
    ]
    for transfer in [huge, *small]:
        transfer.add_done_callback(lambda transfer: order.append(transfer.label))
    slow.resume()
    assert all(ended(transfer) is TransferState.DONE for transfer in [huge, *small])
    assert memory.right()
    # A waiting thread may wake before the callbacks of the transfer's end are called.
    assert until(lambda: len(order) == 1 + len(small))
    assert order[-1] == "huge"


def test_transfers_from_many_threads_arrive(
    ucx_tls: str, source: Source, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(ucx_tls, chunk_bytes=64 << 10)
    transfers: list[Transfer] = []
    descriptors = [memory.pieces(source, [(i * 4096, (255 - i) * 8192, 4096 + i)]) for i in range(256)]

    def start(some: Any) -> None:
        for one in some:
            transfers.append(read.start([raw_part(source.info, [one])], deadline=now() + SOON, label="one"))

    threads = [threading.Thread(target=start, args=(descriptors[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {ended(transfer) for transfer in transfers} == {TransferState.DONE}
    assert memory.right()
    assert read.gauges().transfers == 0


def test_nixl_is_called_on_reading_threads_only(
    ucx_tls: str, source: Source, memory: Memory, transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: set[str] = set()
    calls: set[str] = set()
    real = nixl_binding.call

    def call(name: str, peer: str, function: Callable[[], Any]) -> Any:
        callers.add(threading.current_thread().name)
        calls.add(name)
        return real(name, peer, function)

    monkeypatch.setattr(nixl_binding, "call", call)
    read: Transport = transport(ucx_tls)
    transfer = read.start([raw_part(source.info, [memory.all_of(source)])], deadline=now() + SOON, label="r11")
    transfer.extend(now() + SOON)
    assert ended(transfer) is TransferState.DONE
    transfer.cancel()
    read.gauges()
    read.retire(source.name)
    assert read.close(SOON)
    assert all(name.endswith("/reading") for name in callers), callers
    assert {"nixlAgent", "loadRemoteMD", "createXferReq", "postXferReq", "releaseXferReq"} <= calls


def test_a_warmed_peer_is_added_before_it_is_read(ucx_tls: str, source: Source, transport: MakeTransport) -> None:
    read = transport(ucx_tls)
    read.warm(source.info)
    assert until(lambda: read.gauges().peers == 1)


def test_a_retired_peer_is_dropped_and_may_come_back(
    ucx_tls: str, source: Source, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(ucx_tls)
    for _ in range(3):
        part = raw_part(source.info, [memory.all_of(source)])
        assert ended(read.start([part], deadline=now() + SOON, label="again")) is TransferState.DONE
        read.retire(source.name)
    assert memory.right()
    assert until(lambda: read.gauges().peers == 0)
    assert source.alive()
