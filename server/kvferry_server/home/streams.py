"""The two streams of the contract, and the poll that stands for one, as values: `read_blocks` and `poll_blocks` send a
reader its blocks, `watch` sends a process of an engine its events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from kvferry._wire.reference import engine_ids
from kvferry.errors import (
    InvalidField,
    KvferryError,
    PeerRestarted,
    PublicationTimeout,
    ServerDraining,
    WatchTakenOver,
)
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.limits import MAX_STALE_STREAMS, check_limit
from kvferry_server.domain.publications import Lease, PublicationRecord, PublicationStage
from kvferry_server.domain.reads import LeaseRequest, RevokeReason, RoutedRequest
from kvferry_server.domain.steps import PublicationStep
from kvferry_server.domain.watch_feed import Feed, Numbered, Process
from kvferry_server.home.home import EVENT_BYTES, Home


@dataclass(frozen=True, slots=True, eq=False)
class Accepted:
    """A lease was granted, or an earlier call of the same read has it. With the publication's own reference, if the
    reader asked with one that a router made."""

    lease: Lease
    reference: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Completed:
    """All blocks have been sent."""

    payload: bytes
    steps: int


@dataclass(frozen=True, slots=True)
class Revoked:
    """The lease is not renewed any more: advice to stop."""

    reason: RevokeReason


ReadMessage: TypeAlias = Accepted | PublicationStep | Completed | Revoked


@dataclass(frozen=True, slots=True)
class Opened:
    """A Watch is open; with `resumed`, it goes on where the last one ended, without a full state."""

    resumed: bool


@dataclass(frozen=True, slots=True)
class Synced:
    """The full state has been sent. With `need_resync`, the process must send its own state again."""

    need_resync: bool


@dataclass(frozen=True, slots=True)
class Lagged:
    """This many events were dropped; the full state follows."""

    dropped: int


WatchMessage: TypeAlias = Opened | Numbered | Synced | Lagged


async def read_blocks(
    home: Home, request: LeaseRequest | RoutedRequest, wait: float
) -> AsyncGenerator[ReadMessage, None]:
    """Grant a lease on a publication and yield its blocks as they are published, until the lease ends. Closing the
    generator early does not end the lease.

    Args:
        home: the source's home.
        request: the reader's call.
        wait: seconds to wait for a publication that has not arrived.

    Raises:
        PublicationTimeout: the publication did not arrive in time.
        ServerDraining: the node server is draining; the lease goes on.
        KvferryError: all that `Lessor.grant`, `Routing.find` and `Engine.check_readable` raise.
    """
    waits_until = home.clock.now() + wait
    asked = await _found(home, request, waits_until, wait)
    lease = _granted(home, asked)
    with _streaming(home, lease), home.wakeups.watching(lease.publication) as waker:
        yield _accepted(home, request, lease)
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
    home: Home, request: LeaseRequest | RoutedRequest, wait: float, lease_id: bytes, next_step: int
) -> Iterator[ReadMessage]:
    """Return what `read_blocks` yields to a reader that has some of it already, as soon as there is something; nothing
    when the wait is over. Cancelling it does not end the lease.

    A publication may have a hundred thousand steps, and an answer takes few of them: the rest is not looked at. Take
    what is needed at once, since the publication may change later.

    Args:
        home: the source's home.
        request: the reader's call.
        wait: seconds to wait for something new.
        lease_id: the lease that the reader has. If it is empty, or another one, the reader gets the lease and
            all steps.
        next_step: index of the first step that the reader has not got under that lease.

    Raises:
        InvalidField: `next_step` is above the number of steps.
        PublicationTimeout: the publication did not arrive in time.
        LeaseEnded: the lease has ended.
        ServerDraining: the node server is draining; the lease goes on.
        KvferryError: all that `Lessor.grant`, `Routing.find` and `Engine.check_readable` raise.
    """
    waits_until = home.clock.now() + wait
    asked = await _found(home, request, waits_until, wait)
    lease = _granted(home, asked, lease_id)
    if not secrets.compare_digest(lease_id, lease.lease_id):
        return chain((_accepted(home, request, lease),), _Untold(lease).take())
    publication = lease.publication
    there = len(publication.steps)
    if next_step > there:
        raise InvalidField("next_step", next_step, f"at most {there}, the steps there are")
    untold = _Untold(lease, next_step)
    if news := _some(untold.take()):
        return news
    with _streaming(home, lease), home.wakeups.watching(publication) as waker:
        while True:
            if not lease.live and not publication.step_count:
                raise _timeout(publication, wait)
            lease.check_replay(asked)
            left = _left(home, lease, waits_until, wait)
            if left <= 0:
                return iter(())
            await waker.wait(left)
            waker.clear()
            if news := _some(untold.take()):
                return news


async def watch(
    home: Home, process: Process, secret: bytes, resume_epoch: bytes, resume_sequence: int, host: str = ""
) -> AsyncGenerator[WatchMessage, None]:
    """Serve a process's Watch: yield its full state, or the events after `resume_sequence`, then events as they happen.

    Args:
        home: the engine's home.
        process: the process that watches.
        secret: the secret of its engine's session.
        resume_epoch: epoch of the home that the process last watched; empty: it watches for the first time.
        resume_sequence: number of the last event that it got.
        host: the host that the Watch comes from; empty if unknown.

    Raises:
        WatchTakenOver: a newer Watch of the process has opened.
        PeerRestarted: the engine was replaced or evicted.
        ServerDraining: the node server ends, which the process was told; or it is draining and the process is new.
        KvferryError: all that `Home.open_watch` raises.
    """
    with home.turn():
        home.check_may_watch(process)
        feed = home.open_watch(process, secret, host)
        number = feed.take_over()
        home.wakeups.wake(feed)
        told = resume_sequence
        resumed = resume_epoch == home.epoch and feed.dropped_after(told) == 0
        # A home that needs a resync must send the full state: only `synced`, at its end, can say so.
        resumed = resumed and not home.need_resync(process)
    try:
        yield Opened(resumed)
        if not resumed:
            told = feed.sequence
            async with aclosing(_full_state(home, feed, number)) as messages:
                async for message in messages:
                    yield message
        with home.wakeups.watching(feed) as waker:
            while True:
                waker.clear()
                dropped = feed.dropped_after(told)
                if dropped:
                    yield Lagged(dropped)
                    told = feed.sequence
                    async with aclosing(_full_state(home, feed, number)) as messages:
                        async for message in messages:
                            yield message
                for numbered in feed.after(told):
                    _check_current(feed, number)
                    told = numbered.sequence
                    yield numbered
                _check_current(feed, number)
                if feed.after(told):
                    continue
                if home.stopping:
                    raise ServerDraining("this node server is draining")
                await waker.wait()
    finally:
        # A stream that ended with the node server says nothing about its process.
        if feed.current_watch == number and not home.stopping:
            with home.turn():
                home.close_watch(process)


async def _full_state(home: Home, feed: Feed, number: int) -> AsyncGenerator[WatchMessage, None]:
    process = feed.process
    events = home.state(process)
    size = EVENT_BYTES * len(events)
    if feed.full_states:
        # Only the first is sent unchecked, since without one the engine dies. Watches that were taken over may never
        # take what is sent, so further ones count.
        home.memory.check(process.engine, size)
    feed.full_states += 1
    try:
        with home.memory.holding(process.engine, size):
            for event in events:
                _check_current(feed, number)
                yield Numbered(0, event)
    finally:
        feed.full_states -= 1
    yield Synced(home.need_resync(process))


async def _found(home: Home, request: LeaseRequest | RoutedRequest, waits_until: float, wait: float) -> LeaseRequest:
    """Return the request for a lease. A read with a reference that a router made first waits for its publication: here,
    without a lease, because nothing is pinned for it yet."""
    if isinstance(request, LeaseRequest):
        return request
    wanted = request.router_key
    with home.turn():
        engines = home.engines.find_named(engine_ids(request.engine_id, request.data_parallel_rank))
        sources = [engine.ref for engine in engines]
        found = home.routing.find(sources, wanted)
        if found is not None:
            return home.routing.request(found, request)
        _check_some_readable(engines)
        waiting = home.routing.wait(sources, request)
    try:
        with home.wakeups.watching(waiting) as waker:
            while found is None:
                left = waits_until - home.clock.now()
                if left <= 0:
                    raise _never_came(sources[0], request, wait)
                await waker.wait(left)
                waker.clear()
                with home.turn():
                    found = home.routing.find(_living(home, sources), wanted)
    finally:
        home.routing.end_wait(waiting)
    with home.turn():
        return home.routing.request(found, request)


def _check_some_readable(engines: Sequence[Engine]) -> None:
    """Raise as `Engine.check_readable` if none can be read from."""
    errors = list[KvferryError]()
    for engine in engines:
        try:
            engine.check_readable()
        except KvferryError as error:
            errors.append(error)
        else:
            return
    raise errors[0]


def _living(home: Home, sources: Sequence[EngineRef]) -> list[EngineRef]:
    """Return those incarnations that live. Raises `PeerRestarted` or `EngineUnknown` if none does."""
    living, gone = list[EngineRef](), list[KvferryError]()
    for source in sources:
        try:
            living.append(home.engines.find_live(source.engine_id, source.incarnation).ref)
        except KvferryError as error:
            gone.append(error)
    if not living:
        raise gone[0]
    return living


def _accepted(home: Home, request: LeaseRequest | RoutedRequest, lease: Lease) -> Accepted:
    return Accepted(lease, home.reference(lease.publication) if isinstance(request, RoutedRequest) else "")


def _granted(home: Home, request: LeaseRequest, lease_id: bytes = b"") -> Lease:
    """Grant a lease. A reader that shows the lease's id goes on whatever has become of the source, as on an open
    stream. Raises what `Lessor.grant` and `Engine.check_readable` do."""
    source = request.read.source
    with home.turn():
        if not (lease_id and home.lessor.has_lease(request.read, lease_id)):
            home.engines.find_live(source.engine_id, source.incarnation).check_readable()
        return home.lessor.grant(request)


class _Untold:
    """What the reader of a lease has not got yet.

    Args:
        lease: the lease.
        steps: number of steps that the reader has.
    """

    def __init__(self, lease: Lease, steps: int = 0) -> None:
        self._lease = lease
        self._steps, self._completed, self._revoked = steps, False, False

    def take(self) -> Iterator[ReadMessage]:
        """Yield what has become known since the last call."""
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


def _some(messages: Iterator[ReadMessage]) -> Iterator[ReadMessage] | None:
    """Return the messages if there are any."""
    first = next(messages, None)
    return None if first is None else chain((first,), messages)


def _left(home: Home, lease: Lease, waits_until: float, wait: float) -> float:
    """Return the seconds that a reader that has everything so far may still wait.

    Raises:
        ServerDraining: the node server is draining; the reader has to ask again later.
        PublicationTimeout: the wait is over, and the publication has not arrived.
    """
    if home.draining:
        raise ServerDraining("this node server is draining; the lease goes on")
    left = waits_until - home.clock.now()
    if left <= 0 and lease.publication.stage is PublicationStage.AWAITED:
        raise _timeout(lease.publication, wait)
    return left


@contextmanager
def _streaming(home: Home, lease: Lease) -> Iterator[None]:
    """Count one more stream of a lease; raises `LimitReached` if there are too many."""
    most = lease.request.parties + MAX_STALE_STREAMS
    check_limit("streams", lease.streams, most, home.times.renew_every)
    lease.streams += 1
    try:
        yield
    finally:
        lease.streams -= 1


def _check_current(feed: Feed, number: int) -> None:
    if feed.evicted:
        ref = feed.process.engine
        problem = f"{ref} was evicted by an operator: it has to be started again"
        raise PeerRestarted(problem, engine_id=ref.engine_id, incarnation=ref.incarnation.hex(), current="")
    if feed.current_watch != number:
        engine_id = feed.process.engine.engine_id
        raise WatchTakenOver(f"a newer Watch of the same process of {engine_id!r} took over", engine_id=engine_id)


def _never_came(source: EngineRef, request: RoutedRequest, wait: float) -> PublicationTimeout:
    name, engine_id = request.router_key.name, source.engine_id
    return PublicationTimeout(
        f"nothing was published by engine {engine_id!r} under the router key {name!r} within {wait:.3f} s",
        engine_id=engine_id,
        publication=0,
        waited_ms=round(wait * 1000),
    )


def _timeout(publication: PublicationRecord, wait: float) -> PublicationTimeout:
    return PublicationTimeout(
        f"{publication} was not published within {wait:.3f} s",
        engine_id=publication.source.engine_id,
        publication=publication.number,
        waited_ms=round(wait * 1000),
    )
