"""An error on a reading thread concerns one transfer or one peer: no other ends, hangs or loses its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvferry._transport.nixl_agent import ReadingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.transfer import Chunk, PeerWork
from kvferry._transport.transport import Transfer, TransferState
from kvferry.errors import TransferFailed
from kvferry.planner.descriptors import Descriptors
from tests.transport.conftest import MakeSource, MakeTransport
from tests.transport.sources import SOON, Memory, Source
from tests.transport.transfers import TCP, assert_done, assert_failed, read_all, until


def test_a_read_that_cannot_be_divided_fails_alone(
    ucx_tls: str,
    source: Source,
    new_source: MakeSource,
    memory: Memory,
    transport: MakeTransport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = transport(ucx_tls, chunk_bytes=1 << 16)
    other = new_source(ucx_tls, size=4 << 20)
    assert_done(read_all(read, other, memory, at=8 << 20))
    following = PeerWork.next

    def refuse(share: PeerWork, options: NixlOptions) -> Chunk | None:
        if share.info.name == source.name:
            raise MemoryError("no memory for a chunk")
        return following(share, options)

    with monkeypatch.context() as patch:
        patch.setattr(PeerWork, "next", refuse)
        doomed = read_all(read, source, memory, deadline=None)
        assert_failed(doomed)
        assert "no memory for a chunk" in str(doomed.error)
        assert_done(read_all(read, other, memory, at=8 << 20))
    assert read.gauges().agents == 1
    assert_done(read_all(read, source, memory))
    assert memory.right()


def test_a_read_that_cannot_be_made_fails_alone(
    ucx_tls: str, source: Source, memory: Memory, transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = transport(ucx_tls)
    assert_done(read_all(read, source, memory))

    def refuse(*_: object) -> Iterator[Descriptors]:
        raise MemoryError("no memory for a list")

    with monkeypatch.context() as patch:
        patch.setattr(ReadingAgent, "make", refuse)
        assert_failed(read_all(read, source, memory))
    assert read.gauges().agents == 1
    assert_done(read_all(read, source, memory))


def test_a_peer_that_cannot_be_opened_breaks_alone(
    ucx_tls: str,
    source: Source,
    new_source: MakeSource,
    memory: Memory,
    transport: MakeTransport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = transport(ucx_tls)
    assert_done(read_all(read, source, memory))
    other = new_source(ucx_tls, size=4 << 20)
    warm_up = ReadingAgent.warm_up

    def refuse(agent: ReadingAgent, peer: str) -> object:
        if peer == other.name:
            raise MemoryError("no memory for a first read")
        return warm_up(agent, peer)

    with monkeypatch.context() as patch:
        patch.setattr(ReadingAgent, "warm_up", refuse)
        assert_failed(read_all(read, other, memory, at=8 << 20))
        assert_done(read_all(read, source, memory))
    assert_done(read_all(read, other, memory, at=8 << 20))
    assert read.gauges().agents == 1


def test_a_thread_that_fails_waits_for_posted_chunks_and_fails_all_other_work(
    new_source: MakeSource, memory: Memory, transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = transport(TCP, chunk_bytes=1 << 20, bytes_in_flight=2 << 20, fence_time=30.0)
    stopped, other = new_source(TCP), new_source(TCP, size=4 << 20)
    assert_done(read_all(read, stopped, memory))
    assert_done(read_all(read, other, memory, at=8 << 20))
    stopped.stop()
    moving = read_all(read, stopped, memory, deadline=None)
    assert until(lambda: moving.chunks_in_flight == 2)

    run = Transfer._run_callback

    def fail(transfer: Transfer, callback: Callable[[Transfer], None]) -> None:
        if transfer is last:
            raise SystemExit("not of an engine's callback, which ends no thread")
        run(transfer, callback)

    # Stopped, or the read might end before the callback is added, which would then run on this thread.
    other.stop()
    last = read_all(read, other, memory, at=8 << 20)
    last.add_done_callback(lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "_run_callback", fail)
        other.resume()
        assert moving.wait(SOON)
    assert moving.state is TransferState.FAILED
    assert isinstance(moving.error, TransferFailed)
    assert not moving.quiet
    # Its agent is not ended under the source, which would kill it; new reads go to a fresh one.
    assert_done(read_all(read, other, memory, at=8 << 20))
    assert not moving.quiet
    stopped.resume()
    assert moving.wait_quiet(SOON)
    assert stopped.alive()
