"""Chunks: the same bytes in the same order, none longer than asked."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.geometry import MemoryKind
from kvferry.planner.descriptors import Descriptors, MemoryPair, chunks, joined
from tests.support.simulated_memories import copies

MEMORY = MemoryPair((MemoryKind.DRAM, 3), (MemoryKind.VRAM, 1))


def array(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


@st.composite
def lists(draw: st.DrawFn) -> Descriptors:
    """Rows of some bytes, and runs of some blocks; or rows alone."""
    rows, runs = draw(st.integers(1, 5)), draw(st.integers(0, 5))
    drawn = [
        array(draw(st.lists(st.integers(1, 40), min_size=count, max_size=count)))
        for count in (rows, rows, rows, runs, runs, runs)
    ]
    return Descriptors(MEMORY, *drawn) if runs else Descriptors(MEMORY, *drawn[:3])


def of_formula(some: Descriptors) -> list[tuple[int, int, int]]:
    rows = zip(some.source.tolist(), some.destination.tolist(), some.length.tolist(), strict=True)
    runs = (some.source_offset.tolist(), some.destination_offset.tolist(), some.repeats.tolist())
    return [
        (source + offset, destination + own_offset, length * repeats)
        for source, destination, length in rows
        for offset, own_offset, repeats in zip(*runs, strict=True)
    ]


def byte_pairs(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [(source + i, destination + i) for source, destination, length in pieces for i in range(length)]


@given(some=st.lists(lists(), min_size=1, max_size=4))
def test_there_is_a_descriptor_for_each_row_and_each_run(some: list[Descriptors]) -> None:
    for one in some:
        expected = of_formula(one)
        assert of_formula(one.one_by_one()) == copies(one) == expected
        assert one.count == len(expected)
        assert one.total_bytes == sum(length for _, _, length in expected)
    whole = joined(MEMORY, some)
    assert whole.plain
    assert copies(whole) == [piece for one in some for piece in copies(one)]


@given(whole=lists(), limit=st.integers(1, 300))
def test_chunks_move_the_same_bytes_in_the_same_order(whole: Descriptors, limit: int) -> None:
    parts = list(chunks(whole, limit))
    assert all(part.memory == MEMORY and 0 < part.total_bytes <= limit for part in parts)
    assert [pair for part in parts for pair in byte_pairs(copies(part))] == byte_pairs(copies(whole))


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30), limit=st.integers(50, 100))
def test_single_descriptors_fill_their_chunks(lengths: list[int], limit: int) -> None:
    addresses = array(list(range(0, 100 * len(lengths), 100)))
    parts = list(chunks(Descriptors(MEMORY, addresses, addresses, array(lengths)), limit))
    for part, following in pairwise(parts):
        assert part.total_bytes + copies(following)[0][2] > limit


def test_nothing_has_no_chunks() -> None:
    assert list(chunks(Descriptors(MEMORY, *[array([])] * 3), 100)) == []
