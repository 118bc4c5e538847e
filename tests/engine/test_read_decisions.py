"""The ends of a scheduler's reads, moment by moment: what counts, what is given up, and when blocks go back (R1, R4,
R5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry import Blocks
from kvferry._control.lease_holder import VERDICT_TIMEOUT
from kvferry._reads.leased_reads import ANSWER_GRACE, RANKS_GRACE
from kvferry.engine.values import WorkerOutput
from kvferry.errors import (
    InvalidField,
    TransferCancelled,
    TransferExpired,
    TransferFailed,
    TransferStuck,
    WrongState,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.engine.played_reads import BEGAN, RANKS, TIMEOUT, World
from tests.support.played_home import Verdict


@pytest.mark.parametrize(("late", "counts"), [(-0.001, True), (0.0, False), (0.001, False)])
def test_a_read_counts_if_its_last_rank_ended_before_the_lease(world: World, late: float, *, counts: bool) -> None:
    read_id = world.reading()
    world.ends(read_id, 0)
    assert world.finished() == []
    world.now = world.lease.deadline + late
    world.ends(read_id, 1)
    # The home gets the report in any case.
    assert world.home.heard("report", *(() if counts else ("drop",)))
    assert [report.rank for report in world.home.reports[0]] == [0, 1]
    if counts:
        assert world.finished() == []
        world.home.judge(pb.VERDICT_VALID)
    (end,) = world.finished()
    assert (end.error is None, end.confirmed, end.quiet, end.ranks, end.bytes) == (counts, counts, True, 2, 20)
    assert isinstance(end.error, TransferExpired) is not counts
    assert end.lost == ({} if counts else {"full": (20, 7)})
    assert world.free()
    assert dict(+world.meter.stats().outcomes) == {"done" if counts else "expired": 1}


@pytest.mark.parametrize(
    ("verdict", "good", "confirmed"),
    [
        (pb.VERDICT_VALID, True, True),
        (pb.VERDICT_UNKNOWN, True, False),
        (None, True, False),
        (pb.VERDICT_EXPIRED, False, False),
    ],
)
def test_the_homes_verdict_decides_a_read(world: World, verdict: Verdict, *, good: bool, confirmed: bool) -> None:
    read_id = world.reading()
    for rank in range(RANKS):
        world.ends(read_id, rank)
    assert world.home.heard("report")
    world.home.judge(verdict)
    (end,) = world.finished()
    assert (end.error is None, end.confirmed) == (good, confirmed)
    # What comes later changes nothing.
    world.home.judge(pb.VERDICT_EXPIRED)
    world.look()
    assert world.finished() == []


def test_an_answer_without_a_verdict_leaves_the_readers_own_clock_to_decide(world: World) -> None:
    read_id = world.reading()
    for rank in range(RANKS):
        world.ends(read_id, rank)
    assert world.home.heard("report")
    world.home.say_of(0, pb.NotificationResult(done=pb.Acknowledged()))
    (end,) = world.finished()
    assert (end.error, end.confirmed) == (None, False)


def test_a_read_that_ended_after_its_lease_fails(world: World) -> None:
    read_id = world.reading()
    world.ends(read_id, 0)
    world.now = world.lease.deadline
    world.ends(read_id, 1)
    (end,) = world.finished()
    assert isinstance(end.error, TransferExpired)


def test_a_read_that_ended_before_its_last_block_was_published_does_not_count(world: World) -> None:
    """A worker has reported too early."""
    world.granted(complete=False)
    read_id = world.reads.attach("mine", {"full": Blocks([20, 7], end_token=32)}, (0, 32), allow_overlap=False).read_id
    for rank in range(RANKS):
        world.ends(read_id, rank)
    (end,) = world.finished()
    assert isinstance(end.error, TransferFailed)
    assert "before its last block was published" in str(end.error)
    assert end.lost


def test_an_end_that_fits_no_report_delays_no_other(world: World) -> None:
    read_ids, free = world.three_reading(), world.busy()
    for number, read_id in enumerate(read_ids):
        for rank in range(RANKS):
            world.ends(read_id, rank, size=1 << 64 if number == 1 else 10)
    free.set()
    assert world.home.heard("report", "report", "drop")
    assert [end.read_id for end in world.finished()] == [read_ids[1]]
    for report in range(2):
        world.home.judge(pb.VERDICT_VALID, report)
    assert {end.read_id for end in world.finished()} == {read_ids[0], read_ids[2]}


def test_a_home_without_a_verdict_is_awaited_for_a_bounded_time(world: World) -> None:
    read_id = world.reading()
    for rank in range(RANKS):
        world.ends(read_id, rank)
    assert world.home.heard("report")
    world.now += VERDICT_TIMEOUT + ANSWER_GRACE - 0.001
    world.look()
    assert world.finished() == []
    world.now += 0.001
    world.look()
    (end,) = world.finished()
    assert (end.error, end.confirmed) == (None, False)


def test_the_time_for_the_verdict_runs_from_the_report(world: World) -> None:
    """Between the end of a read and its report the machine may have been paused: only the home can know."""
    report = world.home.report

    def paused(*given: Any) -> None:
        world.now += VERDICT_TIMEOUT + ANSWER_GRACE
        report(*given)

    world.home.report = paused  # type: ignore[assignment, method-assign]
    read_id = world.reading()
    for rank in range(RANKS):
        world.ends(read_id, rank)
    assert world.home.heard("report")
    assert world.finished() == []
    world.home.judge(pb.VERDICT_EXPIRED)
    (end,) = world.finished()
    assert isinstance(end.error, TransferExpired)


def test_an_unreachable_home_is_not_awaited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        world.home.say("asked")
        raise RuntimeError("a bug")

    monkeypatch.setattr(world.home, "report", fails)
    read_id = world.reading()
    for rank in range(RANKS):
        world.ends(read_id, rank)
    assert world.home.heard("asked", "drop")
    (end,) = world.finished()
    assert (end.error, end.confirmed) == (None, False)


def test_an_unreachable_home_is_awaited_for_a_bounded_time(world: World) -> None:
    world.acquire("mine", "reference")
    world.now += TIMEOUT + RANKS_GRACE - 0.001
    world.look()
    assert world.reads.granted("mine") is None
    world.now += 0.001
    world.look()
    with pytest.raises(TransferStuck):
        world.reads.granted("mine")
    assert world.home.heard("gave up")
    assert world.meter.stats().outcomes["not_granted"] == 1


@pytest.mark.parametrize("why", ["cancelled", "expired"])
def test_a_read_that_failed_as_a_whole_reports_its_outcome_for_each_rank(world: World, why: str) -> None:
    read_id = world.reading()
    if why == "cancelled":
        assert world.reads.cancel("mine")
    else:
        world.now = world.lease.deadline
        world.look()
    for rank in range(RANKS):
        world.ends(read_id, rank)
    assert world.home.heard("report", "drop")
    outcome = pb.RANK_OUTCOME_CANCELLED if why == "cancelled" else pb.RANK_OUTCOME_EXPIRED
    assert [report.outcome for report in world.home.reports[0]] == [outcome] * RANKS


def test_a_lease_that_ends_stops_the_ranks_and_the_read_ends_with_them(world: World) -> None:
    read_id = world.reading()
    world.ends(read_id, 0)
    world.now = world.lease.deadline - 0.001
    world.look()
    assert world.reads.cancels() == []
    world.now = world.lease.deadline
    world.look()
    world.look()
    # Once.
    assert world.reads.cancels() == [read_id]
    assert world.finished() == []
    assert not world.free()
    world.ends(read_id, 1, "TransferCancelled")
    (end,) = world.finished()
    assert isinstance(end.error, TransferExpired)
    assert end.quiet
    assert world.free()


def test_a_rank_that_fails_stops_the_others_and_its_error_is_returned(world: World) -> None:
    read_id = world.reading()
    world.ends(read_id, 1, "TransferFailed", quiet=False)
    assert world.reads.cancels() == [read_id]
    world.ends(read_id, 0, "TransferCancelled", quiet=True)
    (end,) = world.finished()
    assert isinstance(end.error, TransferFailed)
    assert not end.quiet
    assert world.home.heard("report", "drop")
    outcomes = [report.outcome for report in world.home.reports[0]]
    assert outcomes == [pb.RANK_OUTCOME_CANCELLED, pb.RANK_OUTCOME_FAILED]
    assert not world.free()
    world.reads.collect(WorkerOutput(0, quiesced=(read_id,)))
    assert not world.free()
    world.reads.collect(WorkerOutput(1, quiesced=(read_id,)))
    assert world.reads.finished().quiesced == ("mine",)
    assert world.free()


def test_a_failed_read_returns_its_error_only_at_its_end(world: World) -> None:
    read_id = world.reading()
    world.ends(read_id, 1, "TransferFailed")
    with pytest.raises(WrongState, match="attach each request once"):
        world.reads.attach("mine", {"full": Blocks([1, 2], end_token=32)}, None, allow_overlap=False)
    # Its error is that of its end.
    assert world.reads.granted("mine") is not None
    world.ends(read_id, 0)
    (end,) = world.finished()
    assert isinstance(end.error, TransferFailed)


def test_the_first_error_is_returned_though_the_lease_ended_since(world: World) -> None:
    read_id = world.reading()
    world.ends(read_id, 0, "TransferFailed")
    world.now = world.lease.deadline + 1
    world.ends(read_id, 1)
    (end,) = world.finished()
    assert isinstance(end.error, TransferFailed)
    assert dict(+world.meter.stats().outcomes) == {"failed": 1}


def test_a_rank_that_became_quiet_does_not_end_the_read_for_the_others(world: World) -> None:
    read_id = world.reading()
    world.ends(read_id, 1, "TransferFailed", quiet=False)
    world.reads.collect(WorkerOutput(1, quiesced=(read_id, "of another engine")))
    assert not world.reads.finished()
    assert not world.free()
    world.ends(read_id, 0, "TransferCancelled")
    world.look()
    found = world.reads.finished()
    assert [end.quiet for end in found.reads] == [True]
    assert found.quiesced == ()
    assert world.free()


def test_a_read_is_attached_once_and_reports_of_unknown_reads_are_ignored(world: World) -> None:
    world.reading()
    with pytest.raises(WrongState, match="attach each request once"):
        world.reads.attach("mine", {"full": Blocks([1, 2], end_token=32)}, None, allow_overlap=False)
    world.ends("unknown", 0)
    assert world.finished() == []


def test_the_error_of_a_read_says_whether_its_blocks_are_quiet(world: World) -> None:
    read_id = world.reading()
    world.reads.cancel("mine")
    world.ends(read_id, 0, "TransferCancelled")
    world.ends(read_id, 1, "TransferStuck", quiet=False)
    (end,) = world.finished()
    assert isinstance(end.error, TransferCancelled)
    assert (end.quiet, end.error.quiet) == (False, False)
    world.reads.collect(WorkerOutput(1, quiesced=(read_id,)))
    assert end.error.quiet


def test_the_last_rank_that_fails_stops_no_other(world: World) -> None:
    read_id = world.reading()
    world.ends(read_id, 0)
    world.ends(read_id, 1, "TransferFailed")
    assert world.reads.cancels() == []
    (end,) = world.finished()
    assert isinstance(end.error, TransferFailed)


def test_a_rank_ends_a_read_once_and_only_ranks_that_exist_do(world: World) -> None:
    read_id = world.reading()
    for rank in (-1, RANKS):
        with pytest.raises(InvalidField, match="rank"):
            world.ends(read_id, rank)
    world.ends(read_id, 0)
    world.ends(read_id, 0, "TransferFailed")
    world.ends(read_id, 0)
    assert world.finished() == []
    world.ends(read_id, 1)
    assert world.home.heard("report")
    world.home.judge(pb.VERDICT_VALID)
    assert [end.error for end in world.finished()] == [None]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("holds", [False, True])
def test_workers_without_reports_are_awaited_for_a_bounded_time(
    worlds: Callable[..., World], *, holds: bool, at_once: bool
) -> None:
    world = worlds(hold_until_quiet=holds)
    read_id = world.reading()
    world.lease.renewed(BEGAN + TIMEOUT, BEGAN + 1, 1000.0, more=True)
    world.ends(read_id, 0)
    world.now = BEGAN + TIMEOUT - 0.001
    world.look()
    assert world.reads.cancels() == []
    world.now = BEGAN + TIMEOUT
    world.look()
    assert world.reads.cancels() == [read_id]
    world.now = BEGAN + TIMEOUT + RANKS_GRACE - 0.001
    world.look()
    assert not world.home.reports
    world.now += 0.001
    world.look()
    # The source does not wait for the silent rank.
    assert world.home.heard("report", "drop", "cancel")
    assert [report.rank for report in world.home.reports[0]] == [0]
    ended = world.finished()
    if not holds:
        (end,) = ended
        assert isinstance(end.error, TransferStuck)
        assert "did not end in time: rank 1 has not reported" in end.error.message
        assert end.error.values["ranks"] == "1"
        assert not end.quiet
    # Its blocks stay in quarantine until the rank has said that they are quiet.
    assert not world.free()
    world.ends(read_id, 1, "TransferCancelled", quiet=at_once)
    if not at_once:
        assert not world.free()
        assert not world.reads.finished()
        world.reads.collect(WorkerOutput(1, quiesced=(read_id,)))
    assert world.free()
    late = world.reads.finished()
    assert [end.quiet for end in late.reads] == ([True] if holds else [])
    assert late.quiesced == (() if holds else ("mine",))
