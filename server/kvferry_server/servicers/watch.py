"""The RPC Watch: the stream of events that a home sends to a process of an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from kvferry._clock import to_duration
from kvferry._wire.version import OURS_ENCODED
from kvferry.errors import LimitReached, ServerDraining, WatchTakenOver
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Event, Feed, Process
from kvferry_server.domain.publications import PublicationRecord
from kvferry_server.domain.router_keys import Question
from kvferry_server.domain.values import LeaseState
from kvferry_server.home.home import EVENT_BYTES, Home
from kvferry_server.servicers import encode
from kvferry_server.servicers.limits import MAX_RELEASED_READS


async def watch(
    home: Home, process: Process, secret: bytes, resume_epoch: bytes, resume_sequence: int, host: str = ""
) -> AsyncGenerator[pb.WatchResponse, None]:
    """Serve a process's Watch: yield its full state, or the events after `resume_sequence` if `resume_epoch` is that of
    this home, then events as they happen. Raises `WatchTakenOver` if a newer Watch of the process has opened;
    `PeerRestarted` if the engine was replaced or evicted; `EngineUnknown` if its scheduler has been away for so long
    that the home has forgotten the engine; `ServerDraining` if the node server ends, after the `draining` event, or is
    draining and the process is new; and as `Home.open_watch`."""
    with home.turn():
        feed = home.open_watch(process, secret, host)
        number = feed.current_watch
        home.wakeups.wake(feed)
        sent = resume_sequence
        resumed = resume_epoch == home.epoch and feed.dropped_after(sent) == 0
        # A home that needs a resync must send the full state: only `synced`, at its end, can ask for the resync.
        resumed = resumed and not home.need_resync(process)
    try:
        opened = pb.WatchOpened(resumed=resumed, advertise=home.advertise, times=encode.times(home.times))
        yield pb.WatchResponse(home_epoch=home.epoch, version=OURS_ENCODED, opened=opened)
        needs_state = not resumed
        with home.wakeups.watching(feed) as waker:
            while True:
                waker.clear()
                if not needs_state and (dropped := feed.dropped_after(sent)):
                    yield pb.WatchResponse(home_epoch=home.epoch, lagged=pb.WatchLagged(dropped=dropped))
                    needs_state = True
                begun_at = feed.sequence
                with _full_state(home, feed) if needs_state else nullcontext(feed.after(sent)) as events:
                    for sequence, event in events:
                        _check_current(feed, number)
                        if (held := _held(home, feed, host, event)) is not None:
                            with held:
                                yield _message(home, event, sequence)
                if needs_state:
                    synced = pb.WatchSynced(need_resync=home.need_resync(process))
                    yield pb.WatchResponse(home_epoch=home.epoch, synced=synced)
                    # Events that happened meanwhile may have been dropped.
                    sent, needs_state = begun_at, False
                    continue
                sent = events[-1][0] if events else sent
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


@contextmanager
def _full_state(home: Home, feed: Feed) -> Iterator[list[tuple[int, Event]]]:
    """Give a process's full state, as events with the number 0, and count it against its engine while it is sent."""
    process, events = feed.process, home.state(feed.process)
    size = EVENT_BYTES * len(events)
    if feed.full_states:
        # Only the first full state is sent unchecked, since without one the engine dies. Watches that were taken over
        # may never take theirs, which keep publications that were forgotten meanwhile: so further full states count.
        home.memory.check(process.engine, size)
    feed.full_states += 1
    home.memory.take(process.engine, size)
    try:
        yield [(0, event) for event in events]
    finally:
        home.memory.give(process.engine, size)
        feed.full_states -= 1


def _held(home: Home, feed: Feed, host: str, event: Event) -> ExitStack | None:
    """Hold what a question takes while it is sent. None: it is left out, because it has ended while earlier events were
    sent, and its prompt is gone; or because its process, or host, holds too much: Watches that were taken over may
    never take the questions that they were being sent."""
    if not isinstance(event, Question):
        return ExitStack()
    try:
        return home.memory.hold(host or feed.process.engine, host, event.ask.size) if event.open else None
    except LimitReached:
        return None


def _check_current(feed: Feed, number: int) -> None:
    if feed.ended is not None:
        raise feed.ended
    if feed.current_watch != number:
        engine_id = feed.process.engine.engine_id
        raise WatchTakenOver(f"a newer Watch of the same process of {engine_id!r} took over", engine_id=engine_id)


def _message(home: Home, event: Event, sequence: int) -> pb.WatchResponse:
    response = pb.WatchResponse(home_epoch=home.epoch, sequence=sequence)
    if isinstance(event, PublicationRecord):
        response.released.CopyFrom(_released(event))
    elif isinstance(event, Question):
        ask, remaining = event.ask, max(0.0, event.deadline - home.clock.now())
        question = pb.Question(
            number=event.number,
            reference=ask.reference,
            first_token=ask.first_token,
            asker=encode.engine_ref(ask.asker),
            remaining=to_duration(remaining),
            prompt=pb.Prompt.FromString(ask.prompt),
        )
        response.question.MergeFrom(question)
    elif isinstance(event, pb.RankLost):
        response.rank_lost.CopyFrom(event)
    elif isinstance(event, pb.QuestionEnded):
        response.question_ended.CopyFrom(event)
    else:
        response.draining.CopyFrom(event)
    return response


def _released(publication: PublicationRecord) -> pb.Released:
    # Valid reads first: there may be any number of failed ones, since every bearer of the reference may try.
    reads = sorted(publication.reads, key=lambda lease: lease.ended_as is not LeaseState.VALID)
    listed = reads[:MAX_RELEASED_READS]
    return pb.Released(
        publication=publication.number,
        request_id=publication.request_id,
        outcome=pb.ReleaseOutcome.ValueType(publication.outcome or 0),
        reads=[encode.read_summary(lease) for lease in listed],
        reads_left_out=len(reads) - len(listed),
    )
