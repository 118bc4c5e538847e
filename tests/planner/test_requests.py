"""R7: a mistake in a request is a typed error before anything is expanded."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.errors import BadBlock, BlocksShort, InvalidField, KvferryError
from kvferry.geometry import Blocks, Group, GroupKind, Interval, TokenShard
from kvferry.planner import Path, PathRule, ReadPlan, plan_read
from tests.support.geometries import Engine, Held, Rank, Tensor, engine, tensors, tp_ranks
from tests.support.simulated_memories import copies

GQA = tensors(layers=1, axis=2)


@pytest.fixture(scope="module")
def plan() -> ReadPlan:
    """From 12 blocks of 16 tokens to 10 blocks of 8, block 0 null on both sides."""
    source = engine("p", GQA, 2, num_blocks=12, null_block=0).geometry()
    return plan_read(source, engine("d", GQA, block_tokens=8, num_blocks=10, null_block=0).geometry(), 0)


def ask(plan: ReadPlan, source: object, destination: object, tokens: object = None) -> object:
    return plan.expand({"full": source}, {"full": destination}, tokens)  # type: ignore[dict-item, arg-type]


def test_right_requests_are_expanded(plan: ReadPlan) -> None:
    assert plan.expand({"full": Blocks([3, 4])}, {"full": Blocks([1, 2, 5, 9])}).total_bytes == 32 * 2 * 2 * 4


@pytest.mark.parametrize("bad", [-1, 12, 2**31 - 1, -(2**31)])
def test_source_ids_out_of_range_are_refused(plan: ReadPlan, bad: int) -> None:
    with pytest.raises(BadBlock) as caught:
        ask(plan, Blocks([3, bad]), Blocks([1, 2, 5, 9]))
    padding = ": -1 is padding? cut the table to the request's blocks" if bad == -1 else ""
    assert caught.value.values == {
        "group": "full",
        "side": "source",
        "block": str(bad),
        "num_blocks": "12",
        "problem": f"out of range{padding}",
    }


@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1])
def test_destination_ids_out_of_range_are_refused(plan: ReadPlan, bad: int) -> None:
    with pytest.raises(BadBlock, match=f"destination block {bad} of 10"):
        ask(plan, Blocks([3, 4]), Blocks([1, 2, bad, 9]))


@pytest.mark.parametrize("ids", [[3.0, 4.0], [2**31], [-(2**31) - 1], [[3], [4]], np.array([2**32 + 1])])
def test_ids_that_numpy_would_truncate_are_refused(ids: object) -> None:
    with pytest.raises(InvalidField):
        Blocks(ids)  # type: ignore[arg-type]


def test_the_null_block_is_neither_read_nor_written(plan: ReadPlan) -> None:
    with pytest.raises(BadBlock, match="source block 0 of 12: the null block"):
        ask(plan, Blocks([0, 4]), Blocks([1, 2, 5, 9]))
    with pytest.raises(BadBlock, match="destination block 0 of 10: the null block"):
        ask(plan, Blocks([3, 4]), Blocks([1, 2, 0, 9]))


def test_null_blocks_where_nothing_is_needed_are_fine(plan: ReadPlan) -> None:
    # Block tables name the null block for absent blocks, such as blocks that left a window.
    found = plan.expand({"full": Blocks([0, 4])}, {"full": Blocks([0, 0, 5, 9])}, (16, 32))
    assert found.total_bytes == 16 * 2 * 2 * 4


def test_a_destination_block_given_twice_is_refused(plan: ReadPlan) -> None:
    with pytest.raises(BadBlock, match=r"destination block 5 .* given twice"):
        ask(plan, Blocks([3, 4]), Blocks([5, 2, 9, 5]))


def test_a_source_block_may_be_read_twice(plan: ReadPlan) -> None:
    assert plan.expand({"full": Blocks([3, 3])}, {"full": Blocks([1, 2, 5, 9])}).descriptors


def test_destinations_are_unique_per_pool() -> None:
    groups = [Group(name, block_tokens=16, num_blocks=8, pool="memory") for name in ("a", "b")]
    model = [Tensor("layers.0", "key", "a"), Tensor("layers.1", "key", "b")]
    geometry = Engine("x", tuple(groups), tp_ranks(model, 1)).geometry()
    shared = plan_read(geometry, geometry, 0)
    blocks = {"a": Blocks([1, 2]), "b": Blocks([3, 4])}
    assert shared.expand(blocks, blocks).descriptors
    with pytest.raises(BadBlock, match="given twice"):
        shared.expand(blocks, {"a": Blocks([1, 2]), "b": Blocks([2, 4])})


def test_a_pool_and_a_group_of_one_name_are_different_things() -> None:
    groups = (Group("a", block_tokens=16, num_blocks=8, pool="b"), Group("b", block_tokens=16, num_blocks=8))
    geometry = Engine(
        "x", groups, tp_ranks([Tensor("layers.0", "key", "a"), Tensor("layers.1", "key", "b")], 1)
    ).geometry()
    blocks = {"a": Blocks([1, 2]), "b": Blocks([1, 2])}
    assert plan_read(geometry, geometry, 0).expand(blocks, blocks).descriptors


def test_source_blocks_fewer_than_wanted_are_refused(plan: ReadPlan) -> None:
    with pytest.raises(BlocksShort) as caught:
        ask(plan, Blocks([3]), Blocks([1, 2, 5, 9]), (0, 32))
    assert caught.value.values == {
        "group": "full",
        "side": "source",
        "asked": "tokens [0, 32)",
        "available": "tokens [0, 16)",
    }


def test_destination_blocks_fewer_than_granted_are_refused(plan: ReadPlan) -> None:
    with pytest.raises(BlocksShort, match=r"the destination has tokens \[0, 16\)"):
        ask(plan, Blocks([3, 4]), Blocks([1, 2]))


def test_an_end_token_beyond_the_blocks_is_refused(plan: ReadPlan) -> None:
    with pytest.raises(BlocksShort, match="2 blocks of 16"):
        ask(plan, Blocks([3, 4], 0, 33), Blocks([1, 2, 5, 9]))


def test_tokens_below_the_sources_first_are_refused(plan: ReadPlan) -> None:
    with pytest.raises(BlocksShort, match=r"the source has tokens \[16, 32\)"):
        ask(plan, Blocks([4], 16), Blocks([1, 2, 5, 9]), (8, 32))


def test_requests_for_no_tokens_need_no_blocks(plan: ReadPlan) -> None:
    assert plan.expand({"full": Blocks([])}, {"full": Blocks([])}).sources == ()
    assert plan.expand({"full": Blocks([3])}, {"full": Blocks([1, 2])}, (5, 5)).sources == ()


def test_a_prefix_that_covers_everything_reads_nothing(plan: ReadPlan) -> None:
    assert plan.expand({"full": Blocks([3, 4])}, {"full": Blocks([], 32)}).sources == ()


@pytest.mark.parametrize("tokens", [(-1, 8), (9, 8), (0.0, 8.0), ("a", "b"), (1, 2, 3), 7, (0, None)])
def test_token_ranges_that_are_invalid_are_refused(plan: ReadPlan, tokens: object) -> None:
    with pytest.raises(InvalidField, match="tokens"):
        ask(plan, Blocks([3, 4]), Blocks([1, 2, 5, 9]), tokens)


def test_numpy_integers_are_integers(plan: ReadPlan) -> None:
    ask(plan, Blocks([3, 4]), Blocks([1, 2, 5, 9]), (np.int64(0), np.int32(32)))


@pytest.mark.parametrize("huge", [2**40, 2**62, 2**64, 2**200])
def test_huge_positions_do_not_wrap(plan: ReadPlan, huge: int) -> None:
    with pytest.raises((InvalidField, BlocksShort)):
        ask(plan, Blocks([3, 4]), Blocks([1, 2, 5, 9]), (0, huge))
    with pytest.raises(InvalidField):
        ask(plan, Blocks([3, 4], huge), Blocks([1, 2, 5, 9], huge))


def test_positions_far_up_are_exact() -> None:
    # Block sizes without a small common multiple, at the end of what positions can be.
    source = engine("p", GQA, block_tokens=1009, num_blocks=4).geometry()
    destination = engine("d", GQA, block_tokens=1013, num_blocks=4).geometry()
    plan = plan_read(source, destination, 0, rule=PathRule(Path.DIRECT))
    begin = (2**40 - 5000) // (1009 * 1013) * (1009 * 1013)
    near = plan.expand({"full": Blocks([1, 2])}, {"full": Blocks([3, 1])}, (0, 2018))
    far = plan.expand({"full": Blocks([1, 2], begin)}, {"full": Blocks([3, 1], begin)}, (begin, begin + 2018))
    assert copies(near.sources[0].descriptors[0]) == copies(far.sources[0].descriptors[0])


def test_groups_that_neither_engine_has_are_refused(plan: ReadPlan) -> None:
    blocks = {"full": Blocks([3, 4])}
    with pytest.raises(InvalidField, match="ful1"):
        plan.expand(blocks, {"full": Blocks([1, 2, 5, 9]), "ful1": Blocks([1])})
    with pytest.raises(InvalidField, match="group 'full' of the destination blocks is None"):
        plan.expand(blocks, {})
    with pytest.raises(BlocksShort, match="none of this group"):
        plan.expand({}, {"full": Blocks([1, 2, 5, 9])})


def test_groups_that_only_the_source_has_are_fine(plan: ReadPlan) -> None:
    blocks = {"full": Blocks([3, 4]), "draft": Blocks([99999])}
    assert plan.expand(blocks, {"full": Blocks([1, 2, 5, 9])}).descriptors


def state_plan() -> ReadPlan:
    group = Group("full", GroupKind.STATE, num_blocks=4, null_block=0)
    geometry = Engine("x", (group,), tp_ranks([Tensor("layers.0", "ssm", state_rows=1)], 1)).geometry()
    return plan_read(geometry, geometry, 0)


def test_states_at_different_tokens_are_refused() -> None:
    with pytest.raises(BlocksShort, match="asked for a state at token 7, the source has one at 8"):
        ask(state_plan(), Blocks([1], state_token=8), Blocks([2], state_token=7))


@pytest.mark.parametrize("ids", [[], [1, 2]])
def test_a_state_is_one_block(ids: list[int]) -> None:
    with pytest.raises(InvalidField, match=r"number of \w+ blocks of state group .*, expected 1"):
        ask(state_plan(), Blocks(ids), Blocks([2]))
    with pytest.raises(InvalidField, match=r"number of \w+ blocks of state group .*, expected 1"):
        ask(state_plan(), Blocks([2]), Blocks(ids))


def test_a_state_is_not_in_the_null_block() -> None:
    with pytest.raises(BadBlock, match="null block"):
        ask(state_plan(), Blocks([0]), Blocks([2]))


def granular(granule: int) -> ReadPlan:
    geometry = engine("x", [Tensor("layers.0", "key", granule=granule)], num_blocks=6).geometry()
    return plan_read(geometry, geometry, 0)


def test_a_prefix_inside_a_granule_is_refused() -> None:
    with pytest.raises(InvalidField, match="a multiple of 8 tokens: group 'full' cannot be cut finer"):
        ask(granular(8), Blocks([1, 2]), Blocks([3, 4], 12))


def test_a_start_inside_a_granule_is_refused() -> None:
    with pytest.raises(InvalidField, match="a multiple of 8 tokens"):
        ask(granular(8), Blocks([1, 2]), Blocks([3, 4]), (12, 32))


def test_a_prefix_inside_a_state_of_several_tokens_is_refused() -> None:
    from fractions import Fraction

    geometry = engine("x", [Tensor("layers.0", "key", tokens_per_state=Fraction(4))], num_blocks=6).geometry()
    with pytest.raises(InvalidField, match="a multiple of 4 tokens"):
        ask(plan_read(geometry, geometry, 0), Blocks([1, 2]), Blocks([3, 4], 6))


def test_a_token_shard_is_cut_only_where_it_holds_a_whole_granule() -> None:
    # Rank 1 of 2 holds tokens 3-5, 9-11 …; in granules of 2 held tokens these are (3, 4), (5, 9), (10, 11).
    tensor = Tensor("layers.0", "latent", axis=1, granule=2)
    ranks = tuple(Rank((Held(tensor, Interval(0, 1), TokenShard(index, 2, 3)),)) for index in range(2))
    geometry = Engine("x", (Group("full", block_tokens=12, num_blocks=6),), ranks).geometry()
    plan = plan_read(geometry, geometry, 1)
    for fine in (0, 1, 2, 3, 5, 10):
        assert plan.expand({"full": Blocks([1, 2])}, {"full": Blocks([3, 4], fine)}).descriptors, fine
    for torn in (4, 6, 7, 8, 9, 11):
        with pytest.raises(InvalidField, match="cannot be cut finer"):
            ask(plan, Blocks([1, 2]), Blocks([3, 4], torn))


def test_plans_are_unchanged_by_requests_that_fail(plan: ReadPlan) -> None:
    before = plan.expand({"full": Blocks([3, 4])}, {"full": Blocks([1, 2, 5, 9])})
    for bad in (Blocks([99]), Blocks([-1]), Blocks([0])):
        with pytest.raises(KvferryError):
            ask(plan, bad, Blocks([1, 2, 5, 9]))
    after = plan.expand({"full": Blocks([3, 4])}, {"full": Blocks([1, 2, 5, 9])})
    assert (after.descriptors, after.total_bytes) == (before.descriptors, before.total_bytes)
