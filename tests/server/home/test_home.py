"""The home as a whole: deadlines that fire by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kvferry_server.domain.clock import BootClock
from kvferry_server.domain.publications import PublicationOutcome
from kvferry_server.domain.times import Times
from kvferry_server.domain.watch_feed import Feed, Numbered, Process, ReleaseEvent, Role
from kvferry_server.home.home import Home
from tests.support.parties import P2, SECRETS, D, FakeClock, P, ask, offer, registration

SCHEDULER = Process(P, Role.SCHEDULER)


def opened(home: Home) -> Feed:
    """Engine P with its one rank, within a turn."""
    feed = home.open_watch(SCHEDULER, SECRETS[P])
    home.sources.begin_snapshot(P)
    home.sources.end_snapshot(P, 0)
    home.register(registration(), SECRETS[P])
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


async def next_event(home: Home, feed: Feed) -> Numbered:
    with home.wakeups.watching(feed) as waker:
        while not feed.after(0):
            waker.clear()
            await waker.wait()
    return feed.after(0)[0]


async def test_deadlines_fire_by_themselves_also_ones_that_come_before_the_awaited_one() -> None:
    home = Home(BootClock(), Times(ttl=0.05, max_ttl=0.05, hold=0.05, final=60), "node:1")
    async with driven(home) as feed:
        with home.turn():
            home.sources.publish(P, offer())
            lease = home.lessor.grant(ask())
        told = await asyncio.wait_for(next_event(home, feed), 20)
    assert isinstance(told.event, ReleaseEvent)
    assert told.event.publication.outcome is PublicationOutcome.UNREAD
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
        # What a new home cannot know counts as long as it may last.
        assert home.reuse_after(successor.engine) == home.times.ttl - home.times.engine_ttl
    clock.pass_by(home.times.ttl)
    with home.turn():
        assert home.reuse_after(successor.engine) == 0
        assert not list(home.records.publications())
