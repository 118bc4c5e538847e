"""What a client has counted and measured since it was made, as plain values: `Client.stats` returns them.

Nothing here needs a metrics library. `kvferry.integrations.prometheus` shows the same values to Prometheus; an engine
with metrics of its own reads them where it likes. Totals only rise; the other values are of the moment.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

SECONDS = (0.0001, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Bounds for durations, from a plan of a short request to the longest timeout of a read."""

SIZES = tuple(4.0**power for power in range(5, 18))
"""Bounds for bytes: 1 KiB to 16 GiB."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Measured values, counted by size.

    Attributes:
        bounds: upper bounds of the buckets, inclusive and rising.
        counts: number of values in each bucket alone; one more than bounds, the last for values above all of them.
        sum: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def up_to(self) -> Iterator[tuple[float, int]]:
        """Return each bound with the number of values up to it; the last bound is infinite."""
        return zip((*self.bounds, math.inf), accumulate(self.counts), strict=True)


class Measured:
    """Counts measured values. Not thread-safe.

    Args:
        bounds: see `Distribution`.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def distribution(self) -> Distribution:
        """Return the values so far."""
        return Distribution(self._bounds, tuple(self._counts), self._sum)


@dataclass(frozen=True, slots=True)
class ReadStats:
    """The reads whose leases this process holds: those of a `SchedulerPort`, or of `Cache.read`.

    Attributes:
        outcomes: ended reads: "done", "failed", "cancelled", "expired"; "not_granted": no home gave a lease.
        failures: reads that failed, expired or were not granted, by the class of their error.
        disputed: reads counted as done, of which the home has said since that their leases had ended.
        prompts: reads counted as done: "matched": their sources have marked the same prompt; "unmarked": they have not
            marked what was read; "unknown": nothing was compared.
        stages: reads in progress: "waiting", "granted", "reading", "judging".
        wait: seconds from the request until the home promised the blocks.
        grant: seconds from there until all blocks were known; of a progressive read, until the first were.
        attach: seconds from there until there were blocks to read into.
        judge: seconds from the end of the last rank until the home's verdict.
        size: bytes of a read, by all ranks. This and the seconds are of reads that are done.
    """

    outcomes: Mapping[str, int]
    failures: Mapping[str, int]
    disputed: int
    prompts: Mapping[str, int]
    stages: Mapping[str, int]
    wait: Distribution
    grant: Distribution
    attach: Distribution
    judge: Distribution
    size: Distribution


@dataclass(frozen=True, slots=True)
class RankStats:
    """What the ranks of this process read into their memory, by all of its caches.

    Attributes:
        handshake: seconds that a rank waited for the handshake with a new source; not counted where it was known.
        plan: seconds in which a rank made descriptors of a request's blocks.
        move: seconds from the start of a rank's transfer until its last byte was seen, or it failed; of a progressive
            read, of its transfers together.
        steps: seconds in which a rank had moved all that the source had published; only of progressive reads.
        bytes: bytes that have arrived.
        staged_bytes: those of them that went through staging memory.
        pieces: contiguous ranges to read, before fusing and merging.
        descriptors: NIXL descriptors, after it.
        transfers: transfers that have not ended.
        uncertain_bytes: bytes of transfers that have ended and may still write to their blocks, which are in
            quarantine.
        quarantined_bytes: bytes that ever were in quarantine.
        agents: reading agents, retired ones included.
        retired_agents: agents that get no new work, and are destroyed as soon as that is safe.
        agents_retired: agents that were ever retired.
        staging_slots: slots of staging memory in use.
    """

    handshake: Distribution
    plan: Distribution
    move: Distribution
    steps: Distribution
    bytes: int
    staged_bytes: int
    pieces: int
    descriptors: int
    transfers: int = 0
    uncertain_bytes: int = 0
    quarantined_bytes: int = 0
    agents: int = 0
    retired_agents: int = 0
    agents_retired: int = 0
    staging_slots: int = 0


@dataclass(frozen=True, slots=True)
class SourceStats:
    """The publications of the engines that this client has opened.

    Attributes:
        published: publications.
        held: publications that are not released: their blocks are pinned.
        released: released publications: "read", "unread", "declined", "aborted", "final", see `ReleaseOutcome`;
            "refused": the home has not accepted them.
    """

    published: int = 0
    held: int = 0
    released: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallStats:
    """The calls to node servers.

    Attributes:
        calls: calls that were started, streams included.
        failed: those that failed, by the class of their error.
        retried: those that failed in a way after which the same is asked again.
        homes: node servers that this client has talked to.
        unreachable: how many of them cannot be reached now.
        unreachable_seconds: how long the longest of these outages has lasted.
    """

    calls: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    retried: int = 0
    homes: int = 0
    unreachable: int = 0
    unreachable_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ClientStats:
    """What a client has counted and measured: its reads, the transfers of its ranks, its publications and calls."""

    reads: ReadStats
    ranks: RankStats
    source: SourceStats
    calls: CallStats
