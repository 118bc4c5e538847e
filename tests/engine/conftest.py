"""Two node servers, and engines on them; and the reads of a scheduler without either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry import Interval
from tests.engine.played_reads import World
from tests.engine.port_engines import PortEngine
from tests.support.caches import POISON, Model, shards
from tests.support.engines import two_homes


@pytest.fixture(autouse=True)
def late_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that is short of processors may take more than the second after which a read ends unconfirmed."""
    monkeypatch.setattr("kvferry._control.lease_holder.VERDICT_TIMEOUT", 30.0)


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of two node servers: the source's on TCP, the destination's on a UNIX socket."""
    with two_homes(tmp_path_factory.mktemp("homes")) as addresses:
        yield addresses


@pytest.fixture
def port_engine(tmp_path: Path) -> Iterator[Callable[..., PortEngine]]:
    """Make engines; they start side by side, so call `ready` on them once all are made."""
    made: list[PortEngine] = []

    def make(address: str, model: Model, units: list[Interval], **options: Any) -> PortEngine:
        made.append(PortEngine(address, model, units, tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def shared(homes: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PortEngine, PortEngine]]:
    """A source of two ranks and a destination of three, for tests that do nothing lasting to them."""
    folder, model = tmp_path_factory.mktemp("port-shared"), Model(heads=6)
    made = [PortEngine(homes[0], model, shards(6, 2), folder)]
    try:
        made.append(PortEngine(homes[1], model, shards(6, 3), folder))
        yield made[0].ready(), made[1].ready()
    finally:
        for each in made:
            each.close()


@pytest.fixture
def pair(shared: tuple[PortEngine, PortEngine]) -> tuple[PortEngine, PortEngine]:
    """The shared engines, the destination's memory poisoned."""
    for memory in shared[1].memories:
        memory.cells[:] = POISON
    return shared


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(**options))
        return made[-1]

    yield make
    for one in made:
        one.reads.close(20)
        one.loop.close()


@pytest.fixture
def world(worlds: Callable[..., World]) -> World:
    return worlds()
