"""Blocks whose states have the same positions: what is summed, or cleared, in one step. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.geometry.blocks import AnyIds, BlockIds, Blocks
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import Plane
from kvferry.planner.rows import Int64s, places_by_value
from kvferry.planner.token_line import StateLayout


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
