"""Quiet is reported only when no posted read can write any more, whatever goes wrong while a read begins (R4)."""

from __future__ import annotations

import contextlib
import threading
import zlib
from types import SimpleNamespace
from typing import cast

import pytest

from kvferry._control.connection import Control
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.reader_lease import ReaderLease
from kvferry._loop import Loop
from kvferry._memory.rank_memory import RankMemory
from kvferry._reads.rank_read import RankOrder, RankRead, Wanted
from kvferry._transport.nixl_agent import NixlOptions
from kvferry._transport.staging_pool import StagingOptions
from kvferry._transport.transport import Transfer, TransferState, Transport
from kvferry.errors import TransferCancelled, TransferFailed, TransferStuck
from tests.transport.conftest import MakeSource, MakeTransport
from tests.transport.sources import POISON, SOON, Memory, Source, raw_part
from tests.transport.staged_parts import part as staged_part
from tests.transport.staged_parts import some
from tests.transport.transfers import TCP, assert_done, read_all, until

NO_THREAD = "can't start new thread"


def threads_run_out(patch: pytest.MonkeyPatch, left: int) -> None:
    """Only so many reading threads can be started any more; Python says so as it does where the system refuses."""
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def refuse(thread: threading.Thread) -> None:
        # Of the transport's: what other tests have left may start some of its own.
        if not thread.name.endswith("/reading"):
            start(thread)
            return
        started.append(thread)
        if len(started) > left:
            raise RuntimeError(NO_THREAD)
        start(thread)

    patch.setattr(threading.Thread, "start", refuse)


def assert_failed_and_still(transfer: Transfer, read: Transport, source: Source, memory: Memory) -> None:
    """The transfer failed; once it reports quiet, not a byte changes, also when the source is read again."""
    assert transfer.wait(SOON)
    assert transfer.state is TransferState.FAILED
    assert transfer.wait_quiet(SOON)
    before = memory.bytes[: source.size].copy()
    assert_done(read_all(read, source, memory, at=8 << 20))
    assert bool((memory.bytes[: source.size] == before).all())
    assert read.gauges().transfers == read.gauges().uncertain == 0


def test_staging_memory_that_is_refused_fails_the_parts_begun_before(
    ucx_tls: str, source: Source, memory: Memory
) -> None:
    # No machine has so much memory: numpy raises an error when it is made.
    staging = StagingOptions(path="staged", slots=1, slot_bytes=1 << 56)
    read = Transport(RankMemory([memory.region]), NixlOptions(ucx_tls=ucx_tls, chunk_bytes=1 << 16), staging=staging)
    parts = [
        raw_part(source.info, [memory.all_of(source)]),
        staged_part(source, memory, some(1), some(2), at=8 << 20),
    ]
    transfer = read.start(parts, deadline=None, label="no memory")
    assert isinstance(transfer.error, TransferFailed)
    # A chunk may land at any moment, and makes both true.
    with transfer._changed:
        assert transfer.error.quiet == transfer.quiet
    assert_failed_and_still(transfer, read, source, memory)
    assert read.close(SOON)


def test_a_thread_that_is_refused_fails_the_parts_begun_before(
    ucx_tls: str, source: Source, new_source: MakeSource, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Transport(RankMemory([memory.region]), NixlOptions(ucx_tls=ucx_tls, reading_agents=2, chunk_bytes=1 << 16))
    mine = zlib.crc32(source.name.encode()) % 2
    name = next(f"other-{i}" for i in range(99) if zlib.crc32(f"other-{i}".encode()) % 2 != mine)
    other = new_source(ucx_tls, size=4 << 20, name=f"{name}")
    other.info  # noqa: B018
    parts = [
        raw_part(source.info, [memory.all_of(source)]),
        raw_part(other.info, [memory.all_of(other, at=8 << 20)]),
    ]
    with monkeypatch.context() as patch:
        threads_run_out(patch, 1)
        transfer = read.start(parts, deadline=None, label="no thread")
    assert NO_THREAD in str(transfer.error)
    assert_failed_and_still(transfer, read, source, memory)
    # The failed step is tried again.
    assert_done(read_all(read, other, memory, at=8 << 20))
    assert read.close(SOON)


def test_shares_that_find_no_new_agent_fail_and_the_old_one_goes_on(
    new_source: MakeSource, memory: Memory, transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a few posts in a row may be done when they return: then the next chunks are four times as large.
    read = transport(TCP, chunk_bytes=1 << 18, bytes_in_flight=2 << 20, fence_time=0.3)
    victim, slow = new_source(TCP, size=4 << 20), new_source(TCP)
    assert_done(read_all(read, victim, memory, at=8 << 20))
    assert_done(read_all(read, slow, memory))
    slow.stop()
    patient = read_all(read, slow, memory, deadline=None)
    assert until(lambda: patient.chunks_in_flight >= 2)
    with monkeypatch.context() as patch:
        threads_run_out(patch, 0)
        victim.stop()
        doomed = read_all(read, victim, memory, at=8 << 20, deadline=None)
        assert until(lambda: doomed.chunks_in_flight >= 2)
        waiting = read_all(read, victim, memory, at=8 << 20, deadline=None)
        doomed.cancel()
        # The agent is given up for `doomed`; `waiting` should go to a fresh one, which cannot be made.
        assert waiting.wait(SOON)
        assert waiting.state is TransferState.FAILED
        assert NO_THREAD in str(waiting.error)
    slow.resume()
    victim.resume()
    assert_done(patient)
    assert doomed.wait_quiet(SOON)


def share() -> RankRead:
    home, lease = cast(Control, SimpleNamespace(address="home:1")), ReaderLease.without_end(b"l" * 16)
    order = RankOrder("r", "request", home, "e", b"i" * 16, 1, "reference", lease, GrantedPart({}), Wanted({}), 60.0)
    # Nothing waits for its news.
    return RankRead(Loop(), order)


def test_a_cancel_while_the_transfer_is_started_does_not_report_quiet(
    source: Source, memory: Memory, transport: MakeTransport
) -> None:
    transport_ = transport(chunk_bytes=1 << 16)
    read = share()
    answers: list[bool] = []

    def start() -> Transfer:
        transfer = read_all(transport_, source, memory, deadline=None)
        answers.append(read.stop())
        return transfer

    transfer = read.begin(start)
    assert answers == [False]
    assert transfer.wait(SOON)
    assert transfer.state in (TransferState.CANCELLED, TransferState.DONE)
    assert transfer.wait_quiet(SOON)
    assert read.stop()


def test_a_cancel_before_the_transfer_is_started_reports_quiet_and_nothing_is_started() -> None:
    read = share()
    assert read.stop()
    started: list[str] = []

    def start() -> Transfer:
        started.append("started")
        raise AssertionError

    with pytest.raises(TransferCancelled):
        read.begin(start)
    assert started == []
    assert read.stop()


def test_cancels_from_another_thread_never_report_quiet_while_reads_go_on() -> None:
    class Clock:
        def __call__(self) -> float:
            return 0.0

    for _ in range(300):
        read, go = share(), threading.Barrier(2)
        answers: list[bool] = []

        def cancel(read: RankRead = read, go: threading.Barrier = go, answers: list[bool] = answers) -> None:
            go.wait()
            answers.append(read.stop())

        def start() -> Transfer:
            transfer = Transfer("r", 10, None, Clock(), lambda: None)
            # Posted at once, as a reading thread does.
            transfer.begin()
            return transfer

        thread = threading.Thread(target=cancel)
        thread.start()
        go.wait()
        transfer: Transfer | None = None
        with contextlib.suppress(TransferCancelled):
            transfer = read.begin(start)
        thread.join()
        if answers == [True]:
            assert transfer is None


def test_the_error_of_a_read_given_up_shows_when_it_is_quiet(
    new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(TCP, chunk_bytes=1 << 20)
    stopped = new_source(TCP)
    assert_done(read_all(read, stopped, memory))
    memory.bytes[:] = POISON
    stopped.stop()
    transfer = read_all(read, stopped, memory, deadline=None)
    assert until(lambda: transfer.chunks_in_flight > 0)
    stuck = TransferStuck("it did not end in time")
    transfer.cancel()
    transfer.tell(stuck)
    assert not stuck.quiet
    stopped.resume()
    assert transfer.wait_quiet(SOON)
    assert stuck.quiet
    late = TransferStuck("it did not end in time", quiet=False)
    transfer.tell(late)
    assert late.quiet


def test_an_agent_waits_for_the_latest_fence_of_a_peer(
    new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(TCP, chunk_bytes=1 << 20, fence_time=0.3)
    stopped = new_source(TCP, size=4 << 20)
    assert_done(read_all(read, stopped, memory))
    stopped.stop()
    # Two reads under way at one peer: one is given up by its caller, one is not.
    given_up = read_all(read, stopped, memory, deadline=None)
    patient = read_all(read, stopped, memory, at=4 << 20, deadline=None)
    assert until(lambda: given_up.chunks_in_flight == patient.chunks_in_flight == 4)
    given_up.cancel()
    assert until(lambda: read.gauges().retired_agents == 1)
    # The agent is given up, and not destroyed under the one that is still waited for.
    assert not given_up.wait_quiet(1.0)
    assert patient.state is TransferState.MOVING
    stopped.resume()
    assert_done(patient)
    assert given_up.wait_quiet(SOON)
    assert memory.right()


def test_a_peer_that_leaves_is_dropped_only_after_its_reads(
    new_source: MakeSource, memory: Memory, transport: MakeTransport
) -> None:
    read = transport(TCP, chunk_bytes=1 << 20, bytes_in_flight=2 << 20)
    source = new_source(TCP)
    assert_done(read_all(read, source, memory))
    memory.bytes[:] = POISON
    source.stop()
    transfer = read_all(read, source, memory, deadline=None)
    assert until(lambda: transfer.chunks_in_flight == 2)
    read.retire(source.name)
    # Behind it in the thread's inbox, so that the order to leave was obeyed when this one waits.
    behind = read_all(read, source, memory, at=8 << 20, deadline=None)
    threading.Event().wait(0.1)
    assert read.gauges().peers == 1
    source.resume()
    assert_done(transfer)
    # Then it is dropped, and added again for what came after.
    assert_done(behind)
    assert memory.right()
    assert source.alive()
