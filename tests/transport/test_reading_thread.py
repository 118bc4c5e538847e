"""An error on a reading thread concerns one transfer or one peer: no other ends, hangs or loses its source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from kvferry._transport.nixl_agent import ReadingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.peer_work import Chunk, PeerWork
from kvferry._transport.transport import Transfer, TransferState
from kvferry.errors import InvalidField, TransferFailed
from kvferry.geometry import Blocks, EngineGeometry, RankGeometry
from kvferry.planner import Path, PathRule, plan_read
from kvferry.planner.descriptors import Descriptors
from kvferry.planner.footprint import Footprint
from tests.transport.conftest import MakeSource, MakeTransport
from tests.transport.sources import SOON, Memory, Source
from tests.transport.staged_parts import BLOCK_BYTES, BLOCKS, GROUP, planes
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


def test_descriptors_of_other_blocks_than_the_plans_are_refused_before_anything_is_posted(
    source: Source, memory: Memory, transport: MakeTransport
) -> None:
    sides = [
        EngineGeometry(name, (GROUP,), (RankGeometry(0, planes(base, heads_first=True)),))
        for name, base in (("p", source.base), ("d", memory.base))
    ]
    plan = plan_read(sides[0], sides[1], 0, rule=PathRule(Path.DIRECT))
    (planned,) = plan.expand({"full": Blocks([1, 5, 9])}, {"full": Blocks([2, 4, 6])}).sources
    (raw,) = planned.descriptors
    moved = raw.source.copy()
    moved[1] += np.uint64(BLOCK_BYTES)
    read = transport()
    wrong = replace(planned, descriptors=(replace(raw, source=moved),))
    with pytest.raises(InvalidField, match="the request's blocks"):
        read.start([(source.info, wrong)], deadline=None, label="wrong")
    assert read.gauges().transfers == 0
    assert memory.untouched()
    assert_done(read.start([(source.info, planned)], deadline=None, label="right"))


def test_descriptors_too_many_to_check_at_once_are_checked_before_they_are_posted(
    source: Source, memory: Memory, transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source whose planes overlap makes the check of a long read take many seconds; the check then runs where no
    other read waits for it."""
    checking: set[str] = set()
    check = Footprint.check

    def noted(footprint: Footprint, descriptors: Descriptors, most: float = inf) -> int:
        effort = check(footprint, descriptors, most)
        if effort <= most:
            checking.add(threading.current_thread().name)
        return effort

    monkeypatch.setattr(Footprint, "check", noted)
    count = 8
    shape = planes(source.base, heads_first=True)[0]
    layered = tuple(replace(shape, layer=f"layers.{n}", base=source.base + 64 * n) for n in range(count))
    own = tuple(replace(shape, layer=f"layers.{n}", base=memory.base + n * BLOCKS * BLOCK_BYTES) for n in range(count))
    sides = [EngineGeometry(name, (GROUP,), (RankGeometry(0, of),)) for name, of in (("p", layered), ("d", own))]
    plan = plan_read(sides[0], sides[1], 0, rule=PathRule(Path.DIRECT))
    theirs, mine = list(range(0, 60, 3)), list(range(1, 41, 2))
    (planned,) = plan.expand({"full": Blocks(theirs)}, {"full": Blocks(mine)}).sources
    monkeypatch.setattr("kvferry._transport.transport.AT_ONCE", planned.descriptors[0].count)
    read = transport(chunk_descriptors=16)
    assert_done(read.start([(source.info, planned)], deadline=None, label="right"))
    pieces = [
        (
            of.base - source.base + block * BLOCK_BYTES,
            to.base - memory.base + into * BLOCK_BYTES,
            BLOCK_BYTES,
        )
        for of, to in zip(layered, own, strict=True)
        for block, into in zip(theirs, mine, strict=True)
    ]
    memory.pieces(source, pieces)
    assert memory.right()
    assert checking
    assert threading.current_thread().name not in checking
    (raw,) = planned.descriptors
    moved = raw.source.copy()
    moved[-1] += np.uint64(BLOCK_BYTES)
    last = int(raw.destination[-1]) - memory.base
    memory.bytes[:] = 0
    wrong = replace(planned, descriptors=(replace(raw, source=moved),))
    transfer = read.start([(source.info, wrong)], deadline=None, label="wrong")
    assert transfer.wait(SOON)
    assert isinstance(transfer.error, InvalidField)
    assert transfer.wait_quiet(SOON)
    assert not memory.bytes[last : last + 64].any()
