"""Counts and measures reads and their shares, for `Client.stats`. Called once per read or share, never per block."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import Protocol
from weakref import WeakSet

from kvferry._reads.leased_read import LeasedRead, ReadStage
from kvferry._reads.read_times import ShareWork
from kvferry.errors import KvferryError, TransferCancelled, TransferExpired
from kvferry.stats import RankStats, ReadStats, TransportGauges, total


def kind_of(error: KvferryError | None) -> str:
    if error is None:
        return "done"
    if isinstance(error, TransferExpired):
        return "expired"
    return "cancelled" if isinstance(error, TransferCancelled) else "failed"


class HasReads(Protocol):
    """An owner of reads in progress."""

    def stages(self) -> Mapping[ReadStage, int]:
        """Count the reads in progress by stage. Takes their lock."""


class ReadMeter:
    """Measures the reads of one client. Thread-safe; its lock is the innermost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: WeakSet[HasReads] = WeakSet()
        self._stats = ReadStats()

    def add_owner(self, owner: HasReads) -> None:
        """Count the reads in progress of this owner, too, as long as the owner is referenced."""
        with self._lock:
            self._owners.add(owner)

    def ended(self, read: LeasedRead) -> None:
        times, stats = read.stamps.times(()), self._stats
        kind = kind_of(read.error)
        with self._lock:
            self._count(kind, read.error)
            if kind == "done":
                stats.prompts[read.request.prompt.found] += 1
                stats.wait.add(times.wait)
                stats.grant.add(times.grant)
                stats.attach.add(times.attach)
                if times.judge:
                    stats.judge.add(times.judge)
                stats.size.add(read.bytes)

    def refused(self, read: LeasedRead) -> None:
        """Count a read that got no lease, or whose lease ended before the read began."""
        cancelled = isinstance(read.error, TransferCancelled)
        with self._lock:
            self._count("cancelled" if cancelled else "not_granted", read.error)

    def withdrawn(self) -> None:
        """Count a read that its engine withdrew before a rank had begun."""
        with self._lock:
            self._stats.outcomes["cancelled"] += 1

    def disputed(self) -> None:
        """Count a read that was counted as done before the home's verdict EXPIRED."""
        with self._lock:
            self._stats.disputed += 1

    def stats(self) -> ReadStats:
        with self._lock:
            owners = tuple(self._owners)
        stages = [owner.stages() for owner in owners]
        with self._lock:
            found = copy.deepcopy(self._stats)
        for each in stages:
            found.stages.update({stage.value: count for stage, count in each.items()})
        return found

    def _count(self, outcome: str, error: KvferryError | None) -> None:
        self._stats.outcomes[outcome] += 1
        if outcome not in ("done", "cancelled"):
            self._stats.failures[type(error).__name__] += 1


class ShareMeter:
    """Measures the shares of all ranks of one client. Thread-safe; its lock is the innermost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = RankStats()

    def ended(self, work: ShareWork, arrived: int) -> None:
        """Count a share that has ended, of which `arrived` bytes have arrived."""
        stats = self._stats
        with self._lock:
            for seconds, measured in (
                (work.handshake, stats.handshake),
                (work.plan, stats.plan),
                (work.move, stats.move),
                (work.steps, stats.steps),
            ):
                if seconds:
                    measured.add(seconds)
            stats.bytes += arrived
            # Staged bytes arrive with the rest, or not at all: of a failed share, their number is not known.
            stats.staged_bytes += min(work.staged_bytes, arrived)
            stats.pieces += work.pieces
            stats.descriptors += work.descriptors

    def stats(self, transports: Iterable[TransportGauges]) -> RankStats:
        """Return the counts so far, with the gauges of the ranks' transports."""
        with self._lock:
            found = copy.deepcopy(self._stats)
        for each in dataclasses.fields(gauges := total(TransportGauges, transports)):
            setattr(found, each.name, getattr(gauges, each.name))
        return found
