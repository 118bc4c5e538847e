"""A router that makes the reference itself and sends it to source and destination at once, on real node servers and
NIXL."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvferry import Blocks, ReleaseOutcome, router_reference
from tests.support.caches import Model, expect, kv, shards, write
from tests.support.engines import Engine

MakeEngine = Callable[..., Engine]
Homes = tuple[str, str]


def test_destination_that_asks_first_gets_every_byte(engine: MakeEngine, homes: Homes) -> None:
    model = Model(heads=4)
    source = engine(homes[0], model, shards(model.heads, 2))
    destination = engine(homes[1], model, shards(model.heads, 2), serve=False).ready()
    source.ready()
    tokens, theirs, ours = 75, [3, 4, 5, 30, 1], [9, 2, 17, 18, 31]
    request = kv(model, 1, tokens)
    for memory in source.memories:
        write(memory, request, theirs)
    reference = router_reference(homes[0], source.spec.engine_id)
    for rank in destination.ranks:
        rank.send_read(reference, ours, (0, tokens), read_id="r1", parties=2)
    publication = source.session.publish("request-1", {"full": Blocks(theirs, end_token=tokens)}, reference=reference)
    results = [rank.answer() for rank in destination.ranks]
    for memory in destination.memories:
        assert np.array_equal(memory.cells, expect(memory, request, ours, (0, tokens)))
    assert all(result.confirmed and result.request_id == "request-1" for result in results)
    release = source.release_of(publication)
    assert release.outcome is ReleaseOutcome.READ
    (read,) = release.reads
    assert read.reported == 2
