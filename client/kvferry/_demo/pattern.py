"""The bytes that the demonstration moves: a function of (request, layer, component, unit, state, position) and of
nothing else, so that a byte in the wrong place is found.

Derived from the definition of a plane, independently of the planner, whose result is checked against it.
"""

from __future__ import annotations

import math
import zlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry import Group, GroupKind, Plane

Bytes: TypeAlias = npt.NDArray[np.uint8]
Flags: TypeAlias = npt.NDArray[np.bool_]

POISON = 0xA5
"""Content of destination memory before a read, and afterwards wherever the read must not write."""


def blocks_view(memory: Bytes, start: int, plane: Plane) -> Bytes:
    """Return a plane as ``uint8[num_blocks, pages, page_tokens, units, state_bytes]`` over the rank's memory, which is
    ``uint8[n]``; `start` is the address of its first byte."""
    shape = (plane.num_blocks, plane.pages, plane.page_tokens, len(plane.units), plane.state_bytes)
    strides = (plane.block_stride, plane.page_stride, plane.token_stride, plane.unit_stride, 1)
    return np.lib.stride_tricks.as_strided(memory[plane.base - start :], shape, strides)


def held_states(plane: Plane, block: int) -> npt.NDArray[np.int64]:
    """Return which states of the request its block `block` holds in this plane, ``int64[block_states]``."""
    shard = plane.token_shard
    turn = int(shard.interleave / plane.tokens_per_state) if shard.count > 1 else 1
    index = np.arange(block * plane.block_states, (block + 1) * plane.block_states)
    if shard.count == 1:
        return index
    return (index // turn * shard.count + shard.index) * turn + index % turn


def expected(request: str, plane: Plane, blocks: range) -> Bytes:
    """Return the content of a request's blocks, ``uint8[blocks, pages, page_tokens, units, state_bytes]``."""
    seed = np.uint64(zlib.crc32(f"{request}/{plane.layer}/{plane.component}".encode()))
    states = np.concatenate([held_states(plane, block) for block in blocks]).astype(np.uint64)
    units = np.arange(plane.units.begin, plane.units.end, dtype=np.uint64)
    words = np.arange(-(-plane.state_bytes // 8), dtype=np.uint64)
    place = (states[:, None] << np.uint64(32)) ^ (units << np.uint64(16)) ^ (seed << np.uint64(8))
    mixed = _mix(_mix(place)[:, :, None] + words)
    shape = (len(blocks), plane.pages, plane.page_tokens, len(units), plane.state_bytes)
    return np.ascontiguousarray(mixed).view(np.uint8)[..., : plane.state_bytes].reshape(shape)


def wanted(plane: Plane, group: Group, tokens: int, blocks: range, held: int = 0) -> tuple[Flags, Flags]:
    """Return which states of the blocks a read of `tokens` tokens must write, and which it may write. The first `held`
    tokens are already there, and are not read.

    Both are ``bool[blocks, pages, page_tokens]``, and differ in granules that `tokens` or a window's start divides.
    """
    shape = (len(blocks), plane.pages, plane.page_tokens)
    if group.kind is GroupKind.STATE:
        everything = np.ones(shape, np.bool_)
        return everything, everything
    states = np.concatenate([held_states(plane, block) for block in blocks]).reshape(shape)
    first_token = max(held, tokens - group.window_tokens) if group.kind is GroupKind.WINDOW else held
    begin, end = int(first_token / plane.tokens_per_state), math.ceil(tokens / plane.tokens_per_state)
    step = plane.token_granule * plane.token_shard.count
    must = (states >= begin) & (states < end)
    may = (states >= begin // step * step) & (states < -(-end // step) * step)
    return must, may


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply one round of splitmix64, after which neighbours differ in every byte."""
    with np.errstate(over="ignore"):
        words = words * np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return words ^ (words >> np.uint64(32))
