"""Two node servers, and engines on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry import Interval
from tests.e2e.servers import NodeServerProcess
from tests.e2e.world import POISON, Model, shards
from tests.engine.world import PortEngine


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of two node servers: the source's and the destination's."""
    folder = tmp_path_factory.mktemp("port-homes")
    with NodeServerProcess(folder / "p", tcp=True) as source, NodeServerProcess(folder / "d") as destination:
        yield source.address, destination.address


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
