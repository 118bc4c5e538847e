"""Releases are acknowledged whatever the home has answered before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry._control import home_session
from kvferry._control.backoff import BACKOFF_FIRST
from kvferry._control.home_session import HomeSession
from kvferry.errors import HomeRecovering, KvferryError, PeerRestarted
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.control.scripted import SPEC, released
from tests.support.blocking_control import looping, on_loop, turns


class World:
    """A session that hears of releases, and a connection whose calls are answered by the test. Its clock stands still.

    Attributes:
        acknowledged: the publications of each call.
    """

    address = "home:1"

    def __init__(self, session: Any) -> None:
        self.now = 1000.0
        self.acknowledged: list[list[int]] = []
        self._session = session

    async def notify_one(self, request: pb.NotifyRequest, timeout: float = 5.0) -> pb.NotificationResult:
        (told,) = request.notifications
        if told.HasField("released_ack"):
            self.acknowledged.append(list(told.released_ack.publications))
            self.answer = asyncio.get_running_loop().create_future()
            await self.answer
        return pb.NotificationResult(done=pb.Acknowledged())

    def release(self, number: int) -> None:
        self.session._loop.run(self.session._on_event(released(number)))
        turns(self.session._loop)

    def fail(self, error: KvferryError) -> None:
        on_loop(self.session._loop, lambda: self.answer.set_exception(error))
        turns(self.session._loop)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        turns(self.session._loop)

    @property
    def session(self) -> HomeSession:
        found: HomeSession = self._session
        return found


@pytest.fixture
def world() -> Iterator[World]:
    made = World(None)
    with looping(lambda: made.now) as loop:
        home: Any = made
        made._session = HomeSession(loop, home, SPEC)
        yield made


def test_releases_whose_acknowledgement_was_refused_go_with_the_next_one(world: World) -> None:
    world.release(1)
    world.fail(PeerRestarted("the engine is another", engine_id="engine"))
    world.release(2)
    assert world.acknowledged == [[1], [1, 2]]


@pytest.mark.parametrize(("asked", "least", "most"), [(None, BACKOFF_FIRST / 2, BACKOFF_FIRST), (7.0, 7.0, 7.0)])
@pytest.mark.parametrize("closed", [False, True])
def test_acknowledgements_are_repeated_after_the_pause_unless_the_session_is_closed(
    world: World, asked: float | None, least: float, most: float, closed: bool
) -> None:
    world.release(1)
    world.fail(HomeRecovering("not now", retry_after=asked))
    world.advance(least - 0.001)
    assert world.acknowledged == [[1]]
    if closed:
        world.session.close()
    world.advance(most - least + 0.001)
    assert world.acknowledged == [[1]] * (1 if closed else 2)


def test_a_warning_says_whose_releases_a_home_does_not_take(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.release(1)
    for _ in range(8):
        world.fail(HomeRecovering("not now"))
        world.advance(1.0)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert f"releases of engine {SPEC.engine_id!r}" in warning
    assert "not now" in warning


def test_a_call_acknowledges_a_bounded_number_of_releases(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_session, "MOST_ACKNOWLEDGED", 2)
    for number in range(1, 5):
        world.release(number)
    on_loop(world.session._loop, lambda: world.answer.set_result(None))
    turns(world.session._loop)
    assert world.acknowledged == [[1], [2, 3]]
