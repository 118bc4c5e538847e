"""A transfer's state, without NIXL: how it ends, and when it is quiet."""

import logging
import threading

import pytest

from kvferry._transport.transfer import Transfer, TransferState
from kvferry.errors import BadAgentMetadata, TransferCancelled, TransferExpired, TransferFailed, TransferStuck


class Clock:
    """Seconds that stand still."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, size: int = 20, deadline: float | None = 110.0) -> Transfer:
    return Transfer("t", size, deadline, clock, lambda: None)


def test_a_transfer_is_done_when_its_last_byte_has_arrived(clock: Clock) -> None:
    transfer = make(clock)
    states = [transfer.state]
    for _ in range(2):
        assert transfer.begin()
        states.append(transfer.state)
        assert not transfer.quiet
        clock.now += 1
        transfer.landed(10)
    assert [*states, transfer.state] == [
        TransferState.PENDING,
        TransferState.MOVING,
        TransferState.MOVING,
        TransferState.DONE,
    ]
    assert transfer.quiet
    assert transfer.ended_at == 102.0
    assert transfer.error is None


def test_the_deadline_is_judged_after_the_last_chunk(clock: Clock) -> None:
    transfer = make(clock, size=10)
    assert transfer.begin()
    clock.now = 110.001
    transfer.landed(10)
    assert transfer.state is TransferState.EXPIRED
    assert isinstance(transfer.error, TransferExpired)
    assert transfer.error.quiet
    assert transfer.quiet


def test_chunks_are_not_posted_after_the_deadline(clock: Clock) -> None:
    transfer = make(clock)
    clock.now = 110.001
    assert not transfer.begin()
    assert transfer.state is TransferState.EXPIRED
    assert transfer.quiet


def test_late_success_makes_a_transfer_quiet_but_not_done(clock: Clock) -> None:
    transfer = make(clock, size=10)
    assert transfer.begin()
    clock.now = 111.0
    transfer.settle(clock.now)
    assert transfer.state is TransferState.EXPIRED
    assert not transfer.quiet
    assert isinstance(transfer.error, TransferExpired)
    assert not transfer.error.quiet
    transfer.landed(10)
    assert transfer.state is TransferState.EXPIRED
    assert transfer.quiet
    assert transfer.error.quiet


def test_extending_moves_the_deadline_forward_only(clock: Clock) -> None:
    transfer = make(clock)
    transfer.extend(105.0)
    assert transfer.deadline == 110.0
    transfer.extend(120.0)
    assert transfer.deadline == 120.0


def test_a_deadline_that_has_passed_stays_passed(clock: Clock) -> None:
    transfer = make(clock)
    clock.now = 110.001
    transfer.extend(200.0)
    assert transfer.deadline == 110.0
    assert not transfer.begin()
    assert transfer.state is TransferState.EXPIRED


def test_cancel_returns_whether_the_transfer_is_quiet(clock: Clock) -> None:
    idle, moving = make(clock), make(clock)
    assert moving.begin()
    assert idle.cancel()
    assert not moving.cancel()
    assert isinstance(moving.error, TransferCancelled)
    assert not moving.begin()
    moving.landed(10)
    assert moving.state is TransferState.CANCELLED
    assert moving.cancel()


def test_an_ended_transfer_keeps_its_state(clock: Clock) -> None:
    transfer = make(clock, size=10)
    assert transfer.begin()
    transfer.landed(10)
    transfer.fail(TransferFailed("late"))
    transfer.cancel()
    clock.now = 200.0
    transfer.settle(clock.now)
    assert transfer.state is TransferState.DONE


def test_an_uncertain_chunk_is_quiet_when_its_agent_is_gone(clock: Clock) -> None:
    transfer = make(clock)
    assert transfer.begin()
    shared = TransferFailed("peer", peer="x")
    transfer.fail(shared)
    assert not transfer.wait_quiet(0)
    transfer.fenced()
    assert transfer.wait_quiet(0)
    assert transfer.state is TransferState.FAILED
    # Other transfers got the same error: each has its own.
    assert transfer.error is not shared
    assert transfer.error is not None
    assert transfer.error.values == {"peer": "x", "transfer": "t"}


def test_errors_keep_their_type(clock: Clock) -> None:
    transfer = make(clock)
    transfer.fail(BadAgentMetadata("bad", problem="digest"))
    assert isinstance(transfer.error, BadAgentMetadata)


def test_callbacks_run_once_and_in_order(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    transfer = make(clock, size=10)
    calls: list[str] = []

    def broken(_: Transfer) -> None:
        raise RuntimeError("broken callback")

    transfer.add_quiet_callback(lambda _: calls.append("quiet"))
    transfer.add_done_callback(broken)
    transfer.add_done_callback(lambda _: calls.append("done"))
    assert transfer.begin()
    with caplog.at_level(logging.ERROR):
        transfer.fail(TransferFailed("x"))
    assert calls == ["done"]
    assert "broken callback" in caplog.text
    transfer.landed(10)
    assert calls == ["done", "quiet"]
    transfer.add_done_callback(lambda _: calls.append("late"))
    transfer.settle(clock.now)
    assert calls == ["done", "quiet", "late"]


def test_waiting_ends_with_the_transfer(clock: Clock) -> None:
    transfer = make(clock)
    assert not transfer.wait(0)
    waiter = threading.Thread(target=transfer.wait)
    waiter.start()
    transfer.cancel()
    waiter.join(10)
    assert not waiter.is_alive()


def test_an_empty_transfer_is_done_at_once(clock: Clock) -> None:
    transfer = make(clock, size=0, deadline=1.0)
    assert transfer.state is TransferState.DONE
    assert transfer.wait_quiet(0)


@pytest.mark.parametrize(("late", "counts"), [(-0.001, True), (0.0, False), (0.001, False)])
def test_a_transfer_has_expired_at_its_deadline_as_its_lease_has(clock: Clock, late: float, *, counts: bool) -> None:
    moving, settled, extended, idle = (make(clock, size=10) for _ in range(4))
    assert moving.begin()
    clock.now = 110.0 + late
    moving.landed(10)
    settled.settle(clock.now)
    assert [moving.state is TransferState.DONE, settled.state is TransferState.PENDING] == [counts] * 2
    extended.extend(200.0)
    assert extended.deadline == (200.0 if counts else 110.0)
    assert extended.begin() is counts
    assert idle.goes_on() is counts


def test_bytes_without_a_deadline_count_for_ever(clock: Clock) -> None:
    transfer = make(clock, size=10, deadline=None)
    clock.now = 1e9
    transfer.extend(5.0)
    assert transfer.deadline is None
    transfer.settle(clock.now)
    assert transfer.goes_on()
    assert transfer.begin()
    transfer.landed(10)
    assert transfer.state is TransferState.DONE


def test_a_renewal_does_not_change_an_ended_transfer(clock: Clock) -> None:
    transfer = make(clock)
    transfer.cancel()
    transfer.extend(200.0)
    assert transfer.deadline == 110.0


def test_a_chunk_about_to_be_read_is_not_read_after_a_cancel(clock: Clock) -> None:
    transfer = make(clock)
    assert transfer.goes_on()
    states = [transfer.state]
    transfer.cancel()
    assert not transfer.goes_on()
    assert [*states, transfer.state] == [TransferState.MOVING, TransferState.CANCELLED]


def test_a_cancel_wakes_the_threads_that_read() -> None:
    woken: list[str] = []
    Transfer("t", 10, None, Clock(), lambda: woken.append("woken")).cancel()
    assert woken == ["woken"]


def test_an_error_given_to_a_transfer_shows_when_it_is_quiet(clock: Clock) -> None:
    transfer = make(clock)
    assert transfer.begin()
    early = TransferStuck("stuck", quiet=True)
    transfer.tell(early)
    transfer.cancel()
    assert not early.quiet
    transfer.fenced()
    late = TransferStuck("stuck", quiet=False)
    transfer.tell(late)
    assert early.quiet
    assert late.quiet
    assert isinstance(transfer.error, TransferCancelled)
    assert transfer.error.quiet


@pytest.mark.parametrize("ending", ["landed", "fenced"])
def test_waiting_for_quiet_ends_by_arrival_or_fence(clock: Clock, ending: str) -> None:
    transfer = make(clock)
    assert transfer.begin()
    calls: list[str] = []
    transfer.add_quiet_callback(lambda _: calls.append("before"))
    waiters = [threading.Thread(target=wait, daemon=True) for wait in (transfer.wait, transfer.wait_quiet)]
    for waiter in waiters:
        waiter.start()
    transfer.fail(TransferFailed("x"))
    # Waiting for the end is over, though the transfer is not quiet.
    waiters[0].join(10)
    assert [waiter.is_alive() for waiter in waiters] == [False, True]
    assert calls == []
    if ending == "landed":
        transfer.landed(10)
    else:
        transfer.fenced()
    waiters[1].join(10)
    assert not waiters[1].is_alive()
    transfer.add_quiet_callback(lambda _: calls.append("after"))
    assert calls == ["before", "after"]


def test_a_deadline_that_passes_runs_the_callbacks(clock: Clock) -> None:
    transfer = make(clock)
    calls: list[TransferState] = []
    transfer.add_done_callback(lambda ended: calls.append(ended.state))
    clock.now = 111.0
    transfer.settle(clock.now)
    assert calls == [TransferState.EXPIRED]
