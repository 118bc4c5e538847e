"""Bounds on memory and CPU of a call in this process."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

MEMORY = 1 << 30
"""Most bytes of a call: the largest requests of real engines take a tenth."""
SECONDS = 10.0
"""Most seconds of CPU of a call; most calls take milliseconds."""


@contextmanager
def bounded(seconds: float = SECONDS) -> Iterator[None]:
    """Within, memory beyond `MEMORY` is a MemoryError; afterwards, more than `seconds` of CPU are an AssertionError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY, hard))
    began = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    used = time.process_time() - began
    assert used < seconds, f"it took {used:.1f} s of CPU"
