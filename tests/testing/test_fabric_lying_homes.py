"""What a home says of a publication under a router's key directs a reader nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvferry import Blocks, EngineSpec, Group, router_reference
from kvferry._wire.reference import format_reference, parse_reference
from kvferry.engine import SchedulerPort
from kvferry.errors import InvalidField
from kvferry.testing import Fabric
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.values import EngineRef
from kvferry_server.home.home import Home
from kvferry_server.servicers import encode
from tests.testing.fabric_engines import SOON, Engine, kv

LIAR = "liar.example:7423"


@pytest.fixture
def reader(fabric: Fabric) -> Iterator[SchedulerPort]:
    port = SchedulerPort(fabric.client(), EngineSpec("d", (Group("full", block_tokens=4, num_blocks=32),)))
    yield port
    port.close()


def lie(monkeypatch: pytest.MonkeyPatch, **lies: Any) -> None:
    """Let the home answer readers with another reference than that of the publication."""
    true = Home.reference

    def reference(home: Home, publication: Any) -> str:
        named = parse_reference(true(home, publication))
        for name, value in lies.items():
            setattr(named, name, value)
        return format_reference(named)

    monkeypatch.setattr(Home, "reference", reference)


def renamed(ref: EngineRef) -> pb.EngineRef:
    return pb.EngineRef(engine_id="another", incarnation=ref.incarnation)


def acquire(fabric: Fabric, reader: SchedulerPort) -> str:
    """Publish and acquire under a router's reference, which is returned."""
    source, reference = Engine(fabric, "p"), router_reference(fabric.address, "p")
    source.write(kv(tokens=8), [3, 1])
    source.session.publish("request", {"full": Blocks([3, 1], end_token=8)}, reference=reference)
    reader.acquire("request", reference)
    assert reader.wait_news(SOON)
    return reference


def test_a_home_cannot_name_another_one(fabric: Fabric, reader: SchedulerPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an honest home may have another address than the router knows: only that one was allowed."""
    lie(monkeypatch, home=LIAR)
    acquire(fabric, reader)
    offer = reader.granted("request")
    assert offer is not None
    assert (offer.home, parse_reference(offer.reference).home) == (fabric.address, fabric.address)
    # So what is done with it goes to the home that was asked.
    reader.decline(offer.reference)


def test_a_home_cannot_name_another_engine(
    fabric: Fabric, reader: SchedulerPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie(monkeypatch, engine_id="another")
    monkeypatch.setattr(encode, "engine_ref", renamed)
    acquire(fabric, reader)
    with pytest.raises(InvalidField) as caught:
        reader.granted("request")
    assert caught.value.values["field"] == "source of a publication"
