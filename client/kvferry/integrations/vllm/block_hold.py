"""Keeps blocks from being reused by vLLM after their request was preempted, aborted, or has ended."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from kvferry.geometry.blocks import Blocks


class BlockHold:
    """The connector's own references to blocks of vLLM's pool, beside those of vLLM's requests.

    vLLM frees the blocks of a request that it preempts or aborts, and evicts blocks from its prefix cache. A block
    becomes free only with its last reference, and stays in the prefix cache until then. So a preempted request usually
    finds its own blocks there again.

    Args:
        pool: vLLM's ``BlockPool`` (``vllm/v1/core/block_pool.py``; 0.32.0); None: unknown, so nothing is held.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._ids: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def can_hold(self) -> bool:
        """Whether vLLM's pool was known when this hold began."""
        return self._pool is not None

    def any_of(self, ids: Set[int]) -> bool:
        return not ids.isdisjoint(self._ids)

    def add(self, blocks: Mapping[str, Blocks]) -> None:
        """Hold blocks, by group, that belong to a request now."""
        if not self.can_hold:
            return
        given = ids_of(blocks)
        self._pool.touch([self._pool.blocks[block] for block in given])
        self._ids += given

    def drop(self, blocks: Mapping[str, Blocks]) -> None:
        given = set(ids_of(blocks))
        self._free([block for block in self._ids if block in given])
        self._ids = [block for block in self._ids if block not in given]

    def free(self) -> None:
        """Free all blocks. Idempotent."""
        ids, self._ids = self._ids, []
        self._free(ids)

    def _free(self, ids: list[int]) -> None:
        if ids:
            # In reverse, as vLLM frees a request: the prefix cache keeps the beginning of a prompt the longest.
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(ids)])


class Holds:
    """The holds of publications, until their release. Always empty without vLLM's pool."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._held: dict[int, BlockHold] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def bind(self, pool: Any) -> None:
        self._pool = pool

    def begin(self) -> BlockHold:
        """Return an empty hold."""
        return BlockHold(self._pool)

    def keep(self, publication: int, hold: BlockHold) -> bool:
        """Keep a hold until its publication is released; return whether the hold is effective, so that vLLM may free
        the request."""
        # Not whether the pool is known by now: a hold that began before that is empty.
        if hold.can_hold:
            self._held[publication] = hold
        return hold.can_hold

    def released(self, publication: int) -> None:
        hold = self._held.pop(publication, None)
        if hold is not None:
            hold.free()


def ids_of(blocks: Mapping[str, Blocks]) -> list[int]:
    """Return the ids of blocks of all groups."""
    return [block for listed in blocks.values() for block in listed.ids.tolist()]
