"""The statements of `notes/peers.md` that are the planner's, each by its number.

The others are about the protocol and the data plane: 4, 8, 9 (its second half), 11, 12, and the completion of 7.
"""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from pathlib import Path

import pytest

import kvferry
from kvferry.errors import BadBlock, BlocksShort, Incompatible
from kvferry.geometry import Blocks, EngineGeometry, Group, GroupKind, Interval
from kvferry.planner import ReadPlan, diff, explain, plan_read, to_text
from tests.support.geometries import HND, NHD, Engine, Held, Layout, Rank, Tensor, engine, shard, tensors, tp_ranks
from tests.support.repository import syntax
from tests.support.simulated_memories import move

HEADS = 8
GQA = tensors(layers=2, axis=HEADS)
MLA = [Tensor(f"layers.{layer}", "latent", axis=1, state_bytes=6) for layer in range(2)]
RATIOS = [(1, 2), (1, 4), (2, 4), (2, 8), (4, 8)]


def gqa(size: int, layout: Layout = HND, **fields: object) -> Engine:
    return engine("x", GQA, size, layout=layout, **fields)  # type: ignore[arg-type]


def plans(source: Engine, destination: Engine) -> list[ReadPlan]:
    theirs, mine = source.geometry(), destination.geometry()
    return [plan_read(theirs, mine, rank.rank) for rank in mine.ranks]


@pytest.mark.parametrize(("p", "d"), RATIOS)
def test_1_with_d_a_multiple_of_p_rank_r_reads_only_rank_r_div_ratio(p: int, d: int) -> None:
    assert [plan.source_ranks for plan in plans(gqa(p), gqa(d))] == [(rank // (d // p),) for rank in range(d)]


@pytest.mark.parametrize(("p", "d"), RATIOS)
def test_2_a_ranks_slice_of_every_remote_block_starts_at_its_offset(p: int, d: int) -> None:
    for plan in plans(gqa(p), gqa(d)):
        rank, local = plan.rank.rank, plan.rank.planes[0].bytes_per_block
        assert local == HEADS // d * 16 * 4
        for read in plan.reads:
            offset = (read.units.begin - read.source.units.begin) * read.source.unit_stride
            length = len(read.units) * read.source.unit_stride
            assert (offset, length) == (rank % (d // p) * local, local)


@pytest.mark.parametrize(("p", "d"), RATIOS)
def test_3_descriptors_are_as_many_as_with_equal_tp_and_none_is_per_token(p: int, d: int) -> None:
    ids = {"full": Blocks([7, 2, 9, 4])}
    equal = plans(gqa(p), gqa(p))[0].expand(ids, ids)
    sliced = plans(gqa(p), gqa(d))[0].expand(ids, ids)
    assert sliced.descriptors == equal.descriptors == 4 * len(GQA)
    assert sliced.total_bytes == equal.total_bytes // (d // p)


def test_5_num_blocks_may_differ() -> None:
    source, destination = gqa(2, num_blocks=30), gqa(4, num_blocks=5)
    (plan, *_) = plans(source, destination)
    assert plan.expand({"full": Blocks([29])}, {"full": Blocks([4])}).descriptors
    with pytest.raises(BadBlock, match="destination block 29 of 5"):
        plan.expand({"full": Blocks([29])}, {"full": Blocks([29])})


def test_5_sizes_that_do_not_fit_are_refused_before_any_transfer() -> None:
    wider = [replace(tensor, state_bytes=8) for tensor in GQA]
    with pytest.raises(Incompatible, match=r"state_bytes is 4 at the source .* 8 at the destination"):
        plans(gqa(2), engine("d", wider, 2))


@pytest.mark.parametrize(("p", "d"), [*RATIOS, *((d, p) for p, d in RATIOS)])
def test_6_nhd_layouts_move_between_unequal_tp_sizes(p: int, d: int) -> None:
    source, destination = gqa(p, NHD), gqa(d, NHD)
    ids = {"full": Blocks([7, 2, 9])}
    assert move(plans(source, destination), source, destination, ids, {"full": Blocks([1, 5, 3])}, 48)


@pytest.mark.parametrize(("p", "d"), [(1, 4), (4, 1), (3, 2)])
def test_6_mla_reads_the_whole_block(p: int, d: int) -> None:
    source, destination = (engine("x", MLA, size, replicated=["latent"]) for size in (p, d))
    ids = {"full": Blocks([7, 2, 9])}
    for plan in plans(source, destination):
        assert plan.expand(ids, ids).total_bytes == 3 * 16 * 6 * len(MLA)


@pytest.mark.parametrize(("d", "p"), RATIOS)
def test_7_with_p_a_multiple_of_d_each_source_fills_its_own_part_of_each_block(d: int, p: int) -> None:
    ratio = p // d
    for plan in plans(gqa(p), gqa(d)):
        rank = plan.rank.rank
        assert plan.source_ranks == tuple(range(rank * ratio, (rank + 1) * ratio))
        for read in plan.reads:
            part = read.source_rank - rank * ratio
            size = HEADS // p
            assert read.units.begin - read.destination.units.begin == part * size
            assert len(read.units) == size


def test_9_mla_reads_each_block_once_striped_over_the_replicas() -> None:
    source, destination = engine("p", MLA, 4, replicated=["latent"]), engine("d", MLA, 1)
    ids = {"full": Blocks([7, 2, 9, 4])}
    (plan,) = plans(source, destination)
    expansion = plan.expand(ids, ids)
    assert [part.total_bytes for part in expansion.sources] == [16 * 6 * len(MLA)] * 4
    assert move([plan], source, destination, ids, ids, 64)


def test_10_a_second_remote_with_another_ratio_coexists() -> None:
    destination = gqa(4)
    ids = {"full": Blocks([7, 2, 9])}
    made = [(source, plan_read(source.geometry(), destination.geometry(), 1)) for source in (gqa(2), gqa(8), gqa(3))]
    for source, plan in [*made, *reversed(made)]:
        assert move([plan], source, destination, ids, ids, 48)


def test_13_a_plan_is_a_frozen_function_of_geometry() -> None:
    source, destination = gqa(3).geometry(), gqa(2).geometry()
    plan, again = (plan_read(source, destination, 1) for _ in range(2))
    assert plan.reads == again.reads
    with pytest.raises(FrozenInstanceError):
        plan.reads = ()  # type: ignore[misc]


def test_13_labels_decide_nothing() -> None:
    source, destination = gqa(3), gqa(2)
    renamed = tuple(replace(rank, labels={"tp_rank": 7, "pp_rank": 3}) for rank in source.ranks)
    found = plan_read(replace(source, ranks=renamed).geometry(), destination.geometry(), 1)
    assert found.reads == plans(source, destination)[1].reads


def test_14_planner_and_executors_contain_no_model_branch() -> None:
    words = {"mla", "mamba", "deepseek", "llama", "ssm", "gqa", "latent", "indexer", "conv"}
    folder = Path(kvferry.__file__).parent
    files = [*(folder / "planner").glob("*.py"), *(folder / "_transport").glob("*.py")]
    assert len(files) > 20
    for file in files:
        tree = syntax(file)
        for node in ast.walk(tree):
            named = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None) or ""
            assert not words & set(str(named).lower().split("_")), f"{file}, line {getattr(node, 'lineno', '?')}"


def hybrid(name: str, size: int, block_tokens: int = 16, layout: Layout = HND, state: Layout = HND) -> Engine:
    """Attention with two KV heads beside a state of eight."""
    groups = (
        Group("full", block_tokens=block_tokens, num_blocks=12),
        Group("state", GroupKind.STATE, num_blocks=6),
    )
    model = [
        Tensor("layers.0", "key", axis=2),
        Tensor("layers.0", "value", axis=2),
        Tensor("layers.1", "ssm", "state", axis=8, state_rows=1),
        Tensor("layers.1", "conv_x", "state", axis=16, state_bytes=2, state_rows=3),
        Tensor("layers.1", "conv_b", "state", axis=2, state_bytes=2, state_rows=3),
    ]
    return Engine(name, groups, tp_ranks(model, size), {"full": layout, "state": state})


def test_15_states_are_read_from_all_ranks_while_attention_reads_a_subset() -> None:
    source, destination = hybrid("p", 8), hybrid("d", 2)
    theirs = {"full": Blocks([3, 7]), "state": Blocks([2], state_token=32)}
    mine = {"full": Blocks([5, 1]), "state": Blocks([4], state_token=32)}
    for plan in plans(source, destination):
        ranks = {
            name: {read.source_rank for read in plan.reads if read.destination.component == name}
            for name in ("key", "ssm", "conv_b")
        }
        half = set(range(4 * plan.rank.rank, 4 * plan.rank.rank + 4))
        assert ranks["ssm"] == half
        # One head, held by four ranks, is striped over them; each block of it still comes from one.
        assert ranks["key"] == ranks["conv_b"] == half
        read = plan.expand(theirs, mine)
        assert read.total_bytes == 2 * 2 * 16 * 4 + 4 * 4 + 8 * 3 * 2 + 3 * 2
    assert move(plans(source, destination), source, destination, theirs, mine, 32)


def test_15_attention_without_striping_reads_one_rank_only() -> None:
    source, destination = hybrid("p", 8).geometry(), hybrid("d", 2).geometry()
    plan = plan_read(source, destination, 1, striping=False)
    assert {read.source_rank for read in plan.reads if read.destination.group == "full"} == {4}
    assert {read.source_rank for read in plan.reads if read.destination.component == "ssm"} == {4, 5, 6, 7}


@pytest.mark.parametrize(("theirs", "ours"), [(1, 3), (2, 1), (3, 2)])
def test_15_logical_blocks_of_several_physical_ones_may_differ_in_their_ratio(theirs: int, ours: int) -> None:
    pages = [Layout("BPUT", pages=count, pad={"P": 5}) for count in (theirs, ours)]
    source, destination = hybrid("p", 4, 24, pages[0]), hybrid("d", 2, 24, pages[1])
    blocks = {"full": Blocks([3, 7]), "state": Blocks([2], state_token=40)}
    assert move(plans(source, destination), source, destination, blocks, blocks, 40)


def test_15_state_rows_in_either_order() -> None:
    source = hybrid("p", 4, state=Layout("BPUT"))
    destination = hybrid("d", 2, state=Layout("BPTU"))
    blocks = {"full": Blocks([3, 7]), "state": Blocks([2], state_token=32)}
    assert move(plans(source, destination), source, destination, blocks, blocks, 32)


def test_16_a_plan_prints_itself() -> None:
    text = to_text(plans(gqa(4), gqa(2)))
    assert "tp1 pp0  tp2 pp0" in text
    assert "[4, 6)" in text


def test_16_groups_may_have_components_with_unequal_pages() -> None:
    # Latent and indexer planes in one group: 64-token pages beside 16-token pages, other state sizes, one block table.
    def made(name: str, block_tokens: int) -> Engine:
        model = [
            Tensor(f"layers.{layer}", component, axis=1, state_bytes=size, granule=granule)
            for layer in range(2)
            for component, size, granule in (("latent", 6, 1), ("rope", 2, 1), ("index", 3, 16), ("index_scale", 1, 16))
        ]
        return engine(name, model, 2, block_tokens=block_tokens, replicated=["latent", "rope", "index", "index_scale"])

    source, destination = made("p", 64), made("d", 32)
    assert diff(source.geometry(), destination.geometry()) == ()
    made_plans = plans(source, destination)
    assert {line.group for plan in made_plans for line in explain(plan)} == {"full"}
    assert move(made_plans, source, destination, {"full": Blocks([3, 1], 0, 90)}, {"full": Blocks([5, 2, 4])}, 90)


def test_16_blocks_fewer_than_wanted_fail_the_request_without_a_crash() -> None:
    (plan, *_) = plans(gqa(2), gqa(2))
    with pytest.raises(BlocksShort, match=r"asked for tokens \[0, 48\), the source has tokens \[0, 32\)"):
        plan.expand({"full": Blocks([1, 2])}, {"full": Blocks([1, 2, 3])}, (0, 48))


def test_16_sizes_that_do_not_divide_are_never_truncated() -> None:
    source, destination = gqa(3, block_tokens=12), gqa(5, block_tokens=16)
    theirs, mine = {"full": Blocks([1, 8, 4, 6], 0, 41)}, {"full": Blocks([3, 1, 5])}
    assert move(plans(source, destination), source, destination, theirs, mine, 41)


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 10])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 12])
def test_17_shards_are_even_or_one_head(heads: int, size: int) -> None:
    model = [Tensor("layers.0", "key", axis=heads)]
    geometry = engine("x", model, size).geometry()
    for rank in geometry.ranks:
        index = rank.rank
        begin, end = index * heads // size, (index + 1) * heads // size
        assert rank.planes[0].units == (Interval(begin, end) if begin < end else Interval(begin, begin + 1))


@pytest.mark.parametrize(("p", "d"), [(2, 4), (4, 2), (3, 2), (2, 3), (6, 4), (5, 7), (16, 3), (3, 16)])
def test_18_slices_are_disjoint_and_cover_the_local_shard(p: int, d: int) -> None:
    for plan in plans(gqa(p), gqa(d)):
        local = shard(plan.rank.rank, d, HEADS)
        per_head = dict.fromkeys(range(local.begin, local.end), 0.0)
        for read in plan.reads:
            if read.destination.name == "layers.0/key":
                for head in range(read.units.begin, read.units.end):
                    per_head[head] += (read.stripe.end - read.stripe.begin) / read.stripe.of
        assert per_head == dict.fromkeys(per_head, 1.0)


def test_19_source_and_destination_offsets_are_different_things() -> None:
    # One global interval is an offset of its own on either side; nothing is derived from the other's.
    source, destination = gqa(2).geometry(), gqa(1, Layout("BPTU", pad={"T": 8})).geometry()
    for read in plan_read(source, destination, 0).reads:
        theirs = (read.units.begin - read.source.units.begin) * read.source.unit_stride
        ours = (read.units.begin - read.destination.units.begin) * read.destination.unit_stride
        assert theirs == 0
        assert ours == 4 * read.source_rank * 4


def test_20_replicated_source_heads_are_read_once() -> None:
    model = tensors(layers=2, axis=2)
    source, destination = engine("p", model, 8), engine("d", model, 1)
    ids = {"full": Blocks([3, 7, 1, 5])}
    (plan,) = plans(source, destination)
    assert plan.expand(ids, ids).total_bytes == 4 * 16 * 4 * 2 * len(model)
    assert move([plan], source, destination, ids, ids, 64)


@pytest.mark.parametrize(("p", "d"), [(3, 2), (2, 3), (6, 4), (5, 7), (7, 5), (12, 8), (16, 10)])
def test_21_tp_sizes_that_do_not_divide_each_other_are_planned_and_right(p: int, d: int) -> None:
    source, destination = gqa(p), gqa(d)
    theirs, mine = {"full": Blocks([3, 7, 1])}, {"full": Blocks([2, 8, 5])}
    assert move(plans(source, destination), source, destination, theirs, mine, 45)


def test_heads_are_read_as_declared_even_if_uneven() -> None:
    def made(name: str, *sizes: int) -> Engine:
        model = tensors(layers=1, axis=10)
        edges = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        ranks = tuple(
            Rank(tuple(Held(tensor, Interval(begin, end)) for tensor in model)) for begin, end in pairwise(edges)
        )
        return Engine(name, (Group("full", block_tokens=16, num_blocks=8),), ranks)

    source, destination = made("p", 3, 3, 2, 2), made("d", 1, 4, 5)
    ids = {"full": Blocks([3, 7, 1])}
    assert move(plans(source, destination), source, destination, ids, ids, 40)


def test_layer_splits_read_from_any_other_layer_split() -> None:
    def made(name: str, size: int, *stages: int) -> Engine:
        ranks = []
        for stage in range(len(stages)):
            layers = range(sum(stages[:stage]), sum(stages[: stage + 1]))
            model = [tensor for tensor in tensors(layers=7, axis=4) if int(tensor.layer.split(".")[1]) in layers]
            ranks += [
                replace(rank, labels={"tp_rank": i, "pp_rank": stage}) for i, rank in enumerate(tp_ranks(model, size))
            ]
        return Engine(name, (Group("full", block_tokens=16, num_blocks=8),), tuple(ranks))

    source, destination = made("p", 3, 2, 5), made("d", 2, 3, 1, 3)
    ids = {"full": Blocks([3, 7, 1])}
    assert move(plans(source, destination), source, destination, ids, ids, 40)
    # The middle stage holds layer 3 only: it reads from the source's second stage alone.
    assert {plan_rank // 3 for plan_rank in plans(source, destination)[2].source_ranks} == {1}


def test_geometries_survive_the_wire() -> None:
    from kvferry._wire.geometry_codec import engine_from_proto, engine_to_proto

    def crossed(geometry: EngineGeometry) -> EngineGeometry:
        return engine_from_proto(
            type(engine_to_proto(geometry)).FromString(engine_to_proto(geometry).SerializeToString())
        )

    source, destination = hybrid("p", 4).geometry(), hybrid("d", 3).geometry()
    assert crossed(source) == source
    assert plan_read(crossed(source), crossed(destination), 1).reads == plan_read(source, destination, 1).reads
