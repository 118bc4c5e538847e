"""Time that a test lets pass on a fabric passes for the home and all clients: nothing has to be waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, Cache, Client, EngineSpec, Group, Release, ReleaseOutcome, SchedulerPort, WorkerPort
from kvferry.errors import InvalidField, PublicationTimeout
from kvferry.testing import Fabric
from tests.support.waiting import until

AXES = ("kv", "block", "head", "token", "content")
SOON = 20.0


def spec(name: str) -> EngineSpec:
    return EngineSpec(name, (Group("full", block_tokens=16, num_blocks=8),))


def memory(value: float) -> Any:
    return np.full((2, 8, 1, 16, 4), value, np.float32)


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric() as made:
        yield made


@pytest.fixture
def prefill(fabric: Fabric) -> Cache:
    return fabric.client().register_cache(spec("p"), tensors={"layer": memory(7)}, axes=AXES)


def decode(client: Client) -> tuple[SchedulerPort, WorkerPort, Any]:
    mine = memory(0)
    port = SchedulerPort(client, spec("d"))
    worker = WorkerPort(client, port.spec)
    worker.register({"layer": mine}, axes=AXES)
    return port, worker, mine


def test_a_lease_is_renewed_while_an_engine_keeps_its_request_for_several_ttls(fabric: Fabric, prefill: Cache) -> None:
    port, worker, mine = decode(fabric.client())
    publication = prefill.session.publish("mine", {"full": Blocks([1])})
    port.acquire("mine", publication.reference, timeout=120.0)
    until(lambda: port.granted("mine") is not None)
    fabric.advance(100.0)
    worker.start(port.attach("mine", {"full": Blocks([2])}))
    ended: list[Any] = []

    def has_ended() -> bool:
        port.collect(worker.finished())
        ended.extend(port.finished().reads)
        return bool(ended)

    until(has_ended)
    assert (ended[0].error, ended[0].confirmed, mine[0, 2, 0, 0, 0]) == (None, True, 7)


def test_a_publication_that_nobody_reads_comes_back_after_the_hold(fabric: Fabric, prefill: Cache) -> None:
    prefill.session.publish("mine", {"full": Blocks([1])})
    fabric.advance(119.0)
    assert prefill.session.released() == []
    fabric.advance(2.0)
    (release,) = prefill.session.released(SOON)
    assert (release.request_id, release.outcome, release.local) == ("mine", ReleaseOutcome.UNREAD, False)


def test_a_publication_is_held_from_when_a_home_that_was_away_takes_it(fabric: Fabric) -> None:
    """The readers that were given it meanwhile have failed, and others may come: only a decline ends the hold."""
    port, _, _ = decode(fabric.client())
    fabric.stop_home()
    port.publish("mine", {"full": Blocks([1])})
    fabric.advance(40.0)
    fabric.start_home()
    until(lambda: bool(fabric._homes[fabric.address]._home.journal.pinned))
    fabric.advance(118.0)
    assert port.released() == []
    fabric.advance(3.0)
    released: list[Release] = []

    def told() -> bool:
        released.extend(port.released())
        return bool(released)

    until(told)
    assert [(release.request_id, release.outcome) for release in released] == [("mine", ReleaseOutcome.UNREAD)]


def test_a_publication_comes_back_after_the_lease_and_the_hold_of_a_reader_that_died(
    fabric: Fabric, prefill: Cache
) -> None:
    client = fabric.client(optimistic=False)
    port, _, _ = decode(client)
    publication = prefill.session.publish("mine", {"full": Blocks([1])})
    port.acquire("mine", publication.reference)
    until(lambda: port.granted("mine") is not None)
    fabric.kill(client)
    fabric.advance(29.0 + 119.0)
    assert prefill.session.released() == []
    fabric.advance(3.0)
    (release,) = prefill.session.released(SOON)
    assert release.outcome is ReleaseOutcome.UNREAD
    assert [read.state for read in release.reads] == ["expired"]


def test_a_wait_for_a_publication_ends_at_its_timeout(fabric: Fabric, prefill: Cache) -> None:
    port, _, _ = decode(fabric.client())
    publication = prefill.session.publish("mine", {"full": Blocks([1])}, last=False)
    port.acquire("mine", publication.reference, timeout=60.0)
    fabric.advance(59.0)
    assert port.granted("mine") is None
    fabric.advance(2.0)

    def timed_out() -> bool:
        try:
            return port.granted("mine") is not None
        except PublicationTimeout:
            return True

    until(timed_out)


def test_time_does_not_go_back(fabric: Fabric) -> None:
    with pytest.raises(InvalidField):
        fabric.advance(-1.0)
