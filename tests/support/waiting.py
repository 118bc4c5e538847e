"""Waiting for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry._clock import now

PAUSE = 0.001
"""Seconds between two looks, in which the processor is that of what is waited for."""


def until(condition: Callable[[], bool], within: float = 30.0) -> None:
    """Wait for something that another process or thread does."""
    end = now() + within
    while not condition():
        assert now() < end, "it did not come about"
        time.sleep(PAUSE)
