"""The states that a token shard holds, by the definition: its own turns of `interleave` states."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.geometry import TokenShard
from kvferry.planner.token_line import StateLayout


@pytest.mark.parametrize("shard", [(0, 1, 1), (0, 2, 1), (1, 2, 4), (2, 3, 2)], ids=str)
def test_held_states_are_those_of_the_definition(shard: tuple[int, int, int]) -> None:
    index, count, interleave = shard
    layout = StateLayout(48, TokenShard(index, count, interleave), 4096, 10)
    held = [state for state in range(96) if state // interleave % count == index]
    states = np.arange(96, dtype=np.int64)
    assert np.flatnonzero(layout.holds(states)).tolist() == held
    assert [layout.held_state(place) for place in range(len(held))] == held
    assert layout.held_indices(np.array(held, np.int64)).tolist() == list(range(len(held)))
    assert [layout.held_before(state) for state in range(97)] == [
        sum(one < state for one in held) for state in range(97)
    ]
    assert layout.held_per_block == sum(state < 48 for state in held)
