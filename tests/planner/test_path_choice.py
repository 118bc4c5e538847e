"""The path of a lane: how the constants of the cost model decide, and how the plan explains the decision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.planner import Costs, Path, PathRule, plan_read
from kvferry.planner.path_choice import PathChoice
from tests.support.geometries import HND, NHD, Layout, engine, tensors

MODEL = tensors(layers=1, components=["key"], axis=4)
FREE = Costs(descriptor=0, byte=0, staged_byte=0, cell=0, copied_byte=0)


def chosen(costs: Costs, *, source: Layout = NHD, destination: Layout = HND, ranks: int = 1) -> PathChoice:
    """The choice for one plane, read by the first of some ranks; 16 tokens in a block."""
    read_from, read_into = (
        engine(name, MODEL, tp, layout=layout, block_tokens=16, num_blocks=64).geometry()
        for name, tp, layout in (("p", 1, source), ("d", ranks, destination))
    )
    (choice,) = plan_read(read_from, read_into, 0, rule=PathRule(costs=costs)).paths
    return choice


def test_costs_depend_on_the_number_of_pieces_and_the_bytes_of_rows() -> None:
    # A block is 64 pieces of 4 bytes, or one row.
    pieces, size = 16 * 4, 16 * 4 * 4
    for costs, direct, staged in (
        (replace(FREE, descriptor=1e-6), pieces * 1e-6, 1e-6),
        (replace(FREE, byte=1e-9), size * 1e-9, 0.0),
        (replace(FREE, staged_byte=1e-9), 0.0, size * 1e-9),
        (replace(FREE, cell=1e-9), 0.0, pieces * 1e-9),
        (replace(FREE, copied_byte=1e-9), 0.0, size * 1e-9),
    ):
        choice = chosen(costs)
        assert choice.direct == pytest.approx(direct)
        assert choice.staged == pytest.approx(staged)
        assert choice.path is (Path.STAGED if staged < direct else Path.DIRECT)
        assert choice.measurable


def test_a_slice_of_heads_is_staged_as_whole_rows_and_copied_as_the_slice() -> None:
    # One head of four: a quarter of the bytes is wanted, but the row spans nearly all of them.
    row = 15 * 4 * 4 + 4
    assert chosen(replace(FREE, staged_byte=1e-9), ranks=4).staged == pytest.approx(row * 1e-9)
    assert chosen(replace(FREE, copied_byte=1e-9), ranks=4).staged == pytest.approx(16 * 4 * 1e-9)


def test_the_plan_says_by_how_much_a_path_is_cheaper() -> None:
    cheaper = chosen(replace(FREE, descriptor=1e-6))
    expected = "reading rows of 256 B and permuting them takes 0.02 of the time of reading pieces of 4 B"
    assert cheaper.reason == expected
    dearer = chosen(replace(FREE, byte=1e-9, staged_byte=2e-9))
    assert dearer.path is Path.DIRECT
    assert dearer.reason.startswith("reading pieces of 4 B takes 0.50 of the time of reading rows of 256 B")


def test_paths_are_not_compared_where_staging_gains_nothing() -> None:
    same = chosen(Costs(), source=NHD, destination=NHD)
    assert (same.path, same.direct, same.staged, same.measurable) == (Path.DIRECT, 0.0, 0.0, False)
