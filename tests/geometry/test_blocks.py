"""Block ids: what numpy would silently truncate is refused, and runs carry any list."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry._wire.geometry_codec import blocks_from_proto, runs_to_proto
from kvferry.errors import BadBlock, InvalidField
from kvferry.geometry.blocks import MAX_BLOCKS, TOKEN_LIMIT, BlockRuns, Blocks, check_ids, repeated
from kvferry.v1 import kv_transfer_pb2 as pb

ids_lists = st.lists(st.integers(0, 2**31 - 1), max_size=60)


@given(ids=ids_lists, first=st.integers(0, 1000))
def test_blocks_survive_the_wire(ids: list[int], first: int) -> None:
    blocks = Blocks(ids, first_token=first, end_token=first + 5)
    assert blocks_from_proto(runs_to_proto(BlockRuns.of_blocks("full", blocks, 16))) == blocks


def test_consecutive_ids_are_one_run_on_the_wire() -> None:
    message = runs_to_proto(BlockRuns.of_blocks("full", Blocks(range(100, 10_100)), 16))
    assert list(message.run_starts) == [100]
    assert list(message.run_counts) == [10_000]
    assert message.end_token == 160_000


def test_end_token_defaults_to_the_end_of_the_last_block() -> None:
    assert runs_to_proto(BlockRuns.of_blocks("full", Blocks([3, 9], first_token=20), 16)).end_token == 48


@pytest.mark.parametrize(
    "ids",
    [
        [0.5, 1.0],
        [2**31],
        [-(2**31) - 1],
        [2**32 + 1],
        [[1, 2], [3, 4]],
        ["a"],
        np.array([1.0]),
        np.array([2**63], np.uint64),
    ],
    ids=str,
)
def test_ids_that_would_be_truncated_are_refused(ids: object) -> None:
    with pytest.raises(InvalidField):
        Blocks(ids)  # type: ignore[arg-type]


def test_tokens_past_the_limit_are_refused() -> None:
    assert Blocks([3], TOKEN_LIMIT - 1).first_token == TOKEN_LIMIT - 1
    for wrong in ((TOKEN_LIMIT, None, 0), (0, TOKEN_LIMIT, 0), (0, None, TOKEN_LIMIT)):
        with pytest.raises(InvalidField, match=r"2\*\*40"):
            Blocks([3], *wrong)


def test_ids_cannot_be_changed_behind_a_checked_list() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Blocks([1, 2]).ids[0] = 9


def test_blocks_pickle() -> None:
    blocks = Blocks([1, 5], first_token=3, end_token=20)
    assert pickle.loads(pickle.dumps(blocks)) == blocks


@pytest.mark.parametrize(
    "changes",
    [
        {"run_starts": [1], "run_counts": [1, 2]},
        {"run_starts": [1], "run_counts": [0]},
        {"run_starts": [0], "run_counts": [2**32 - 1]},
        {"run_starts": [0] * 3, "run_counts": [MAX_BLOCKS // 2] * 3},
        {"run_starts": [2**31], "run_counts": [1]},
        {"run_starts": [2**64 - 1], "run_counts": [1]},
        {"run_starts": [2**31 - 1], "run_counts": [2]},
        {"run_starts": range(0, 40, 2), "run_counts": [1] * 19 + [0]},
        {"run_starts": range(0, 40, 2), "run_counts": [1] * 19},
        {"run_starts": range(0, 40, 2), "run_counts": [2**32 - 1] * 20},
        {"run_starts": [*range(0, 38, 2), 2**64 - 1], "run_counts": [1] * 20},
        {"run_starts": [*range(0, 38, 2), 2**31 - 1], "run_counts": [1] * 19 + [2]},
        {"first_token": 5, "end_token": 4},
        {"end_token": 2**63},
    ],
    ids=str,
)
def test_runs_with_wrong_numbers_are_refused_before_they_are_expanded(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidField):
        blocks_from_proto(pb.GroupBlocks(group="full", **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1, 64, 2**31 - 1])
def test_id_out_of_range_is_named(bad: int) -> None:
    with pytest.raises(BadBlock) as caught:
        check_ids("full", "source", Blocks([1, bad, 2]).ids, 64, None)
    assert caught.value.values["block"] == str(bad)


def test_null_block_is_refused() -> None:
    with pytest.raises(BadBlock, match="null"):
        check_ids("full", "destination", Blocks([1, 0]).ids, 64, 0)


@given(st.lists(st.integers(0, 30), max_size=12), st.lists(st.integers(0, 30), max_size=12))
def test_the_smallest_id_that_is_given_twice_is_found(one: list[int], two: list[int]) -> None:
    ids = one + two
    twice = [block for block in ids if ids.count(block) > 1]
    assert repeated([Blocks(one).ids, Blocks(two).ids]) == min(twice, default=None)
