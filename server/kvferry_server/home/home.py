"""The home: engines, publications, leases and feeds on one clock, and the loop that acts on their deadlines.

Every access is a turn, `with home.turn(): ...`. It first acts on deadlines that have passed; then the caller uses
`engines`, `sources`, `lessor` or `records`, and does not wait; at the end it acts on deadlines again. The calls that
wait for what has changed go on after the turn, so they only see settled states.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from kvferry._wire.reference import format_reference
from kvferry.errors import ServerDraining
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Event, Feed, Process, Role
from kvferry_server.domain.lessor import Lessor
from kvferry_server.domain.limits import Limits
from kvferry_server.domain.publications import PublicationRecord
from kvferry_server.domain.records import Records
from kvferry_server.domain.registry import Registry
from kvferry_server.domain.routing import Routing
from kvferry_server.domain.sources import Sources
from kvferry_server.domain.times import Clock, Times
from kvferry_server.home.time_slices import TimeSlices

EVENT_BYTES = 160  # Bytes of an event that is kept or waits to be sent, estimated
FEED_BYTES = 2048  # Bytes of a process's feed beside its events, estimated. A rank's feed has hardly any events.
SHORTEST_SLEEP = 0.001  # Of the loop, in seconds: it must not spin when a timer fires a little early


class Waker(asyncio.Event):
    """The event on which one call waits. Clear it, look, then wait: a change after the look sets it and ends the
    wait."""

    async def wait(self, seconds: float | None = None) -> Literal[True]:
        """Wait until something has changed, or until `seconds` have passed."""
        # Before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes together with the change: a task that
        # cancels a call or the home's loop would wait for ever. When the time is over the waiter only looks.
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.set)
        try:
            return await super().wait()
        finally:
            if timer is not None:
                timer.cancel()


class Wakeups:
    """The wakers of calls, by topic. Belongs to one event loop."""

    def __init__(self) -> None:
        self._wakers: dict[Hashable, set[Waker]] = {}

    @contextmanager
    def watching(self, topic: Hashable) -> Iterator[Waker]:
        """Give a waker that every change of the topic sets while the context lasts."""
        waker = Waker()
        self._wakers.setdefault(topic, set()).add(waker)
        try:
            yield waker
        finally:
            wakers = self._wakers[topic]
            wakers.discard(waker)
            if not wakers:
                del self._wakers[topic]

    def wake(self, topic: Hashable) -> None:
        for waker in self._wakers.get(topic, ()):
            waker.set()

    def wake_all(self) -> None:
        for topic in self._wakers:
            self.wake(topic)


class Home(AbstractContextManager[float]):
    """One home. Not thread-safe: it belongs to the event loop that runs it. `advertise` is the address in references,
    at which others reach this home."""

    def __init__(self, clock: Clock, times: Times, advertise: str, limits: Limits | None = None) -> None:
        self.clock, self.times, self.limits = clock, times, limits or Limits()
        self.advertise = advertise
        self.epoch = secrets.token_bytes(16)  # Random per start
        self.wakeups = Wakeups()  # Topics: publications, reads that wait under a router's key, feeds
        # To be used within a `turn`.
        self.records = Records(clock, times, self.limits, self.wakeups.wake)
        self.memory, self.journal = self.records.memory, self.records.journal
        self.engines = Registry(self.records)
        self.sources = Sources(self.records)
        self.lessor = Lessor(self.records)
        self.routing = Routing(self.records, 1 + secrets.randbits(48))
        self.time_slices = TimeSlices()
        self.stopping = False  # The node server is about to end, and Watches with it
        self._driver = Waker()
        self._sleeps_until = -math.inf

    def turn(self) -> AbstractContextManager[float]:
        """Act on deadlines, then give the present in seconds on the home's clock; act on deadlines again at the end,
        also after an error."""
        return self  # The same for all turns: they have no state, and each call makes several.

    def __enter__(self) -> float:
        self.settle()
        return self.clock.now()

    def __exit__(self, *_: object) -> None:
        self.settle()
        if self.next_deadline() < self._sleeps_until:
            self._driver.set()

    def next_deadline(self) -> float:
        return self.records.deadlines.next_deadline()

    async def run(self) -> None:
        """Act on deadlines as they pass, until cancelled."""
        while True:
            self._driver.clear()
            with self.turn() as now:
                pass
            self._sleeps_until = self.next_deadline()
            sleep = self._sleeps_until - now
            await self._driver.wait(None if math.isinf(sleep) else max(SHORTEST_SLEEP, sleep))

    def drain(self) -> None:
        """Accept no new work. Renewals are still answered and reports taken. Waiting readers are answered DRAINING, and
        those who wait for the answer to a question, PREFIX_MISS.
        Watches get `draining` and go on: a source must learn of the reads that end meanwhile, or it would publish their
        blocks again after the restart, without readers. Idempotent."""
        if self.draining:
            return
        self.records.draining = True
        live = sum(self.journal.live_leases.values())
        pinned = len(self.journal.pinned)
        self.journal.events.write(logging.INFO, "draining", {"live_leases": live, "pinned": pinned})
        for engine in self.engines.all_engines():
            # Their answers would be refused, and sent again, with their blocks pinned.
            self.records.end_questions(engine)
            for feed in engine.feeds.values():
                feed.push(pb.Draining())
        self.wakeups.wake_all()

    def end_watches(self) -> None:
        """End the Watches of a draining home with DRAINING, once each has sent all its events."""
        self.stopping = True
        self.wakeups.wake_all()

    @property
    def draining(self) -> bool:
        return self.records.draining

    def check_not_draining(self) -> None:
        if self.draining:
            raise ServerDraining("this node server is draining: it serves again when kvferryd has been restarted")

    def open_watch(self, process: Process, secret: bytes, host: str = "") -> Feed:
        """Open a process's Watch, within a turn. Returns its feed, which serves this Watch and no older one. Raises
        `ServerDraining`; `LimitReached` if the engine takes too much memory; and as `Registry.open_engine` and
        `Registry.open_rank`."""
        known, is_scheduler = self.records.engines.get(process.engine), process.role is Role.SCHEDULER
        new = known is None or process not in known.feeds
        size = FEED_BYTES + (EVENT_BYTES * self.limits.watch_queue if is_scheduler else 0)
        if new or self.stopping:
            # In a drain only processes that had a Watch may open one.
            self.check_not_draining()
        if new:
            self.memory.check(process.engine, size)
        if is_scheduler:
            engine = self.engines.open_engine(process.engine, secret, host)
        else:
            engine = self.engines.open_rank(process.engine, secret, process.rank, process.node)
        if process not in engine.feeds:
            engine.feeds[process] = Feed(process, self.limits.watch_queue)
            engine.feed_bytes += size
            self.memory.take(process.engine, size)
        feed = engine.feeds[process]
        feed.current_watch += 1
        return feed

    def close_watch(self, process: Process) -> None:
        """Note that a process's Watch ended and that no newer one took over; within a turn."""
        if process.role is Role.RANK:
            self.engines.close_rank(process.engine, process.rank)
        else:
            self.engines.close_engine(process.engine)

    def need_resync(self, process: Process) -> bool:
        """Whether a process must send this home its state again: a scheduler its snapshot, a rank its registration."""
        engine = self.engines.find(process.engine)
        if process.role is Role.SCHEDULER:
            return engine.recovering
        return process.rank not in engine.ranks or process.rank in engine.lost_ranks

    def state(self, process: Process) -> list[Event]:
        """Return the full state for a process, as events, whatever it received before."""
        if process.role is Role.RANK:
            return []
        engine = self.engines.find(process.engine)
        lost = map(engine.rank_lost, sorted(engine.lost_ranks))
        return [*self.records.released(process.engine), *lost, *engine.router_keys.open_questions.values()]

    def reference(self, publication: PublicationRecord) -> str:
        return format_reference(
            pb.Reference(
                home=self.advertise,
                engine_id=publication.source.engine_id,
                incarnation=publication.source.incarnation,
                publication=publication.number,
                request_id=publication.request_id,
                key=self.records.key(publication),
            )
        )

    def settle(self) -> None:
        """Act on deadlines that have passed: begin or end a turn."""
        if self.next_deadline() <= self.clock.now():
            self.records.advance()
