"""The source engines of a rank: how it meets them, once for all reads that wait, and which it forgets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import cast

import pytest

from kvferry import EngineSpec
from kvferry._control.connection import Control
from kvferry._reads.source_engines import BREAKER_THRESHOLD, SourceEngine, SourceEngines, _Slot
from kvferry._wire.geometry_codec import Handshaken
from kvferry.errors import (
    BadAgentMetadata,
    EngineUnknown,
    KvferryError,
    LimitReached,
    PeerRestarted,
    PublicationStale,
    TransferFailed,
    Unavailable,
    Unreachable,
    WrongKey,
)
from kvferry.planner import PathRule
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.geometries import engine, tensors
from tests.support.loops import PlayedLoop

HERE = engine("decode", tensors(layers=1, axis=2)).geometry()
THERE = engine("prefill", tensors(layers=1, axis=2)).geometry()
SPEC = EngineSpec("decode", HERE.groups, 1)
SOON = 20.0
"""Seconds until a handshake is given up, which a test never waits for."""


class Home:
    """A home whose answers to handshakes a test gives: errors; after these, an engine whose agent has a name."""

    def __init__(self, *errors: Exception, agent_name: str = "", address: str = "home:1") -> None:
        self.address = address
        self.agent_name = agent_name
        self.errors = list(errors)
        self.asked: list[str] = []
        self.begun, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()

    async def handshake(self, request: pb.HandshakeRequest, _: float) -> Handshaken:
        self.asked.append(request.reference)
        self.begun.set()
        await self.answers.wait()
        if self.errors:
            raise self.errors.pop(0)
        name = self.agent_name or f"agent of {request.incarnation.hex()}"
        return Handshaken(THERE, {0: geometry_pb2.Agent(name=name, metadata=b"metadata")}, True)


class Engines(SourceEngines):
    """The source engines of a rank, on a loop of the test's own."""

    def __init__(self, loop: PlayedLoop) -> None:
        self.loop = loop
        self.retired: list[str] = []
        reader = pb.EngineRef(engine_id="decode", incarnation=b"d" * 16)
        here, nobody = HERE.ranks[0], cast(Control, None)
        super().__init__(loop, SPEC, reader, here, nobody, PathRule(), self._unmeasured, self.retired.append)

    async def _unmeasured(self, *_: object) -> None: ...

    def met(self, home: Home, incarnation: bytes = b"p" * 16, reference: str = "reference") -> SourceEngine:
        return self.loop.run(self.asked_for(home, reference, SOON, incarnation))

    async def asked_for(
        self, home: Home, reference: str, within: float, incarnation: bytes = b"p" * 16
    ) -> SourceEngine:
        until = self.loop.now() + within
        return await self.get(cast(Control, home), (home.address, "prefill", incarnation), reference, until)

    def met_together(self, home: Home, *asked: tuple[str, float]) -> list[SourceEngine | BaseException]:
        """What becomes of those that ask, each by a reference and within a time, while the first handshake goes on."""

        async def run() -> list[SourceEngine | BaseException]:
            home.answers.clear()
            each = [asyncio.ensure_future(self.asked_for(home, reference, within)) for reference, within in asked]
            await home.begun.wait()
            home.answers.set()
            return await asyncio.gather(*each, return_exceptions=True)

        return self.loop.run(run())


@pytest.fixture
def found() -> Iterator[Engines]:
    loop = PlayedLoop()
    yield Engines(loop)
    loop.close()


def test_engines_that_references_invent_do_not_fill_the_memory(found: Engines) -> None:
    home = Home(*[EngineUnknown("no such engine") for _ in range(100)])
    for number in range(100):
        with pytest.raises(EngineUnknown):
            found.met(home, number.to_bytes(16, "big"))
    assert len(home.asked) == 100
    assert not found._slots


def test_an_engine_whose_reads_keep_failing_is_remembered(found: Engines) -> None:
    home = Home()
    source = (home.address, "prefill", b"p" * 16)
    found._slots[source] = _Slot()
    for _ in range(BREAKER_THRESHOLD):
        found.failed(source)
    for _ in range(2):
        with pytest.raises(Unreachable):
            found.met(home)
    assert not home.asked


def test_one_handshake_serves_all_waiting_reads(found: Engines) -> None:
    home = Home()
    first, second = found.met_together(home, ("a", SOON), ("b", SOON))
    assert first is second
    assert home.asked == ["a"]


@pytest.mark.parametrize("error", [WrongKey("no"), PublicationStale("old")], ids=["key", "stale"])
def test_a_reference_that_is_gone_affects_no_other_reference(found: Engines, error: KvferryError) -> None:
    home = Home(error)
    first, same, other = found.met_together(home, ("a", SOON), ("a", SOON), ("b", SOON))
    assert (type(first), type(same)) == (type(error), type(error))
    assert isinstance(other, SourceEngine)
    assert home.asked == ["a", "b"]


@pytest.mark.parametrize(
    ("error", "gone"),
    [(PeerRestarted("anew"), True), (EngineUnknown("who"), True), (TransferFailed("no such source"), False)],
    ids=["restarted", "unknown", "failed"],
)
def test_an_error_of_the_source_ends_all_reads_that_wait_for_its_handshake(
    found: Engines, error: KvferryError, *, gone: bool
) -> None:
    found.met(Home())
    found.failed(("home:1", "prefill", b"p" * 16))
    home = Home(error)
    each = found.met_together(home, ("a", SOON), ("b", 2 * SOON))
    assert [type(end) for end in each] == [type(error)] * 2
    assert home.asked == ["a"]
    # Its failed reads are forgotten with it.
    assert bool(found._slots) is not gone


def test_a_read_with_time_left_repeats_the_handshake(found: Engines) -> None:
    home = Home(Unavailable("not now", retry_after=SOON + 1))
    short, patient = found.met_together(home, ("a", SOON), ("b", 2 * SOON))
    assert isinstance(short, Unavailable)
    assert isinstance(patient, SourceEngine)
    assert home.asked == ["a", "b"]


def test_who_waits_for_the_handshake_of_another_waits_for_its_own_time_only(found: Engines) -> None:
    home = Home()

    async def run() -> SourceEngine:
        home.answers.clear()
        longer = asyncio.ensure_future(found.asked_for(home, "a", SOON))
        await home.begun.wait()
        with pytest.raises(Unavailable, match="'prefill' was not complete in time"):
            await asyncio.wait_for(found.asked_for(home, "b", 0.01), SOON)
        home.answers.set()
        return await longer

    assert found.loop.run(run()) is found.met(home)
    assert home.asked == ["a"]


def test_who_begins_a_handshake_for_others_waits_for_its_own_time_only(found: Engines) -> None:
    class Refusing(Home):
        async def handshake(self, request: pb.HandshakeRequest, left: float) -> Handshaken:
            if self.asked:
                self.answers.clear()
                again.set()
            return await super().handshake(request, left)

    home, again = Refusing(Unavailable("not now", retry_after=4 * SOON)), asyncio.Event()

    async def run() -> SourceEngine:
        each = [asyncio.ensure_future(found.asked_for(home, name, (1 + n) * SOON)) for n, name in enumerate("abc")]
        await again.wait()
        found.loop.leap += 2 * SOON
        with pytest.raises(Unavailable, match="'prefill' was not complete in time"):
            await asyncio.wait_for(each[1], SOON / 10)
        home.answers.set()
        return await each[2]

    assert isinstance(found.loop.run(run()), SourceEngine)
    assert home.asked == ["a", "b"]


def test_a_read_that_is_cancelled_does_not_end_the_handshake_of_others(found: Engines) -> None:
    home = Home()

    async def run() -> SourceEngine:
        home.answers.clear()
        first, second = (asyncio.ensure_future(found.asked_for(home, name, SOON)) for name in "ab")
        await home.begun.wait()
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        home.answers.set()
        return await second

    assert isinstance(found.loop.run(run()), SourceEngine)
    assert home.asked == ["a"]


def test_a_handshake_without_a_thread_ends_and_no_other(found: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> threading.Thread:
        raise LimitReached("no thread", retry_after=1.0)

    home = Home()
    found.loop.turn()
    with monkeypatch.context() as patch:
        patch.setattr("kvferry._loop.start_thread", refuse)
        with pytest.raises(LimitReached):
            found.met(home)
    assert isinstance(found.met(home), SourceEngine)


def test_an_agent_that_is_named_after_another_engine_is_refused(found: Engines) -> None:
    """NIXL knows agents by name alone: this one would take the other engine's place."""
    home = Home(agent_name="agent of " + (b"q" * 16).hex())
    with pytest.raises(BadAgentMetadata, match="named neither after a key nor after its engine's incarnation"):
        found.met(home)
    home.agent_name = ""
    assert found.met(home).agents[0].name == "agent of " + (b"p" * 16).hex()


def test_a_source_gets_another_handshake_after_a_failed_read(found: Engines) -> None:
    home = Home()
    first = found.met(home)
    assert found.met(home) is first
    found.failed((home.address, "prefill", b"p" * 16))
    assert found.known((home.address, "prefill", b"p" * 16)) is None
    assert found.met(home) is not first
    assert len(home.asked) == 2


def test_a_restarted_engine_replaces_its_own_earlier_start_only(found: Engines) -> None:
    home, other = Home(), Home(address="home:2")
    first, namesake = found.met(home), found.met(other)
    found.met(home, b"r" * 16)
    assert found.retired == [agent.name for agent in first.agents.values()]
    assert found.known((other.address, "prefill", b"p" * 16)) is namesake


def test_an_engine_that_has_ended_according_to_its_home_is_dropped_there_only(found: Engines) -> None:
    """Another home may have, or claim to have, an engine of the same name and incarnation."""
    home, other = Home(), Home(address="home:2")
    found.met(home)
    namesake = found.met(other)
    found.gone((home.address, "prefill", b"p" * 16))
    assert found.known((home.address, "prefill", b"p" * 16)) is None
    assert found.known((other.address, "prefill", b"p" * 16)) is namesake
