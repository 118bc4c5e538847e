"""The bytes of one block, as rows, extents and loops: against the formula of a plane, one state at a time."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from random import Random

import pytest

from kvferry.planner import plan_read
from kvferry.planner.lane import Lane
from kvferry.planner.rows import Cells, Cut, loops_of, rows_of
from tests.support.geometries import Layout, engine, tensors
from tests.support.simulated_memories import address, addresses

Cell = tuple[int, int, int]
"""Where from, where to, and how many bytes."""


@cache
def lanes(seed: int) -> list[tuple[Lane, Cut]]:
    """Lanes of engines of one model and of random layouts, and a cut of each."""
    turns, found = Random(seed), []
    for _ in range(20):
        model = tensors(layers=2, axis=turns.choice((2, 4)), state_bytes=turns.choice((1, 3)))
        ends = []
        for name, size in (("p", 1), ("d", turns.choice((1, 2)))):
            layout = Layout(
                turns.choice(("BPUT", "BPTU", "PBUT", "UBPT", "TUPB")),
                turns.randrange(5),
                cross_layer=turns.random() < 0.5,
                pages=turns.choice((1, 2, 3)),
                pad={axis: turns.choice((0, 0, 0, 5)) for axis in "BPUT"},
            )
            ends.append(engine(name, model, size, block_tokens=6, num_blocks=turns.choice((1, 4)), layout=layout))
        plan = plan_read(ends[0].geometry(), ends[1].geometry(), 0)
        for lane in plan.lanes:
            first, own = turns.randrange(6), turns.randrange(6)
            found += [(lane, Cut(first, own, turns.randint(1, 6 - max(first, own)))), (lane, lane.whole_block)]
    return found


def cells(lane: Lane, cut: Cut) -> list[list[Cell]]:
    """The states of a cut, plane by plane."""
    return [
        [
            (
                address(read.source, 0, unit, cut.source + at),
                address(read.destination, 0, unit, cut.destination + at),
                read.source.state_bytes,
            )
            for unit in range(read.units.begin, read.units.end)
            for at in range(cut.count)
        ]
        for read in lane.reads
    ]


def fused(of: list[Cell]) -> list[Cell]:
    """By rising source address, those that touch on both sides made one."""
    found: list[Cell] = []
    for source, destination, length in sorted(of):
        last = found[-1] if found else (-1, -1, 0)
        if (last[0] + last[2], last[1] + last[2]) == (source, destination):
            found[-1] = (last[0], last[1], last[2] + length)
        else:
            found.append((source, destination, length))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_the_states_of_a_cut_fused(seed: int) -> None:
    seen = set()
    for lane, cut in lanes(seed):
        planes = [fused(plane) for plane in cells(lane, cut)]
        one_by_one, across = (
            [row for plane in planes for row in plane],
            fused([row for plane in planes for row in plane]),
        )
        for rows, due in (
            (rows_of(lane.planes, cut, across=False), one_by_one),
            (rows_of(lane.planes, cut, across=True), across),
            (lane.rows(cut), one_by_one if min(lane.source.num_blocks, lane.destination.num_blocks) == 1 else across),
        ):
            made = list(zip(rows.source.tolist(), rows.destination.tolist(), rows.length.tolist(), strict=True))
            assert sorted(made) == sorted(due)
            assert (rows.unfused, len(rows)) == (len(one_by_one), len(due))
            assert int(rows.length.sum()) == sum(length for _, _, length in due)
            if due is across:
                assert made == due
        assert lane.rows(cut) is lane.rows(cut)
        seen |= {len(across) < len(one_by_one), len(planes[0]) > 1, one_by_one != sorted(one_by_one)}
    assert seen == {True, False}


@pytest.mark.parametrize("seed", range(3))
def test_an_extent_holds_the_bytes_of_planes_that_interleave(seed: int) -> None:
    joined = set()
    for lane, _ in lanes(seed):
        spans = sorted(
            (min(cell[0] for cell in plane), max(cell[0] + cell[2] for cell in plane))
            for plane in cells(lane, lane.whole_block)
        )
        due: list[tuple[int, int, int]] = []
        for begin, end in spans:
            if due and begin < due[-1][1]:
                due[-1] = (due[-1][0], max(due[-1][1], end), due[-1][2] + 1)
            else:
                due.append((begin, end, 1))
        found = [(extent.source, extent.source + extent.length, len(extent.planes)) for extent in lane.extents]
        assert found == due
        for extent in lane.extents:
            bases = [int(lane.planes[alike].source_base[plane]) for alike, plane in extent.planes]
            assert all(extent.source <= base < extent.source + extent.length for base in bases)
        members = [plane for extent in lane.extents for plane in extent.planes]
        assert len(set(members)) == len(members) == len(lane.reads)
        joined |= {len(due) < len(spans)}
    assert joined == {True, False}


def steps(there: Cells, here: Cells) -> list[Cell]:
    """The cells that a loop copies."""
    both = (addresses(side.times(1, 0, 0), 0) for side in (there, here))
    return [(source, own, there.size) for source, own in zip(*both, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_loops_copy_the_states_of_a_cut(seed: int) -> None:
    counts = set()
    for lane, cut in lanes(seed):
        begins = {plane[0][:2]: plane for plane in cells(lane, Cut(0, 0, 1))}
        begins = dict(zip(begins, cells(lane, cut), strict=True))
        for alike, members in enumerate(lane.planes):
            loops = loops_of(members, cut)
            assert lane.loops(alike, cut) == loops
            assert lane.loops(alike, cut) is lane.loops(alike, cut)
            base = int(members.source_base[0]), int(members.destination_base[0])
            due = [(source - base[0], own - base[1], length) for source, own, length in begins[base]]
            made = [step for loop in loops for step in steps(*loop)]
            assert sorted(singles(made)) == sorted(singles(due))
            for there, here in loops:
                assert (there.shape, there.size) == (here.shape, here.size)
                assert list(here.strides) == sorted(here.strides, reverse=True)
            # States in equal steps are one loop, and states that touch are one cell.
            unit = due[: cut.count]
            equal = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(unit)}
            if len(equal) <= 1:
                assert len(loops) == 1
                touching = len(fused(unit)) == 1
                assert len(made) == (
                    len(fused(due)) if touching and len(fused(due)) == 1 else members.units if touching else len(due)
                )
            assert len(loops) <= cut.count
            counts.add((len(loops), len(loops[0][0].shape), loops[0][0].size > members.state_bytes))
    assert {count[0] for count in counts} >= {1, 2, 3}
    assert {count[1:] for count in counts} >= {(1, False), (1, True), (2, False)}


def singles(pieces: list[Cell]) -> list[tuple[int, int]]:
    return [(source + byte, own + byte) for source, own, length in pieces for byte in range(length)]
