"""Node servers in processes of their own, and engines on them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry import Client, EngineSession, EngineSpec, Interval, Publication, Release
from tests.e2e.servers import NodeServerProcess
from tests.e2e.world import POISON, Memory, Model, RankProcess, shards, unique_id


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of two node servers: the source's on TCP, the destination's on a UNIX socket."""
    folder = tmp_path_factory.mktemp("homes")
    with (
        NodeServerProcess(folder / "source", tcp=True) as source,
        NodeServerProcess(folder / "destination") as destination,
    ):
        yield source.address, destination.address


@pytest.fixture(params=["", "tcp"], ids=["ucx-default", "ucx-tcp"])
def ucx_tls(request: pytest.FixtureRequest) -> str:
    """UCX's default moves bytes inside the post; over tcp a post really returns before it is done."""
    return str(request.param)


class Engine:
    """An engine of a test: its session here, its ranks in processes of their own."""

    def __init__(
        self,
        address: str,
        model: Model,
        units: list[Interval],
        folder: Path,
        *,
        engine_id: str = "",
        serve: bool = True,
        identity: dict[str, str] | None = None,
        **options: object,
    ) -> None:
        self.model = model
        self.spec = EngineSpec(
            engine_id or unique_id("engine"), (model.group(),), len(units), identity or {"model": "tiny"}
        )
        self.client = Client(address)
        self.session: EngineSession = self.client.open_engine(self.spec)
        self.memories = [Memory(model, held, folder / f"memory-{uuid.uuid4().hex}") for held in units]
        token = str(self.session.token)
        self.ranks = [
            RankProcess(address, self.spec, rank, memory, token, serve=serve, **options)
            for rank, memory in enumerate(self.memories)
        ]

    def ready(self) -> Engine:
        for rank in self.ranks:
            rank.ready()
        return self

    def release_of(self, publication: Publication) -> Release:
        """`released` of this publication; others that come by are of earlier tests."""
        while True:
            found = self.session.released(timeout=20)
            if not found:
                raise TimeoutError(f"publication {publication.number} was not released")
            for release in found:
                if release.publication == publication.number:
                    return release

    def close(self) -> None:
        """End its processes. Idempotent."""
        for rank in self.ranks:
            rank.close()
        self.client.close()
        for memory in self.memories:
            memory.close()
        self.ranks, self.memories = [], []


@pytest.fixture(scope="session")
def shared(homes: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """A source and a destination of one rank each, for tests that do nothing lasting to them."""
    folder, model = tmp_path_factory.mktemp("shared"), Model()
    made = [Engine(homes[0], model, shards(model.heads, 1), folder)]
    try:
        made.append(Engine(homes[1], model, shards(model.heads, 1), folder, serve=False))
        yield made[0].ready(), made[1].ready()
    finally:
        for each in made:
            each.close()


@pytest.fixture
def one_to_one(shared: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """The shared engines, the destination's memory poisoned."""
    shared[1].memories[0].cells[:] = POISON
    return shared


@pytest.fixture
def engine(homes: tuple[str, str], tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines; they start side by side, so call `ready` on them once all are made."""
    made: list[Engine] = []

    def make(address: str, model: Model, units: list[Interval], **options: object) -> Engine:
        made.append(Engine(address, model, units, tmp_path, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()
