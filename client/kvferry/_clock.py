"""The clock of the client: monotonic, and counting the time in which a host is suspended, since leases run on."""

from __future__ import annotations

import time

from google.protobuf.duration_pb2 import Duration

# Only Linux has CLOCK_BOOTTIME; elsewhere the monotonic clock comes closest.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Return this host's time in seconds. Never compare it with the time of another host."""
    return time.clock_gettime(_CLOCK)


def to_duration(seconds: float) -> Duration:
    """Convert seconds to a message; negative becomes zero."""
    nanos = max(0, round(seconds * 1e9))
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def from_duration(duration: Duration) -> float:
    """Convert a message to seconds."""
    return duration.seconds + duration.nanos / 1e9
