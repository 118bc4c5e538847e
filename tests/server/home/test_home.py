"""The home as a whole: deadlines that fire without calls, and the events of its Watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress

import pytest

from kvferry._wire.outcomes import ReleaseOutcome
from kvferry.errors import LimitReached, WatchTakenOver
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Event, Feed, Process, Role
from kvferry_server.domain.limits import Limits
from kvferry_server.domain.publications import PublicationRecord
from kvferry_server.domain.times import BOOT, Times
from kvferry_server.domain.values import RevokeReason
from kvferry_server.home.home import EVENT_BYTES, Home
from kvferry_server.servicers.watch import watch
from tests.support.parties import P2, SECRETS, TIMES, D, E, FakeClock, P, arrived, ask, offer, registration

SCHEDULER = Process(P, Role.SCHEDULER)


def opened(home: Home) -> Feed:
    """Engine P with its one rank, within a turn."""
    feed = home.open_watch(SCHEDULER, SECRETS[P])
    home.sources.begin_snapshot(P)
    home.sources.end_snapshot(P, 0)
    home.engines.register(registration(), SECRETS[P])
    return feed


@asynccontextmanager
async def driven(home: Home) -> AsyncIterator[Feed]:
    """A home whose loop runs, with an engine of one rank."""
    driver = asyncio.create_task(home.run())
    await asyncio.sleep(0)
    with home.turn():
        feed = opened(home)
    try:
        yield feed
    finally:
        driver.cancel()
        with suppress(asyncio.CancelledError):
            await driver


async def next_event(home: Home, feed: Feed) -> Event:
    with home.wakeups.watching(feed) as waker:
        while not feed.after(0):
            waker.clear()
            await waker.wait()
    return feed.after(0)[0][1]


async def test_deadlines_fire_without_calls_and_also_before_the_awaited_deadline() -> None:
    home = Home(BOOT, Times(ttl=0.05, max_ttl=0.05, hold=0.05, final=60), "node:1")
    async with driven(home) as feed:
        with home.turn():
            home.sources.publish(P, offer())
            lease = home.lessor.grant(ask())
        told = await asyncio.wait_for(next_event(home, feed), 20)
    assert isinstance(told, PublicationRecord)
    assert told.outcome is ReleaseOutcome.UNREAD
    assert not lease.live


async def test_an_idle_home_sleeps() -> None:
    class CountingClock(FakeClock):
        asked = 0

        def now(self) -> float:
            self.asked += 1
            return super().now()

    clock = CountingClock()
    home = Home(clock, Times(), "node:1")
    async with driven(home):
        for _ in range(10):
            await asyncio.sleep(0)
        before = clock.asked
        for _ in range(1000):
            await asyncio.sleep(0)
        assert clock.asked == before


async def test_a_predecessor_ends_before_its_successor_begins() -> None:
    clock = FakeClock()
    home = Home(clock, Times(), "node:1")
    with home.turn():
        opened(home)
        home.sources.publish(P, offer())
        lease = home.lessor.grant(ask(reader=D))
        home.close_watch(SCHEDULER)
    clock.pass_by(home.times.engine_ttl)
    successor = Process(P2, Role.SCHEDULER)
    with home.turn():
        home.open_watch(successor, SECRETS[P2])
        assert lease.live
        # Leases that a new home does not know count as long as they may last.
        assert home.engines.reuse_after(successor.engine) == home.times.ttl - home.times.engine_ttl
    clock.pass_by(home.times.ttl)
    with home.turn():
        assert home.engines.reuse_after(successor.engine) == 0
        assert not arrived(home.records)


async def test_leases_on_an_engine_that_stops_in_order_run_to_their_ends() -> None:
    home = Home(FakeClock(), TIMES, "node:1")
    with home.turn():
        opened(home)
        home.sources.publish(P, offer())
        lease = home.lessor.grant(ask(reader=D))
        home.engines.retire(P)
    with home.turn():
        # The engine's memory stays unchanged for as long: no reader has to stop.
        assert home.lessor.renew(lease.lease_id, D).revoked is RevokeReason.ABORTED
        assert lease.live


async def test_a_rank_that_is_back_before_its_readers_ask_was_not_lost() -> None:
    clock = FakeClock()
    home = Home(clock, TIMES, "node:1")
    rank = Process(P, Role.RANK, 0)
    with home.turn():
        opened(home)
        home.open_watch(rank, SECRETS[P])
        home.sources.publish(P, offer())
        lease, other = (home.lessor.grant(ask(reader=reader)) for reader in (D, E))
        home.close_watch(rank)
    clock.pass_by(TIMES.engine_ttl)
    with home.turn():
        assert home.lessor.renew(other.lease_id, E).revoked is RevokeReason.SOURCE_LOST
    with home.turn():
        home.open_watch(rank, SECRETS[P])
        home.engines.register(registration(), SECRETS[P])
        late = home.lessor.grant(ask(reader=E, name="late"))
    clock.pass_by(1.0)
    with home.turn():
        for granted, reader in ((lease, D), (late, E)):
            assert home.lessor.renew(granted.lease_id, reader).revoked is None
            assert granted.remaining(clock.now()) == TIMES.ttl


async def test_full_state_beside_an_unfinished_one_needs_memory() -> None:
    home = Home(FakeClock(), TIMES, "node:1", Limits(memory=1 << 20, engine_memory=0))
    with home.turn():
        opened(home)
        for number in (1, 2, 3):
            home.sources.publish(P, offer(number, last=True))
            home.sources.abort(P, number)
    async with AsyncExitStack() as stack:

        async def again() -> AsyncGenerator[pb.WatchResponse, None]:
            stream = watch(home, SCHEDULER, SECRETS[P], b"", 0)
            await stack.enter_async_context(aclosing(stream))
            assert (await anext(stream)).opened.resumed is False
            return stream

        held = home.memory.held(P)
        first = await again()
        assert (await anext(first)).HasField("released")
        assert home.memory.held(P) == held + 3 * EVENT_BYTES
        second = await again()
        assert (await anext(second)).HasField("released")
        assert home.memory.held(P) == held + 6 * EVENT_BYTES
        home.memory.take(E, (1 << 20) - home.memory.used - 100)
        third = await again()
        with pytest.raises(LimitReached, match="memory"):
            await anext(third)
        for taken_over in (first, second):
            with pytest.raises(WatchTakenOver):
                await anext(taken_over)
        assert home.memory.held(P) == held
        # A process to which no full state is being sent is never refused one.
        last = await again()
        assert [(await anext(last)).WhichOneof("event") for _ in range(4)] == ["released"] * 3 + ["synced"]
        assert home.memory.held(P) == held


async def test_events_dropped_while_the_full_state_is_sent_are_not_lost() -> None:
    home = Home(FakeClock(), TIMES, "node:1", Limits(watch_queue=2))

    def released(*numbers: int) -> None:
        for number in numbers:
            with home.turn():
                home.sources.publish(P, offer(number, last=True))
                home.sources.abort(P, number)

    with home.turn():
        opened(home)
    async with aclosing(watch(home, SCHEDULER, SECRETS[P], b"", 0)) as stream:
        assert (await anext(stream)).opened.resumed is False
        assert (await anext(stream)).HasField("synced")
        released(1, 2, 3)
        assert (await anext(stream)).lagged.dropped == 1
        assert (await anext(stream)).HasField("released")
        released(4, 5, 6)
        rest = [await anext(stream) for _ in range(10)]
    assert [message.WhichOneof("event") for message in rest] == [
        *["released"] * 2,
        "synced",
        "lagged",
        *["released"] * 6,
    ]
