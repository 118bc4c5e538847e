"""A scheduler's reads until all ranks have begun: grants, refusals, their news, and limits; cancels, and the close."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry import Blocks
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.reader_lease import ReaderLease
from kvferry.engine.values import WorkerOutput
from kvferry.errors import (
    Closed,
    LimitReached,
    PublicationStale,
    TransferCancelled,
    TransferExpired,
    TransferFailed,
    TransferStuck,
    WrongState,
)
from tests.engine.late_news import LateNews
from tests.engine.played_reads import BEGAN, LEASE, RANKS, TIMEOUT, World


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
    worlds: Callable[..., World],
) -> None:
    world = worlds(max_waiting=2)
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


def test_waiting_reads_have_a_limit(worlds: Callable[..., World]) -> None:
    world = worlds(max_waiting=2)
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
