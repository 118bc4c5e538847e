"""A lease that its home has lost: when it is asked for again, and when that is too late (R1).

The home, the pauses and the clock do as a test says, since no home answers at a moment that a test names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest

from kvferry._clock import to_duration
from kvferry._control import acquisition
from kvferry._control.acquire_request import AcquireRequest
from kvferry._control.acquisition import Acquisition
from kvferry._control.backoff import CALL_TIMEOUT
from kvferry._control.connection import Control
from kvferry._control.reader_lease import ReaderLease, deadline_after
from kvferry._control.renewals import Renewals
from kvferry._loop import Loop
from kvferry.errors import HomeRecovering, KvferryError, PublicationStale
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.blocking_control import looping, on_loop, turns

Answer: TypeAlias = "pb.ReadBlocksResponse | KvferryError"
FIRST, SECOND = b"1" * 16, b"2" * 16
BEGAN, REMAINING = 1000.0, 30.0
ASKED = pb.ReadBlocksRequest(reference="reference", parties=2, expected_reads=5)


class World:
    """A lease that was lost, of a read whose blocks are all known, and a clock that stands still."""

    def __init__(self) -> None:
        self.now = BEGAN
        self.calls: list[tuple[pb.ReadBlocksRequest, float]] = []
        self.pauses: list[float] = []
        self.given_back: list[ReaderLease] = []
        self._answer: asyncio.Future[Any]

    def use(self, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.renewals = loop, Renewals(loop)
        home = cast(Control, SimpleNamespace(address="home:1", read_blocks=self._read_blocks))
        request = AcquireRequest(home, pb.Reference(engine_id="source"), "reference", "read", 1, 0, BEGAN + 600)
        self.acquisition = Acquisition(
            loop,
            request,
            ASKED,
            self.renewals,
            lambda _, lease, __: self.given_back.append(lease),
            bool,
            asyncio.Semaphore(1),
            bool,
        )
        self.acquisition._granted = self.acquisition._over = True
        monkeypatch.setattr(acquisition, "asyncio", SimpleNamespace(sleep=self._sleep))

    def ask(self, remaining: float = REMAINING) -> None:
        self.lease = self.acquisition._had = ReaderLease(FIRST, BEGAN, remaining, 10.0)
        self.ask_for(self.lease)

    def ask_for(self, lease: ReaderLease) -> None:
        on_loop(self.loop, lambda: self.loop.spawn(self.acquisition._acquire_again(lease), "a lease"))
        turns(self.loop)

    def answer(self, answer: Answer) -> None:
        settle = self._answer.set_exception if isinstance(answer, KvferryError) else self._answer.set_result
        self._do(lambda: settle(answer))  # type: ignore[arg-type]

    def grant(self) -> None:
        self.answer(pb.ReadBlocksResponse(accepted=pb.Accepted(lease_id=SECOND, remaining=to_duration(60.0))))

    def end_pause(self) -> None:
        self._do(lambda: self._pause.set_result(None))

    @property
    def renewed(self) -> bool:
        return self.lease in self.renewals._kept

    def _do(self, call: Callable[[], object]) -> None:
        on_loop(self.loop, call)
        turns(self.loop)

    def _read_blocks(self, request: pb.ReadBlocksRequest, left: float) -> Any:
        self.calls.append((request, left))
        self._answer = self.loop.future()
        return self._answer

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._pause = self.loop.future()
        await self._pause


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    with looping(lambda: made.now) as loop:
        made.use(loop, monkeypatch)
        yield made


def test_a_lost_lease_is_asked_for_as_the_first_time_for_as_long_as_it_lasts(world: World) -> None:
    world.now = deadline_after(BEGAN, REMAINING) - 2.5
    world.ask()
    ((request, left),) = world.calls
    # As a reader that has nothing: the home has lost the lease.
    assert request == ASKED
    assert left == pytest.approx(2.5)
    world.now += 3.0
    world.ask_for(world.lease)
    assert 0 < world.calls[1][1] < 0.01


def test_a_call_for_a_lost_lease_has_the_usual_timeout(world: World) -> None:
    world.ask(remaining=50 * CALL_TIMEOUT)
    assert world.calls[0][1] == CALL_TIMEOUT


def test_a_lost_lease_whose_read_has_ended_is_not_asked_for(world: World) -> None:
    lease = ReaderLease(FIRST, BEGAN, REMAINING, 10.0)
    lease.end()
    world.ask_for(lease)
    assert world.calls == []


def test_a_grant_in_time_counts_from_its_request(world: World) -> None:
    world.now = BEGAN + 5
    world.ask()
    world.now = BEGAN + 20
    world.grant()
    assert (world.renewed, world.given_back) == (True, [])
    assert (world.lease.lease_id, world.lease.deadline) == (SECOND, deadline_after(BEGAN + 5, 60.0))


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_a_grant_that_is_too_late_is_given_back(world: World, late: float) -> None:
    world.now = BEGAN + 5
    world.ask()
    world.now = world.lease.deadline + late
    world.grant()
    assert (world.renewed, world.lease.lease_id) == (False, FIRST)
    (unneeded,) = world.given_back
    assert (unneeded.lease_id, unneeded.deadline) == (SECOND, deadline_after(BEGAN + 5, 60.0))


@pytest.mark.parametrize("over", [True, False], ids=["all blocks known", "more blocks awaited"])
def test_a_grant_for_a_read_that_has_ended_meanwhile_is_given_back(world: World, over: bool) -> None:
    """Also for a progressive read that failed without asking for its next blocks."""
    world.acquisition._over = over
    world.ask()
    world.lease.end()
    world.grant()
    assert [lease.lease_id for lease in world.given_back] == [SECOND]


@pytest.mark.parametrize("answer", [pb.ReadBlocksResponse(), HomeRecovering("not now")], ids=["nothing", "recovering"])
def test_a_home_that_is_not_ready_is_asked_again_after_pauses(world: World, answer: Answer) -> None:
    world.ask()
    for number in range(1, 7):
        world.answer(answer)
        assert (len(world.calls), len(world.pauses)) == (number, number)
        world.end_pause()
    assert world.pauses[0] > 0
    assert world.pauses[-1] > 2 * world.pauses[0]
    world.grant()
    assert (world.renewed, len(world.pauses)) == (True, 6)


def test_a_pause_is_as_long_as_the_home_asks_for(world: World) -> None:
    world.ask()
    world.answer(HomeRecovering("not now", retry_after=7.0))
    assert world.pauses == [7.0]


@pytest.mark.parametrize(
    "error",
    [PublicationStale("gone"), HomeRecovering("not now", retry_after=4.0), HomeRecovering("no", retry_after=REMAINING)],
    ids=["final", "at its end", "after it"],
)
def test_a_lease_that_is_not_granted_again_in_time_is_logged(
    world: World, caplog: pytest.LogCaptureFixture, error: KvferryError
) -> None:
    world.now = deadline_after(BEGAN, REMAINING) - 4.0
    world.ask()
    with caplog.at_level(logging.WARNING):
        world.answer(error)
    assert world.pauses == []
    assert "was lost and could not be acquired again" in caplog.text


def test_a_lease_whose_read_has_ended_is_not_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.ask()
    world.lease.end()
    with caplog.at_level(logging.WARNING):
        world.answer(PublicationStale("gone"))
    assert (world.pauses, caplog.text) == ([], "")
