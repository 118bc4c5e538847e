"""Chunks: the same bytes in the same order, none longer than asked."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.geometry import MemoryKind
from kvferry.planner.descriptors import DescriptorTable, MemoryPair, PreparedDescriptors, RawDescriptors, chunks

MEMORY = MemoryPair(MemoryKind.DRAM, 0, MemoryKind.DRAM, 0)


def raw(lengths: list[int]) -> RawDescriptors:
    length = np.array(lengths, np.uint64)
    source = np.cumsum(length) + np.uint64(10_000)
    return RawDescriptors(MEMORY, source, source * np.uint64(2), length)


def byte_pairs(descriptors: RawDescriptors) -> list[tuple[int, int]]:
    rows = zip(descriptors.source.tolist(), descriptors.destination.tolist(), descriptors.length.tolist(), strict=True)
    return [(source + i, destination + i) for source, destination, length in rows for i in range(length)]


@given(lengths=st.lists(st.integers(1, 50), max_size=30), limit=st.integers(1, 60))
def test_chunks_of_raw_descriptors_move_the_same_bytes(lengths: list[int], limit: int) -> None:
    whole = raw(lengths)
    parts = list(chunks(whole, limit))
    assert all(isinstance(part, RawDescriptors) and 0 < part.total_bytes <= limit for part in parts)
    assert [pair for part in parts if isinstance(part, RawDescriptors) for pair in byte_pairs(part)] == byte_pairs(
        whole
    )


@given(count=st.integers(0, 40), entry=st.integers(1, 30), limit=st.integers(1, 100))
def test_chunks_of_prepared_descriptors_hold_every_index_once(count: int, entry: int, limit: int) -> None:
    row = np.array([[0, entry, 0, entry, 100]], np.uint64)
    first = np.zeros(1, np.int64)
    table = DescriptorTable(MEMORY, row, row, first, first, entry)
    source, destination = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32)[::-1]
    parts = list(chunks(PreparedDescriptors(table, source, destination), limit))
    assert all(part.count == 1 or part.total_bytes <= limit for part in parts)
    prepared = [part for part in parts if isinstance(part, PreparedDescriptors)]
    assert np.concatenate([source[:0], *(part.source for part in prepared)]).tolist() == source.tolist()
    assert np.concatenate([destination[:0], *(part.destination for part in prepared)]).tolist() == destination.tolist()
