"""The connector's own references to blocks of vLLM's pool, beside those of vLLM's requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.geometry.blocks import Blocks


class BlockHolds:
    """Blocks that are held for publications.

    vLLM frees the blocks of a request that it preempts, aborts or finishes, and evicts blocks from its prefix cache. A
    block becomes free only with its last reference, and stays in the prefix cache until then. So a preempted request
    usually finds its own blocks there again.

    A block is referred to once, until the last publication that has it drops it: thousands of answers may have the same
    beginning. A publication has each of its blocks once.

    `pool` is vLLM's ``BlockPool`` (``vllm/v1/core/block_pool.py``; 0.32.0).
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._holders = np.zeros(pool.num_gpu_blocks, np.int64)
        """How many publications have each block."""
        self._count = 0

    def with_more(self, ids: npt.ArrayLike) -> int:
        """Return how many blocks would be held with these."""
        return self._count + int(np.count_nonzero(self._holders[np.asarray(ids, np.int64)] == 0))

    def add(self, ids: npt.ArrayLike) -> None:
        """Hold blocks that a request, or the prefix cache, has now."""
        given = np.asarray(ids, np.int64)
        added = given[self._holders[given] == 0].tolist()
        self._holders[given] += 1
        self._count += len(added)
        self._pool.touch([self._pool.blocks[block] for block in added])

    def drop(self, ids: npt.ArrayLike) -> None:
        given = np.asarray(ids, np.int64)
        self._holders[given] -= 1
        # In reverse, as vLLM frees a request: the prefix cache keeps the beginning of a prompt the longest.
        left = given[self._holders[given] == 0][::-1].tolist()
        self._count -= len(left)
        self._pool.free_blocks([self._pool.blocks[block] for block in left])


def ids_of(blocks: Mapping[str, Blocks]) -> list[int]:
    """Return the ids of blocks of all groups."""
    return [block for listed in blocks.values() for block in listed.ids.tolist()]
