"""The reads of a scheduler, moment by moment: what counts, what is given up, and when blocks go back (R1, R4, R5).

The clock and the home answer as a test says, since no test can have a rank's report come at the very end of a lease.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, cast

import pytest

from kvferry import Blocks, EngineSpec, Group
from kvferry._control.acquire_request import Acquired
from kvferry._control.block_use import BlockUse
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.lease_holder import VERDICT_TIMEOUT, LeaseHolder
from kvferry._control.reader_lease import ReaderLease
from kvferry._reads.leased_reads import ANSWER_GRACE, RANKS_GRACE
from kvferry._reads.meters import ReadMeter
from kvferry._wire.publication import Told
from kvferry.engine.scheduler_reads import Reads
from kvferry.engine.values import RankEnd, ReadEnd, WorkerOutput
from kvferry.errors import (
    BadBlock,
    Closed,
    InvalidField,
    LimitReached,
    PublicationStale,
    TransferCancelled,
    TransferExpired,
    TransferFailed,
    TransferStuck,
    WrongState,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.engine.late_news import LateNews
from tests.support.loops import PlayedLoop
from tests.support.played_home import PlayedHome, Verdict

RANKS = 2
SPEC = EngineSpec("decode", (Group("full", block_tokens=16, num_blocks=32),), RANKS)
BLOCKS = {"full": Blocks([3, 4], end_token=32)}
BEGAN, TIMEOUT, LEASE = 1000.0, 60.0, 30.0


class World:
    """A scheduler's reads, and a clock that stands still."""

    def __init__(self, *, hold_until_quiet: bool = False, max_waiting: int = 4) -> None:
        self.loop = PlayedLoop(BEGAN)
        self.home = PlayedHome(self.loop)
        self.use = BlockUse(SPEC.groups)
        self.meter = ReadMeter()
        self.reads = Reads(
            self.loop,
            SPEC,
            cast(LeaseHolder, self.home),
            self.use.writes(),
            max_waiting,
            hold_until_quiet=hold_until_quiet,
            meter=self.meter,
        )
        self.lease = ReaderLease(b"l" * 16, BEGAN, LEASE, 10.0)
        self.numbers = count(1)

    @property
    def now(self) -> float:
        return self.loop.now()

    @now.setter
    def now(self, time: float) -> None:
        self.loop.still = time

    def answer(
        self, answer: Acquired | Exception | None = None, text: str = "reference", *, complete: bool = True
    ) -> None:
        source = pb.EngineRef(engine_id="prefill", incarnation=b"i" * 16)
        part = GrantedPart(dict(BLOCKS), Told(payload=b"payload"), complete=complete)
        granted = Acquired(self.lease, source, "theirs", part)
        self.home.answer(text, answer or granted)

    def acquire(self, request_id: str, reference: str) -> None:
        read_id = f"read {next(self.numbers)}"
        asked = self.home.request(reference, read_id, parties=RANKS, expected_reads=0, timeout=TIMEOUT)
        self.reads.acquire(request_id, asked)

    def stages(self) -> Counter[str]:
        """The number of reads in progress, by stage."""
        return +self.meter.stats().stages

    def granted(self, request: str = "mine", *, complete: bool = True) -> None:
        self.acquire(request, "reference")
        self.answer(complete=complete)
        self.look()
        assert self.stages()["granted"]

    def reading(self) -> str:
        """A read that all ranks have begun; its id."""
        self.granted()
        return self.reads.attach("mine", {"full": Blocks([20, 7], end_token=32)}, None, allow_overlap=False).read_id

    def three_reading(self) -> list[str]:
        """Three reads that all ranks have begun; their ids."""
        found = []
        for number in range(3):
            self.granted(f"request {number}")
            blocks = {"full": Blocks([10 * number + 10, 10 * number + 11], end_token=32)}
            found.append(self.reads.attach(f"request {number}", blocks, None, allow_overlap=False).read_id)
        return found

    def busy(self) -> threading.Event:
        """The loop does nothing else until the event is set."""
        free = threading.Event()
        self.loop.call(lambda: free.wait(30))
        return free

    def ends(self, read_id: str, rank: int, error: str = "", *, quiet: bool = True, size: int = 10) -> None:
        end = RankEnd(read_id, "mine", not error, quiet, size, error_name=error, message=error)
        self.reads.collect(WorkerOutput(rank, (end,) if end.ok else (), () if end.ok else (end,)))

    def look(self) -> None:
        """Have everything happen that is due."""
        self.loop.turn()

    def finished(self) -> list[ReadEnd]:
        self.look()
        return list(self.reads.finished().reads)

    def free(self) -> bool:
        """Whether another may write to the blocks."""
        try:
            self.use.pin({"full": Blocks([20, 7]).ids})
        except BadBlock:
            return False
        return True


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def world(**options: Any) -> World:
        made.append(World(**options))
        return made[-1]

    yield world
    for one in made:
        one.reads.close(20)
        one.loop.close()


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make()


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
    make: Callable[..., World], *, holds: bool, at_once: bool
) -> None:
    world = make(hold_until_quiet=holds)
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


@pytest.mark.parametrize("why", ["its lease", "its time"])
def test_a_grant_that_is_not_attached_in_time_is_refused_and_given_back(world: World, why: str) -> None:
    world.granted()
    if why == "its time":
        world.lease.renewed(BEGAN + TIMEOUT, BEGAN + 1, 1000.0, more=True)
    end = world.lease.deadline if why == "its lease" else BEGAN + TIMEOUT
    world.now = end - 0.001
    world.look()
    grant = world.reads.granted("mine")
    assert grant is not None
    assert grant.timeout == pytest.approx(BEGAN + TIMEOUT - world.now)
    world.now = end
    world.look()
    assert world.home.heard("drop", "cancel")
    # No worker has heard of it.
    assert world.reads.cancels() == []
    with pytest.raises(TransferExpired if why == "its lease" else TransferStuck):
        world.reads.attach("mine", {"full": Blocks([20, 7])}, None, allow_overlap=False)
    # It was told once, and is forgotten.
    with pytest.raises(WrongState, match="acquire it first"):
        world.reads.granted("mine")
    assert dict(+world.meter.stats().outcomes) == {"not_granted": 1}


def test_a_refusal_is_returned_once(world: World) -> None:
    world.acquire("mine", "reference")
    assert world.reads.granted("mine") is None
    with pytest.raises(WrongState, match="is waiting for its source"):
        world.reads.attach("mine", {}, None, allow_overlap=False)
    world.answer(PublicationStale("gone"))
    world.look()
    with pytest.raises(PublicationStale):
        world.reads.granted("mine")
    assert not world.stages()
    assert not world.reads.cancel("mine")


def test_news_names_the_requests_that_were_granted_or_refused_each_once(world: World) -> None:
    """News do not name waiting requests, so an engine need not ask for each in each step."""
    for request in ("granted", "refused", "cancelled", "waits"):
        world.acquire(request, request)
    assert world.reads.take_changed() == []
    world.answer(text="granted")
    world.look()
    world.answer(PublicationStale("gone"), text="refused")
    world.look()
    world.reads.cancel("cancelled")
    assert world.reads.take_changed() == ["granted", "refused"]
    assert world.reads.take_changed() == []


def test_news_forgets_a_request_that_is_given_up(world: World) -> None:
    """An engine that never asks for news has nothing piled up."""
    world.granted()
    world.reads.cancel("mine")
    assert world.reads.take_changed() == []


@pytest.mark.parametrize("quiet", [True, False])
def test_news_forgets_a_request_whose_read_has_ended(world: World, *, quiet: bool) -> None:
    read_id = world.reading()
    world.ends(read_id, 0, "TransferFailed", quiet=quiet)
    world.ends(read_id, 1)
    assert [end.request_id for end in world.finished()] == ["mine"]
    assert world.reads.take_changed() == []


def test_news_names_a_granted_request_whose_source_has_published_more(world: World) -> None:
    world.granted(complete=False)
    world.reads.take_changed()
    world.home.step("reference", GrantedPart({"full": Blocks([5], 32, 48)}, complete=False))
    world.look()
    assert world.reads.take_changed() == ["mine"]


def test_what_was_published_in_several_steps_between_two_looks_is_one_step_for_the_workers(world: World) -> None:
    world.granted(complete=False)
    world.reads.attach("mine", {"full": Blocks([20, 7, 9, 11], end_token=64)}, (0, 64), allow_overlap=False)
    world.home.step("reference", GrantedPart({"full": Blocks([5], 32, 48)}, complete=False))
    world.look()
    world.home.step("reference", GrantedPart({"full": Blocks([8], 48, 64)}, complete=True))
    world.look()
    (step,) = world.reads.grant_steps()
    (runs,) = step.granted
    assert (runs.blocks().ids.tolist(), runs.first_token, runs.end) == ([5, 8], 32, 64)
    assert step.last
    assert world.reads.grant_steps() == []


def test_ranks_get_the_lease_that_a_restarted_home_gave_before_the_read_was_attached(world: World) -> None:
    """With the former one they would be refused the checksums that they verify with."""
    world.granted()
    assert world.reads.granted("mine") is not None
    assert world.lease.acquired_again(b"n" * 16, BEGAN, BEGAN, LEASE)
    grant = world.reads.attach("mine", {"full": Blocks([20, 7], end_token=32)}, None, allow_overlap=False)
    assert grant.lease_id == b"n" * 16


def test_news_of_a_request_outlives_an_earlier_read_of_the_same_name(world: World) -> None:
    """The earlier one has failed, and becomes quiet only when the later one is granted already."""
    earlier = world.reading()
    world.ends(earlier, 0, "TransferFailed", quiet=False)
    world.ends(earlier, 1)
    world.look()
    world.reads.take_changed()
    world.granted()
    world.reads.collect(WorkerOutput(0, quiesced=(earlier,)))
    assert world.reads.take_changed() == ["mine"]


def test_waiting_reads_have_a_limit_and_granted_or_cancelled_ones_do_not_count(
    make: Callable[..., World],
) -> None:
    world = make(max_waiting=2)
    for request in ("one", "two"):
        world.acquire(request, request)
    with pytest.raises(LimitReached):
        world.acquire("three", "three")
    world.answer(text="one")
    world.look()
    world.reads.cancel("two")
    for request in ("three", "four"):
        world.acquire(request, request)
    with pytest.raises(LimitReached):
        world.acquire("five", "five")


def test_the_end_of_a_read_during_the_end_of_a_schedulers_wait_is_returned(world: World) -> None:
    read_id = world.reading()
    assert world.reads.news.wait(30.0)
    world.ends(read_id, 0)

    def ends() -> None:
        world.ends(read_id, 1, "TransferFailed")
        world.look()

    world.reads.news._told = LateNews(ends)
    assert world.reads.news.wait(0.0)


def test_a_waiting_scheduler_is_woken_by_a_grant_an_end_a_refusal_and_quiet(world: World) -> None:
    reads = world.reads
    assert not reads.news.wait(0.0)
    read_id = world.reading()
    assert reads.news.wait(30.0)
    assert not reads.news.wait(0.0)
    world.ends(read_id, 0)
    assert not reads.news.wait(0.0)
    world.ends(read_id, 1, "TransferFailed", quiet=False)
    assert reads.news.wait(30.0)
    assert world.finished()
    assert not reads.news.wait(0.0)
    reads.collect(WorkerOutput(1, quiesced=(read_id,)))
    assert reads.news.wait(30.0)
    assert reads.finished().quiesced == ("mine",)
    world.acquire("other", "other")
    world.answer(PublicationStale("gone"), "other")
    assert reads.news.wait(30.0)
    with pytest.raises(PublicationStale):
        reads.granted("other")


def test_deadlines_are_checked_again_and_again(world: World) -> None:
    for number in (1, 2):
        world.home.answers.clear()
        world.granted()
        # Nothing but the clock says that this has ended.
        world.now = world.lease.deadline
        assert world.home.heard(*("drop", "cancel") * number)
        with pytest.raises(TransferExpired):
            world.reads.granted("mine")
        world.lease = ReaderLease(b"m" * 16, world.now, LEASE, 10.0)


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


@pytest.mark.parametrize("granted", [False, True])
def test_a_cancel_before_the_read_gives_back_the_lease_it_has_or_gets(world: World, *, granted: bool) -> None:
    if granted:
        world.granted()
        assert world.reads.cancel("mine")
        assert world.home.heard("drop", "cancel")
    else:
        world.acquire("mine", "reference")
        world.answer()
        world.reads.cancel("mine")
        assert set(world.home.said) <= {"drop", "cancel"}
    assert not world.stages()
    assert world.finished() == []
    assert dict(+world.meter.stats().outcomes) == {"cancelled": 1}


def test_a_cancel_of_a_read_under_way_waits_for_the_ranks(world: World) -> None:
    read_id = world.reading()
    assert world.reads.cancel("mine")
    assert world.reads.cancel("mine")
    assert world.reads.cancels() == [read_id]
    assert world.finished() == []
    for rank in range(RANKS):
        world.ends(read_id, rank, "TransferCancelled")
    (end,) = world.finished()
    assert isinstance(end.error, TransferCancelled)
    assert world.free()


def test_waiting_reads_have_a_limit(make: Callable[..., World]) -> None:
    world = make(max_waiting=2)
    for name in ("one", "two"):
        world.acquire(name, name)
    with pytest.raises(WrongState, match="being read already"):
        world.acquire("two", "two")
    with pytest.raises(LimitReached):
        world.acquire("three", "three")
    world.answer(text="one")
    world.look()
    # What is granted waits no longer.
    world.acquire("three", "three")
    assert world.stages() == {"waiting": 2, "granted": 1}


def test_close_waits_until_waiting_reads_have_reported_to_their_homes(world: World) -> None:
    """An accepted lease pins its source until the home receives its end."""
    for request in ("mine", "another"):
        world.acquire(request, "reference")
    world.look()
    world.reads.close(20)
    assert world.home.said == ["gave up", "gave up", "closed"]


def test_close_ends_reads_under_way_and_gives_their_leases_back(world: World) -> None:
    """Ranks may still write, until their reports say otherwise."""
    reading = world.reading()
    world.granted("granted")
    world.acquire("waits", "nobody")
    world.look()
    world.reads.close(20)
    assert world.home.heard("gave up", *("drop", "cancel") * 2, "closed")
    (end,) = world.finished()
    assert (end.read_id, end.quiet, end.lost) == (reading, False, {"full": (20, 7)})
    assert isinstance(end.error, TransferCancelled)
    assert not world.free()
    with pytest.raises(TransferCancelled):
        world.reads.granted("granted")
    for rank in range(RANKS):
        world.ends(reading, rank, "TransferCancelled")
    assert world.reads.finished().quiesced == ("mine",)
    assert world.free()


def test_reads_whose_client_is_closed_end(world: World) -> None:
    """An engine that still asks for them would wait without end."""
    reading = world.reading()
    for rank in range(RANKS):
        world.ends(reading, rank)
    assert world.home.heard("report")
    world.acquire("waits", "nobody")
    world.look()
    world.loop.close()
    # The home has not said that its lease had ended.
    (end,) = world.reads.finished().reads
    assert (end.error, end.confirmed, end.quiet) == (None, False, True)
    with pytest.raises(TransferCancelled):
        world.reads.granted("waits")
    with pytest.raises(Closed):
        world.acquire("late", "nobody")
    world.reads.close(20)


def test_a_grant_that_cannot_be_decoded_ends_the_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(world.reads, "on_granted", fails)
    world.acquire("mine", "reference")
    world.answer()
    assert world.home.heard("drop", "cancel")
    world.look()
    with pytest.raises(TransferFailed, match="a bug"):
        world.reads.granted("mine")
