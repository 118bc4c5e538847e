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


def trim() -> None:
    """Give freed memory back to the system."""
    _of_glibc("malloc_trim", ctypes.c_size_t(0))


def _of_glibc(name: str, *arguments: object) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


class Trimmer:
    """Gives memory back after a node server has freed much of it; an idle one compares two numbers every few seconds.

    `worked_on` returns the bytes of all requests so far, which were freed when they were answered; `held` returns the
    bytes that the home holds.
    """

    def __init__(self, worked_on: Callable[[], int], held: Callable[[], int]) -> None:
        self._worked_on = worked_on
        self._held = held
        self._trimmed_at = 0
        self._most_held = 0
        self._seen = 0
        self._again = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TRIM_POLL)
            if self.due():
                # Giving back much memory takes milliseconds.
                await asyncio.to_thread(trim)

    def due(self) -> bool:
        """Whether `TRIM_BYTES` may have been freed since `due` was last true. Then true once more as soon as no request
        arrives between two calls, because memory that was in use at the first trim was not given back."""
        worked_on, held = self._worked_on(), self._held()
        self._most_held = max(self._most_held, held)
        quiet, self._seen = worked_on == self._seen, worked_on
        freed = worked_on - self._trimmed_at + self._most_held - held >= TRIM_BYTES
        if not freed and not (self._again and quiet):
            return False
        self._again = freed
        self._trimmed_at, self._most_held = worked_on, held
        return True


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
