"""Waiting for what other processes and threads do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvferry._clock import now

PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two looks, in which the processor is that of what is waited for: at first, and in a long wait."""
SHARE = 0.02
"""Of the time waited so far: what a look may come too late."""


def until(condition: Callable[[], bool], within: float = 30.0) -> None:
    """Wait for something that another process or thread does."""
    began = now()
    while not condition():
        waited = now() - began
        assert waited < within, "it did not come about"
        time.sleep(min(max(PAUSE, SHARE * waited), LONGEST_PAUSE))


def stop(*pids: int) -> None:
    """SIGSTOP to processes; wait until all of their threads have stopped. Until then they answer."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(_stopped(pid) for pid in pids))


def without_waits(log: str) -> str:
    """Return what a client has logged, without its warnings that an answer takes more than a second: on a busy machine
    it may."""
    return "".join(line for line in log.splitlines(keepends=True) if not line.startswith("still waiting for "))


def _stopped(pid: int) -> bool:
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return all(state in "TtZX" for state in states)
