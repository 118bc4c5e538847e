"""Publications that are given up: their rest at the engine, and the refill of a restarted home."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from kvferry import Blocks, Cache, EngineSpec, Group
from kvferry._clock import now
from kvferry._control import publications
from kvferry._control.connection import Control, NotificationAnswer
from kvferry._control.home_session import HomeSession
from kvferry._control.publication_sender import PublicationSender
from kvferry._control.publications import Publication
from kvferry._control.publish import Publish, PublishMore
from kvferry._wire.outcomes import ReleaseOutcome
from kvferry._wire.reference import router_reference
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import InternalError, InvalidField, KvferryError, NotPublished, Unavailable, Unreachable
from kvferry.testing import Fabric
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.loops import PlayedLoop
from tests.support.waiting import until

AXES = ("kv", "block", "head", "token", "content")
SPEC = EngineSpec("prefill", (Group("full", block_tokens=16, num_blocks=32),))
SOON = 30.0


class RefusingSession:
    """A session whose home takes none of what it is sent."""

    spec = SPEC
    patience = SOON

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ended_steps: list[int] = []
        self.sent: list[pb.Notification] = []

    async def attempt(self, told: Sequence[pb.Notification], timeout: float) -> tuple[list[KvferryError], None]:
        self.sent += told
        return [InvalidField("blocks", 0, "others") for _ in told], None

    def ended(self, step: pb.Publish, error: KvferryError | None) -> None:
        assert error is not None
        self.ended_steps.append(step.step)


@pytest.fixture
def loop() -> Iterator[PlayedLoop]:
    made = PlayedLoop()
    yield made
    made.close()


def test_steps_behind_a_refused_one_are_given_up_with_it(loop: PlayedLoop) -> None:
    session = RefusingSession()
    sender = PublicationSender(loop, cast(HomeSession, session))
    publication = Publication(1, "request", "reference")
    with session.lock:
        for index in range(4):
            sender.put(publication, pb.Publish(publication=1, step=index, last=index == 3))
    until(lambda: len(session.ended_steps) == 4)
    loop.run(sender.close(SOON))
    assert session.ended_steps == [0, 1, 2, 3]


class AwaySession(RefusingSession):
    """A session whose home is away for longer than anybody waits, until a step is given up."""

    patience = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[KvferryError | None] = []

    async def attempt(self, told: Sequence[pb.Notification], timeout: float) -> tuple[list[Any], Any]:
        self.sent += told
        failure = None if self.errors else Unreachable("no way", retry_after=0.01, address="home")
        return [failure for _ in told], failure

    def ended(self, step: pb.Publish, error: KvferryError | None) -> None:
        self.errors.append(error)


def test_a_step_that_its_home_does_not_take_in_time_is_given_up(loop: PlayedLoop) -> None:
    """Readers are told that it was: the home may have offered it to them."""
    session = AwaySession()
    sender = PublicationSender(loop, cast(HomeSession, session))
    publication = Publication(1, "request", "reference")
    with session.lock:
        sender.put(publication, pb.Publish(publication=1, last=True))
    until(lambda: bool(session.errors))
    assert [type(error) for error in session.errors] == [NotPublished]
    loop.run(sender.close(SOON))
    aborts = [told.abort for told in session.sent if told.HasField("abort")]
    assert aborts == [pb.Abort(publication=1, not_published=True)]


def register(fabric: Fabric) -> Cache:
    memory = np.zeros((2, 32, 1, 16, 4), np.float32)
    return fabric.client().register_cache(SPEC, tensors={"layer": memory}, axes=AXES)


def by_session(fabric: Fabric) -> tuple[Publication, Callable[[], Any], Callable[[], Any]]:
    session = register(fabric).session
    publication = session.publish("request", {"full": Blocks([1])})

    def abort() -> None:
        with pytest.raises(Unavailable):
            session.abort(publication, timeout=0.1)

    return publication, abort, lambda: session.released(timeout=0.0)


def by_port(fabric: Fabric) -> tuple[Publication, Callable[[], Any], Callable[[], Any]]:
    client = fabric.client()
    port, worker = SchedulerPort(client, SPEC), WorkerPort(client, SPEC)
    worker.register({"layer": np.zeros((2, 32, 1, 16, 4), np.float32)}, axes=AXES)
    publication = port.publish("request", {"full": Blocks([1])})
    until(lambda: not port._session._sender._messages)
    return publication, lambda: port.abort(publication), port.released


@pytest.mark.parametrize("engine", [by_session, by_port])
def test_an_abort_that_never_reached_its_home_is_sent_to_the_next(
    monkeypatch: pytest.MonkeyPatch, engine: Callable[[Fabric], Any]
) -> None:
    notify, failed = Control.notify, threading.Event()

    async def call(control: Control, request: pb.NotifyRequest, timeout: float = 5.0) -> list[NotificationAnswer]:
        if any(told.HasField("abort") for told in request.notifications[:1]):
            # The abort alone, not a refill.
            failed.set()
            raise Unreachable("no way", retry_after=0.01, address="home")
        return await notify(control, request, timeout)

    monkeypatch.setattr(Control, "notify", call)
    # A restarted home releases nothing before the leases that it does not know have ended.
    with Fabric(ttl=10.0, max_ttl=10.0) as fabric:
        publication, abort, released = engine(fabric)
        abort()
        assert failed.wait(SOON)
        fabric.stop_home()
        fabric.start_home()
        found: list[Any] = []

        def told() -> bool:
            fabric.advance(1.0)
            found.extend(released())
            return bool(found)

        until(told)
        assert [(one.publication, one.outcome) for one in found] == [(publication.number, ReleaseOutcome.ABORTED)]


@pytest.mark.parametrize("together", [1, 2])
def test_steps_of_a_call_that_its_home_ends_with_an_error_stay_pinned(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """The home may have acted on some of them. They are withdrawn, also at the next home."""
    refused, withdrawn, free = list[int](), set[int](), threading.Event()

    async def refuse(control: Control, request: pb.NotifyRequest, timeout: float = 5.0) -> Any:
        withdrawn.update(told.abort.publication for told in request.notifications if told.HasField("abort"))
        refused.extend(told.publish.publication for told in request.notifications if told.HasField("publish"))
        if any(told.HasField("publish") for told in request.notifications):
            raise InvalidField("notifications", 0, "others")
        raise Unreachable("the home is away", address=control.address)

    with Fabric() as fabric:
        session = register(fabric).session._session
        session._loop.call(lambda: free.wait(SOON))
        with monkeypatch.context() as away:
            away.setattr(Control, "notify", refuse)
            numbers = [
                session.publish(Publish(f"request-{index}", {"full": Blocks([index])})).number
                for index in range(1, together + 1)
            ]
            free.set()
            until(lambda: withdrawn == set(numbers) and len(refused) == together)
            assert refused == numbers
            told = [notification.abort for notification in session._offers.snapshot().notifications]
            aborts = [abort.publication for abort in told if abort.not_published]
            assert aborts == numbers
        released = session.released(SOON)
        assert {release.publication for release in released} <= set(numbers)
        assert not any(release.local for release in released)


def test_a_refused_publication_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its router key, which readers wait for, is free again."""
    notify, free = Control.notify, threading.Event()

    async def refuse(control: Control, request: pb.NotifyRequest, timeout: float = 5.0) -> list[NotificationAnswer]:
        if [told.publish.step for told in request.notifications if told.HasField("publish")] != [0, 1]:
            return await notify(control, request, timeout)
        return [InvalidField("blocks", 0, "others"), InternalError("failed", error_id="1")]

    monkeypatch.setattr(Control, "notify", refuse)
    with Fabric() as fabric:
        session = register(fabric).session._session
        session._loop.call(lambda: free.wait(SOON))
        first = Publish("request", {"full": Blocks([1])}, last=False, reference=router_reference("", "prefill"))
        publication = session.publish(first)
        session.publish_more(PublishMore(publication, {"full": Blocks([2], first_token=16)}, last=True))
        free.set()
        assert [release.publication for release in session.released(SOON)] == [publication.number]
        assert session.unreleased() == ()
        assert session.publish(first).number == publication.number + 1


def test_blocks_stay_pinned_without_a_home_for_as_long_as_a_lease_may_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that waited for the publication has a lease of max_ttl, even if the final deadline is sooner."""
    monkeypatch.setattr(publications, "LOCAL_RELEASE_MARGIN", 0.0)
    with Fabric(ttl=1.0, max_ttl=3.0, final=0.5, hold=60.0) as fabric:
        session = register(fabric).session
        began = now()
        session.publish("request", {"full": Blocks([1])}, last=False)
        fabric.stop_home()
        (release,) = session.released(timeout=SOON)
        assert release.local
        assert now() - began >= 3.0
