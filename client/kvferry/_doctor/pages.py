"""Huge pages: reads from a source in pages of 2 MiB are up to twice as fast as from pages of 4 KiB (docs/nixl.md)."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

from kvferry._doctor.finding import Finding, Kind, Level
from kvferry._doctor.host import Host

GOOD = Kind("huge-pages-given", Level.OK)
OFF = Kind(
    "huge-pages-off",
    Level.WARNING,
    "Reads on this host of pieces of 64 KiB and more take 1.4 to 2 times as long from a source in pages of 4 KiB.",
    "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root, on the host), and start engines anew.",
)
NOT_GIVEN = Kind(
    "huge-pages-not-given",
    Level.WARNING,
    "The kernel allows huge pages, but gave none here: memory is fragmented, or they are switched off for this "
    "process. Reads from memory allocated now take 1.4 to 2 times as long.",
    "Start engines early after boot; echo 1 > /proc/sys/vm/compact_memory (as root, on the host). If THP_enabled in "
    "/proc/self/status is 0, the service manager switched them off.",
)
MADVISE = Kind(
    "huge-pages-on-request",
    Level.OK,
    "Memory gets huge pages only if its owner asks. kvferry.host_memory does; torch does with THP_MEM_ALLOC_ENABLE=1.",
    "For engines whose cache is torch's host memory: set THP_MEM_ALLOC_ENABLE=1.",
)
KINDS = (GOOD, OFF, NOT_GIVEN, MADVISE)

_SIZE = 2 << 20
_TRIED = 16 << 20
_MADV_HUGEPAGE = 14


def check(host: Host) -> list[Finding]:
    """Read the kernel's mode, and try to get huge pages."""
    mode = host.chosen("/sys/kernel/mm/transparent_hugepage/enabled")
    if mode in ("", "never"):
        said = "the kernel has none" if not mode else "transparent huge pages: never"
        return [OFF.found(said)]
    given = _given()
    if not given:
        allowed = host.status().get("THP_enabled", "1")
        return [
            NOT_GIVEN.found(
                f"mode {mode}, 0 of {_TRIED >> 20} MiB in huge pages; THP_enabled of this process: {allowed}"
            )
        ]
    said = f"mode {mode}; {given >> 20} of {_TRIED >> 20} MiB came in huge pages"
    if mode == "madvise" and host.environ.get("THP_MEM_ALLOC_ENABLE") != "1":
        return [MADVISE.found(said)]
    return [GOOD.found(said)]


def _given() -> int:
    """Allocate memory as `kvferry.host_memory` does; the bytes of it in huge pages."""
    with mmap.mmap(-1, _TRIED + _SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        first = (start + _SIZE - 1) // _SIZE * _SIZE
        ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(first), ctypes.c_size_t(_TRIED), _MADV_HUGEPAGE)
        ctypes.memset(first, 1, _TRIED)
        with Path("/proc/self/smaps").open() as smaps:
            inside = False
            given = 0
            for line in smaps:
                if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                    low, high = int(bounds[1], 16), int(bounds[2], 16)
                    inside = low < first + _TRIED and high > first
                elif inside and line.startswith("AnonHugePages:"):
                    given += int(line.split()[1]) << 10
    return min(given, _TRIED)
