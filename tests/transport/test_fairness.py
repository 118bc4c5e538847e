"""One huge request starves no small one, and one stopped source takes no room from others (R10)."""

from __future__ import annotations

import pytest

from kvferry._clock import now
from kvferry._transport.peer_link import Link
from kvferry._transport.transport import Transfer, TransferState, Transport
from tests.support.waiting import until
from tests.transport.conftest import MakeSource, MakeTransport
from tests.transport.sources import SOON, Memory, Source, raw_part

CHUNK = 64 << 10
TRIES = 10
"""On a busy machine a small read may have ended before this thread adds its callback."""


def huge(read: Transport, source: Source, memory: Memory) -> Transfer:
    return read.start([raw_part(source.info, [memory.all_of(source)])], deadline=now() + SOON, label="huge")


def small(read: Transport, source: Source, memory: Memory) -> Transfer:
    pieces = memory.pieces(source, [(0, source.size, 4096)])
    return read.start([raw_part(source.info, [pieces])], deadline=now() + SOON, label="small")


def overtaken(read: Transport, sources: tuple[Source, Source], memory: Memory) -> bool:
    """Whether a huge read had not come far when a small one, begun after it, had ended."""
    first, found = huge(read, sources[0], memory), list[int]()
    second = small(read, sources[1], memory)
    # On the thread that reads both, and at once.
    second.add_done_callback(lambda _: found.append(first.bytes_done))
    done(second)
    done(first)
    until(lambda: bool(found))
    return found[0] < sources[0].size // 2


def done(transfer: Transfer) -> None:
    assert transfer.wait(SOON)
    assert transfer.state is TransferState.DONE, transfer.error


def test_a_small_read_overtakes_a_huge_one_from_the_same_source(
    ucx_tls: str, source: Source, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(ucx_tls, chunk_bytes=CHUNK, bytes_in_flight=2 * CHUNK)
    done(small(read, source, memory))
    # It has to wait for a chunk or two, not for all 128.
    assert any(overtaken(read, (source, source), memory) for _ in range(TRIES))
    assert memory.right()


def test_a_small_read_overtakes_a_huge_one_from_another_source_when_there_is_room_for_one(
    ucx_tls: str, source: Source, new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    other = new_source(ucx_tls)
    read = transport(ucx_tls, chunk_bytes=CHUNK, bytes_in_flight=2 * CHUNK, bytes_in_flight_total=CHUNK)
    done(small(read, source, memory))
    done(small(read, other, memory))
    assert any(overtaken(read, (source, other), memory) for _ in range(TRIES))


def test_bytes_in_flight_to_a_destination_are_bounded(
    new_source: MakeSource, memory: Memory, transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_source("tcp")
    slow = new_source("tcp")
    read = transport("tcp", chunk_bytes=CHUNK, bytes_in_flight=8 * CHUNK, bytes_in_flight_total=4 * CHUNK)
    for each in (other, slow):
        done(small(read, each, memory))
    post_next, flying = Link.post_next, list[int]()

    def counted(link: Link) -> bool:
        # On the thread that posts them: from elsewhere the links are counted one after the other, while it goes on.
        posted = post_next(link)
        flying.append(read.gauges().chunks_in_flight)
        return posted

    with monkeypatch.context() as patch:
        # On a busy machine a source may look stalled, and then takes no room from the other.
        patch.setattr("kvferry._transport.peer_link.STALLED", SOON)
        patch.setattr(Link, "post_next", counted)
        for transfer in [huge(read, each, memory) for each in (other, slow)]:
            done(transfer)
    assert 1 <= max(flying) <= 4


def test_a_stopped_source_takes_no_room_from_others(
    new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    stopped, healthy = new_source("tcp"), new_source("tcp")
    read = transport("tcp", chunk_bytes=CHUNK, bytes_in_flight=8 * CHUNK, bytes_in_flight_total=2 * CHUNK)
    for each in (stopped, healthy):
        done(small(read, each, memory))
    stopped.stop()
    stuck = huge(read, stopped, memory)
    while read.gauges().chunks_in_flight == 0:
        assert not stuck.state.final
    done(huge(read, healthy, memory))
    assert not stuck.state.final
    stopped.resume()
    done(stuck)
