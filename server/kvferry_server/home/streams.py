"""The streams of the contract, and the poll that stands for one, as values: what a reader of blocks, and what a process
of an engine, is told and when."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.errors import InvalidField, PublicationTimeout, ServerDraining, WatchTakenOver
from kvferry_server.domain.limits import check_limit
from kvferry_server.domain.publications import Lease, PublicationRecord, PublicationStage
from kvferry_server.domain.reads import Ask, RevokeReason
from kvferry_server.domain.steps import PublicationStep
from kvferry_server.domain.watch_feed import Feed, Numbered, Process
from kvferry_server.home.home import EVENT_BYTES, Home
from kvferry_server.home.wakeups import Waker


@dataclass(frozen=True, slots=True, eq=False)
class Accepted:
    """A lease was granted, or is still had."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Completed:
    """All blocks were sent."""

    payload: bytes
    steps: int


@dataclass(frozen=True, slots=True)
class Revoked:
    """Advice to stop."""

    reason: RevokeReason


STREAMS_CUT_OFF = 8
"""Streams of one lease whose readers have gone, as this server has not seen yet."""

ReadMessage: TypeAlias = Accepted | PublicationStep | Completed | Revoked


@dataclass(frozen=True, slots=True)
class Opened:
    """A Watch is open."""

    resumed: bool


@dataclass(frozen=True, slots=True)
class Synced:
    """The full state was told."""

    need_resync: bool


@dataclass(frozen=True, slots=True)
class Lagged:
    """Events were dropped; the full state follows."""

    dropped: int


WatchMessage: TypeAlias = Opened | Numbered | Synced | Lagged


async def read_blocks(home: Home, ask: Ask, wait: float) -> AsyncGenerator[ReadMessage, None]:
    """Lease a publication and tell its blocks as they come, until the lease ends. Leaving early ends nothing.

    Args:
        home: of the source.
        ask: what is asked.
        wait: seconds to wait for a publication that has not come.

    Raises:
        PublicationTimeout: it did not come.
        KvferryError: all that `Lessor.grant` raises.
    """
    waits_until = home.clock.now() + wait
    with _reading(home, ask) as (lease, waker):
        yield Accepted(lease)
        untold = _Untold(lease)
        while True:
            waker.clear()
            for message in untold.take():
                yield message
            if not lease.live:
                return
            awaited = lease.publication.stage is PublicationStage.AWAITED
            left = _left(home, lease, waits_until, wait)
            await waker.wait(left if awaited else None)


async def poll_blocks(
    home: Home, ask: Ask, wait: float, lease_id: bytes, next_step: int
) -> AsyncGenerator[ReadMessage, None]:
    """Tell what `read_blocks` tells, to a reader who has some of it, and end as soon as something was told, or when the
    wait is over. Leaving early ends nothing.

    Args:
        home: of the source.
        ask: what is asked.
        wait: seconds to wait for something to tell.
        lease_id: of the lease that the reader has; empty, or of another one: it is told the lease, and all steps.
        next_step: first step that it has not been told under that lease.

    Raises:
        InvalidField: the reader has steps that there are not.
        PublicationTimeout: the publication did not come.
        LeaseEnded: the lease has ended.
        KvferryError: all that `Lessor.grant` raises.
    """
    waits_until = home.clock.now() + wait
    with _reading(home, ask, lease_id) as (lease, waker):
        told = not secrets.compare_digest(lease_id, lease.lease_id)
        if told:
            next_step = 0
            yield Accepted(lease)
        there = len(lease.publication.steps)
        if next_step > there:
            raise InvalidField("next_step", next_step, f"at most {there}, the steps there are")
        untold = _Untold(lease, next_step)
        while True:
            waker.clear()
            for message in untold.take():
                told = True
                yield message
            if told:
                return
            if not lease.live and not lease.publication.step_count:
                raise _timeout(lease.publication, wait)
            lease.check_replay(ask)
            left = _left(home, lease, waits_until, wait)
            if left <= 0:
                return
            await waker.wait(left)


async def watch(
    home: Home, process: Process, secret: bytes, resume_epoch: bytes, resume_sequence: int, peer: str = ""
) -> AsyncGenerator[WatchMessage, None]:
    """Be a process's Watch: its full state, or what came after `resume_sequence`, then events as they happen.

    Raises:
        WatchTakenOver: a newer Watch of the process has come.
        ServerDraining: after it was told.
        KvferryError: all that `Home.open_watch` raises.
    """
    with home.turn():
        home.check_taking()
        feed = home.open_watch(process, secret, peer)
        holder = feed.take_over()
        home.wakeups.wake(feed)
        told = resume_sequence
        resumed = resume_epoch == home.epoch and feed.dropped_after(told) == 0
        # A home that needs a resync could not say so in a resumed stream, which has no `synced`.
        resumed = resumed and not home.need_resync(process)
    try:
        yield Opened(resumed)
        if not resumed:
            told = feed.sequence
            async with aclosing(_full_state(home, feed, holder)) as messages:
                async for message in messages:
                    yield message
        with home.wakeups.watching(feed) as waker:
            while True:
                waker.clear()
                dropped = feed.dropped_after(told)
                if dropped:
                    yield Lagged(dropped)
                    told = feed.sequence
                    async with aclosing(_full_state(home, feed, holder)) as messages:
                        async for message in messages:
                            yield message
                for numbered in feed.after(told):
                    _check_holder(feed, holder)
                    told = numbered.sequence
                    yield numbered
                _check_holder(feed, holder)
                if feed.after(told):
                    continue
                if home.draining:
                    raise ServerDraining("this node server is draining")
                await waker.wait()
    finally:
        # A stream that drain has ended says nothing about its process.
        if feed.holder == holder and not home.draining:
            with home.turn():
                home.close_watch(process)


async def _full_state(home: Home, feed: Feed, holder: int) -> AsyncGenerator[WatchMessage, None]:
    process = feed.process
    events = home.state(process)
    size = EVENT_BYTES * len(events)
    if feed.tellings:
        # A Watch that was taken over may not take what it is told. The first is never refused: an engine dies without.
        home.memory.check(process.engine, size)
    feed.tellings += 1
    try:
        with home.memory.holding(process.engine, size):
            for event in events:
                _check_holder(feed, holder)
                yield Numbered(0, event)
    finally:
        feed.tellings -= 1
    yield Synced(home.need_resync(process))


@contextmanager
def _reading(home: Home, ask: Ask, lease_id: bytes = b"") -> Iterator[tuple[Lease, Waker]]:
    """A reader has a lease, and waits for what there is to tell of it. Who shows its id goes on whatever has become of
    the source, as in a stream. Errors as `Lessor.grant`, and for a source that cannot be read."""
    source = ask.read.source
    with home.turn():
        if not home.lessor.has_lease(ask.read, lease_id):
            home.engines.check_readable(home.engines.find_live(source.engine_id, source.incarnation))
        lease = home.lessor.grant(ask)
    with _streaming(home, lease), home.wakeups.watching(lease.publication) as waker:
        yield lease, waker


class _Untold:
    """What the reader of a lease has not been told.

    Args:
        lease: the lease.
        steps: that it was told before.
    """

    def __init__(self, lease: Lease, steps: int = 0) -> None:
        self._lease = lease
        self._steps, self._completed, self._revoked = steps, False, False

    def take(self) -> Iterator[ReadMessage]:
        """What there is now, once."""
        publication = self._lease.publication
        while self._steps < len(publication.steps):
            self._steps += 1
            yield publication.steps[self._steps - 1]
        if publication.complete and not self._completed:
            self._completed = True
            yield Completed(publication.steps[-1].payload, self._steps)
        if self._lease.revoked is not None and not self._revoked:
            self._revoked = True
            yield Revoked(self._lease.revoked)


def _left(home: Home, lease: Lease, waits_until: float, wait: float) -> float:
    """Seconds that a reader who was told all there is may still wait.

    Raises:
        ServerDraining: it has to ask again later.
        PublicationTimeout: the wait is over, and the publication has not come.
    """
    if home.draining:
        raise ServerDraining("this node server is draining; the lease goes on")
    left = waits_until - home.clock.now()
    if left <= 0 and lease.publication.stage is PublicationStage.AWAITED:
        raise _timeout(lease.publication, wait)
    return left


@contextmanager
def _streaming(home: Home, lease: Lease) -> Iterator[None]:
    """One more stream tells the blocks of a lease: one for each party, and some that were cut off unseen."""
    most = lease.ask.parties + STREAMS_CUT_OFF
    check_limit("streams", lease.streams, most, home.times.renew_every)
    lease.streams += 1
    try:
        yield
    finally:
        lease.streams -= 1


def _check_holder(feed: Feed, holder: int) -> None:
    if feed.holder != holder:
        engine_id = feed.process.engine.engine_id
        raise WatchTakenOver(f"a newer Watch of the same process of {engine_id!r} took over", engine_id=engine_id)


def _timeout(publication: PublicationRecord, wait: float) -> PublicationTimeout:
    return PublicationTimeout(
        f"{publication} did not come within {wait:.3f} s",
        engine_id=publication.source.engine_id,
        publication=publication.number,
        waited_ms=round(wait * 1000),
    )
