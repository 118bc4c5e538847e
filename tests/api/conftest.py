"""Two engines in this process, whose arrays the tests see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import kvferry
from kvferry import Cache, Client, EngineSpec, Group
from tests.support.engines import Engine, engines_in, two_homes
from tests.support.identifiers import unique_id

AXES = ("kv", "block", "head", "token", "content")
TOKENS, BLOCKS = 16, 64


def array(blocks: int = BLOCKS) -> npt.NDArray[np.uint32]:
    return np.zeros((2, blocks, 2, TOKENS, 4), np.uint32)


@dataclass
class Pair:
    """A source whose blocks hold their own number, and a destination.

    Attributes:
        node: address of the node server.
        source, destination: their caches.
        theirs, mine: the memory of the two.
    """

    node: str
    client: Client
    source: Cache
    destination: Cache
    theirs: npt.NDArray[np.uint32] = field(repr=False)
    mine: npt.NDArray[np.uint32] = field(repr=False)

    def holds(self, block: int) -> int:
        """What lies in a block of the destination, the same number everywhere; -1 if it is mixed."""
        values = np.unique(self.mine[:, block])
        return int(values[0]) if len(values) == 1 else -1


@pytest.fixture(autouse=True)
def late_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that is short of processors may take more than the second after which a read ends unconfirmed."""
    monkeypatch.setattr("kvferry._control.lease_holder.VERDICT_TIMEOUT", 30.0)


@pytest.fixture(scope="session")
def node() -> Iterator[str]:
    with kvferry.serve() as server:
        yield server.address


@pytest.fixture
def client(node: str) -> Iterator[Client]:
    with Client(node) as made:
        yield made


@pytest.fixture
def pair(node: str, client: Client) -> Pair:
    group = Group("full", block_tokens=TOKENS, num_blocks=BLOCKS)
    theirs, mine = array(), array()
    theirs[:] = np.arange(BLOCKS, dtype=np.uint32).reshape(1, -1, 1, 1, 1)
    mine[:] = 10_000
    caches = [
        client.register_cache(EngineSpec(unique_id(name), (group,)), tensors={"l": memory}, axes=AXES, serve=serves)
        for name, memory, serves in (("source", theirs, True), ("destination", mine, True))
    ]
    return Pair(node, client, caches[0], caches[1], theirs, mine)


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of two node servers: the source's on TCP, the destination's on a UNIX socket."""
    with two_homes(tmp_path_factory.mktemp("homes")) as addresses:
        yield addresses


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines; they start side by side, so call `ready` on them once all are made."""
    with engines_in(tmp_path) as make:
        yield make
