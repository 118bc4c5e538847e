"""Nothing that a node server says, and nothing that a handler raises, ends a Watch for good but a refusal."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvferry import Blocks
from kvferry._control.backoff import SILENCE
from kvferry._control.connection import Control
from kvferry._control.publish import Publish
from kvferry._control.watcher import Watcher
from kvferry._wire.channel import MAX_MESSAGE_BYTES
from kvferry.errors import (
    ContractDiffers,
    EngineUnknown,
    HomeRecovering,
    InternalError,
    KvferryError,
    ServerDraining,
    WatchTakenOver,
)
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.scripted import opened, opened_session, released, scripted, synced
from tests.support.waiting import until

SCHEDULER = pb.WatchRequest(
    engine=pb.EngineRef(engine_id="engine", incarnation=b"i" * 16), role=pb.WATCH_ROLE_SCHEDULER
)


class Handler:
    """Takes events; raises while the test says."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.taken: list[int] = []
        self.done = threading.Event()

    async def __call__(self, message: pb.WatchResponse) -> None:
        if message.WhichOneof("event") != "released":
            return
        if message.released.publication == 1 and self.error is not None:
            error, self.error = self.error, None
            raise error
        self.taken.append(message.released.publication)
        if {1, 2} <= set(self.taken):
            self.done.set()


def watcher_of(control: Control, handler: Callable[[pb.WatchResponse], Awaitable[None]] | None = None) -> Watcher:
    request = pb.WatchRequest.FromString(SCHEDULER.SerializeToString())
    return Watcher(control._loop, control, request, handler or Handler(None), "engine")


@pytest.mark.parametrize("error", [ValueError("a bug"), HomeRecovering("not now"), KvferryError("neither")])
def test_an_event_whose_handler_raises_is_sent_again(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted(tmp_path) as (server, control):
        server.watch = lambda _: iter([opened(), released(1), released(2), synced()])
        handler = Handler(error)
        watcher = watcher_of(control, handler)
        server.loop.run(watcher.open(30))
        assert handler.done.wait(30)
        # The event after the one that failed was not held up by it, and both are told again.
        assert handler.taken[0] == 2
        assert watcher.failure is None
        server.loop.run(watcher.close())
    assert not server.watched[1].resume_epoch
    assert str(error) in caplog.text


def test_an_event_whose_handler_raises_is_sent_again_after_a_watch_was_resumed(tmp_path: Path) -> None:
    told_again = threading.Event()

    def events(count: int) -> Iterator[pb.WatchResponse]:
        if count == 1:
            yield from (opened(), synced())
            raise ServerDraining("the node server is draining")
        yield opened(resumed=count == 2)
        yield from (released(1), released(2))
        if count == 2:
            # Only what follows the Watch can end it.
            told_again.wait(30)
        yield synced()

    with scripted(tmp_path) as (server, control):
        server.watch = events
        handler = Handler(ValueError("a bug"))
        watcher = watcher_of(control, handler)
        server.loop.run(watcher.open(30))
        found = handler.done.wait(20)
        told_again.set()
        server.loop.run(watcher.close())
    assert found


def test_a_watch_of_a_restarted_home_is_resumed_from_the_events_of_this_home(tmp_path: Path) -> None:
    def events(count: int) -> Iterator[pb.WatchResponse]:
        for number, message in enumerate((opened(), synced())):
            message.home_epoch, message.sequence = bytes([count]) * 16, 10 - 4 * count + number
            yield message
        raise ServerDraining("the node server is draining")

    with scripted(tmp_path) as (server, control):
        server.watch = events
        watcher = watcher_of(control)
        server.loop.run(watcher.open(30))
        server.until(lambda: len(server.watched) > 2)
        server.loop.run(watcher.close())
    said = [(asked.resume_epoch, asked.resume_sequence) for asked in server.watched[:3]]
    assert said == [(b"", 0), (bytes([1]) * 16, 7), (bytes([2]) * 16, 3)]


def interrupted(kind: str) -> Iterator[pb.WatchResponse]:
    """A Watch that goes wrong after it was open."""
    yield opened()
    yield synced()
    if kind == "oversized":
        yield pb.WatchResponse(opened=pb.WatchOpened(advertise="x" * (MAX_MESSAGE_BYTES + 1)))
    elif kind == "internal":
        raise InternalError("a bug of the server")
    elif kind == "draining":
        raise ServerDraining("the node server is draining")
    elif kind == "restarted":
        # What a restarted home says to a rank whose scheduler is later than an engine_ttl.
        raise EngineUnknown("this home has no engine 'engine'", engine_id="engine")
    else:
        # What gRPC makes of an exception of the other side: UNKNOWN.
        raise RuntimeError("not ours")


@pytest.mark.parametrize("kind", ["oversized", "internal", "draining", "restarted", "unknown"])
def test_a_watch_goes_on_after_a_message_that_cannot_be_decoded(tmp_path: Path, kind: str) -> None:
    with scripted(tmp_path) as (server, control):
        server.watch = lambda count: interrupted(kind) if count < 3 else iter([opened(), released(1), released(2)])
        handler = Handler(None)
        watcher = watcher_of(control, handler)
        server.loop.run(watcher.open(30))
        assert handler.done.wait(30)
        assert watcher.failure is None
        server.loop.run(watcher.close())


def test_an_engine_publishes_again_when_the_release_of_its_home_was_taken_back(tmp_path: Path) -> None:
    taken_back = threading.Event()

    def watch(count: int) -> Iterator[pb.WatchResponse]:
        if count > 1 and not taken_back.is_set():
            raise ContractDiffers("the caller is too old")
        yield opened()
        yield synced()
        if count == 1:
            raise InternalError("it stops")

    with scripted(tmp_path) as (server, control):
        server.watch = watch
        session = opened_session(control)

        def refused() -> bool:
            try:
                session.publish(Publish("r", {"full": Blocks([1])}))
            except ContractDiffers:
                return True
            return False

        until(refused)
        published = session.pinned()
        assert refused()
        assert session.pinned() == published
        taken_back.set()
        until(lambda: not refused())
        session.close()


def test_a_watch_of_an_engine_that_was_never_there_is_refused_at_once(tmp_path: Path) -> None:
    def unknown() -> Iterator[pb.WatchResponse]:
        raise EngineUnknown("this home has no engine 'engine'", engine_id="engine")
        yield

    with scripted(tmp_path) as (server, control):
        server.watch = lambda _: unknown()
        watcher = watcher_of(control)
        with pytest.raises(EngineUnknown):
            server.loop.run(watcher.open(1e6))
        assert isinstance(watcher.failure, EngineUnknown)


def test_a_refusal_ends_the_watch(tmp_path: Path) -> None:
    def taken_over() -> Iterator[pb.WatchResponse]:
        yield opened()
        raise WatchTakenOver("a newer one", engine_id="engine")

    with scripted(tmp_path) as (server, control):
        server.watch = lambda _: taken_over()
        watcher = watcher_of(control)
        with pytest.raises(WatchTakenOver):
            server.loop.run(watcher.open(30))
        assert isinstance(watcher.failure, WatchTakenOver)


def test_a_refill_that_a_home_cannot_take_now_is_repeated(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control):
        server.watch = lambda _: iter([opened(), synced(need_resync=True)])
        refusals = [HomeRecovering("not now", retry_after=0.01), InternalError("lost")]

        def notify(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            if refusals:
                raise refusals.pop()
            return [pb.NotificationResult(done=pb.Acknowledged()) for _ in request.notifications]

        server.notify = notify
        session = opened_session(control)
        phases = [
            notification.resync.phase
            for request in server.notified
            for notification in request.notifications
            if notification.WhichOneof("kind") == "resync"
        ]
        # The end is sent only after all earlier notifications were taken.
        assert phases == [pb.RESYNC_PHASE_BEGIN] * 3 + [pb.RESYNC_PHASE_END]
        session.close()


def test_a_storm_of_releases_is_acknowledged_in_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A wait for an answer would take longer than the session has time to open.
    monkeypatch.setattr(Control.notify_one, "__defaults__", (60.0,))
    count = 2000
    with scripted(tmp_path) as (server, control):
        answering = threading.Event()

        def notify(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            answering.wait(60)
            return [pb.NotificationResult(done=pb.Acknowledged()) for _ in request.notifications]

        server.watch = lambda _: iter([opened(), *(released(1 + number) for number in range(count)), synced()])
        server.notify = notify
        # A home that answers nothing meanwhile does not hold up the Watch.
        session = opened_session(control)
        answering.set()

        def acknowledged() -> set[int]:
            return {
                number
                for request in server.notified
                for notification in request.notifications
                for number in notification.released_ack.publications
            }

        server.until(lambda: len(acknowledged()) == count)
        assert len(server.notified) < 10
        session.close()


def test_acknowledgements_that_failed_are_sent_again(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control):
        more = threading.Event()

        def events() -> Iterator[pb.WatchResponse]:
            yield from (opened(), released(7), synced())
            more.wait(30)
            yield released(8, sequence=1)

        def notify(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            if len(server.notified) == 1:
                raise ServerDraining("not now")
            return [pb.NotificationResult(done=pb.Acknowledged()) for _ in request.notifications]

        server.watch, server.notify = lambda _: events(), notify
        session = opened_session(control)
        server.until(lambda: len(server.notified) >= 1)
        more.set()
        server.until(lambda: any(8 in told.notifications[0].released_ack.publications for told in server.notified))
        assert {7, 8} <= {
            number for told in server.notified[1:] for number in told.notifications[0].released_ack.publications
        }
        session.close()


def test_a_wait_for_a_home_is_logged_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recovering() -> Iterator[pb.WatchResponse]:
        raise HomeRecovering("the home waits for its engines")
        yield

    with scripted(tmp_path) as (server, control), caplog.at_level(logging.WARNING):
        server.watch = lambda _: recovering()

        def clock() -> float:
            """Stands still until the home has refused, and then until that was said."""
            return 30.0 if "still waiting" in caplog.text else SILENCE if len(server.watched) > 1 else 0.0

        monkeypatch.setattr(server.loop, "now", clock)
        with pytest.raises(HomeRecovering):
            opened_session(control)
    (said,) = [record.getMessage() for record in caplog.records if "still waiting" in record.getMessage()]
    assert "the home waits for its engines" in said
    assert control.address in said
