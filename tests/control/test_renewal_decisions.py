"""Renewals, moment by moment: what is sent when and to whom, and what becomes of each answer (R1, R10).

The clock and the homes do as a test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, cast

import pytest

from kvferry._clock import to_duration
from kvferry._control.connection import Control, NotificationAnswer, answers_of
from kvferry._control.reader_lease import RENEW_LEAST, ReaderLease, deadline_after
from kvferry._control.renewals import RENEW_AGAIN, RENEW_TIMEOUT, Renewals
from kvferry._loop import Loop
from kvferry._wire.status import to_notification_error
from kvferry.errors import Closed, InvalidField, KvferryError, LeaseEnded, LimitReached, Unavailable
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.blocking_control import on_loop, turns

READERS = [pb.EngineRef(engine_id=f"reader {number}", incarnation=bytes([number]) * 16) for number in range(2)]
BEGAN, EVERY, REMAINING = 1000.0, 10.0, 60.0
Answer: TypeAlias = "asyncio.Future[list[pb.NotificationResult]]"


def renewed(seconds: float = REMAINING, revoked: pb.RevokeReason.ValueType = pb.REVOKE_REASON_UNSPECIFIED) -> pb.NotificationResult:  # noqa: E501 # fmt: skip
    return pb.NotificationResult(renewed=pb.Renewed(remaining=to_duration(seconds), revoked=revoked))


def failed(error: KvferryError) -> pb.NotificationResult:
    return pb.NotificationResult(error=to_notification_error(error))


@dataclass(eq=False)
class Home:
    """In place of `Control`: takes renewals, and answers when a test says."""

    loop: Loop
    address: str
    sent: list[tuple[list[bytes], pb.EngineRef, Answer]] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    at_once: KvferryError | None = None
    complaints: list[str] = field(default_factory=list)

    def complain(self, error: KvferryError, what: str) -> None:
        self.complaints.append(f"{what}: {error.message}")

    async def notify(self, request: pb.NotifyRequest, timeout: float) -> list[NotificationAnswer]:
        ids, answer = [notification.renew.lease_id for notification in request.notifications], self.loop.future()
        self.sent.append((ids, request.sender, answer))
        self.timeouts.append(timeout)
        if self.at_once is not None:
            raise self.at_once
        return answers_of(request, pb.NotifyResponse(results=await answer), self.address)

    def until(self, count: int) -> None:
        """See that so many calls have come."""
        turns(self.loop)
        assert len(self.sent) == count

    def answer(self, call: int, *results: pb.NotificationResult) -> None:
        answer = self.sent[call][2]
        if answer.done():
            return
        on_loop(self.loop, lambda: answer.set_result(list(results)))
        turns(self.loop)

    def fail(self, call: int, error: KvferryError) -> None:
        answer = self.sent[call][2]
        on_loop(self.loop, lambda: answer.set_exception(error))
        turns(self.loop)


class World:
    """Leases, and a clock that stands still."""

    def __init__(self) -> None:
        self.now = BEGAN
        self.loop = Loop("kvferry-test-loop", lambda: self.now)
        self.home = Home(self.loop, "home:1")
        self.renewals = Renewals(self.loop)
        self.extended: list[tuple[int, float]] = []
        self.lost: list[int] = []

    def keep(self, number: int, *, every: float = EVERY, home: Home | None = None, reader: int = 0) -> ReaderLease:
        lease = ReaderLease(number.to_bytes(16, "big"), self.now, REMAINING, every)
        lease.changed = lambda: self.extended.append((number, lease.deadline))
        self.keep_on(number, lease, home or self.home, reader)
        return lease

    def keep_on(self, number: int, lease: ReaderLease, home: Home, reader: int = 0) -> None:
        lost = partial(self.lost.append, number)
        on_loop(
            self.loop,
            lambda: self.renewals.keep(lease, cast(Control, home), READERS[reader], f"read {number}", lost),
        )

    def drop(self, lease: ReaderLease) -> None:
        on_loop(self.loop, lambda: self.renewals.drop(lease))

    def advance(self, seconds: float) -> None:
        """As if the loop had slept so long."""
        self.now += seconds
        turns(self.loop)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    on_loop(made.loop, made.renewals.close)
    made.loop.close(30)


def test_a_lease_is_renewed_when_it_is_due_and_each_answer_extends_it(world: World) -> None:
    lease = world.keep(1)
    world.advance(EVERY - 0.001)
    world.home.until(0)
    world.advance(0.001)
    world.home.until(1)
    ids, sender, _ = world.home.sent[0]
    assert (ids, sender) == ([lease.lease_id], READERS[0])
    sent_at = world.now
    # It is not sent again before its time, whether it is answered or not.
    world.advance(5.0)
    world.home.until(1)
    world.home.answer(0, renewed())
    # Counted from when it was sent.
    assert lease.deadline == deadline_after(sent_at, REMAINING)
    assert world.extended == [(1, lease.deadline)]
    world.advance(5.0)
    world.home.until(2)
    world.home.answer(1, renewed(20.0, pb.REVOKE_REASON_ABORTED))
    world.advance(100.0)
    world.home.until(2)
    assert world.lost == []


def test_a_renewal_that_is_answered_after_the_deadline_revives_nothing(world: World) -> None:
    lease = world.keep(1)
    world.advance(EVERY)
    world.home.until(1)
    before = lease.deadline
    world.now = before
    world.home.answer(0, renewed())
    assert lease.deadline == before


def test_an_overloaded_home_may_answer_until_the_lease_ends(world: World) -> None:
    # The home would answer a repetition no sooner, and drop the abandoned call.
    lease = world.keep(1)
    end = lease.deadline
    world.advance(EVERY)
    world.home.until(1)
    assert world.home.timeouts == [end - world.now]
    # Others go out meanwhile, and the last before the end has a moment as well.
    world.advance(end - world.now - 1.0)
    world.home.until(2)
    assert world.home.timeouts[1] == RENEW_TIMEOUT
    world.home.answer(0, renewed())
    assert lease.deadline > end


def test_a_lease_that_its_home_does_not_extend_for_now_is_renewed_more_often(world: World) -> None:
    # Its source is away for a while. Asked in each third of a whole term only, the home could not say that it is back.
    lease = world.keep(1, every=REMAINING / 3)
    end = lease.deadline
    gaps = list[float]()
    for call in range(8):
        due = lease.next_renewal
        assert due is not None
        gaps.append(due - world.now)
        world.advance(due - world.now)
        world.home.until(call + 1)
        world.home.answer(call, renewed(end - world.now))
    assert gaps == sorted(gaps, reverse=True)
    # One comes well within the last tenth, and the end is not reached.
    assert 0 < end - world.now < REMAINING / 10
    assert lease.deadline == end
    due = lease.next_renewal
    assert due is not None
    world.advance(due - world.now)
    world.home.answer(8, renewed())
    assert lease.deadline > end


def test_a_home_that_extends_nothing_is_not_asked_without_a_pause() -> None:
    lease = ReaderLease(b"1" * 16, 0.0, REMAINING, EVERY)
    lease.renewing(lease.deadline - 0.01)
    lease.renewed(lease.deadline - 0.01, lease.deadline - 0.01, 0.01, more=True)
    assert lease.next_renewal == pytest.approx(lease.deadline - 0.01 + RENEW_LEAST)


def test_renewals_of_each_reader_go_in_calls_of_its_own_and_only_when_due(world: World) -> None:
    other = Home(world.loop, "home:3")
    for number, (home, reader) in enumerate([(world.home, 0), (world.home, 1), (other, 0), (world.home, 0)]):
        world.keep(number, home=home, reader=reader)
    world.keep(9, every=EVERY + 1)
    world.advance(EVERY)
    world.home.until(2)
    other.until(1)
    sent = [([int.from_bytes(one, "big") for one in ids], sender) for ids, sender, _ in world.home.sent + other.sent]
    assert sent == [([0, 3], READERS[0]), ([1], READERS[1]), ([2], READERS[0])]


def test_answers_go_to_their_leases_however_many_calls_it_takes(world: World) -> None:
    leases = [world.keep(number, every=EVERY) for number in range(1300)]
    world.advance(EVERY)
    world.home.until(3)
    assert [one for ids, _, _ in world.home.sent for one in ids] == [lease.lease_id for lease in leases]
    for call in (2, 0, 1):
        ids = world.home.sent[call][0]
        world.home.answer(call, *(renewed(100.0 + int.from_bytes(one, "big")) for one in ids))
    assert [lease.deadline for lease in leases] == [deadline_after(world.now, 100.0 + n) for n in range(1300)]
    assert len(world.extended) == 1300


def test_a_call_that_is_refused_goes_again_in_halves(world: World) -> None:
    leases = [world.keep(number) for number in range(5)]
    world.advance(EVERY)
    world.home.until(1)
    world.home.fail(0, InvalidField("notifications", 5, "none"))
    assert [[int.from_bytes(one, "big") for one in ids] for ids, _, _ in world.home.sent[1:]] == [[0, 1], [2, 3, 4]]
    world.home.answer(1, renewed(100.0), renewed(101.0))
    assert [lease.deadline for lease in leases[:2]] == [
        deadline_after(world.now, seconds) for seconds in (100.0, 101.0)
    ]
    world.home.fail(2, InvalidField("notifications", 3, "none"))
    assert len(world.home.sent) == 5


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Unavailable("not now"), RENEW_AGAIN),
        (LimitReached("too many", retry_after=3.0), 3.0),
        (LimitReached("too many", retry_after=0.5), RENEW_AGAIN),
        (Closed("it is closed"), EVERY),
    ],
    ids=["unavailable", "later", "soon", "closed"],
)
def test_a_call_that_failed_is_repeated_whole(world: World, error: KvferryError, again: float) -> None:
    for number in range(2):
        world.keep(number)
    world.advance(EVERY)
    world.home.until(1)
    world.home.fail(0, error)
    world.home.until(1)
    assert world.home.complaints[0].startswith("renewals of 2 leases are repeated, the first for read 0: ")
    world.advance(again - 0.001)
    world.home.until(1)
    world.advance(0.001)
    world.home.until(2)
    assert len(world.home.sent[1][0]) == 2


def test_renewals_that_could_not_be_sent_are_repeated(world: World) -> None:
    world.home.at_once = Unavailable("no connection")
    world.keep(1)
    world.advance(EVERY)
    world.home.until(1)
    world.advance(RENEW_AGAIN)
    world.home.until(2)


def test_a_refused_renewal_fails_no_other(world: World) -> None:
    leases = [world.keep(number) for number in range(3)]
    world.advance(EVERY)
    world.home.until(1)
    answer = [failed(LimitReached("busy", retry_after=2.0)), pb.NotificationResult(done=pb.Acknowledged()), renewed()]
    world.home.answer(0, *answer)
    assert leases[2].deadline == deadline_after(world.now, REMAINING)
    assert [each.rpartition("the first for ")[2] for each in world.home.complaints] == [
        "read 0: busy",
        "read 1: a renewal was answered with done",
    ]
    world.advance(2.0)
    world.home.until(2)
    assert world.home.sent[1][0] == [leases[0].lease_id]


@pytest.mark.parametrize("results", [1, 4])
def test_an_answer_with_another_number_of_results_renews_nothing_and_the_call_goes_again_in_halves(
    world: World, results: int
) -> None:
    leases = [world.keep(number) for number in range(3)]
    world.advance(EVERY)
    world.home.until(1)
    world.home.answer(0, *[renewed()] * results)
    assert world.extended == []
    world.home.until(3)
    assert [ids for ids, *_ in world.home.sent[1:]] == [[leases[0].lease_id], [one.lease_id for one in leases[1:]]]
    world.home.answer(1)
    assert "the first for read 0: home:1 answered 1 notifications" in world.home.complaints[-1]
    world.home.answer(2, renewed(), renewed())
    assert [number for number, _ in world.extended] == [1, 2]


def test_a_lease_that_its_home_does_not_know_is_lost_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.keep(1)
    world.advance(EVERY)
    world.home.until(1)
    world.home.answer(0, failed(LeaseEnded("who")))
    assert world.lost == [1]
    assert "read 1: home:1 has no record of the lease" in caplog.text
    world.home.answer(0, failed(LeaseEnded("who")))
    assert world.lost == [1]
    world.advance(REMAINING)
    world.home.until(1)


def test_a_lease_that_its_home_renews_no_more_is_kept_and_not_renewed(world: World) -> None:
    lease = ReaderLease(b"1" * 16, world.now, REMAINING, EVERY)
    lease.renewed(world.now, world.now, REMAINING, more=False)
    world.keep_on(1, lease, world.home)
    world.advance(EVERY)
    world.home.until(0)


@pytest.mark.parametrize("answer", ["lost", "refused"])
def test_a_dropped_lease_is_not_logged(world: World, caplog: pytest.LogCaptureFixture, answer: str) -> None:
    lease, other = world.keep(1), world.keep(2)
    world.advance(EVERY)
    world.home.until(1)
    world.drop(lease)
    world.drop(lease)
    assert lease.ended
    error: KvferryError = LeaseEnded("who") if answer == "lost" else Unavailable("not now")
    world.home.answer(0, failed(error), renewed())
    assert (world.lost, world.home.complaints, caplog.records) == ([], [], [])
    world.advance(EVERY)
    world.home.until(2)
    assert world.home.sent[1][0] == [other.lease_id]
    # A later `keep` comes too late.
    world.keep_on(1, lease, world.home)
    world.advance(EVERY)
    world.home.until(3)
    assert world.home.sent[2][0] == [other.lease_id]


def test_a_bug_of_one_reader_hinders_no_other(world: World) -> None:
    def refuse() -> None:
        raise RuntimeError("a bug")

    lease = ReaderLease(b"x" * 16, world.now, REMAINING, EVERY)
    lease.changed = refuse
    world.keep_on(0, lease, world.home)
    world.keep(1)
    world.advance(EVERY)
    world.home.until(1)
    world.home.answer(0, renewed(), renewed())
    assert [number for number, _ in world.extended] == [1]


def test_close_ends_all_renewals(world: World) -> None:
    world.keep(1)
    on_loop(world.loop, world.renewals.close)
    world.advance(EVERY)
    world.keep(2)
    world.advance(EVERY)
    world.home.until(0)


def test_a_lease_that_is_due_before_the_others_wakes_the_renewals(world: World) -> None:
    world.keep(1, every=500.0)
    world.advance(0.0)
    for number, every in ((2, 0.3), (3, 0.05)):
        world.keep(number, every=every)
    world.advance(0.05)
    world.home.until(1)
    world.advance(0.25)
    world.home.until(2)
    assert {int.from_bytes(one, "big") for ids, _, _ in world.home.sent for one in ids} == {2, 3}


def test_renewals_go_on_after_any_exception_of_a_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler of the application's loggers may raise anything."""
    turn, failed = Renewals._turn, list[int]()

    async def fails(renewals: Renewals) -> bool:
        if not failed:
            failed.append(1)
            raise SystemExit
        return await turn(renewals)

    monkeypatch.setattr(Renewals, "_turn", fails)
    world.keep(1)
    world.advance(EVERY)
    world.advance(1.0)
    world.home.until(1)
    assert failed
