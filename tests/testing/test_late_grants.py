"""A grant that reaches its worker late, or never, ends in bounded time, and nothing writes to its blocks then; and
a read never ends well after its own timeout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, EngineSpec, Group
from kvferry.engine import Grant, RankEnd, ReadEnd, SchedulerPort, WorkerOutput, WorkerPort
from kvferry.errors import BadBlock, TransferCancelled, TransferStuck, WrongState
from kvferry.testing import Fabric
from tests.support.waiting import until
from tests.testing.fabric_engines import SOON

AXES = ("kv", "block", "head", "token", "content")
SENTINEL = -1.0


def ended(scheduler: SchedulerPort) -> list[ReadEnd]:
    """The ends of reads, once there are some."""
    found: list[ReadEnd] = []
    until(lambda: found.extend(scheduler.finished().reads) or bool(found))  # type: ignore[func-returns-value]
    return found


class Ports:
    """Two engines of one rank each; the messages between the scheduler and the worker of the reader are the test's."""

    def __init__(self, fabric: Fabric) -> None:
        self.source, self.given = self._engine(fabric, "p")
        self.decode, self.memory = self._engine(fabric, "d")
        self.given[:] = 7
        self.memory[:] = SENTINEL

    def _engine(self, fabric: Fabric, name: str) -> tuple[tuple[SchedulerPort, WorkerPort], Any]:
        client, spec = fabric.client(), EngineSpec(name, (Group("full", block_tokens=16, num_blocks=8),))
        memory = np.zeros((2, 8, 1, 16, 4), np.float32)
        scheduler, worker = SchedulerPort(client, spec), WorkerPort(client, spec)
        worker.register({"layer": memory}, axes=AXES)
        return (scheduler, worker), memory

    def attached(self, request_id: str, timeout: float = SOON) -> Grant:
        scheduler, _ = self.decode
        publication = self.source[0].publish(request_id, {"full": Blocks([1])}, expected_reads=9)
        scheduler.acquire(request_id, publication.reference, timeout=timeout)
        until(lambda: scheduler.granted(request_id) is not None)
        return scheduler.attach(request_id, {"full": Blocks([2])})

    def free(self) -> bool:
        """Whether another read may write to the block."""
        scheduler, _ = self.decode
        try:
            grant = self.attached("another")
        except BadBlock:
            scheduler.cancel("another")
            return False
        self.cancelled(grant)
        return True

    def cancelled(self, grant: Grant) -> None:
        scheduler, worker = self.decode
        scheduler.cancel(grant.request_id)
        for read_id in scheduler.cancels():
            worker.cancel(read_id)
        scheduler.collect(worker.finished())
        assert [end.request_id for end in ended(scheduler)] == [grant.request_id]


@pytest.fixture
def ports() -> Iterator[Ports]:
    with Fabric() as fabric:
        yield Ports(fabric)


def test_a_cancel_that_overtakes_its_grant_ends_the_read_and_the_grant_is_never_read(ports: Ports) -> None:
    scheduler, worker = ports.decode
    grant = ports.attached("mine")
    scheduler.cancel("mine")
    (read_id,) = scheduler.cancels()
    worker.cancel(read_id)
    scheduler.collect(worker.finished())
    (end,) = ended(scheduler)
    assert isinstance(end.error, TransferCancelled)
    assert end.quiet
    worker.start(grant)
    assert worker.running() == 0
    assert ports.free()
    assert np.all(ports.memory == SENTINEL)


def test_a_grant_that_is_lost_ends_with_the_answer_to_a_cancel(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry._reads.leased_reads.RANKS_GRACE", 0.1)
    monkeypatch.setattr("kvferry.engine.scheduler_reads.CANCEL_AGAIN", 0.1)
    scheduler, worker = ports.decode
    grant = ports.attached("mine", timeout=0.5)
    ends = ended(scheduler)
    assert isinstance(ends[0].error, TransferStuck)
    assert not ends[0].quiet
    # The cancels so far are lost as well.
    until(lambda: grant.read_id in scheduler.cancels())
    assert not ports.free()
    until(lambda: grant.read_id in scheduler.cancels())
    worker.cancel(grant.read_id)
    worker.cancel(grant.read_id)
    scheduler.collect(worker.finished())
    assert scheduler.finished().quiesced == ("mine",)
    worker.start(grant)
    assert (worker.running(), ports.free()) == (0, True)
    assert np.all(ports.memory == SENTINEL)


def test_a_share_whose_report_is_lost_ends_with_the_answer_to_a_cancel(
    ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry._reads.leased_reads.RANKS_GRACE", 0.1)
    monkeypatch.setattr("kvferry.engine.scheduler_reads.CANCEL_AGAIN", 0.1)
    scheduler, worker = ports.decode
    grant = ports.attached("mine", timeout=1.0)
    worker.start(grant)
    until(lambda: bool(worker.finished()))
    ends = ended(scheduler)
    assert (type(ends[0].error), ends[0].quiet) == (TransferStuck, False)
    until(lambda: grant.read_id in scheduler.cancels())
    worker.cancel(grant.read_id)
    scheduler.collect(worker.finished())
    assert scheduler.finished().quiesced == ("mine",)
    assert ports.free()


def test_a_share_whose_last_report_is_lost_becomes_quiet_with_the_answer_to_a_cancel(
    ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank has said that its share ended and may still write; that it is quiet was not heard."""
    monkeypatch.setattr("kvferry.engine.scheduler_reads.CANCEL_AGAIN", 0.1)
    scheduler, worker = ports.decode
    grant = ports.attached("mine")
    scheduler.collect(WorkerOutput(0, (), (RankEnd(grant.read_id, "mine", False, False, 0),)))
    ends = ended(scheduler)
    assert not ends[0].quiet
    assert not ports.free()
    until(lambda: grant.read_id in scheduler.cancels())
    worker.cancel(grant.read_id)
    scheduler.collect(worker.finished())
    assert scheduler.finished().quiesced == ("mine",)
    assert ports.free()


def test_a_share_that_was_read_stays_read_when_a_cancel_comes_late(ports: Ports) -> None:
    scheduler, worker = ports.decode
    grant = ports.attached("mine")
    worker.start(grant)
    until(lambda: worker.running() == 0)
    first = worker.finished()
    worker.cancel(grant.read_id)
    for output in (first, worker.finished()):
        scheduler.collect(output)
    ends = ended(scheduler)
    assert (ends[0].error, ends[0].quiet) == (None, True)
    with pytest.raises(WrongState, match="already started"):
        worker.start(grant)
    assert np.all(ports.memory[:, 2] == 7)


@pytest.mark.parametrize("timeout", [1e-9, 1e-6])
def test_a_read_whose_time_is_over_before_its_bytes_have_come_has_failed(timeout: float) -> None:
    with Fabric() as fabric:
        ports = Ports(fabric)
        cache = ports.decode[1].cache
        publication = ports.source[0].publish("request", {"full": Blocks([1])}, expected_reads=20)
        until(lambda: ports.source[0].stats().pinned == 1)
        for _ in range(20):
            error = cache.read(publication.reference, {"full": Blocks([3])}, timeout=timeout).exception(SOON)
            assert error is not None
        # One that had time is good.
        assert cache.read(publication.reference, {"full": Blocks([3])}, timeout=SOON).result(SOON).confirmed
