"""Every read ends, whatever is closed, cancelled or not to be had meanwhile, and its home and its caller hear of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future

import numpy as np
import pytest

from kvferry import Blocks, Cache, Client, Read, ReadResult
from kvferry.errors import Closed, PublicationTimeout
from tests.support.caches import Model, shards
from tests.support.engines import Engine, reader_of

MakeEngine = Callable[..., Engine]
Homes = tuple[str, str]
Pair = tuple[Engine, Engine]

BLOCKS = {"full": Blocks([1, 2, 3])}


@pytest.fixture
def cache(homes: Homes, one_to_one: Pair) -> Iterator[Cache]:
    """A reader in this process."""
    model = one_to_one[0].model
    with Client(homes[1]) as client:
        yield reader_of(client, model, np.zeros(model.rank_bytes(shards(model.heads, 1)[0]), np.uint8))


class Closing(Mapping[str, Blocks]):
    """Blocks that close a cache when somebody looks at them."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def __getitem__(self, group: str) -> Blocks:
        return BLOCKS[group]

    def __iter__(self) -> Iterator[str]:
        self._cache.close()
        return iter(BLOCKS)

    def __len__(self) -> int:
        return len(BLOCKS)


def test_read_that_is_started_while_its_cache_is_closed_is_refused(cache: Cache, one_to_one: Pair) -> None:
    reference = one_to_one[0].session.publish("r", BLOCKS).reference
    with pytest.raises(Closed):
        cache.read(reference, Closing(cache)).result(60)


@pytest.mark.parametrize("ahead", [0, 1, 5, 20])
def test_close_that_does_not_wait_ends_every_read(cache: Cache, one_to_one: Pair, ahead: int) -> None:
    reference = one_to_one[0].session.publish("r", BLOCKS, expected_reads=64).reference
    cache.read(reference, BLOCKS).result(30)
    reads = [cache.read(reference, BLOCKS, allow_overlap=True) for _ in range(60)]
    for read in reads[:ahead]:
        read.exception(30)
    cache.close(0)
    for read in reads:
        read.exception(60)
        assert read.wait_quiet(60)


def test_callback_may_wait_for_another_read(cache: Cache, one_to_one: Pair) -> None:
    reference = one_to_one[0].session.publish("r", BLOCKS, expected_reads=2).reference
    found: Future[ReadResult] = Future()

    def again(_: Read) -> None:
        found.set_result(cache.read(reference, BLOCKS, allow_overlap=True).result(60))

    cache.read(reference, BLOCKS).add_done_callback(again)
    assert found.result(60).confirmed


@pytest.mark.parametrize("given_up", ["cancelled", "timed out"])
def test_rank_that_stops_waiting_leaves_the_lease_to_the_others(
    engine: MakeEngine, homes: Homes, given_up: str
) -> None:
    model = Model()
    source = engine(homes[0], model, shards(model.heads, 1))
    destination = engine(homes[1], model, shards(model.heads, 2), serve=False)
    source.ready(), destination.ready()
    publication = source.session.publish("r", {}, last=False)
    (first, second), ids, options = destination.ranks, [4, 5, 6], {"read_id": "shared", "parties": 2}
    first.send_read(publication.reference, ids, (0, 48), **options)
    if given_up == "timed out":
        with pytest.raises(PublicationTimeout):
            second.read(publication.reference, ids, (0, 48), timeout=1.0, **options)
    else:
        second.call("start_reads", publication.reference, {"full": Blocks(ids)}, 1, tokens=(0, 48), **options)
        assert second.call("cancel_reads", 1.0) == ["WAITING"]
    source.session.publish_more(publication, {"full": Blocks([1, 2, 3])}, last=True)
    assert first.answer().confirmed
