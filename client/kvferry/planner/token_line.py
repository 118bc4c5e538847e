"""The token line: the blocks of both sides laid end to end, and the pieces into which they cut it. Also the blocks of
one side whose states have the same positions (`AlikeBlocks`): they are summed, or cleared, in one step. Pure.

The line's points are the held states where both sides hold the same tokens, and all states where their token shards
differ. A *piece* is a stretch within one block on each side that both sides hold. Pieces repeat with the lcm of the
block sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.geometry.blocks import AnyIds, BlockIds, Blocks
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import Plane, TokenShard
from kvferry.planner.rows import Cut, Int64s, places_by_value

Index = TypeVar("Index", int, Int64s)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The positions of a request's states in the blocks of one side: `block_states` per block over all token shards,
    `block_stride` bytes from block to block. `shard` has the held states, counted in states; `num_blocks` are the block
    ids of the group on this side."""

    block_states: int
    shard: TokenShard
    block_stride: int
    num_blocks: int

    @classmethod
    def of(cls, plane: Plane, group: Group) -> StateLayout:
        shard = plane.token_shard
        # Plane and check_rank have checked that no state is torn apart.
        interleave = int(shard.interleave / plane.tokens_per_state) if shard.count > 1 else 1
        return cls(
            block_states=plane.block_states * shard.count,
            shard=shard if interleave == shard.interleave else TokenShard(shard.index, shard.count, interleave),
            block_stride=plane.block_stride,
            num_blocks=group.num_blocks,
        )

    @property
    def held_per_block(self) -> int:
        return self.block_states // self.shard.count

    def held_before(self, state: int) -> int:
        """The number of held states below `state`."""
        turn = self.shard.count * self.shard.interleave
        whole, rest = divmod(state, turn)
        in_turn = min(max(rest - self.shard.index * self.shard.interleave, 0), self.shard.interleave)
        return whole * self.shard.interleave + in_turn

    def held_state(self, index: Index) -> Index:
        """The state with this index among the held states."""
        turn, within = index // self.shard.interleave, index % self.shard.interleave
        return (turn * self.shard.count + self.shard.index) * self.shard.interleave + within

    def holds(self, states: Int64s) -> npt.NDArray[np.bool_]:
        return np.equal(states // self.shard.interleave % self.shard.count, self.shard.index)

    def held_indices(self, states: Int64s) -> Int64s:
        """The index of each state, all held, among the held states."""
        turn = self.shard.interleave * self.shard.count
        return states // turn * self.shard.interleave + states % self.shard.interleave


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The same cut of many blocks: ``source[i]`` is read into ``destination[i]``, ``int64[n]`` each. They are block
    ids; in a `Line`, blocks counted from its origin."""

    cut: Cut
    source: Int64s
    destination: Int64s


class Line:
    """The token line of two layouts.

    Attributes:
        same_tokens: both sides hold the same states, so that consecutive held states are consecutive on both.
        source_step, destination_step: states of the line per block of a side.
        period: the number of states after which the pieces repeat.
        steps: pieces end at multiples of these numbers of states, the smallest first: blocks, turns of token shards.
        pieces_per_period: an upper bound, known without making the pieces.
    """

    def __init__(self, source: StateLayout, destination: StateLayout) -> None:
        self.source, self.destination = source, destination
        self.same_tokens = source.shard == destination.shard
        sides = source, destination
        self.source_step, self.destination_step = (
            side.held_per_block if self.same_tokens else side.block_states for side in sides
        )
        self.period = lcm(self.source_step, self.destination_step)
        turns = [] if self.same_tokens else [side.shard.interleave for side in sides if side.shard.count > 1]
        self.steps = tuple(sorted({self.source_step, self.destination_step, *turns}))
        self.pieces_per_period = sum(self.period // step for step in self.steps)

    @cached_property
    def period_pieces(self) -> tuple[Segment, ...]:
        return self.pieces(0, self.period)

    def pieces(self, begin: int, end: int) -> tuple[Segment, ...]:
        """All pieces of ``[begin, end)``, by cut."""
        inner = [np.arange(begin // step + 1, -(-end // step), dtype=np.int64) * step for step in self.steps]
        edges = np.unique(np.concatenate((np.array([begin, end], np.int64), *inner)))
        first, count = edges[:-1], np.diff(edges)
        source_at = destination_at = first
        if not self.same_tokens:
            both = self.source.holds(first) & self.destination.holds(first)
            first, count = first[both], count[both]
            if len(first) == 0:
                return ()
            source_at, destination_at = self.source.held_indices(first), self.destination.held_indices(first)
        source_block, source_at = np.divmod(source_at, self.source.held_per_block)
        destination_block, destination_at = np.divmod(destination_at, self.destination.held_per_block)
        # Blocks hold at most 2**20 states (`coverage.MAX_CELLS`), so this does not wrap.
        cuts = (source_at * self.destination.held_per_block + destination_at) * (int(count.max()) + 1) + count
        return tuple(
            Segment(
                Cut(int(source_at[alike[0]]), int(destination_at[alike[0]]), int(count[alike[0]])),
                source_block[alike],
                destination_block[alike],
            )
            for alike in places_by_value(cuts)
        )


@dataclass(frozen=True, slots=True)
class StateRun:
    """Consecutive states of one block: `count` held states from the `first` on."""

    first: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class AlikeBlocks:
    """Source blocks whose summed states have the same positions on one side: `places` are the source's block indices,
    rising, ``int64[n]``; `runs` the positions of the states, in their order; `ids` the block of this side that holds
    each run, ``int32`` or ``int64[n, runs]``, only ever an index."""

    places: Int64s
    runs: tuple[StateRun, ...]
    ids: AnyIds


def whole_granules(layout: StateLayout, plane: Plane, token: int) -> tuple[int, int]:
    """The number of held states before a token, in whole granules: without and with the granule around the token."""
    per_state, granule = plane.tokens_per_state, plane.token_granule
    below = layout.held_before(int(token // per_state)) // granule
    above = -(-layout.held_before(-int(-token // per_state)) // granule)
    return below * granule, above * granule


def states_in_blocks(
    layout: StateLayout,
    group: Group,
    blocks: Blocks,
    held: tuple[int, int],
    wanted: Callable[[Int64s, BlockIds], npt.NDArray[np.bool_]],
) -> tuple[AlikeBlocks, ...]:
    """The blocks that hold the range `held` of the held states of a request, on the side of `layout`, `group` and
    `blocks`. `wanted` selects blocks by their block indices and ids."""
    (begin, stop), per_block = held, layout.held_per_block
    if begin >= stop:
        return ()
    indices = np.arange(begin // per_block, -(-stop // per_block), dtype=np.int64)
    ids = blocks.ids[indices - (0 if group.kind is GroupKind.STATE else blocks.first_token // group.block_tokens)]
    chosen = wanted(indices, ids)
    indices, ids = indices[chosen], ids[chosen]
    low = np.maximum(begin - indices * per_block, 0)
    count = np.minimum(stop - indices * per_block, per_block) - low
    return tuple(
        AlikeBlocks(indices[alike], (StateRun(int(low[alike[0]]), int(count[alike[0]])),), ids[alike][:, None])
        for alike in rows_alike(np.stack((low, count), axis=1))
    )


def rows_alike(rows: Int64s) -> list[npt.NDArray[np.int64]]:
    """Indices of equal rows, rising; one list for each distinct row."""
    if len(rows) == 0:
        return []
    if bool((rows == rows[0]).all()):
        return [np.arange(len(rows), dtype=np.int64)]
    _, kinds = np.unique(rows, axis=0, return_inverse=True)
    return places_by_value(kinds.reshape(-1))
