"""Memory cgroups, in which the kernel ends a process that takes more than it may."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.identifiers import unique_id

ROOT = Path("/sys/fs/cgroup")
ENTER = """
import os, sys
group = sys.argv.pop(1)
if group:
    with open(group, "w") as procs:
        procs.write(str(os.getpid()))
from kvferry_server.node.main import main
main()
"""
"""A program that runs kvferryd in a group, from its start on: what a process has before it enters is not counted."""


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """A new cgroup that may have `limit` bytes. None where this process may make none: then only what a process has
    taken can be looked at."""
    group = _made(limit)
    try:
        yield group
    finally:
        if group is not None:
            _removed(group)


def in_group(group: Path | None) -> tuple[str, ...]:
    """Arguments of Python that run kvferryd in a group."""
    return ("-c", ENTER, "" if group is None else str(group / "cgroup.procs"))


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had so far."""

    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    most = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    assert most, f"process {pid} has ended"
    return most[0]


def _made(limit: int) -> Path | None:
    name = unique_id("kvferry-test")
    for parent, file in ((ROOT / "memory", "memory.limit_in_bytes"), (ROOT, "memory.max")):
        group = parent / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(limit))
        except OSError:
            group.rmdir()
            continue
        return group
    return None


def _removed(group: Path) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        # A process that has ended leaves its group a moment later.
        time.sleep(0.01)
