"""Engines whose source is a process of its own, whose blocks a test may damage after they were summed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import pytest

from examples.demo import blocks_view
from kvferry import Blocks, IntegrityOptions
from kvferry.geometry import EngineGeometry
from tests.support.held_ranks import HeldRanks, allocate
from tests.support.node_servers import NodeServerProcess


@dataclass(frozen=True)
class Order:
    """What a source is to publish.

    Attributes:
        engine: its geometry.
        tokens: of the request.
        integrity: of its client.
        announce: whether the publish says that sums will come.
        sum_ranks: ranks that sum; None: all.
        late: whether the ranks sum only when the test says so, by `Sources.sum_now`.
        damage: (rank, plane, block in the request, unit, state, byte) to overwrite, after the blocks were summed.
    """

    engine: EngineGeometry
    tokens: int
    integrity: IntegrityOptions = field(default_factory=lambda: IntegrityOptions("full"))
    announce: bool = True
    sum_ranks: tuple[int, ...] | None = None
    late: bool = False
    damage: tuple[int, str, int, int, int, int] | None = None
    ucx_tls: str = ""


class Held(HeldRanks):
    """All ranks of an engine in one process, whose bytes can be damaged."""

    def damage(self, blocks: dict[str, Blocks], what: tuple[int, str, int, int, int, int]) -> int:
        """Overwrite a byte; returns the id of the block it is in."""
        rank, name, block, unit, state, byte = what
        _, cells, placed = self.ranks[rank]
        plane = next(plane for plane in placed.planes if plane.name == name)
        block_id = int(blocks[plane.group].ids[block])
        view = blocks_view(cells, cells.ctypes.data, plane)
        page, at = divmod(state, plane.page_tokens)
        view[block_id, page, at, unit - plane.units.begin, byte] ^= 0xFF
        return block_id


@dataclass(frozen=True)
class Published:
    """What a source answers."""

    reference: str
    sums: tuple[int, ...]
    damaged_block: int


def hold_source(address: str, pipe: Connection) -> None:
    """The process of a source: one engine after another, each until it is told to go on."""
    while True:
        try:
            order: Order = pipe.recv()
        except EOFError:
            return
        held = Held(address, order.engine, order.ucx_tls, serve=True, integrity=order.integrity)
        blocks = allocate(order.engine, order.tokens, 0, 1)
        held.fill("request", blocks)
        publication = held.session.publish("request", blocks, checksums=order.announce)
        chosen = range(len(held.ranks)) if order.sum_ranks is None else order.sum_ranks
        if order.late:
            pipe.send(Published(publication.reference, (), -1))
            pipe.recv()
        sums = tuple(held.ranks[rank][0].checksum(publication.number, blocks).result(30) for rank in chosen)
        damaged = held.damage(blocks, order.damage) if order.damage else -1
        pipe.send(Published(publication.reference, sums, damaged))
        pipe.recv()
        held.client.close()


@dataclass(frozen=True)
class Sources:
    """The process of the sources, and the server that is the home of all."""

    server: NodeServerProcess
    pipe: Connection

    @contextmanager
    def publish(self, order: Order) -> Iterator[Published]:
        """Have something published, until the end of the block."""
        self.pipe.send(order)
        yield self.pipe.recv()
        self.pipe.send("done")

    def sum_now(self) -> Published:
        """Let the ranks of a late order sum."""
        self.pipe.send("sum")
        answer: Published = self.pipe.recv()
        return answer

    @contextmanager
    def destination(self, engine: EngineGeometry, integrity: IntegrityOptions | None, **options: Any) -> Iterator[Held]:
        """A destination in this process."""
        held = Held(self.server.address, engine, options.get("ucx_tls", ""), serve=False, integrity=integrity)
        try:
            yield held
        finally:
            held.client.close()


@contextmanager
def sources_at(server: NodeServerProcess) -> Iterator[Sources]:
    """A process of sources at a server."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold_source, args=(server.address, theirs), daemon=True)
    process.start()
    theirs.close()
    yield Sources(server, ours)
    ours.close()
    process.join(20)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    with NodeServerProcess(tmp_path_factory.mktemp("home"), tcp=True) as server, sources_at(server) as found:
        yield found
