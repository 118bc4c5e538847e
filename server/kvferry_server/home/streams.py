"""The two streams of the contract, as values: what a reader of blocks, and what a process of an engine, is told and
when."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.errors import PublicationTimeout, ServerDraining, WatchTakenOver
from kvferry_server.domain.limits import check_limit
from kvferry_server.domain.publications import Lease, PublicationRecord, PublicationStage
from kvferry_server.domain.reads import Ask, RevokeReason
from kvferry_server.domain.steps import PublicationStep
from kvferry_server.domain.watch_feed import Feed, Numbered, Process
from kvferry_server.home.home import EVENT_BYTES, Home


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
    with home.turn() as now:
        home.engines.check_readable(home.engines.find_live(ask.read.source.engine_id, ask.read.source.incarnation))
        lease = home.lessor.grant(ask)
    publication, waits_until = lease.publication, now + wait
    with _streaming(home, lease), home.wakeups.watching(publication) as waker:
        yield Accepted(lease)
        steps, completed, revoked = 0, False, False
        while True:
            waker.clear()
            while steps < len(publication.steps):
                steps += 1
                yield publication.steps[steps - 1]
            if publication.complete and not completed:
                completed = True
                yield Completed(publication.steps[-1].payload, steps)
            if lease.revoked is not None and not revoked:
                revoked = True
                yield Revoked(lease.revoked)
            if not lease.live:
                return
            if home.draining:
                raise ServerDraining("this node server is draining; the lease goes on")
            left = waits_until - home.clock.now() if publication.stage is PublicationStage.AWAITED else None
            if left is not None and left <= 0:
                raise _timeout(publication, wait)
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
