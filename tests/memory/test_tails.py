"""The tokens of its blocks that a read clears: all that it did not move, and none that were there before it."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry import Blocks, Group, Plane
from kvferry._memory.rank_memory import RankMemory, clear_tails
from kvferry.geometry.model import GroupKind
from kvferry.geometry.tensors import Holding, planes_of
from kvferry.planner.request_blocks import needed

BLOCK, HEADS, NUM_BLOCKS = 8, 2, 9
FULL = 0x55


def cache(group: Group, granule: int) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint8]], tuple[Plane, ...]]:
    """A cache full of bytes that are not zero."""
    memory = np.full((NUM_BLOCKS, HEADS, BLOCK, 4), FULL, np.uint8)
    held = Holding(token_granule=granule)
    return memory, planes_of({"0": memory}, ("block", "head", "token", "content"), group, ("key",), held)


@pytest.mark.parametrize("granule", [1, 4])
@pytest.mark.parametrize("window", [0, 5, 11])
@pytest.mark.parametrize("floor", [0, 8, 16])
def test_tails_are_cleared_where_nothing_was_moved(granule: int, window: int, floor: int) -> None:
    kind = GroupKind.WINDOW if window else GroupKind.TOKENS
    group = Group("g", kind, BLOCK, NUM_BLOCKS, 0, window)
    for end in range(floor + 1, 5 * BLOCK + 1):
        memory, planes = cache(group, granule)
        first = 0 if not window else max(0, end - window + 1)
        count = -(-end // BLOCK)
        # Blocks that have left the window are null blocks.
        ids = [0 if (place + 1) * BLOCK <= first else 3 + place for place in range(count)][floor // BLOCK :]
        if window and end - window >= floor and ids[(end - window) // BLOCK - floor // BLOCK]:
            first = end - window
        blocks = Blocks(ids, floor, end)
        source = {"g": Blocks(range(1, count + 1), 0, end)}
        moved = needed([group], {"g": Group("g", kind, BLOCK, NUM_BLOCKS, None, window)}, source, {"g": blocks}, None)
        if not moved:
            continue
        clear_tails(planes, {"g": group}, {"g": blocks}, moved, RankMemory())
        begin = max(first, floor) // granule * granule
        behind = -(-end // granule) * granule
        for block in range(NUM_BLOCKS):
            for at in range(BLOCK):
                token = (block - 3) * BLOCK + at
                is_own = block in ids and floor <= token
                expected = 0 if is_own and not begin <= token < behind else FULL
                assert (memory[block, :, at] == expected).all(), (end, block, at)
