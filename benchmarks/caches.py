"""The caches of the benchmarks' engines: their layout, their memory, and whether the right bytes have arrived."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry import Group, Interval, MemoryKind, MemoryRegion, Plane
from kvferry.host_memory import HostMemory

Ids = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]

ELEMENT = 2
"""Bytes of an element (bfloat16)."""

POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)
"""Odd: no two words of a source are alike."""


class WrongBytes(AssertionError):
    """A read did not deliver what its source holds."""


@dataclass(frozen=True)
class Layout:
    """A cache with heads before tokens (HND), key and value apart: the defaults are half a Llama-3-8B, of which one
    block is 1 MiB.

    Attributes:
        layers: each has a key plane and a value plane.
        heads: KV heads of the model.
        head_dim: elements of a head's state.
        block_tokens: tokens of a block.
        num_blocks: blocks of the cache.
    """

    layers: int = 16
    heads: int = 8
    head_dim: int = 128
    block_tokens: int = 16
    num_blocks: int = 512

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one block of one plane."""
        return self.block_tokens * self.head_dim * ELEMENT

    def block_bytes(self, heads: int = 0) -> int:
        """Bytes of one block of all planes; of so many heads, 0 for all."""
        return 2 * self.layers * (heads or self.heads) * self.head_bytes

    def group(self) -> Group:
        """The one group."""
        return Group("full", block_tokens=self.block_tokens, num_blocks=self.num_blocks)

    def planes(self, base: int, heads: int, first: int = 0) -> tuple[Plane, ...]:
        """The planes of a rank that holds `heads` heads, from `first` on, in memory from `base` on."""
        state = self.head_dim * ELEMENT
        block = heads * self.head_bytes
        return tuple(
            Plane(
                layer=f"layers.{index // 2}",
                component=("key", "value")[index % 2],
                group="full",
                format="plain",
                dtype="bfloat16",
                memory_kind=MemoryKind.DRAM,
                device=0,
                base=base + index * self.num_blocks * block,
                num_blocks=self.num_blocks,
                block_stride=block,
                page_tokens=self.block_tokens,
                page_stride=0,
                block_states=self.block_tokens,
                unit_stride=self.head_bytes,
                token_stride=state,
                state_bytes=state,
                axis_size=self.heads,
                units=Interval(first, first + heads),
            )
            for index in range(2 * self.layers)
        )


class CacheMemory:
    """The memory of one rank, touched.

    Args:
        layout: of the cache.
        heads: how many the rank holds, from the first; 0: all.
        huge: in huge pages where the system has them, as engines should; else in pages of 4 KiB.

    Attributes:
        region: for `Client.register_cache`.
        keep: what owns the memory.
        words: ``uint64[planes, blocks, heads, words of a head]``.
    """

    def __init__(self, layout: Layout, heads: int = 0, *, huge: bool = True) -> None:
        self.layout, self.heads = layout, heads or layout.heads
        size = layout.num_blocks * layout.block_bytes(self.heads)
        self.keep: Any
        if huge:
            self.keep = HostMemory(size)
            cells = self.keep.array
        else:
            # Not numpy's own, which asks for huge pages itself.
            self.keep = mmap.mmap(-1, size)
            cells = np.frombuffer(self.keep, np.uint8)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):
                self.keep.madvise(mmap.MADV_NOHUGEPAGE)
            cells[:: mmap.PAGESIZE] = 0
        self.region = MemoryRegion(MemoryKind.DRAM, 0, cells.ctypes.data, size)
        shape = (2 * layout.layers, layout.num_blocks, self.heads, layout.head_bytes // 8)
        self.words: Words = cells.view(np.uint64).reshape(shape)

    def planes(self) -> tuple[Plane, ...]:
        """The rank's planes."""
        return self.layout.planes(self.region.base, self.heads)

    def fill(self) -> None:
        """Write what a source holds: words that say where they lie."""
        for plane in range(len(self.words)):
            self.words[plane] = _content(self.layout, plane, np.arange(self.layout.num_blocks, dtype=np.int32))

    def poison(self, ids: Ids) -> None:
        """Write what no source holds into these blocks."""
        self.words[:, ids] = POISON

    def check(self, ids: Ids, source_ids: Ids) -> None:
        """Compare these blocks with those of a source that holds all heads.

        Raises:
            WrongBytes: they differ.
        """
        for plane in range(len(self.words)):
            expected = _content(self.layout, plane, source_ids)[:, : self.heads]
            wrong = np.flatnonzero((self.words[plane, ids] != expected).any(axis=(1, 2)))
            if len(wrong):
                first = wrong[0]
                raise WrongBytes(
                    f"plane {plane}: {len(wrong)} of {len(ids)} blocks are wrong, the first is block {ids[first]}, "
                    f"which should hold block {source_ids[first]} of the source"
                )


def _content(layout: Layout, plane: int, ids: Ids) -> Words:
    """What a source holds in these blocks of a plane: ``uint64[blocks, heads, words of a head]``."""
    shape = (layout.heads, layout.head_bytes // 8)
    per_block = shape[0] * shape[1]
    first = (np.uint64(plane * layout.num_blocks) + ids.astype(np.uint64)) * np.uint64(per_block)
    within = np.arange(1, 1 + per_block, dtype=np.uint64) * FACTOR
    return ((first * FACTOR)[:, None] + within).reshape(len(ids), *shape)


def blocks_in_runs(layout: Layout, count: int, run: int, seed: int) -> Ids:
    """`count` different blocks in runs of `run`, the runs in random order and, where there is room, never touching."""
    pitch = run + (count // run * (run + 1) <= layout.num_blocks)
    starts = np.random.default_rng(seed).permutation(layout.num_blocks // pitch)[: count // run] * pitch
    return (starts[:, None] + np.arange(run)).ravel().astype(np.int32)
