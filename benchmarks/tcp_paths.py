"""Short pieces over TCP: read directly, and through staging memory."""

from __future__ import annotations

from benchmarks.measures import FULL, Effort, Topic
from benchmarks.paths import measured


def run(effort: Effort = FULL) -> Topic:
    """Measure over TCP."""
    return measured("tcp_paths", "Short pieces over TCP: read directly, and through staging memory", "tcp", effort)
