"""Memory for caches: what the system makes of what is asked."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import InvalidField, WrongState
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


@pytest.mark.parametrize(("shared", "setting"), [(False, "enabled"), (True, "shmem_enabled")])
def test_huge_pages_are_used_where_the_system_has_them(shared: bool, setting: str) -> None:
    memory = HostMemory(SIZE, shared=shared)
    if chosen(setting) in ("always", "madvise", "advise", "within_size", "force"):
        assert memory.huge_bytes() >= SIZE - 2 * HUGE_PAGE
    else:
        assert memory.huge_bytes() == 0


def test_shared_host_memory_is_the_same_memory() -> None:
    memory = HostMemory(SIZE, shared=True)
    memory.array[[0, SIZE - 1]] = 7
    script = (
        "import sys; from kvferry.host_memory import HostMemory\n"
        f"memory = HostMemory.attach(int(sys.argv[1]), {SIZE})\n"
        f"print(memory.array[[0, {SIZE - 1}]].tolist()); memory.array[1] = 9\n"
    )
    command = [sys.executable, "-c", script, str(memory.fd)]
    done = subprocess.run(command, pass_fds=[memory.fd], capture_output=True, text=True, check=True)
    assert done.stdout == "[7, 7]\n"
    assert memory.array[:2].tolist() == [7, 9]


def test_the_array_outlives_its_host_memory() -> None:
    array = HostMemory(SIZE).array[10:20]
    array[:] = 3
    assert array.sum() == 30


def test_host_memory_on_a_numa_node() -> None:
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    if nodes:
        memory = HostMemory(SIZE, numa_node=0)
        address = f"{memory._mapped:x} "
        lines = Path("/proc/self/numa_maps").read_text().splitlines() if Path("/proc/self/numa_maps").exists() else []
        policies = [line.split()[1] for line in lines if line.startswith(address)]
        assert all(policy == "bind:0" for policy in policies)
        assert memory.array.sum() == 0
    with pytest.raises(InvalidField, match="numa_node"):
        HostMemory(SIZE, numa_node=4000)


def test_errors_name_the_impossible_argument() -> None:
    with pytest.raises(InvalidField, match="size"):
        HostMemory(0)
    with pytest.raises(WrongState, match="shared=True"):
        _ = HostMemory(1).fd


def descriptors_of_memory() -> set[tuple[int, int]]:
    """This process's descriptors of shared memory, by device and inode: other threads open and close others."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if "memfd:kvferry-cache" in str(descriptor.readlink()):
                stat = descriptor.stat()
                found.add((stat.st_dev, stat.st_ino))
    return found


def test_descriptors_are_given_back() -> None:
    before = descriptors_of_memory()
    kept = HostMemory(1, shared=True)
    assert len(descriptors_of_memory() - before) == 1
    for _ in range(10):
        HostMemory(1, shared=True)
    assert len(descriptors_of_memory() - before) == 1
    del kept
    assert descriptors_of_memory() <= before
    assert np.frombuffer(HostMemory(64).array, np.uint64).sum() == 0
