"""Several homes of one fabric are node servers of several nodes: engines read across them, and one alone goes away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry import Client
from kvferry.errors import HomeNotAllowed, InvalidField, Unreachable
from kvferry.testing import Fabric
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.introspection_pb2 import ENGINE_STATE_INCOMPLETE, ListEnginesRequest
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.stubs import KVTransferStub
from tests.support.waiting import until
from tests.testing.fabric_engines import SOON, Engine, kv

VALUES = kv(tokens=8)
THEIRS, MINE = [3, 1], [5, 6]


@pytest.fixture
def two() -> Iterator[Fabric]:
    with Fabric(homes=2) as fabric:
        yield fabric


def test_engines_of_two_homes_read_from_each_other(two: Fabric) -> None:
    engines = [Engine(two, f"e{home}", homes=[home]) for home in (0, 1)]
    for source, destination in (engines, engines[::-1]):
        publication = source.publish(VALUES, THEIRS)
        (read,) = destination.read(publication.reference, MINE, allow_overlap=True)
        read.result(SOON)
        assert source.outcome(publication).name == "READ"


def test_a_home_that_stops_takes_its_own_engines_alone(two: Fabric) -> None:
    far, near, decode = (Engine(two, name, homes=[home]) for name, home in (("far", 1), ("near", 0), ("d", 0)))
    lost, kept = far.publish(VALUES, THEIRS), near.publish(VALUES, THEIRS)
    two.stop_home(1)
    (read,) = decode.read(kept.reference, MINE)
    read.result(SOON)
    with pytest.raises(Unreachable):
        decode.scheduler.decline(lost.reference, timeout=0.05)
    two.start_home(1)
    (read,) = decode.read(lost.reference, MINE)
    read.result(SOON)
    assert decode.holds(VALUES, MINE)


def test_a_rank_on_another_node_is_of_its_engine(two: Fabric) -> None:
    prefill, decode = Engine(two, "p", 2, homes=[0, 0, 1]), Engine(two, "d", 3, homes=[1, 0, 1, 1])
    publication = prefill.publish(VALUES, THEIRS)
    for read in decode.read(publication.reference, MINE):
        read.result(SOON)
    assert decode.holds(VALUES, MINE)
    assert prefill.outcome(publication).name == "READ"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_on_another_node_is_lost_with_its_process_or_its_node(stopped: bool) -> None:
    with Fabric(homes=2) as two:
        prefill, decode = Engine(two, "p", 2, homes=[0, 0, 1]), Engine(two, "d")
        introspection = IntrospectionStub(two.client()._network.dial(two.addresses[0], None))
        if stopped:
            two.stop_home(1)
        else:
            two.kill(prefill.workers[1])

        def incomplete() -> bool:
            # The engine's home hears of the loss by and by, and waits an engine ttl from then on.
            two.advance(11.0)
            listed = introspection.ListEngines(ListEnginesRequest(), timeout=SOON).engines
            return ENGINE_STATE_INCOMPLETE in [each.state for each in listed]

        until(incomplete)
        publication = prefill.publish(VALUES, THEIRS)
        (read,) = decode.read(publication.reference, MINE, timeout=3.0)
        problem = str(read.exception(SOON))
        assert "1 of 2 ranks are missing" in problem
        assert (f"nodes lost: {two.addresses[1]}" in problem) == stopped


def test_a_rank_is_registered_again_through_a_node_that_is_back(two: Fabric) -> None:
    prefill = Engine(two, "p", 2, homes=[0, 0, 1])
    for home in (1, 0):
        two.stop_home(home)
        two.start_home(home)
    publication = prefill.publish(VALUES, THEIRS)
    decode = Engine(two, "d")
    (read,) = decode.read(publication.reference, MINE, timeout=SOON)
    read.result(SOON)
    assert decode.holds(VALUES, MINE)


def test_a_router_declines_at_any_home(two: Fabric) -> None:
    prefill = Engine(two, "p")
    publication = prefill.publish(VALUES, THEIRS)
    declined = pb.Notification(decline=pb.Decline(reference=publication.reference))
    channel = two.client()._network.dial(two.addresses[1], None)
    KVTransferStub(channel).Notify(pb.NotifyRequest(notifications=[declined]), timeout=SOON)
    assert prefill.outcome(publication).name == "DECLINED"


def test_a_home_that_a_client_is_not_allowed_is_refused(two: Fabric) -> None:
    publication = Engine(two, "p").publish(VALUES, THEIRS)
    with Client(two.addresses[1]) as client, pytest.raises(HomeNotAllowed):
        client.decline(publication.reference)
    with Client(two.addresses[1], allowed_homes=two.addresses) as client:
        client.decline(publication.reference)


def test_time_passes_at_all_homes(two: Fabric) -> None:
    engines = [Engine(two, f"e{home}", homes=[home]) for home in (0, 1)]
    unread = [engine.publish(VALUES, THEIRS) for engine in engines]
    two.advance(121.0)
    for engine, publication in zip(engines, unread, strict=True):
        assert engine.outcome(publication).name == "UNREAD"


def test_homes_that_are_not_there_are_refused(two: Fabric) -> None:
    with pytest.raises(InvalidField, match="0 to 1"):
        two.client(home=2)
    with pytest.raises(InvalidField):
        two.stop_home(-1)
    with pytest.raises(InvalidField):
        Fabric(homes=0)
