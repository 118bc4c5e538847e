"""A home that answers whatever it likes, and a system that gives no thread: what waits ends, what is kept is bounded,
and nobody else's reads notice."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec
from kvferry._cache import runtime_of
from kvferry._clock import now, to_duration
from kvferry._control import granted_steps
from kvferry._control.block_use import BlockUse
from kvferry._control.connection import Control
from kvferry._control.lease_holder import LeaseHolder
from kvferry._control.publications import Publication
from kvferry._control.publish import PublishMore
from kvferry._control.reader_lease import LONGEST_LEASE, ReaderLease
from kvferry._control.renewals import Renewals
from kvferry._session import EngineSession, home_session_of
from kvferry._wire.geometry_codec import put_together
from kvferry._wire.reference import format_reference, parse_reference
from kvferry._wire.status import from_notification_error, to_notification_error
from kvferry._wire.token import engine_ref
from kvferry._wire.version import OURS_ENCODED
from kvferry.errors import (
    BadGeometry,
    Closed,
    HomeRecovering,
    InvalidField,
    KvferryError,
    LeaseEnded,
    LimitReached,
    ServerDraining,
    Unreachable,
    WatchTakenOver,
)
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.holding import DONE, READER, accepted, holding
from tests.control.polling import reading
from tests.control.scripted import SPEC, opened, opened_session, polled, released, scripted, synced
from tests.support.blocking_control import BlockingControl, on_loop
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess
from tests.support.waiting import until

AXES = ("kv", "block", "head", "token", "content")


@pytest.mark.parametrize("what", ["a reference that lies", "another engine of the same name"])
def test_a_home_speaks_of_its_own_engines_only(tmp_path: Path, what: str) -> None:
    def tensors() -> dict[str, np.ndarray]:
        return {"layers.0": np.zeros((2, 8, 1, 16, 8), np.uint8)}

    name = unique_id("source")
    spec = EngineSpec(name, SPEC.groups)
    with (
        NodeServerProcess(tmp_path / "home", engine_ttl=1.0) as home,
        NodeServerProcess(tmp_path / "hostile", engine_ttl=1.0) as hostile,
        Client(home.address) as client,
        Client(hostile.address) as liar,
        Client(home.address) as reading,
    ):
        victim = client.register_cache(spec, tensors=tensors(), axes=AXES)
        impostor = liar.register_cache(spec, tensors=tensors(), axes=AXES)
        reader = reading.register_cache(EngineSpec(unique_id("reader"), SPEC.groups), tensors=tensors(), axes=AXES)
        reference = victim.session.publish("request", {"full": Blocks([1])}).reference
        reader.read(reference, {"full": Blocks([2])}).result(30)
        parsed = parse_reference(reference)
        known = (runtime_of(reader).homes.get(parsed.home).address, name, parsed.incarnation)
        assert runtime_of(reader)._sources.known(known) is not None
        theirs = impostor.session.publish("request", {"full": Blocks([1])}).reference
        if what == "a reference that lies":
            lie = parse_reference(reference)
            lie.home = parse_reference(theirs).home
            theirs = format_reference(lie)
        read = reader.read(theirs, {"full": Blocks([3])}, timeout=10)
        assert (read.exception(30) is None) == (what != "a reference that lies")
        # What was known of the engine at its true home is known still: its next read needs no handshake.
        assert runtime_of(reader)._sources.known(known) is not None


@contextmanager
def without_threads_for(name: str) -> Iterator[None]:
    """What a thread of this name starts is refused, as by a system that has no more."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if threading.current_thread().name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        yield


def test_a_call_without_a_thread_is_refused_and_the_next_one_goes_on(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control):
        home = BlockingControl("", control=control)
        server.read_blocks = lambda _: polled(accepted=accepted())
        on_loop(server.loop, bool)
        calls: list[Callable[[], object]] = [
            lambda: next(home.watch(pb.WatchRequest())),
            lambda: home.read_blocks(pb.ReadBlocksRequest()),
            lambda: home.notify(pb.NotifyRequest()),
        ]
        with without_threads_for("kvferry-test-loop"):
            for call in calls:
                with pytest.raises(LimitReached):
                    call()
        assert home.read_blocks(pb.ReadBlocksRequest()) == polled(accepted=accepted())


@pytest.mark.slow
def test_a_grant_beyond_the_size_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(granted_steps, "GRANT_BYTES", 16 << 20)
    sent: list[int] = []
    ids = pb.GroupBlocks(group="full", run_starts=range(1 << 20, (1 << 20) + 100_000), run_counts=[1] * 100_000)

    def endless(request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        if not request.lease_id:
            return polled(accepted=accepted())
        answer = polled(blocks=[pb.Blocks(step=request.next_step, groups=[ids])])
        sent.append(answer.ByteSize())
        return answer

    with reading(tmp_path, endless) as (_, read):
        read.start()
        assert isinstance(read.outcome(), InvalidField)
        assert len(read.given_back) == 1
        assert sum(sent) < 2 * granted_steps.GRANT_BYTES


def test_a_delay_that_a_home_asks_for_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry._wire.status.LONGEST_RETRY", 0.05, raising=False)
    with scripted(tmp_path) as (server, control):

        def watch(count: int) -> Iterator[pb.WatchResponse]:
            yield opened()
            yield synced()
            if count == 1:
                raise ServerDraining("come back in three hundred years", retry_after=1e10)

        server.watch = watch
        session = EngineSession(opened_session(control))
        server.until(lambda: len(server.watched) >= 2)
        session.close()


def test_a_handshake_of_more_ranks_than_it_said_ends_at_once() -> None:
    page = pb.HandshakeResponse(ranks=[geometry_pb2.RankGeometry()])
    taken: list[int] = []

    def pages() -> Iterator[pb.HandshakeResponse]:
        yield pb.HandshakeResponse(
            source_version=OURS_ENCODED, engine=geometry_pb2.EngineGeometry(engine_id="engine"), num_ranks=0
        )
        while len(taken) < 1000:
            taken.append(1)
            yield page

    with pytest.raises(BadGeometry):
        put_together(pages())
    assert len(taken) == 1


def test_a_handshake_of_too_many_planes_is_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry._wire.geometry_codec.MAX_PLANES", 100, raising=False)
    planes = [geometry_pb2.Plane() for _ in range(101)]
    page = pb.HandshakeResponse(ranks=[geometry_pb2.RankGeometry(planes=planes)])
    first = pb.HandshakeResponse(
        source_version=OURS_ENCODED, engine=geometry_pb2.EngineGeometry(engine_id="engine"), num_ranks=1
    )
    with pytest.raises(BadGeometry, match="100 planes"):
        put_together([first, page])


def test_a_lease_has_a_longest_time_and_is_renewed_meanwhile() -> None:
    lease = ReaderLease(b"l" * 16, 0.0, 1e12, 1e12)
    assert lease.deadline <= LONGEST_LEASE
    assert lease.next_renewal is not None
    assert lease.next_renewal < lease.deadline
    lease.renewed(10.0, 11.0, 1e12, more=True)
    assert lease.deadline <= 10.0 + LONGEST_LEASE


def let_go(holder: LeaseHolder, home: Control) -> None:
    lease = ReaderLease(b"l" * 16, now(), 60.0, 20.0)
    on_loop(home._loop, lambda: holder.let_go(home, lease))


def test_a_home_that_takes_nothing_keeps_few_messages_waiting_and_none_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry._control.notifier.MAX_WAITING", 3)
    for name in ("deaf", "true"):
        (tmp_path / name).mkdir()
    with (
        scripted(tmp_path / "deaf") as (deaf, hostile),
        scripted(tmp_path / "true") as (server, control),
        holding(control) as holder,
    ):

        def never(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            raise HomeRecovering("not now", retry_after=20.0)

        def once(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            if len(server.notified) == 1:
                raise HomeRecovering("not now", retry_after=0.05)
            return [DONE for _ in request.notifications]

        deaf.notify, server.notify = never, once
        far = Control(hostile.address, None, server.loop)
        for _ in range(8):
            let_go(holder, far)
        deaf.until(lambda: len(deaf.notified) == 8)
        until(lambda: holder._notifier._waiting[far] == 3)
        let_go(holder, control)
        server.until(lambda: len(server.notified) >= 2)
        assert sum(map(len, holder._notifier._later.values())) == 3
        on_loop(server.loop, far.close)


def test_a_read_that_is_asked_for_again_repeats_its_expected_reads(tmp_path: Path) -> None:
    whole = polled(accepted=accepted(renew_every=0.05), complete=pb.Complete())
    with reading(tmp_path, lambda _: whole) as (server, read):
        ended = pb.NotificationResult(error=to_notification_error(LeaseEnded("no such lease")))
        server.notify = lambda request: [ended for _ in request.notifications]
        read.start(expected_reads=4)
        server.until(lambda: len(server.asked) >= 2)
        assert {asked.expected_reads for asked in server.asked} == {4}


def test_a_refill_is_not_repeated_before_the_pause_that_its_home_asked_for(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control):
        server.watch = lambda _: iter([opened(), synced(need_resync=True)])
        refused: list[float] = []

        def notify(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            if not refused:
                refused.append(now())
                raise LimitReached("full", retry_after=1.5, limit="memory", value=1)
            return [DONE for _ in request.notifications]

        server.notify = notify
        session = EngineSession(opened_session(control))
        assert len(server.watched) == 2
        assert now() - refused[0] >= 1.5
        session.close()


def test_blocks_released_while_more_are_published_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = BlockUse.name
    with scripted(tmp_path) as (server, control):
        release = threading.Event()

        def events() -> Iterator[pb.WatchResponse]:
            yield from (opened(), synced())
            release.wait(30)
            yield released(1, sequence=1)

        server.watch = lambda _: events()
        session = EngineSession(opened_session(control))
        publication = session.publish("request", {"full": Blocks([1])}, last=False)
        taken: list[int] = []

        def take() -> None:
            taken.extend(release.publication for release in session.released(30))

        taking = threading.Thread(target=take)

        def slowly(use: BlockUse, *args: object) -> None:
            release.set()
            taking.start()
            taking.join(1.0)
            named(use, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(BlockUse, "name", slowly)
        home_session_of(session).publish_more(
            PublishMore(publication, {"full": Blocks([2], first_token=16)}, last=True)
        )
        taking.join(30)
        assert taken == [1]
        home_session_of(session).block_use.writes().begin("read", {"full": np.array([1, 2], np.int32)})
        session.close()


def test_an_error_that_is_raised_again_and_again_does_not_grow(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control):
        over = threading.Event()

        def taken_over() -> Iterator[pb.WatchResponse]:
            yield from (opened(), synced())
            over.wait(30)
            raise WatchTakenOver("a newer one", engine_id="engine")

        server.watch = lambda _: taken_over()
        session = EngineSession(opened_session(control))
        over.set()
        until(lambda: home_session_of(session)._watcher.failure is not None)
        depths = set()
        for _ in range(5):
            with pytest.raises(WatchTakenOver) as caught:
                session.publish("request", {"full": Blocks([1])})
            depths.add(len(traceback.extract_tb(caught.value.__traceback__)))
        assert len(depths) == 1
        session.close()


def test_a_publish_waits_for_another_no_longer_than_its_timeout(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control):
        server.watch = lambda _: iter([opened(), synced()])
        session = EngineSession(opened_session(control))
        slow, answer = threading.Event(), threading.Event()

        def notify(request: pb.NotifyRequest) -> list[pb.NotificationResult]:
            slow.set()
            answer.wait(30)
            return [DONE for _ in request.notifications]

        server.notify = notify
        published: list[Publication] = []
        first = threading.Thread(
            target=lambda: published.append(session.publish("first", {"full": Blocks([1])}, timeout=30))
        )
        first.start()
        assert slow.wait(30)
        with pytest.raises(Unreachable, match="no answer"):
            session.publish("second", {"full": Blocks([2])}, timeout=0.2)
        assert not answer.is_set()
        assert len(server.notified) == 1
        answer.set()
        first.join(30)
        # The second one is withdrawn: it stays pinned until the home releases it.
        server.until(lambda: server.notified[-1].notifications[-1].HasField("abort"))
        assert [each.request_id for each in session.unreleased()] == ["first", "second"]
        session.close()


def test_a_step_that_a_home_refuses_ends_its_publication(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control):
        server.watch = lambda _: iter([opened(), synced()])
        session = EngineSession(opened_session(control))
        publication = session.publish("request", {"full": Blocks([1])}, last=False)
        refused = pb.NotificationResult(error=to_notification_error(InvalidField("blocks", 2, "others")))
        server.notify = lambda request: [
            refused if told.HasField("publish") else DONE for told in request.notifications
        ]
        with pytest.raises(InvalidField):
            session.publish_more(publication, {"full": Blocks([2], first_token=16)}, last=False)
        server.until(lambda: server.notified[-1].notifications[0].HasField("abort"))
        # Until the home releases it.
        assert session.unreleased() == (publication,)
        session.close()


def test_an_error_of_publish_says_whether_a_publication_will_be_released(tmp_path: Path) -> None:
    """The same class of error may come from the call or from the home, and only after the home's is there a release: an
    engine that frees the blocks at the error would free them twice."""
    with scripted(tmp_path) as (server, control):
        server.watch = lambda _: iter([opened(), synced()])
        session = EngineSession(opened_session(control))
        with pytest.raises(InvalidField) as caught:
            session.publish("request", {"full": Blocks([1])}, expected_reads=-1)
        assert "withdrawn" not in caught.value.values
        assert session.unreleased() == ()
        refused = pb.NotificationResult(error=to_notification_error(InvalidField("expected_reads", 2000, "fewer")))
        server.notify = lambda request: [
            refused if told.HasField("publish") else DONE for told in request.notifications
        ]
        with pytest.raises(InvalidField) as caught:
            session.publish("request", {"full": Blocks([1])}, expected_reads=2000)
        assert caught.value.values["withdrawn"] == str(session.unreleased()[0].number)
        session.close()


def test_a_session_that_was_closed_meanwhile_queues_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publication would get no answer, and its caller would wait for ever."""
    with scripted(tmp_path) as (server, control):
        server.watch = lambda _: iter([opened(), synced()])
        session = EngineSession(opened_session(control))
        pin = BlockUse.pin

        def late(use: BlockUse, *given: Any) -> None:
            session.close()
            pin(use, *given)

        monkeypatch.setattr(BlockUse, "pin", late)
        with pytest.raises(Closed):
            session.publish("request", {"full": Blocks([1])})
        assert session.unreleased() == ()
        home_session_of(session).block_use.writes().begin("read", {"full": np.array([1], np.int32)})


def test_renewals_go_on_after_the_system_had_no_thread_for_one(tmp_path: Path) -> None:
    with scripted(tmp_path) as (server, control):
        remaining = pb.Renewed(remaining=to_duration(60))
        server.notify = lambda request: [pb.NotificationResult(renewed=remaining) for _ in request.notifications]
        renewals, extended = Renewals(server.loop), threading.Event()
        lease = ReaderLease(b"l" * 16, now(), 30.0, 0.1)
        lease.changed = extended.set
        on_loop(server.loop, bool)
        with without_threads_for("kvferry-test-loop"):
            keep = partial(renewals.keep, lease, control, engine_ref(READER), "a read", lambda: None)
            on_loop(server.loop, keep)
            until(lambda: "LimitReached" in control._complaints)
        assert extended.wait(30)
        on_loop(server.loop, renewals.close)


def test_errors_of_homes_are_typed_with_any_delay() -> None:
    error = to_notification_error(HomeRecovering("not now", retry_after=3.0))
    error.retry_after.seconds = -5
    found: KvferryError = from_notification_error(error)
    assert found.retryable
    assert found.retry_after == 0.0
