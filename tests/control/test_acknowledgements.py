"""Releases are acknowledged whatever the home has answered before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvferry._control.acknowledger import AGAIN, Acknowledgements

from kvferry.errors import HomeRecovering, KvferryError, PeerRestarted
from kvferry.v1 import kv_transfer_pb2 as pb

SENDER = pb.NotifyRequest(sender=pb.EngineRef(engine_id="engine", incarnation=b"i" * 16))


class Home:
    """A connection whose calls are answered by the test."""

    address = "home:1"

    def __init__(self) -> None:
        self.acknowledged: list[list[int]] = []
        self.answer: Callable[[KvferryError], None] | None = None

    def notify_later(self, request: pb.NotifyRequest, timeout: float, answered: Callable[..., None]) -> None:
        [told] = request.notifications
        self.acknowledged.append(list(told.released_ack.publications))
        self.answer = answered


def answered(error: KvferryError, *, closed: bool = False) -> tuple[Acknowledgements, Home]:
    """A release was acknowledged to a home, which answers with an error, maybe after the end."""
    home: Any = Home()
    acknowledgements = Acknowledgements(home)
    acknowledgements.add(1, SENDER)
    if closed:
        acknowledgements.close()
    home.answer(error)
    return acknowledgements, home


def test_after_a_refusal_the_next_release_is_acknowledged_with_those_before_it() -> None:
    acknowledgements, home = answered(PeerRestarted("the engine is another", engine_id="engine"))
    acknowledgements.add(2, SENDER)
    assert home.acknowledged == [[1], [1, 2]]


@pytest.mark.parametrize(("asked", "pause"), [(None, AGAIN), (AGAIN / 2, AGAIN), (7.0, 7.0)])
def test_a_home_is_asked_again_when_it_has_said_until_the_end(
    monkeypatch: pytest.MonkeyPatch, asked: float | None, pause: float
) -> None:
    pauses = []

    class Timer:
        daemon = False

        def __init__(self, seconds: float, call: Callable[..., None], given: tuple[pb.NotifyRequest]) -> None:
            pauses.append(seconds)

        def start(self) -> None:
            assert self.daemon

    monkeypatch.setattr("kvferry._control.acknowledger.threading.Timer", Timer)
    answered(HomeRecovering("not now", retry_after=asked))
    assert pauses == [pause]
    answered(HomeRecovering("not now", retry_after=asked), closed=True)
    assert pauses == [pause]
