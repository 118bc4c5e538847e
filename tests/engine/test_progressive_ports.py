"""Reads that begin while their source still computes, through the ports: real processes, real NIXL, and another
division into heads and another block size on each side."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry import Blocks, ReleaseOutcome
from kvferry.errors import InvalidField, PublicationAborted, PublicationTimeout
from tests.engine.port_engines import PortEngine
from tests.support.caches import POISON, Model, expect, kv, shards, write
from tests.support.node_servers import NodeServerProcess

SOURCE, DESTINATION = Model(heads=6, block_tokens=16), Model(heads=6, block_tokens=24)
SOURCE_IDS, IDS, TOKENS = [3, 4, 9, 6, 12], [20, 7, 8], 70
"""A request of 70 tokens: 4 full blocks and a tail at the source."""

Values = dict[tuple[int, str], np.ndarray]
Pair = tuple[PortEngine, PortEngine]


@pytest.fixture(scope="module")
def engines(homes: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A source of two ranks and a destination of three."""
    folder = tmp_path_factory.mktemp("progressive")
    made = [PortEngine(homes[0], SOURCE, shards(6, 2), folder)]
    try:
        made.append(PortEngine(homes[1], DESTINATION, shards(6, 3), folder))
        yield made[0].ready(), made[1].ready()
    finally:
        for each in made:
            each.close()


@pytest.fixture
def pair(engines: Pair) -> Pair:
    for memory in engines[1].memories:
        memory.cells[:] = POISON
    return engines


class Prefill:
    """A request whose source computes and publishes it chunk by chunk."""

    def __init__(self, engine: PortEngine, request: str) -> None:
        self.engine, self.values = engine, kv(engine.model, len(request), TOKENS)
        self.publication = engine.scheduler.publish(request, {}, last=False)
        self.done = 0

    def compute(self, tokens: int, payload: bytes = b"") -> None:
        """Write the KV of the tokens up to here, and publish them."""
        some = {key: array[:, :tokens] for key, array in self.values.items()}
        for memory in self.engine.memories:
            write(memory, some, SOURCE_IDS)
        ids = SOURCE_IDS[self.done // 16 : -(-tokens // 16)]
        blocks = {"full": Blocks(ids, self.done, tokens)}
        last = tokens == TOKENS
        self.engine.scheduler.publish_more(self.publication, blocks, last=last, payload=payload)
        self.done = tokens


def arrived(destination: PortEngine, values: Values, tokens: tuple[int, int], ids: list[int] = IDS) -> bool:
    """Whether the memories hold just these tokens."""
    return all(bool((memory.cells == expect(memory, values, ids, tokens)).all()) for memory in destination.memories)


def test_published_blocks_move_while_the_source_still_computes(pair: Pair) -> None:
    source, destination = pair
    prefill = Prefill(source, "chunks")
    destination.scheduler.acquire("mine", prefill.publication.reference, progressive=True)
    prefill.compute(32)
    offer = destination.grant("mine")
    assert (offer.complete, offer.payload) == (False, b"")
    assert offer.blocks() == {"full": Blocks(SOURCE_IDS[:2], 0, 32)}
    with pytest.raises(InvalidField, match="tokens"):
        destination.start("mine", IDS)
    assert not destination.start("mine", IDS, (0, TOKENS)).complete
    # Into the middle of a destination's block.
    destination.until(lambda: arrived(destination, prefill.values, (0, 32)))
    prefill.compute(64)
    destination.until(lambda: arrived(destination, prefill.values, (0, 64)))
    assert destination.ended == {}
    prefill.compute(TOKENS, b"first token: 7")
    end = destination.end_of("mine")
    assert (end.error, end.quiet, end.ranks, end.confirmed) == (None, True, 3, True)
    assert end.payload == b"first token: 7"
    assert end.bytes == sum(array.size for array in prefill.values.values())
    assert arrived(destination, prefill.values, (0, TOKENS))
    release = source.release_of(prefill.publication)
    assert release.outcome is ReleaseOutcome.READ
    assert [read.reported for read in release.reads] == [3]


def test_layers_move_as_they_finish(pair: Pair) -> None:
    source, destination = pair
    values = kv(SOURCE, 5, TOKENS)

    def compute(layer: int, tokens: tuple[int, int]) -> None:
        some = {key: array[:, : tokens[1]] for key, array in values.items() if key[0] == layer}
        for memory in source.memories:
            write(memory, some, SOURCE_IDS)

    publication = source.scheduler.publish("layers", {}, last=False)
    destination.scheduler.acquire("mine", publication.reference, progressive=True)
    compute(0, (0, 64))
    chunk = Blocks(SOURCE_IDS[:4], 0, 64)
    source.scheduler.publish_more(publication, {"full": chunk}, last=False, layers=["layers.0"])
    offer = destination.grant("mine")
    assert (offer.complete, offer.blocks()) == (False, {})
    destination.start("mine", IDS, (0, TOKENS))
    # The source has not computed the other layer: what its blocks hold is not touched.
    first = {key: array for key, array in values.items() if key[0] == 0}
    destination.until(lambda: arrived(destination, first, (0, 64)))
    compute(1, (0, 64))
    source.scheduler.publish_more(publication, {}, last=False, layers=["layers.1"])
    destination.until(lambda: arrived(destination, values, (0, 64)))
    for layer in (0, 1):
        compute(layer, (64, TOKENS))
    tail = Blocks(SOURCE_IDS[4:], 64, TOKENS)
    source.scheduler.publish_more(publication, {"full": tail}, last=True, payload=b"first token: 7")
    end = destination.end_of("mine")
    assert (end.error, end.quiet, end.confirmed, end.payload) == (None, True, True, b"first token: 7")
    assert end.bytes == sum(array.size for array in values.values())
    assert arrived(destination, values, (0, TOKENS))
    assert source.release_of(publication).outcome is ReleaseOutcome.READ


def test_a_prefix_that_is_cached_already_and_a_source_that_aborts(pair: Pair) -> None:
    source, destination = pair
    prefill = Prefill(source, "prefix")
    destination.scheduler.acquire("mine", prefill.publication.reference, progressive=True)
    prefill.compute(32)
    destination.grant("mine")
    destination.start("mine", IDS[1:], (24, TOKENS))
    destination.until(lambda: arrived(destination, prefill.values, (24, 32), IDS[1:]))
    source.scheduler.abort(prefill.publication)
    end = destination.end_of("mine")
    assert isinstance(end.error, PublicationAborted)
    assert (end.quiet, end.lost) == (True, {"full": tuple(IDS[1:])})
    assert source.release_of(prefill.publication).outcome is ReleaseOutcome.ABORTED


def test_a_source_that_stops_publishing_is_not_waited_for_beyond_the_timeout(pair: Pair) -> None:
    source, destination = pair
    prefill = Prefill(source, "stuck")
    destination.scheduler.acquire("mine", prefill.publication.reference, progressive=True, timeout=1.5)
    prefill.compute(32)
    destination.grant("mine")
    destination.start("mine", IDS, (0, TOKENS))
    end = destination.end_of("mine")
    assert isinstance(end.error, PublicationTimeout)
    assert end.quiet
    source.scheduler.abort(prefill.publication)
    source.release_of(prefill.publication)


@pytest.mark.slow
def test_a_read_goes_on_when_its_home_restarts_halfway(tmp_path: Path, port_engine: Callable[..., PortEngine]) -> None:
    with NodeServerProcess(tmp_path / "one", tcp=True, ttl=20, max_ttl=20) as server:
        source = port_engine(server.address, SOURCE, shards(6, 2))
        destination = port_engine(server.address, DESTINATION, shards(6, 1))
        source.ready(), destination.ready()
        prefill = Prefill(source, "restart")
        destination.scheduler.acquire("mine", prefill.publication.reference, progressive=True)
        prefill.compute(32)
        destination.grant("mine")
        destination.start("mine", IDS, (0, TOKENS))
        destination.until(lambda: arrived(destination, prefill.values, (0, 32)))
        server.stop(signal.SIGKILL)
        server.start()
        prefill.compute(64)
        prefill.compute(TOKENS)
        end = destination.end_of("mine")
        assert (end.error, end.confirmed) == (None, True)
        # Nothing was read twice.
        assert end.bytes == sum(array.size for array in prefill.values.values())
        assert arrived(destination, prefill.values, (0, TOKENS))
