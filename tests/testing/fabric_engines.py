"""Engines on a fabric: each rank a client of its own, its memory a numpy array, its blocks known token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry import (
    Blocks,
    Cache,
    Client,
    EngineSession,
    EngineSpec,
    Group,
    Publication,
    Read,
    ReleaseOutcome,
    StagingOptions,
)
from kvferry.geometry import shards
from kvferry.testing import Fabric

LAYERS, BLOCK, BLOCKS, DIM, HEADS = 2, 4, 32, 8, 6
SOON = 20.0
POISON = 0xFFFF
AXES = {
    "hnd": ("kv", "block", "head", "token", "content"),
    "nhd": ("kv", "block", "token", "head", "content"),
}

Values = npt.NDArray[np.uint16]


def kv(tokens: int, seed: int = 1) -> Values:
    """The KV of a request, ``[layers, kv, tokens, heads, content]``; never the poison."""
    return np.random.default_rng(seed).integers(0, POISON, (LAYERS, 2, tokens, HEADS, DIM), np.uint16)


class Engine:
    """An engine of `ranks` tensor-parallel ranks. `homes`: of its scheduler, and then of each rank; one for all."""

    def __init__(
        self,
        fabric: Fabric,
        name: str,
        ranks: int = 1,
        layout: str = "hnd",
        blocks: int = BLOCKS,
        *,
        homes: Sequence[int] = (0,),
        optimistic: bool = True,
        staging: StagingOptions | None = None,
        **identity: str,
    ) -> None:
        self.fabric, self.layout, self.blocks = fabric, layout, blocks
        self.spec = EngineSpec(name, (Group("full", block_tokens=BLOCK, num_blocks=blocks),), ranks, identity)
        self.heads = shards(ranks, HEADS)
        first, *others = homes if len(homes) > 1 else list(homes) * (ranks + 1)
        self.scheduler = fabric.client(home=first)
        self.session: EngineSession = self.scheduler.open_engine(self.spec)
        self.workers: list[Client] = [
            fabric.client(home=home, optimistic=optimistic, staging=staging) for home in others
        ]
        self.memory = [self._memory(len(heads)) for heads in self.heads]
        self.caches: list[Cache] = [
            worker.register_cache(
                self.spec,
                rank,
                tensors={f"layer{layer}": memory[layer] for layer in range(LAYERS)},
                axes=AXES[layout],
                heads=self.heads[rank],
                total_heads=HEADS,
                token=self.session.token,
            )
            for rank, (worker, memory) in enumerate(zip(self.workers, self.memory, strict=True))
        ]

    def write(self, values: Values, ids: Sequence[int]) -> None:
        """Put a request's KV into blocks."""
        for rank, memory in enumerate(self.memory):
            place(memory, values, ids, self.heads[rank].begin, self.layout)

    def publish(self, values: Values, ids: Sequence[int], request_id: str = "request") -> Publication:
        """Write a request's KV, and offer it."""
        self.write(values, ids)
        return self.session.publish(request_id, {"full": Blocks(list(ids), end_token=values.shape[2])})

    def read(self, reference: str, ids: Sequence[int], **options: Any) -> list[Read]:
        """Begin to read on every rank."""
        if len(self.caches) > 1:
            options = {"read_id": "shared", "parties": len(self.caches), **options}
        return [cache.read(reference, {"full": Blocks(list(ids))}, **options) for cache in self.caches]

    def holds(self, values: Values, ids: Sequence[int]) -> bool:
        """Whether these blocks hold a request's KV, and nothing else was touched."""
        for rank, memory in enumerate(self.memory):
            wanted = self._memory(len(self.heads[rank]))
            place(wanted, values, ids, self.heads[rank].begin, self.layout)
            if not np.array_equal(memory, wanted):
                return False
        return True

    def outcome(self, publication: Publication) -> ReleaseOutcome:
        """How a publication was released, which happens once."""
        released = self.session.released(timeout=SOON)
        assert [release.publication for release in released] == [publication.number]
        return released[0].outcome

    def _memory(self, heads: int) -> Values:
        sizes = {"kv": 2, "block": self.blocks, "head": heads, "token": BLOCK, "content": DIM}
        return np.full((LAYERS, *(sizes[axis] for axis in AXES[self.layout])), POISON, np.uint16)


def place(memory: Values, values: Values, ids: Sequence[int], first_head: int, layout: str) -> None:
    """Write a request's KV where the definition of the layout has it, token by token."""
    heads = memory.shape[1 + AXES[layout].index("head")]
    for token in range(values.shape[2]):
        state = values[:, :, token, first_head : first_head + heads]
        block, slot = ids[token // BLOCK], token % BLOCK
        if layout == "hnd":
            memory[:, :, block, :, slot] = state
        else:
            memory[:, :, block, slot] = state
