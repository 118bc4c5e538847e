"""The stream of events that a home sends to a process of an engine, as values."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from typing import TypeAlias

from kvferry.errors import LimitReached, ServerDraining, WatchTakenOver
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.questions import Question
from kvferry_server.domain.watch_feed import Event, Feed, Numbered, Process
from kvferry_server.home.home import EVENT_BYTES, Home

WatchMessage: TypeAlias = pb.WatchOpened | Numbered | pb.WatchSynced | pb.WatchLagged


async def watch(
    home: Home, process: Process, secret: bytes, resume_epoch: bytes, resume_sequence: int, host: str = ""
) -> AsyncGenerator[WatchMessage, None]:
    """Serve a process's Watch: yield its full state, or the events after `resume_sequence` if `resume_epoch` is that of
    this home, then events as they happen.

    Raises:
        WatchTakenOver: a newer Watch of the process has opened.
        PeerRestarted: the engine was replaced or evicted.
        EngineUnknown: its scheduler has been away for so long that the home has forgotten the engine.
        ServerDraining: the node server ends, after the `draining` event; or it is draining and the process is new.
        KvferryError: all that `Home.open_watch` raises.
    """
    with home.turn():
        feed = home.open_watch(process, secret, host)
        number = feed.current_watch
        home.wakeups.wake(feed)
        sent = resume_sequence
        resumed = resume_epoch == home.epoch and feed.dropped_after(sent) == 0
        # A home that needs a resync must send the full state: only `synced`, at its end, can ask for the resync.
        resumed = resumed and not home.need_resync(process)
    try:
        yield pb.WatchOpened(resumed=resumed)
        needs_state = not resumed
        with home.wakeups.watching(feed) as waker:
            while True:
                waker.clear()
                if not needs_state and (dropped := feed.dropped_after(sent)):
                    yield pb.WatchLagged(dropped=dropped)
                    needs_state = True
                if needs_state:
                    sent, needs_state = feed.sequence, False
                    async with aclosing(_full_state(home, feed, number, host)) as messages:
                        async for message in messages:
                            yield message
                    # Events that happened meanwhile may have been dropped.
                    continue
                for numbered in feed.after(sent):
                    _check_current(feed, number)
                    sent = numbered.sequence
                    with _taken(home, process, host, numbered.event) as goes:
                        if goes:
                            yield numbered
                _check_current(feed, number)
                if feed.after(sent):
                    continue
                if home.stopping:
                    raise ServerDraining("this node server is draining")
                await waker.wait()
    finally:
        # A stream that ended with the node server is no sign that its process ended.
        if feed.current_watch == number and feed.ended is None and not home.stopping:
            with home.turn():
                home.close_watch(process)


async def _full_state(home: Home, feed: Feed, number: int, host: str) -> AsyncGenerator[WatchMessage, None]:
    process = feed.process
    events = home.state(process)
    size = EVENT_BYTES * len(events)
    if feed.full_states:
        # Only the first full state is sent unchecked, since without one the engine dies. Watches that were taken over
        # may never take theirs, so further full states count.
        home.memory.check(process.engine, size)
    feed.full_states += 1
    home.memory.take(process.engine, size)
    try:
        for event in events:
            _check_current(feed, number)
            with _taken(home, process, host, event) as goes:
                if goes:
                    yield Numbered(0, event)
    finally:
        home.memory.give(process.engine, size)
        feed.full_states -= 1
    yield pb.WatchSynced(need_resync=home.need_resync(process))


@contextmanager
def _taken(home: Home, process: Process, host: str, event: Event) -> Iterator[bool]:
    """Give whether an event is to be sent, and hold its memory until the context ends, when the process has taken it. A
    question is left out if it has ended while earlier events were sent: its prompt is gone; and if its process, or
    host, holds too much: Watches that were taken over may never take the questions that they were being sent."""
    if not isinstance(event, Question):
        yield True
        return
    asked, goes = event.asked, False
    with ExitStack() as held:
        if asked is not None:
            with suppress(LimitReached):
                held.enter_context(home.memory.hold(host or process.engine, host, asked.size))
                goes = True
        yield goes


def _check_current(feed: Feed, number: int) -> None:
    if feed.ended is not None:
        raise feed.ended
    if feed.current_watch != number:
        engine_id = feed.process.engine.engine_id
        raise WatchTakenOver(f"a newer Watch of the same process of {engine_id!r} took over", engine_id=engine_id)
