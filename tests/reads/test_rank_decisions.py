"""One rank's shares, moment by moment: which error is whose, and when a share has ended and is quiet (R4, R5, R10).

Sources and the transport do as a test says, since real ones do not fail at a moment that a test names.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sized
from functools import partial
from typing import Any

import pytest

from kvferry._clock import now
from kvferry._memory.access import StillCopying
from kvferry._memory.rank_memory import Tails
from kvferry._reads.rank_read import RankRead
from kvferry._transport.transfer import Transfer, TransferState
from kvferry.errors import (
    BadReference,
    Closed,
    DataLoss,
    KvferryError,
    LimitReached,
    TransferCancelled,
    TransferFailed,
    TransferStuck,
)
from tests.reads.played_rank import AGENT, BLOCKS, GRANTED, GROUP, LONG, PLANES, SOURCE, PlayedRank


@pytest.fixture
def world() -> Iterator[PlayedRank]:
    made = PlayedRank()
    yield made
    made.close()


def test_a_share_that_arrived_succeeds_and_is_quiet(world: PlayedRank) -> None:
    read = world.moving()
    world.transfers[0].landed(10)
    world.until(lambda: world.ended)
    assert (read.error, read.quiet, read.bytes) == (None, True, 10)
    assert (world.said, world.quiesced) == (["succeeded"], [])
    # What the lease is judged by: when the bytes were there, not when this was noticed.
    assert read.ended_at == world.transfers[0].ended_at


def test_a_failed_share_is_reported_at_once_and_its_quiet_once(world: PlayedRank) -> None:
    read = world.moving()
    world.transfers[0].fail(TransferFailed("the peer died"))
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferFailed)
    assert not read.quiet
    assert world.quiesced == []
    assert world.said == ["failed"]
    assert 0 < now() - read.ended_at < LONG
    world.transfers[0].fenced()
    world.until(lambda: world.quiesced)
    assert read.quiet
    world.reads.cancel(read)
    world.reads.close(now() + 20)
    assert (world.ended, world.quiesced) == ([read], [read])


def test_a_cancel_is_no_failure_of_its_source(world: PlayedRank) -> None:
    read = world.moving()
    world.reads.cancel(read)
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferCancelled)
    assert not read.quiet
    assert world.said == []


def test_an_overdue_share_ends_and_its_error_holds_when_it_is_quiet(world: PlayedRank) -> None:
    # A source that is known: to meet one may take longer.
    world.known_sources[SOURCE] = world.peer()
    read = world.moving(within=0.05)
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferStuck)
    assert now() >= read.order.deadline
    assert not read.quiet
    assert not read.error.quiet
    world.transfers[0].landed(10)
    world.until(lambda: world.quiesced)
    assert read.error.quiet
    # That it came in the end does not count.
    assert isinstance(read.error, TransferStuck)
    assert world.said == []


@pytest.mark.parametrize("how", ["cancelled", "overdue"])
def test_a_share_that_ended_during_its_handshake_is_not_begun(world: PlayedRank, how: str) -> None:
    read = world.start(within=0.05 if how == "overdue" else LONG)
    world.until(lambda: world.asked)
    if how == "cancelled":
        world.reads.cancel(read)
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferCancelled if how == "cancelled" else TransferStuck)
    assert read.quiet
    world.answer("a")
    following = world.start("b")
    world.answer("b")
    world.until(lambda: world.transfers)
    assert [transfer.label for transfer in world.transfers] == [following.order.read_id]


def test_a_share_that_was_quiet_when_it_was_stopped_never_writes(world: PlayedRank) -> None:
    """Its engine may have given its blocks to another request since."""
    read = world.start("a")
    expand, quiet = world.expand, list[bool]()

    def cancelled_meanwhile(*wanted: object) -> object:
        quiet.append(world.reads.cancel(read))
        return expand(*wanted)

    world.expand = cancelled_meanwhile  # type: ignore[method-assign]
    world.answer("a")
    world.until(lambda: world.ended)
    assert (quiet, world.transfers) == ([True], [])
    assert isinstance(read.error, TransferCancelled)


def test_a_share_that_is_stopped_while_its_transfer_begins_may_write(world: PlayedRank) -> None:
    read = world.start("a")
    begin, quiet = world.transfer, list[bool]()

    def cancelled_meanwhile(*parts: Any, **how: Any) -> Transfer:
        quiet.append(world.reads.cancel(read))
        return begin(*parts, **how)

    world.transfer = cancelled_meanwhile  # type: ignore[method-assign]
    world.answer("a")
    world.until(lambda: world.ended)
    assert quiet == [False]
    assert [transfer.state for transfer in world.transfers] == [TransferState.CANCELLED]
    assert isinstance(read.error, TransferCancelled)
    assert not read.quiet


def test_closed_rank_reads_begin_nothing_and_cancel_all_shares(world: PlayedRank) -> None:
    read = world.moving()
    world.reads.close(now() + 20)
    assert isinstance(read.error, TransferCancelled)
    with pytest.raises(Closed):
        world.start("late")
    assert world.quiesced == []
    world.transfers[0].landed(10)
    # A share that becomes quiet later is reported, too.
    assert world.quiesced == [read]


def test_a_share_that_reaches_the_loop_after_a_close_ends_without_a_transfer(world: PlayedRank) -> None:
    world.known_sources[SOURCE] = world.peer()
    held, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        goes_on.wait(30)

    world.loop.call(hold)
    assert held.wait(30)
    read = world.start("late")
    closing = threading.Thread(target=world.reads.close, args=(now() + 20,))
    closing.start()
    while not world.reads._closed:
        time.sleep(0.001)
    goes_on.set()
    closing.join(30)
    world.until(lambda: world.ended)
    assert isinstance(read.error, Closed)
    assert read.quiet
    assert world.transfers == []


def test_a_share_reads_what_was_granted_into_its_blocks_from_the_agents_of_its_source(world: PlayedRank) -> None:
    read = world.moving()
    assert world.expanded == [(GRANTED, BLOCKS, (3, 5))]
    (((peer, _),),) = world.parts
    assert peer is AGENT
    assert world.transfers[0].label == read.order.read_id
    # The lease is not this process's to judge.
    assert world.transfers[0].deadline == math.inf


def test_a_known_source_needs_no_handshake(world: PlayedRank) -> None:
    world.known_sources[SOURCE] = world.peer()
    world.start("a")
    world.until(lambda: world.transfers)
    assert world.asked == []


def test_a_failed_handshake_is_repeated_for_the_next_share(world: PlayedRank) -> None:
    world.answer("a", TransferFailed("no such source"))
    world.start("a")
    world.until(lambda: world.ended)
    world.answer("b")
    following = world.start("b")
    world.until(lambda: world.transfers)
    assert world.asked == ["a", "b"]
    assert not following.ended


@pytest.mark.parametrize("where", ["handshake", "expansion", "transport"])
@pytest.mark.parametrize("error", [RuntimeError("a bug"), BadReference("nonsense")], ids=["bug", "input"])
def test_an_error_before_the_read_is_the_error_of_the_share(world: PlayedRank, where: str, error: Exception) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise error

    if where == "expansion":
        world.expand = refuse  # type: ignore[method-assign]
    if where == "transport":
        world.transfer = refuse  # type: ignore[method-assign]
    world.answer("a", error if where == "handshake" else None)
    read = world.start("a")
    world.until(lambda: world.ended)
    if isinstance(error, KvferryError):
        assert read.error is error
    else:
        assert isinstance(read.error, TransferFailed)
        assert "RuntimeError('a bug')" in str(read.error)
    assert (read.quiet, read.bytes) == (True, 0)
    assert world.transfers == []


def test_a_share_ends_at_its_deadline_however_long_another_takes(world: PlayedRank) -> None:
    longer = world.moving()
    world.known_sources[SOURCE] = world.peer()
    first = world.start("b", within=0.2)
    world.until(lambda: world.ended)
    assert world.ended == [first]
    assert not longer.ended
    # The comparison is stopped, since its share has ended.
    assert [transfer.state for transfer in world.transfers] == [TransferState.MOVING, TransferState.CANCELLED]


def test_a_clock_that_leaps_ends_overdue_shares(world: PlayedRank) -> None:
    read = world.moving()
    # As after a suspend, which the sleep of a thread does not count.
    world.loop.leap = 2 * LONG
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferStuck)


def test_a_cancel_that_came_first_counts_though_all_bytes_have_arrived(world: PlayedRank) -> None:
    read = world.moving()
    goes_on = threading.Event()
    world.loop.call(lambda: goes_on.wait(30))
    world.reads.cancel(read)
    world.transfers[0].landed(10)
    goes_on.set()
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferCancelled)
    assert read.quiet
    assert world.said == []


def test_a_cancel_between_arrival_and_its_detection_counts(world: PlayedRank) -> None:
    read = world.moving()
    goes_on = threading.Event()
    world.loop.call(lambda: goes_on.wait(30))
    world.transfers[0].landed(10)
    # Nothing is under way, so its engine may use the blocks again at once.
    assert world.reads.cancel(read)
    goes_on.set()
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferCancelled)


def test_a_share_that_is_cancelled_before_its_first_step_ends(world: PlayedRank) -> None:
    goes_on = threading.Event()
    world.loop.call(lambda: goes_on.wait(30))
    read = world.start("a")
    assert world.reads.cancel(read)
    assert world.reads.cancel(read)
    goes_on.set()
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferCancelled)
    assert (world.ended, world.asked) == ([read], [])


def test_an_engine_whose_callback_raises_hinders_no_other(world: PlayedRank) -> None:
    asked = threading.Event()

    def refuse(_: RankRead) -> None:
        asked.set()
        raise RuntimeError("a bug of the engine")

    tell, world.tell_ended = world.tell_ended, refuse
    read = world.moving()
    world.transfers[0].fail(TransferFailed("the peer died"))
    assert asked.wait(30)
    world.transfers[0].fenced()
    world.until(lambda: world.quiesced)
    assert (read.ended, read.quiet) == (True, True)
    world.tell_ended = tell
    world.start("b", within=0.0)
    world.until(lambda: world.ended)


@pytest.fixture
def careful() -> Iterator[PlayedRank]:
    """A rank whose reads are verified."""
    made = PlayedRank(verifies=True)
    yield made
    made.close()


def test_arrived_blocks_are_compared_before_the_share_succeeds(careful: PlayedRank) -> None:
    read = careful.moving()
    compared = threading.Event()

    def verify(arrived: RankRead) -> None:
        with careful.changed:
            careful.verified.append(arrived)
            careful.changed.notify_all()
        assert compared.wait(30)

    careful.verify = verify
    careful.transfers[0].landed(10)
    careful.until(lambda: careful.verified)
    assert not read.ended
    compared.set()
    careful.until(lambda: careful.ended)
    assert read.error is None
    assert careful.verified == [read]
    assert read.granted == GRANTED


@pytest.mark.parametrize("error", [RuntimeError("a bug"), DataLoss("other bytes")], ids=["bug", "bytes"])
def test_blocks_that_differ_from_their_checksums_fail_the_share(careful: PlayedRank, error: Exception) -> None:
    def verify(_: RankRead) -> None:
        raise error

    careful.verify = verify
    read = careful.moving()
    careful.transfers[0].landed(10)
    careful.until(lambda: careful.ended)
    if isinstance(error, KvferryError):
        assert read.error is error
    else:
        assert isinstance(read.error, TransferFailed)
    assert read.quiet


@pytest.mark.parametrize("how", ["cancelled", "overdue"])
def test_blocks_of_an_ended_share_are_not_compared(careful: PlayedRank, how: str) -> None:
    stopped = threading.Event()

    def verify(arrived: RankRead) -> None:
        with careful.changed:
            careful.verified.append(arrived)
            careful.changed.notify_all()
        while not stopped.is_set():
            try:
                arrived.check()
            except TransferCancelled:
                stopped.set()

    careful.verify = verify
    read = careful.moving()
    careful.transfers[0].landed(10)
    careful.until(lambda: careful.verified)
    if how == "cancelled":
        careful.reads.cancel(read)
    else:
        careful.loop.pass_time(2 * LONG)
    careful.until(lambda: careful.ended)
    assert isinstance(read.error, TransferCancelled if how == "cancelled" else TransferStuck)
    assert read.quiet
    assert stopped.wait(30)
    # What is said of it later changes nothing.
    careful.known_sources[SOURCE] = careful.peer()
    careful.start("b", within=3 * LONG)
    careful.until(lambda: len(careful.transfers) == 2)
    assert careful.ended == [read]


def test_tails_of_a_failed_share_are_not_cleared(careful: PlayedRank, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = Tail(monkeypatch)

    def verify(_: RankRead) -> None:
        raise DataLoss("other bytes")

    careful.verify = verify
    careful.answer("a")
    read = careful.start("a", tails=Tails.ZERO)
    careful.until(lambda: careful.transfers)
    careful.transfers[0].landed(10)
    careful.until(lambda: careful.ended)
    assert isinstance(read.error, DataLoss)
    assert tail.cleared == []


def test_a_share_without_a_thread_to_compare_on_ends(careful: PlayedRank, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> threading.Thread:
        raise LimitReached("no thread", retry_after=1.0)

    read = careful.moving()
    monkeypatch.setattr("kvferry._loop.start_thread", refuse)
    careful.transfers[0].landed(10)
    careful.until(lambda: careful.ended)
    assert isinstance(read.error, LimitReached)


def have_come(listed: Sized, count: int) -> bool:
    return len(listed) == count


class Tail:
    """Clears tails as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cleared: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        monkeypatch.setattr("kvferry._reads.rank_reads.clear_tails", self)

    def __call__(self, *what: Any) -> None:
        self.cleared.append(what)
        if self.error is not None:
            raise self.error


def test_tails_are_cleared_after_arrival_and_only_where_asked(
    world: PlayedRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = Tail(monkeypatch)
    for number, (tails, good) in enumerate([(Tails.KEEP, True), (Tails.ZERO, False), (Tails.ZERO, True)], 1):
        world.answer("a")
        read = world.start("a", tails=tails)
        world.until(partial(have_come, world.transfers, number))
        assert tail.cleared == []
        if good:
            world.transfers[-1].landed(10)
        else:
            world.transfers[-1].fail(TransferFailed("the peer died"))
        world.until(partial(have_come, world.ended, number))
        assert (read.error is None) is good
    ((planes, groups, blocks, moved, _),) = tail.cleared
    assert (planes, groups, blocks) == (PLANES, {"full": GROUP}, BLOCKS)
    assert [one.destination.ids.tolist() for one in moved.values()] == [[7]]


@pytest.mark.parametrize(
    ("error", "quiet"),
    [(StillCopying("lost"), False), (RuntimeError("a bug"), True), (TransferFailed("no"), True)],
    ids=["still copying", "bug", "typed"],
)
def test_tails_that_are_not_cleared_fail_the_share(
    world: PlayedRank, monkeypatch: pytest.MonkeyPatch, error: Exception, *, quiet: bool
) -> None:
    tail = Tail(monkeypatch)
    tail.error = error
    world.answer("a")
    read = world.start("a", tails=Tails.ZERO)
    world.until(lambda: world.transfers)
    world.transfers[0].landed(10)
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferFailed)
    assert (read.quiet, read.error.quiet) == (quiet, quiet)
    # A caller that was about to stop the share gets the same answer.
    assert read.stop() is quiet
    assert read.wait_quiet(0) is quiet
    assert world.quiesced == []


@pytest.mark.parametrize("how", ["cancelled", "overdue"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_share_that_ends_while_its_tails_are_cleared_is_quiet_after_that(
    world: PlayedRank, monkeypatch: pytest.MonkeyPatch, how: str, *, lost: bool
) -> None:
    """A device that hangs holds up neither the share nor the loop, on which leases are renewed."""
    clearing, goes_on = threading.Event(), threading.Event()

    def clear(*_: object) -> None:
        clearing.set()
        assert goes_on.wait(30)
        if lost:
            raise StillCopying("lost")

    monkeypatch.setattr("kvferry._reads.rank_reads.clear_tails", clear)
    world.answer("a")
    read = world.start("a", tails=Tails.ZERO)
    world.until(lambda: world.transfers)
    world.transfers[0].landed(10)
    assert clearing.wait(30)
    if how == "cancelled":
        assert not world.reads.cancel(read)
    else:
        world.loop.pass_time(2 * LONG)
    world.until(lambda: world.ended)
    assert isinstance(read.error, TransferCancelled if how == "cancelled" else TransferStuck)
    assert not read.quiet
    assert not read.wait_quiet(0)
    assert world.quiesced == []
    goes_on.set()
    assert read.wait_quiet(30) is not lost
    if not lost:
        world.until(lambda: world.quiesced)
    assert world.quiesced == ([] if lost else [read])


def test_a_share_without_a_thread_to_clear_tails_on_ends(world: PlayedRank, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> threading.Thread:
        raise LimitReached("no thread", retry_after=1.0)

    world.answer("a")
    read = world.start("a", tails=Tails.ZERO)
    world.until(lambda: world.transfers)
    monkeypatch.setattr("kvferry._loop.start_thread", refuse)
    world.transfers[0].landed(10)
    world.until(lambda: world.ended)
    assert isinstance(read.error, LimitReached)
    assert read.quiet
