"""How many descriptors: fused over planes, merged over blocks, and in grids where they are many."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from kvferry.geometry import Blocks, EngineGeometry, Group, GroupKind
from kvferry.planner import Path, PathRule, plan_read
from kvferry.planner.expansion import Expansion
from kvferry.planner.lane import ROWS_KEPT
from kvferry.planner.rows import Cut
from tests.support.geometries import (
    BLOCKS_FIRST,
    CROSS_LAYER,
    HND,
    NHD,
    PACKED,
    Engine,
    Layout,
    Tensor,
    engine,
    tensors,
    tp_ranks,
)

LAYERS = 4
MODEL = tensors(layers=LAYERS, axis=4)
LATENT = tensors(layers=LAYERS, components=["latent"], axis=1)
SCATTERED = np.random.default_rng(7).permutation(200)[:96]


def moved(
    source: EngineGeometry, destination: EngineGeometry, ids: object, own: object = None, path: Path = Path.DIRECT
) -> Expansion:
    mine = ids if own is None else own
    return plan_read(source, destination, 0, rule=PathRule(path)).expand({"full": Blocks(ids)}, {"full": Blocks(mine)})  # type: ignore[arg-type]


def made(layout: Layout, tp: int = 1, model: list[Tensor] = MODEL, block_tokens: int = 16) -> EngineGeometry:
    return engine("x", model, tp, layout=layout, block_tokens=block_tokens, num_blocks=200).geometry()


def test_a_cross_layer_tensor_at_equal_tp_is_one_descriptor_per_run_of_blocks() -> None:
    expansion = moved(made(CROSS_LAYER), made(CROSS_LAYER), [*range(10, 50), *range(90, 130)])
    assert (expansion.descriptors, expansion.pieces) == (2, 80 * LAYERS * 2)


@pytest.mark.parametrize(
    ("layout", "per_run"),
    [(HND, LAYERS * 2), (NHD, LAYERS * 2), (BLOCKS_FIRST, LAYERS), (PACKED, LAYERS), (CROSS_LAYER, 1)],
)
def test_descriptors_are_one_per_storage_and_run(layout: Layout, per_run: int) -> None:
    expansion = moved(made(layout), made(layout), [*range(10, 50), *range(90, 130)])
    assert expansion.descriptors == 2 * per_run


@pytest.mark.parametrize("layout", [HND, NHD, BLOCKS_FIRST, CROSS_LAYER])
def test_runs_break_where_either_side_jumps(layout: Layout) -> None:
    per_run = moved(made(layout), made(layout), range(64)).descriptors
    expansion = moved(made(layout), made(layout), range(64), [*range(100, 116), *range(120, 168)])
    assert expansion.descriptors == 2 * per_run


def test_a_head_slice_is_one_descriptor_per_plane_and_block() -> None:
    # TP 1 to 2: the slice of a block is contiguous; blocks are not.
    expansion = moved(made(HND), made(HND, 2), range(64))
    assert expansion.descriptors == 64 * LAYERS * 2
    (few,) = expansion.sources[0].descriptors
    assert few.plain
    (part,) = moved(made(HND), made(HND, 2), range(160)).sources[0].descriptors
    assert (len(part.source), len(part.source_offset)) == (LAYERS * 2, 160)
    assert np.array_equal(part.source_offset, 2 * part.destination_offset)


def test_scattered_blocks_are_rows_and_runs_of_single_blocks() -> None:
    ids = np.random.default_rng(7).permutation(200)[:160]
    (part,) = moved(made(HND), made(HND), ids).sources[0].descriptors
    assert part.blocks is not None
    assert (len(part.source), len(part.source_offset)) == (LAYERS * 2, 160)
    assert part.repeats.tolist() == [1] * 160


def test_the_mean_run_decides_who_merges_blocks() -> None:
    runs_of = {run: [start + i for start in range(0, 192, 12) for i in range(run)] for run in (3, 4)}
    found = {run: moved(made(HND), made(HND), ids).descriptors for run, ids in runs_of.items()}
    assert found == {3: 3 * 16 * LAYERS * 2, 4: 16 * LAYERS * 2}


def test_few_descriptors_are_listed_one_by_one() -> None:
    expansion = moved(made(HND), made(HND), [5, 3, 9])
    (few,) = expansion.sources[0].descriptors
    assert few.plain
    assert few.count == 3 * LAYERS * 2


@pytest.mark.parametrize(("theirs", "ours"), [(16, 64), (64, 16), (48, 32)])
def test_contiguous_bytes_stay_one_descriptor_whatever_the_block_sizes(theirs: int, ours: int) -> None:
    source, destination = made(HND, 1, LATENT, theirs), made(HND, 1, LATENT, ours)
    tokens = 192 * 8
    expansion = moved(source, destination, range(tokens // theirs), range(tokens // ours))
    assert expansion.descriptors == LAYERS


def test_a_block_size_change_is_a_few_rows_per_plane() -> None:
    expansion = moved(made(HND, block_tokens=48), made(HND, block_tokens=32), range(64), range(96))
    # Heads lie apart: each of the 128 pieces (two thirds of 32 tokens, the others of 16) is one per head.
    assert expansion.descriptors == 128 * 4 * LAYERS * 2
    lists = expansion.sources[0].descriptors
    assert {length for part in lists for length in part.length.tolist()} == {16 * 4, 32 * 4}
    assert sum(len(part.length) for part in lists) == 4 * 4 * LAYERS * 2


@pytest.mark.parametrize(("layout", "pieces"), [(NHD, 16 * 4), (HND, 4)])
def test_staging_reads_whole_rows_and_merges_them_over_blocks(layout: Layout, pieces: int) -> None:
    ids, own = [*range(10, 50), *range(90, 130)], SCATTERED[:80]
    source = made(layout)
    expansion = moved(source, made(HND), ids, own, Path.STAGED)
    # Two runs of source blocks per plane; that the destination's are scattered makes no difference.
    assert expansion.descriptors == 2 * LAYERS * 2
    assert expansion.pieces == 80 * LAYERS * 2 * (1 if layout is HND else pieces)
    assert expansion.total_bytes == moved(source, made(HND), ids, own).total_bytes


def test_planes_of_one_block_are_not_fused_since_they_may_be_tensors_of_their_own() -> None:
    # With one block two planes can touch by accident, and no descriptor spans two of NIXL's regions.
    model = [Tensor(f"layers.{i}", "ssm", axis=2, state_rows=1) for i in range(2)]

    def geometry(blocks: int) -> EngineGeometry:
        group = Group("full", GroupKind.STATE, num_blocks=blocks)
        return Engine("x", (group,), tp_ranks(model, 1), {"": CROSS_LAYER}).geometry()

    assert [moved(geometry(blocks), geometry(blocks), [0]).descriptors for blocks in (1, 2)] == [2, 1]


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_cached_rows_of_ever_new_token_ranges_do_not_fill_the_memory(part: bool) -> None:
    layers = [Tensor(f"layers.{layer}", "key", axis=2) for layer in range(2)]
    geometry = engine("x", layers, block_tokens=64, num_blocks=4).geometry()
    plan = plan_read(geometry, geometry, 0)
    if part:
        plan = plan.of_layers({"layers.0"})
    before = live_cuts()
    for begin in range(64):
        for end in range(begin + 1, 65):
            plan.expand({"full": Blocks([1])}, {"full": Blocks([2])}, (begin, end))
    assert live_cuts() - before <= ROWS_KEPT + 1


def live_cuts() -> int:
    return len({kept for kept in gc.get_objects() if type(kept) is Cut})
