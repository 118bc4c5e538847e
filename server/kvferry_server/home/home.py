"""The home: engines, leases and events on one clock, and the loop that drives their deadlines.

Everything happens in turns, `with home.turn(): ...`: time is brought up to the present, something is asked of `engines`
or `lessor`, and what that did to others is passed on. Between turns nothing is pending, so that streams see only
settled states.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvferry._wire.reference import format_reference
from kvferry.errors import ServerDraining
from kvferry.v1 import kv_transfer_pb2
from kvferry_server.domain.clock import Clock
from kvferry_server.domain.endings import Released
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.ledger import Standing
from kvferry_server.domain.lessor import SLICE, Lessor
from kvferry_server.domain.limits import Limits
from kvferry_server.domain.publications import PublicationRecord
from kvferry_server.domain.registrations import Registration
from kvferry_server.domain.registry import Engine, EngineDied, EngineGone, RankDied, Registry
from kvferry_server.domain.shares import Memory
from kvferry_server.domain.times import Times
from kvferry_server.domain.watch_feed import Draining, Event, Feed, Process, PublicationReleased, RankLost, Role
from kvferry_server.home.wakeups import Waker, Wakeups

EVENT_BYTES = 160
"""About what an event takes in memory while it is kept, or waits to be told."""

FEED_BYTES = 2048
"""About what the feed of a process takes in memory beside its events. A rank's has next to none."""

SHORTEST_SLEEP = 0.001
"""Seconds: a timer that fires a little early must not spin."""


class Home:
    """One home. Belongs to the event loop that runs it; nothing here is thread-safe.

    Args:
        clock: all time comes from it.
        times: the durations in force.
        advertise: the address to put into references, as others reach this home.
        limits: what it holds at most.

    Attributes:
        epoch: 16 bytes, random per start.
        engines, lessor: the domain; to be asked within a `turn`.
        memory: what they and the events take.
        wakeups: topics are publications and feeds.
        draining: no new work is taken.
    """

    def __init__(self, clock: Clock, times: Times, advertise: str, limits: Limits | None = None) -> None:
        self.clock = clock
        self.times = times
        self.advertise = advertise
        self.limits = limits or Limits()
        self.epoch = secrets.token_bytes(16)
        self.memory = Memory(self.limits.memory, self.limits.engine_memory, times.renew_every)
        self.engines = Registry(clock, times, self.limits, self.memory)
        self.lessor = Lessor(clock, times, self.limits, self.memory)
        self.wakeups = Wakeups()
        self.draining = False
        self._started = clock.now()
        self._feeds: dict[Process, Feed] = {}
        self._feed_sizes: dict[EngineRef, int] = {}
        self._driver = Waker()
        self._sleeps_until = -math.inf

    @contextmanager
    def turn(self) -> Iterator[float]:
        """Gives the present. Whatever is done within takes effect when it is left, also by an error."""
        self._settle()
        try:
            yield self.clock.now()
        finally:
            self._settle()
            if self.next_deadline() < self._sleeps_until:
                self._driver.ring()

    def next_deadline(self) -> float:
        """When the next turn is due, on the home's clock."""
        return min(self.engines.next_deadline(), self.lessor.next_deadline())

    async def run(self) -> None:
        """Drive the deadlines until cancelled. Sleeps until the next one is due."""
        while True:
            self._driver.clear()
            with self.turn() as now:
                pass
            self._sleeps_until = self.next_deadline()
            sleep = self._sleeps_until - now
            await self._driver.wait(None if math.isinf(sleep) else max(SHORTEST_SLEEP, sleep))

    def drain(self) -> None:
        """Take no new work; renewals are answered and reports taken. Streams say so and end with DRAINING.
        Idempotent."""
        if self.draining:
            return
        self.draining = True
        self.lessor.drain()
        for feed in self._feeds.values():
            feed.push(Draining())
        self.wakeups.wake_all()

    def check_taking(self) -> None:
        """Raise `ServerDraining` once no new work is taken."""
        if self.draining:
            raise ServerDraining("this node server is draining")

    # An engine's processes.

    def open_watch(self, process: Process, secret: bytes, peer: str = "") -> Feed:
        """A process's Watch opens, within a turn. Errors as `Registry.open_engine` or `Registry.open_rank`, and
        `LimitReached`: the engine takes too much memory."""
        size = FEED_BYTES
        if process.role is Role.SCHEDULER:
            size += EVENT_BYTES * self.limits.watch_queue
        if process not in self._feeds:
            self.memory.check(process.engine, size)
        if process.role is Role.SCHEDULER:
            engine = self.engines.open_engine(process.engine, secret, peer)
            # The end of a predecessor comes before the beginning of its successor.
            self._settle()
            self.lessor.open(engine.ref, secret)
        else:
            self.engines.open_rank(process.engine, secret, process.rank, process.node)
        feed = self._feeds.get(process)
        if feed is None:
            feed = self._feeds[process] = Feed(process, self.limits.watch_queue)
            self.memory.take(process.engine, size)
            self._feed_sizes[process.engine] = self._feed_sizes.get(process.engine, 0) + size
        return feed

    def close_watch(self, process: Process) -> None:
        """The Watch that a process had ended, and no newer one took over; within a turn."""
        if process.role is Role.RANK:
            self.engines.close_rank(process.engine, process.rank)
        elif process in self._feeds:
            self.engines.close_engine(process.engine)
            self.lessor.lose(process.engine)

    def register(self, registration: Registration, secret: bytes) -> Engine:
        """Take a rank's cache, within a turn; returns its engine. Errors as `Registry.register`."""
        engine = self.engines.register(registration, secret)
        self.lessor.set_groups(registration.engine, registration.groups)
        return engine

    def acknowledge(self, source: EngineRef, numbers: Collection[int]) -> None:
        """A source knows of these releases, within a turn."""
        self.lessor.acknowledge(source, numbers)
        feed = self._feeds.get(Process(source, Role.SCHEDULER))
        if feed is not None:
            feed.acknowledged(numbers)

    def reuse_after(self, engine: EngineRef) -> float:
        """Seconds until the last lease on older incarnations has ended (PROTOCOL, A source that restarts over the same
        memory).

        A home that has been up for less than max_ttl does not know them; its predecessor granted none after this one
        started. An older incarnation that still seems to live may be granted more, until it is found to be dead.
        """
        if self.engines.has_rival(engine):
            return self.times.final
        unknown_until = self._started + self.times.max_ttl
        return max(0.0, max(self.lessor.others_until(engine), unknown_until) - self.clock.now())

    def need_resync(self, process: Process) -> bool:
        """Whether a process has to tell this home again what it is: its snapshot, or its rank's registration."""
        if process.role is Role.SCHEDULER:
            return self.lessor.recovering(process.engine)
        engine = self.engines.find(process.engine)
        return process.rank not in engine.ranks or process.rank in engine.lost_ranks

    def state(self, process: Process) -> list[Event]:
        """What a process has to know, whatever it was told before."""
        if process.role is Role.RANK:
            return []
        engine = self.engines.find(process.engine)
        released = self.lessor.released(process.engine)
        return [
            *(PublicationReleased(publication) for publication in released),
            *(
                RankLost(rank, engine.nodes.get(rank, ""), engine.lost_with_node(rank))
                for rank in sorted(engine.lost_ranks)
            ),
        ]

    def reference(self, publication: PublicationRecord) -> str:
        """The reference of a publication."""
        return format_reference(
            kv_transfer_pb2.Reference(
                home=self.advertise,
                engine_id=publication.source.engine_id,
                incarnation=publication.source.incarnation,
                publication=publication.number,
                request_id=publication.request_id,
                key=self.lessor.key(publication),
            )
        )

    # Within.

    def _settle(self) -> None:
        self.engines.advance()
        for happened in self.engines.take_effects():
            if isinstance(happened, EngineDied):
                self.lessor.end_engine(happened.engine, Standing.DEAD)
            elif isinstance(happened, EngineGone):
                self.lessor.end_engine(happened.engine, Standing.REPLACED)
                self._drop_feeds(happened.engine)
            elif isinstance(happened, RankDied):
                lost = RankLost(happened.rank, happened.node, happened.node_lost)
                self._push(Process(happened.engine, Role.SCHEDULER), lost)
        self.lessor.advance(SLICE)
        for change in self.lessor.take_effects():
            if isinstance(change, Released):
                scheduler = Process(change.publication.source, Role.SCHEDULER)
                self._push(scheduler, PublicationReleased(change.publication))
            else:
                self.wakeups.wake(change.publication)

    def _push(self, process: Process, event: Event) -> None:
        feed = self._feeds.get(process)
        if feed is not None:
            feed.push(event)
            self.wakeups.wake(feed)

    def _drop_feeds(self, engine: EngineRef) -> None:
        for process in [process for process in self._feeds if process.engine == engine]:
            del self._feeds[process]
        self.memory.give(engine, self._feed_sizes.pop(engine, 0))
