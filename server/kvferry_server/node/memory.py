"""The process's memory: its limit, and how freed memory goes back to the system.

glibc keeps freed memory for later, in as many arenas as threads have needed at once, so that after a burst of large
requests the process would look as if it still worked on them. With another libc (musl, macOS) nothing here has effect.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from kvferry_server.node.limits import MAX_HOME_MEMORY, MIN_HOME_MEMORY, TRIM_POLL, WORKING_MEMORY

ARENAS = 2  # glibc's of kvferryd: for the event loop, and for all other threads
TRIM_BYTES = 16 << 20  # Bytes that have been or may have been freed before they are given back
_M_ARENA_MAX = -8


def memory_limit(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may have: the least that its memory cgroups, their parents, and the host
    allow. The arguments are the mount points of procfs and cgroups."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return limits[0]
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            limits += _limits_up(cgroups, path, "memory.max")
        elif "memory" in kinds.split(","):
            limits += _limits_up(cgroups / "memory", path, "memory.limit_in_bytes")
    return min(limits)


def home_memory(limit: int) -> int:
    """Return the budget of a home whose process may have `limit` bytes: half of the limit, if that leaves
    `WORKING_MEMORY`, and at most `MAX_HOME_MEMORY`."""
    return max(MIN_HOME_MEMORY, min(MAX_HOME_MEMORY, limit // 2, limit - WORKING_MEMORY))


def use_few_arenas() -> None:
    """Limit the whole process to `ARENAS` arenas. Only for processes that are nothing but a node server."""
    _of_glibc("mallopt", _M_ARENA_MAX, ARENAS)


async def give_back(worked_on: Callable[[], int], held: Callable[[], int]) -> None:
    """Give memory back to the system after a node server has freed much of it, until cancelled. `worked_on` returns the
    bytes of all requests so far, which were freed with their answers; `held` those that the home holds now."""
    worked_on_before = most_held = 0
    again = False
    while True:
        await asyncio.sleep(TRIM_POLL)
        now_worked_on, now_held = worked_on(), held()
        most_held = max(most_held, now_held)
        much = now_worked_on - worked_on_before + most_held - now_held >= TRIM_BYTES
        if much:
            worked_on_before, most_held = now_worked_on, now_held
        if much or again:
            # It takes milliseconds.
            await asyncio.to_thread(_of_glibc, "malloc_trim", ctypes.c_size_t(0))
        # What was in use at the first time is given back at the second.
        again = much


def _of_glibc(name: str, *arguments: object) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def _limits_up(root: Path, path: str, name: str) -> list[int]:
    """Return the limits of a cgroup and of its parents. In a container, the mounted root is the container's cgroup."""
    found = []
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            text = ""
        if text.isdigit():
            found.append(int(text))
        if folder == root:
            break
    return found
