"""One peer on one agent, moment by moment: reads that may still write, reads given up, and when (R4, R5, R10).

NIXL does not fail, stall or answer at a moment that a test names, so an agent that does as it is told stands in for it
here; what NIXL really does is in the tests of faults and of quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from kvferry._transport import peer_link
from kvferry._transport.nixl_agent import AgentInfo, HandleState, NixlError, ReadingAgent
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.peer_link import (
    CHECKS_AT_ONCE,
    COPIES,
    LATE,
    POLL_ABANDONED,
    POLL_FIRST,
    POLL_LAST,
    STALLED,
    Link,
    LinkState,
)
from kvferry._transport.transfer import (
    COPY_RATE,
    COPY_TIME,
    DESCRIPTOR_TIME,
    PeerWork,
    Transfer,
    TransferState,
    divide,
)
from kvferry._wire.authority import agent_name
from kvferry.errors import InvalidField, TransferFailed
from kvferry.planner.descriptors import Descriptors
from tests.transport.sources import raw

CHUNK = 1000
OPTIONS = NixlOptions(chunk_bytes=CHUNK, bytes_in_flight=3 * CHUNK, warm_up_timeout=5.0, fence_time=60.0)
INFO = AgentInfo("peer", b"", b"", ())
DONE, MOVING, FAILED = HandleState.DONE, HandleState.MOVING, "an error"


class Handle:
    """A read whose state the test sets."""

    def __init__(self, state: HandleState | str) -> None:
        self.state = state
        self.checks = 0
        self.posted = self.released = False
        self.spend: Callable[[], None] = lambda: None

    def post(self) -> HandleState:
        self.posted = True
        return self._said()

    def check(self) -> HandleState:
        self.checks += 1
        self.spend()
        return self._said()

    def release(self) -> None:
        self.released = True

    def _said(self) -> HandleState:
        if isinstance(self.state, str):
            raise NixlError(self.state)
        return self.state


class World:
    """A peer, its agent, and a clock that stands still."""

    def __init__(self, warm: HandleState | str = DONE) -> None:
        self.now = 100.0
        self.cpu = 0.0
        self.first = Handle(warm)
        self.handles: list[Handle] = []
        self.next: HandleState | str = MOVING
        self.removed: list[str] = []
        self.refusal: Exception | None = None
        self.tcp = True
        self.link = Link(INFO, cast(ReadingAgent, self), OPTIONS, self.clock, lambda: self.cpu)

    def clock(self) -> float:
        return self.now

    # The methods that a link calls on its agent.

    def add_peer(self, info: AgentInfo) -> None:
        pass

    def warm_up(self, peer: str) -> Handle:
        return self.first

    def over_tcp(self, peer: str) -> bool:
        return self.tcp

    def make(self, peer: str, chunk: Descriptors) -> Handle:
        if self.refusal is not None:
            raise self.refusal
        self.handles.append(Handle(self.next))
        return self.handles[-1]

    def remove_peer(self, name: str) -> None:
        self.removed.append(name)

    # The methods that a test calls.

    def transfer(self, size: int, deadline: float | None = None) -> Transfer:
        return Transfer("t", size, deadline, self.clock, lambda: None)

    def share(self, chunks: int, deadline: float | None = None) -> Transfer:
        """A transfer of this many chunks that waits for its turn."""
        transfer = self.transfer(chunks * CHUNK, deadline)
        self.link.queued.append(PeerWork(transfer, INFO, [raw([0], [0], [chunks * CHUNK])], self.now))
        return transfer

    def posted(self, chunks: int = 1, deadline: float | None = None) -> Transfer:
        """A transfer with everything under way."""
        transfer = self.share(chunks, deadline)
        for _ in range(chunks):
            assert self.link.post_next()
        assert not self.link.post_next()
        return transfer

    def poll(self, after: float = 1.0) -> bool:
        self.now += after
        return self.link.poll(self.now)


@pytest.fixture
def world() -> World:
    made = World()
    made.link.open()
    assert made.link.state is LinkState.READY
    return made


def test_a_peer_is_dropped_when_it_leaves_or_broke_and_nothing_is_left(world: World) -> None:
    link = world.link
    assert link.quiet
    assert not link.over
    link.leaving = True
    assert link.over
    waiting = world.share(1)
    assert not link.over
    assert link.post_next()
    world.now += 1
    # Asked again, it has nothing more: what is under way keeps the peer.
    assert not link.post_next()
    assert not link.queued
    assert not link.over
    world.handles[0].state = DONE
    assert world.poll()
    assert waiting.state is TransferState.DONE
    assert link.over
    assert world.handles[0].released


def test_a_first_read_under_way_may_write() -> None:
    world = World(MOVING)
    world.link.open()
    world.link.leaving = True
    assert not world.link.quiet
    assert not world.link.over
    world.first.state = DONE
    assert world.poll()
    assert world.link.over


@pytest.mark.parametrize("when", ["posted", "checked"])
def test_a_first_read_that_failed_is_fenced_by_the_end_of_the_agent_only(when: str) -> None:
    world = World(FAILED if when == "posted" else MOVING)
    waiting = world.share(1)
    world.link.open()
    if when == "checked":
        assert not world.link.lost
        world.first.state = FAILED
        assert world.poll()
    assert waiting.state is TransferState.FAILED
    assert world.link.state is LinkState.BROKEN
    assert world.link.lost
    checks = world.first.checks
    world.first.state = DONE
    # NIXL's answers after an error prove nothing.
    assert not world.poll()
    assert world.first.checks == checks
    assert world.link.next_poll() is None
    assert world.link.fence_at() is None
    assert not world.link.quiet
    assert not world.link.over
    world.link.fenced()
    assert world.link.over


def test_a_chunk_that_gave_an_error_is_not_checked_again_and_its_siblings_are(world: World) -> None:
    doomed, other = world.posted(), world.posted()
    broken, sound = world.handles
    waiting = world.share(1)
    broken.state = FAILED
    assert world.poll(0.1)
    # It takes no room any more.
    assert world.link.flowing(world.now) == CHUNK
    assert [doomed.state, waiting.state, other.state] == [
        TransferState.FAILED,
        TransferState.FAILED,
        TransferState.MOVING,
    ]
    assert waiting.quiet
    assert world.link.lost
    assert not world.link.post_next()
    broken.state = DONE
    assert world.link.next_poll() is not None
    assert not world.poll()
    assert (broken.checks, sound.checks) == (1, 2)
    sound.state = DONE
    assert world.poll()
    assert other.state is TransferState.DONE
    assert world.link.next_poll() is None
    assert not doomed.quiet
    assert not broken.released
    assert not world.link.over
    world.link.fenced()
    assert doomed.quiet
    assert world.link.over


def test_a_peer_without_an_answer_is_stuck_after_the_warm_up_and_the_fence_time() -> None:
    world = World(MOVING)
    world.link.open()
    assert world.link.fence_at() == 165.0
    assert not world.link.stuck(165.0)
    assert world.link.stuck(165.001)
    world.first.state = DONE
    assert world.poll()
    assert not world.link.stuck(1e6)
    assert world.link.fence_at() is None


def test_a_read_is_stuck_a_fence_time_after_its_transfer_has_ended(world: World) -> None:
    going_on, given_up = world.posted(), world.posted()
    assert not world.link.stuck(1e6)
    world.now = 200.0
    # While it goes on it is not given up, however late.
    assert world.link.fence_at() == 260.0
    given_up.cancel()
    assert not world.link.stuck(260.0)
    assert world.link.stuck(260.001)
    world.now = 300.0
    assert world.link.fence_at() == 360.0
    going_on.cancel()
    world.now = 330.0
    assert world.link.fence_at() == 360.0
    # One whose connection is gone is waited for no longer.
    world.handles[0].state = FAILED
    assert world.poll()
    assert world.link.fence_at() == 260.0
    world.handles[1].state = FAILED
    assert world.poll()
    assert world.link.fence_at() is None
    assert not world.link.stuck(1e6)


def test_a_chunk_that_a_card_moves_is_stuck_after_a_second() -> None:
    world = World()
    world.tcp = False
    world.link.open()
    world.posted().cancel()
    assert world.link.fence_at() == 101.0
    assert not world.link.stuck(101.0)
    assert world.link.stuck(101.001)


def test_a_share_waits_for_the_first_answer_from_when_it_came() -> None:
    world = World(MOVING)
    world.link.open()
    world.now = 101.0
    early = world.share(1)
    world.now = 103.0
    late = world.share(1)
    assert [world.link.answer_due(share) for share in world.link.queued] == [106.0, 108.0]
    world.link.settle(106.0)
    assert early.state is TransferState.PENDING
    world.link.settle(106.001)
    assert isinstance(early.error, TransferFailed)
    assert "no answer within 5 s" in early.error.message
    assert late.state is TransferState.PENDING
    assert [share.owner for share in world.link.queued] == [late]
    world.first.state = DONE
    assert world.poll()
    # The peer has answered: there is nothing to give up.
    world.link.settle(1e6)
    assert late.state is TransferState.PENDING


def test_a_peer_opened_after_a_share_came_has_its_whole_warm_up_time() -> None:
    world = World(MOVING)
    early = PeerWork(world.transfer(CHUNK), INFO, [], 90.0)
    world.link.open()
    assert world.link.answer_due(early) == 105.0


def test_chunks_under_way_are_at_least_two_and_no_more_than_allowed(world: World) -> None:
    first = world.share(8)
    assert [world.link.post_next() for _ in range(4)] == [True, True, True, False]
    assert first.chunks_in_flight == 3
    world.handles[0].state = DONE
    assert world.poll()
    assert [world.link.post_next() for _ in range(2)] == [True, False]
    assert first.chunks_in_flight == 3

    tight = World()
    tight.link._options = NixlOptions(chunk_bytes=CHUNK, bytes_in_flight=CHUNK)
    tight.link.open()
    tight.share(8)
    assert [tight.link.post_next() for _ in range(3)] == [True, True, False]


def test_a_post_over_tcp_that_is_done_at_once_does_not_count_as_copying(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_link, "COPIED", CHUNK)

    def post(state: HandleState, times: int) -> None:
        world.next = state
        world.share(times)
        for _ in range(times):
            assert world.link.post_next()

    for _ in range(3):
        post(DONE, COPIES - 1)
        post(MOVING, 1)
        assert not world.link.copies
        world.handles[-1].state = DONE
        assert world.poll()
    post(DONE, COPIES)
    assert world.link.copies


def test_chunks_are_not_posted_before_the_first_answer() -> None:
    world = World(MOVING)
    world.link.open()
    world.share(1)
    assert not world.link.post_next()
    assert world.handles == []


def test_transfers_take_turns_and_those_that_ended_lose_theirs(world: World) -> None:
    first, second, third = world.share(2), world.share(2), world.share(2)
    told: list[str] = []
    second.add_done_callback(lambda _: told.append("cancelled"))
    assert world.link.post_next()
    assert first.chunks_in_flight == 1
    second.cancel()
    assert world.link.post_next()
    assert told == ["cancelled"]
    assert [one.chunks_in_flight for one in (first, second, third)] == [1, 0, 1]


def test_a_transfer_that_ends_while_its_chunk_is_made_is_not_posted(world: World) -> None:
    transfer = world.share(1)
    make = world.make

    def late(peer: str, chunk: Descriptors) -> Handle:
        transfer.cancel()
        return make(peer, chunk)

    world.make = late  # type: ignore[method-assign]
    world.link.post_next()
    (handle,) = world.handles
    assert (handle.posted, handle.released) == (False, True)
    assert transfer.quiet
    assert world.link.quiet


@pytest.mark.parametrize("refusal", [InvalidField("descriptors", 1, "others"), RuntimeError("a bug")])
def test_a_chunk_that_cannot_be_made_fails_one_read_with_its_own_error(world: World, refusal: Exception) -> None:
    wrong, right = world.share(1), world.share(1)
    world.refusal = refusal
    assert world.link.post_next()
    world.refusal = None
    error = wrong.error
    if isinstance(refusal, InvalidField):
        assert isinstance(error, InvalidField)
        assert error.message == refusal.message
    else:
        assert isinstance(error, TransferFailed)
        assert "a bug" in str(error)
    assert wrong.quiet
    # The peer has done nothing.
    assert world.link.state is LinkState.READY
    world.next = DONE
    assert world.link.post_next()
    assert right.state is TransferState.DONE


@pytest.mark.parametrize(
    ("name", "called"),
    [
        (agent_name(b"key", "prefill", 3), "rank 3 of engine 'prefill'"),
        (agent_name(b"key", "team/prefill", 12), "rank 12 of engine 'team/prefill'"),
        ("kvferry.agent/1a2b/3", "peer 'kvferry.agent/1a2b/3'"),
        ("other/1a2b/prefill/3", "peer 'other/1a2b/prefill/3'"),
        ("source", "peer 'source'"),
    ],
)
def test_a_peer_is_called_by_its_rank_and_engine(name: str, called: str) -> None:
    world = World(FAILED)
    world.link = Link(AgentInfo(name, b"", b"", ()), cast(ReadingAgent, world), OPTIONS, world.clock)
    waiting = world.share(1)
    world.link.open()
    assert str(waiting.error).startswith(f"{called}: ")


def test_a_share_that_waits_for_room_keeps_its_turn_and_one_that_is_through_does_not(world: World) -> None:
    class Blocked(PeerWork):
        blocked = True

    waits = Blocked(world.transfer(CHUNK), INFO, [], world.now)
    through = PeerWork(world.transfer(CHUNK), INFO, [], world.now)
    world.link.queued.extend([waits, through])
    assert not world.link.post_next()
    assert list(world.link.queued) == [waits]


def test_short_descriptors_are_posted_so_many_at_a_time() -> None:
    options = NixlOptions(chunk_bytes=CHUNK, chunk_descriptors=4)
    short = raw(range(0, 20, 2), range(0, 20, 2), [1] * 10)
    assert [chunk.count for chunk in divide(short, options)] == [4, 4, 2]


@pytest.mark.parametrize("length", [64, 24_000, 1 << 20])
def test_a_chunk_whose_post_copies_takes_about_so_long_whatever_the_length_of_its_descriptors(length: int) -> None:
    places = range(0, 2 * length * int(3 * COPY_TIME / (DESCRIPTOR_TIME + length / COPY_RATE)), 2 * length)
    whole = raw(places, places, [length] * len(places))
    first, *_ = divide(whole, NixlOptions(chunk_bytes=1 << 30), copies=True)
    seconds = first.count * DESCRIPTOR_TIME + first.total_bytes / COPY_RATE
    assert 0.9 * COPY_TIME < seconds <= COPY_TIME


def test_a_chunk_whose_post_copies_has_up_to_four_times_the_bytes_of_others() -> None:
    places = range(0, 12 * CHUNK, 2 * CHUNK)
    whole = raw(places, places, [CHUNK] * 6)
    assert [chunk.total_bytes for chunk in divide(whole, OPTIONS, copies=True)] == [4 * CHUNK, 2 * CHUNK]


def test_a_read_that_is_cancelled_just_after_it_was_judged_is_reported(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine would wait for the read's deadline otherwise, and its staging slots would stay in use for ever."""
    transfer, ended = world.share(1), list[Transfer]()
    transfer.add_done_callback(ended.append)
    settle = Transfer.settle

    def cancelled_then(self: Transfer, now: float) -> bool:
        found = settle(self, now)
        self.cancel()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "settle", cancelled_then)
        world.link.settle(world.now)
    world.link.settle(world.now)
    assert ended == [transfer]
    assert not world.link.queued


def test_deadlines_of_chunks_under_way_are_judged(world: World) -> None:
    transfer = world.posted(deadline=110.0)
    world.link.settle(109.9)
    states = [transfer.state]
    world.now = 111.0
    world.link.settle(111.0)
    assert [*states, transfer.state] == [TransferState.MOVING, TransferState.EXPIRED]
    assert not transfer.quiet
    world.handles[0].state = DONE
    assert world.poll()
    assert transfer.state is TransferState.EXPIRED
    assert transfer.quiet


def pauses(world: World, polls: int) -> Sequence[float]:
    """Seconds between polls of a read that does not end."""
    found = []
    for _ in range(polls):
        due = world.link.next_poll()
        assert due is not None
        assert not world.link.poll(due - 1e-6)
        world.now = max(world.now, due)
        world.link.poll(world.now)
        after = world.link.next_poll()
        assert after is not None
        found.append(after - world.now)
    return found


def test_polls_back_off_while_nothing_arrives_and_come_often_again_after_news(world: World) -> None:
    waited_for, given_up = world.posted(), world.posted()
    due = world.link.next_poll()
    assert due is not None
    assert due <= world.now + POLL_FIRST
    given_up.cancel()
    found = pauses(world, int(LATE / POLL_FIRST) + 10)
    # Until the read is late it is polled often: polling moves a TCP read on.
    assert found[0] == pytest.approx(POLL_FIRST)
    assert sorted(found) == pytest.approx(found, abs=1e-9)
    # One transfer that is waited for is enough.
    assert found[-1] == pytest.approx(POLL_LAST)
    waited_for.cancel()
    assert pauses(world, 10)[-1] == pytest.approx(POLL_ABANDONED)
    world.handles[0].state = DONE
    assert pauses(world, 1)[0] == pytest.approx(POLL_FIRST)


def test_a_check_that_moved_bytes_is_followed_by_the_next_at_once(world: World) -> None:
    """As over TCP, where checks copy. They end when nothing more is there, or others have to have their turn."""
    transfer = world.posted(2)
    costs = iter([3e-6] * 2 + [100e-6, 3e-6] * 3 + [3e-6] * 2)

    def spend() -> None:
        world.cpu += next(costs, 100e-6)

    for handle in world.handles:
        handle.spend = spend
    world.now += POLL_FIRST
    assert not world.link.poll(world.now)
    assert (world.handles[0].checks, world.link.next_poll()) == (1, world.now + POLL_FIRST)
    world.now += POLL_FIRST
    assert not world.link.poll(world.now)
    assert (world.handles[0].checks, world.link.next_poll()) == (5, world.now + POLL_FIRST)
    world.now += POLL_FIRST
    assert not world.link.poll(world.now)
    assert (world.handles[0].checks, world.link.next_poll()) == (5 + CHECKS_AT_ONCE, world.now)
    # An arrived chunk is reported before the next check.
    world.handles[0].state = DONE
    assert world.link.poll(world.now)
    assert (world.handles[1].checks, transfer.chunks) == (6 + CHECKS_AT_ONCE, 1)


def test_a_stalled_peer_takes_no_room(world: World) -> None:
    world.posted(2)
    began = world.now
    assert world.link.flowing(began + STALLED - 0.001) == 2 * CHUNK
    assert world.link.flowing(began + STALLED) == 0
    world.now = began + 10
    world.handles[0].state = DONE
    assert world.poll(0)
    # It goes on.
    assert world.link.flowing(began + 10) == CHUNK
    world.handles[1].state = DONE
    assert world.poll()
    assert world.link.flowing(world.now) == 0


def test_reads_fail_with_their_agent_and_are_quiet_with_its_end(world: World) -> None:
    moving, waiting = world.posted(), world.share(1)
    world.link.fail_all(TransferFailed("the agent failed"))
    assert [one.state for one in (moving, waiting)] == [TransferState.FAILED] * 2
    assert [one.quiet for one in (moving, waiting)] == [False, True]
    world.link.fenced()
    assert moving.quiet
    assert world.link.quiet
    assert world.link.flowing(world.now) == 0


@pytest.mark.parametrize("fails", ["add_peer", "warm_up", ""])
def test_a_peer_is_removed_only_if_it_was_added(fails: str) -> None:
    world = World()

    def refuse(*_: Any) -> Any:
        raise NixlError("no")

    if fails:
        setattr(world, fails, refuse)
    world.link.open()
    assert world.link.over is bool(fails)
    world.link.drop()
    assert world.removed == ([] if fails == "add_peer" else [INFO.name])
