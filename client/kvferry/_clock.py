"""The one clock of the client: monotonic, and counting suspends, since a lease goes on while a host sleeps."""

from __future__ import annotations

import time

from google.protobuf.duration_pb2 import Duration

# CLOCK_BOOTTIME is Linux; elsewhere the monotonic clock is the closest there is.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

LONGEST = 1e8
"""Seconds; timeouts are shorter. Who asks for three years means no deadline at all, and nothing here has none."""


def now() -> float:
    """Seconds on this host's clock; never compared with another host's."""
    return time.clock_gettime(_CLOCK)


def to_duration(seconds: float) -> Duration:
    """Seconds as a proto; negative becomes zero."""
    nanos = max(0, round(seconds * 1e9))
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def from_duration(duration: Duration) -> float:
    """A proto as seconds."""
    return duration.seconds + duration.nanos / 1e9
