"""Memory for caches: what the system makes of what is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.errors import InvalidField
from kvferry.host_memory import HUGE_PAGE, HostMemory

SIZE = 5 * HUGE_PAGE + 12345
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


def chosen(name: str) -> str:
    """The setting in brackets; empty where there is none."""
    file = SETTINGS / name
    return file.read_text().partition("[")[2].partition("]")[0] if file.exists() else ""


def test_host_memory_is_zeroed_aligned_and_of_the_requested_size() -> None:
    memory = HostMemory(SIZE)
    assert memory.array.shape == (SIZE,)
    assert memory.array.ctypes.data % HUGE_PAGE == 0
    assert not memory.array.any()
    assert (memory.region.base, memory.region.length) == (memory.array.ctypes.data, SIZE)


def test_huge_pages_are_used_where_the_system_has_them() -> None:
    memory = HostMemory(SIZE)
    if chosen("enabled") in ("always", "madvise"):
        assert memory.huge_bytes() >= SIZE - 2 * HUGE_PAGE
    else:
        assert memory.huge_bytes() == 0


def test_the_array_outlives_its_host_memory() -> None:
    array = HostMemory(SIZE).array[10:20]
    array[:] = 3
    assert array.sum() == 30


def test_errors_name_the_impossible_argument() -> None:
    with pytest.raises(InvalidField, match="size"):
        HostMemory(0)
