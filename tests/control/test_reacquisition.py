"""A lease that its home has lost: when it is asked for again, and when that is too late (R1).

The home, the pauses and the clock do as a test says, since no home answers at a moment that a test names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest
from kvferry._control.reacquisition import Reacquisition
from kvferry._work_queue import WorkQueue

from kvferry._clock import to_duration
from kvferry._control.connection import CALL_TIMEOUT, Control
from kvferry._control.reader_lease import ReaderLease, deadline_after
from kvferry.errors import HomeRecovering, KvferryError, PublicationStale
from kvferry.v1 import kv_transfer_pb2 as pb

Answer: TypeAlias = "pb.ReadBlocksResponse | KvferryError"
FIRST, SECOND = b"1" * 16, b"2" * 16
BEGAN, REMAINING = 1000.0, 30.0
ASKED = pb.ReadBlocksRequest(reference="reference", parties=2, expected_reads=5)


class World:
    """A lease that was lost, and a clock that stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, remaining: float = REMAINING) -> None:
        self.now = BEGAN
        self.lease = ReaderLease(FIRST, BEGAN, remaining, 10.0)
        self.calls: list[tuple[pb.ReadBlocksRequest, float, Callable[[Answer], None]]] = []
        self.pauses: list[tuple[float, Callable[[], None]]] = []
        self.again = 0
        self.unneeded: list[ReaderLease] = []
        home = SimpleNamespace(address="home:1", read_blocks_later=lambda *call: self.calls.append(call))
        work = SimpleNamespace(do_later=lambda *pause: self.pauses.append(pause))
        monkeypatch.setattr("kvferry._control.reacquisition.now", lambda: self.now)
        self.asks = Reacquisition(
            cast(Control, home), ASKED, "it", self.lease, cast(WorkQueue, work), self.had, self.unneeded.append
        )

    def had(self) -> None:
        self.again += 1

    def answer(self, answer: Answer) -> None:
        self.calls[-1][2](answer)

    def grant(self, **changes: Any) -> None:
        self.answer(
            pb.ReadBlocksResponse(accepted=pb.Accepted(lease_id=SECOND, remaining=to_duration(60.0), **changes))
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_it_is_asked_for_as_the_first_time_for_as_long_as_it_lasts(world: World) -> None:
    world.now = world.lease.deadline - 2.5
    world.asks.ask()
    ((request, left, _),) = world.calls
    # As a reader that has nothing: the home has lost the lease.
    assert request == ASKED
    assert left == pytest.approx(2.5)
    world.now = world.lease.deadline + 1.0
    world.asks.ask()
    assert 0 < world.calls[1][1] < 0.01


def test_one_call_takes_no_longer_than_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, remaining=50 * CALL_TIMEOUT)
    world.asks.ask()
    assert world.calls[0][1] == CALL_TIMEOUT


def test_nobody_asks_for_what_nobody_needs(world: World) -> None:
    world.lease.end()
    world.asks.ask()
    assert world.calls == []


def test_a_grant_in_time_goes_on_from_when_it_was_asked_for(world: World) -> None:
    world.now = BEGAN + 5
    world.asks.ask()
    world.now = BEGAN + 20
    world.grant()
    assert (world.again, world.unneeded) == (1, [])
    assert (world.lease.lease_id, world.lease.deadline) == (SECOND, deadline_after(BEGAN + 5, 60.0))


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_a_grant_that_is_too_late_is_given_back(world: World, late: float) -> None:
    world.now = BEGAN + 5
    world.asks.ask()
    world.now = world.lease.deadline + late
    world.grant()
    assert (world.again, world.lease.lease_id) == (0, FIRST)
    (unneeded,) = world.unneeded
    assert (unneeded.lease_id, unneeded.deadline) == (SECOND, deadline_after(BEGAN + 5, 60.0))


@pytest.mark.parametrize("answer", [pb.ReadBlocksResponse(), HomeRecovering("not now")], ids=["nothing", "recovering"])
def test_a_home_that_cannot_yet_is_asked_again_after_pauses(world: World, answer: Answer) -> None:
    world.asks.ask()
    world.answer(answer)
    for number in range(1, 6):
        assert (len(world.calls), len(world.pauses)) == (number, number)
        world.pauses[-1][1]()
        world.answer(answer)
    assert world.pauses[0][0] > 0
    assert world.pauses[-1][0] > 2 * world.pauses[0][0]
    world.pauses[-1][1]()
    world.grant()
    assert (world.again, len(world.pauses)) == (1, 6)


def test_a_pause_is_as_long_as_the_home_asks_for(world: World) -> None:
    world.asks.ask()
    world.answer(HomeRecovering("not now", retry_after=7.0))
    assert [pause for pause, _ in world.pauses] == [7.0]


@pytest.mark.parametrize(
    "error",
    [PublicationStale("gone"), HomeRecovering("not now", retry_after=4.0), HomeRecovering("no", retry_after=REMAINING)],
    ids=["final", "at its end", "after it"],
)
def test_a_lease_that_cannot_be_had_in_time_is_said(
    world: World, caplog: pytest.LogCaptureFixture, error: KvferryError
) -> None:
    world.now = world.lease.deadline - 4.0
    world.asks.ask()
    with caplog.at_level(logging.WARNING):
        world.answer(error)
    assert world.pauses == []
    assert "was lost and could not be acquired again" in caplog.text


def test_the_end_of_what_nobody_needs_is_not_said(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.asks.ask()
    world.lease.end()
    with caplog.at_level(logging.WARNING):
        world.answer(PublicationStale("gone"))
    assert (world.pauses, caplog.text) == ([], "")
