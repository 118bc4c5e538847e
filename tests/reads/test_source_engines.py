"""Source engines that a rank is told of, and never meets."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvferry import EngineSpec
from kvferry._clock import now
from kvferry._control.connection import Control
from kvferry._reads.source_engines import BREAKER_THRESHOLD, SourceEngine, SourceEngines, _Slot
from kvferry._wire.handshake import Handshaken
from kvferry.errors import BadAgentMetadata, EngineUnknown, Unreachable
from kvferry.planner import PathRule
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.geometries import engine, tensors

HERE = engine("decode", tensors(layers=1, axis=2)).geometry()
THERE = engine("prefill", tensors(layers=1, axis=2)).geometry()
SPEC = EngineSpec("decode", HERE.groups, 1)
SOON = 20.0
"""Seconds until a handshake is given up, which a test never waits for."""


class Home:
    """A home that knows no engine."""

    address = "home:1"

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def handshake(self, request: pb.HandshakeRequest, _: float) -> Any:
        self.asked.append(request.incarnation)
        raise EngineUnknown("no such engine")


class KnowingHome:
    """A home that has an engine, whose agent has a name."""

    def __init__(self, agent_name: str = "", address: str = "home:1") -> None:
        self.address = address
        self.agent_name = agent_name
        self.asked = 0

    def handshake(self, request: pb.HandshakeRequest, _: float) -> Handshaken:
        self.asked += 1
        name = self.agent_name or f"agent of {request.incarnation.hex()}"
        return Handshaken(THERE, {0: geometry_pb2.Agent(name=name, metadata=b"metadata")}, True)


def engines() -> SourceEngines:
    reader = pb.EngineRef(engine_id="decode", incarnation=b"d" * 16)
    return SourceEngines(SPEC, reader, 0, lambda _: HERE, PathRule(), lambda *_: None, lambda _: None)


def test_engines_that_references_invent_do_not_fill_the_memory() -> None:
    found, home = engines(), Home()
    for number in range(100):
        with pytest.raises(EngineUnknown):
            found.get(cast(Control, home), "prefill", number.to_bytes(16, "big"), "reference", now() + SOON)
    assert len(home.asked) == 100
    assert not found._slots


def test_an_engine_whose_reads_keep_failing_is_remembered() -> None:
    found, home = engines(), Home()
    source = (home.address, "prefill", b"p" * 16)
    found._slots[source] = _Slot()
    for _ in range(BREAKER_THRESHOLD):
        found.failed(*source)
    for _ in range(2):
        with pytest.raises(Unreachable):
            found.get(cast(Control, home), *source[1:], "reference", now() + SOON)
    assert not home.asked


def met(found: SourceEngines, home: KnowingHome, incarnation: bytes = b"p" * 16) -> SourceEngine:
    return found.get(cast(Control, home), "prefill", incarnation, "reference", now() + SOON)


def test_an_agent_that_is_named_after_another_engine_is_refused() -> None:
    """NIXL knows agents by name alone: this one would take the other engine's place."""
    found, home = engines(), KnowingHome("agent of " + (b"q" * 16).hex())
    with pytest.raises(BadAgentMetadata, match="named neither after a key nor after its engine's incarnation"):
        met(found, home)
    home.agent_name = ""
    assert met(found, home).agents[0].name == "agent of " + (b"p" * 16).hex()


def test_a_source_is_met_anew_after_a_failed_read() -> None:
    found, home = engines(), KnowingHome()
    first = met(found, home)
    assert met(found, home) is first
    found.failed(home.address, "prefill", b"p" * 16)
    assert found.known(home.address, "prefill", b"p" * 16) is None
    assert met(found, home) is not first
    assert home.asked == 2


def test_a_restarted_engine_replaces_its_own_earlier_start_only() -> None:
    dropped: list[SourceEngine] = []
    reader = pb.EngineRef(engine_id="decode", incarnation=b"d" * 16)
    found = SourceEngines(SPEC, reader, 0, lambda _: HERE, PathRule(), lambda *_: None, dropped.append)
    home, other = KnowingHome(), KnowingHome(address="home:2")
    first, namesake = met(found, home), met(found, other)
    met(found, home, b"r" * 16)
    assert dropped == [first]
    assert found.known(other.address, "prefill", b"p" * 16) is namesake


def test_an_engine_that_has_ended_according_to_its_home_is_dropped_there_only() -> None:
    """Another home may have, or claim to have, an engine of the same name and incarnation."""
    found, home, other = engines(), KnowingHome(), KnowingHome(address="home:2")
    met(found, home)
    namesake = met(found, other)
    found.gone(home.address, "prefill", b"p" * 16)
    assert found.known(home.address, "prefill", b"p" * 16) is None
    assert found.known(other.address, "prefill", b"p" * 16) is namesake
