"""Blocks that vLLM must not give out again, whatever becomes of their request: it is preempted, aborted, or ends."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any


class BlockHold:
    """References of our own to blocks of vLLM's pool, beside those of its requests.

    vLLM frees the blocks of a request that it preempts or aborts, and evicts blocks from its prefix cache. A block that
    is referred to goes back to the free ones only with its last reference, and stays in the prefix cache until then. So
    a request that is preempted usually finds its own blocks there again.

    Args:
        pool: vLLM's ``BlockPool`` (``vllm/v1/core/block_pool.py``; 0.32.0).
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._ids: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def any_of(self, ids: Set[int]) -> bool:
        """Whether one of these blocks is held."""
        return not ids.isdisjoint(self._ids)

    def add(self, ids: Iterable[int]) -> None:
        """Hold blocks that a request has now."""
        given = list(ids)
        self._pool.touch([self._pool.blocks[block] for block in given])
        self._ids += given

    def drop(self, ids: Iterable[int]) -> None:
        """Free some of them."""
        given = set(ids)
        self._free([block for block in self._ids if block in given])
        self._ids = [block for block in self._ids if block not in given]

    def free(self) -> None:
        """Free all of them. Idempotent."""
        ids, self._ids = self._ids, []
        self._free(ids)

    def _free(self, ids: list[int]) -> None:
        # As vLLM frees a request: the prefix cache keeps the beginning of a prompt the longest.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(ids)])
