"""What computes on the loop lets the loop do everything else in between: leases are renewed there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvferry import Blocks, EngineSpec, Group
from kvferry._reads import rank_reads
from kvferry.planner.plan import RequestParts
from kvferry.testing import Fabric

AXES = ("kv", "block", "head", "token", "content")
SOON = 30.0
READS = 40


def test_reads_that_waited_for_one_handshake_expand_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may run at once, each of thousands of blocks, would hold up all renewals for longer than a lease."""
    expand, happened = RequestParts.next, list[str]()

    def noted(self: RequestParts, steps: Mapping[str, Blocks], *given: Any, **options: Any) -> object:
        happened.append("expanded")
        until = time.monotonic() + 1.5 * rank_reads.EXPAND_FOR
        while time.monotonic() < until:
            """An expansion of very many blocks."""
        return expand(self, steps, *given, **options)

    monkeypatch.setattr(RequestParts, "next", noted)
    with Fabric() as fabric:
        source, reader = fabric.client(), fabric.client()
        theirs, mine = (np.zeros((2, READS + 1, 1, 16, 4), np.float32) for _ in range(2))
        specs = [EngineSpec(name, (Group("full", block_tokens=16, num_blocks=READS + 1),)) for name in "pd"]
        session = source.open_engine(specs[0])
        source.register_cache(specs[0], tensors={"layer": theirs}, axes=AXES)
        cache = reader.register_cache(specs[1], tensors={"layer": mine}, axes=AXES)
        publication = session.publish("r", {"full": Blocks([1])}, expected_reads=READS)
        loop = reader._loop

        def turn() -> None:
            happened.append("turn")
            loop.soon(turn)

        loop.call(turn)
        reads = [cache.read(publication.reference, {"full": Blocks([block + 1])}) for block in range(READS)]
        for read in reads:
            read.result(SOON)
    assert happened.count("expanded") == READS
    assert ("expanded", "expanded") not in pairwise(happened)
