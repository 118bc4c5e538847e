"""Counts and measures reads and their shares, for `Client.stats`. Called once per read or share, never per block."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Iterable

from kvferry._reads.leased_read import LeasedRead, ReadStage, ShareWork
from kvferry.errors import PrefixMiss, TransferCancelled, TransferExpired
from kvferry.stats import RankStats, ReadStats, TransportGauges, total


def outcome_of(read: LeasedRead) -> str:
    """Return how a read has ended, as metrics and traces name it."""
    if isinstance(read.error, TransferCancelled):
        return "cancelled"
    if read.stage is ReadStage.REFUSED:
        return "missed" if isinstance(read.error, PrefixMiss) else "not_granted"
    if read.error is None:
        return "done"
    return "expired" if isinstance(read.error, TransferExpired) else "failed"


class ReadMeter:
    """Measures the reads of one client. `stats` may be called from any thread, and takes no lock, with which handlers
    of logs and hooks of traces are called: they may ask for it. The others are called with `lock` held, which also
    guards the reads themselves, see `LeasedReads`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._under_way: set[LeasedRead] = set()
        self._stats = ReadStats()

    def begun(self, read: LeasedRead) -> None:
        self._under_way.add(read)

    def ended(self, read: LeasedRead) -> None:
        """Count a read that has ended, was refused, or was withdrawn before a rank had begun."""
        outcome, stats = outcome_of(read), self._stats
        self._under_way.discard(read)
        stats.outcomes[outcome] += 1
        if outcome not in ("done", "cancelled", "missed"):
            stats.failures[type(read.error).__name__] += 1
        if read.error is None:
            times = read.stamps.times(())
            stats.prompts[read.request.prompt.found] += 1
            stats.wait.add(times.wait)
            stats.grant.add(times.grant)
            stats.attach.add(times.attach)
            if times.judge:
                stats.judge.add(times.judge)
            stats.size.add(read.bytes)

    def stats(self) -> ReadStats:
        found = copy.deepcopy(self._stats)
        # A list: a tuple may run the garbage collector, and others, between its iterator's start and end. What has just
        # ended, and is not counted yet, is in no stage.
        stages = [read.stage for read in list(self._under_way)]
        found.stages.update(stage.value for stage in stages if stage not in (ReadStage.REFUSED, ReadStage.ENDED))
        return found


class ShareMeter:
    """Measures the shares of all ranks of one client. `ended` belongs to the client's event loop; `stats` may be called
    from any thread, and takes no lock: it may see a part of the share that is being counted."""

    def __init__(self) -> None:
        self._stats = RankStats()

    def ended(self, work: ShareWork, arrived: int) -> None:
        """Count a share that has ended, of which `arrived` bytes have arrived."""
        stats = self._stats
        for phase in ("handshake", "plan", "move", "steps"):
            if seconds := getattr(work, phase):
                getattr(stats, phase).add(seconds)
        stats.bytes += arrived
        # Staged bytes arrive with the rest, or not at all: of a failed share, their number is not known.
        stats.staged_bytes += min(work.staged_bytes, arrived)
        stats.pieces += work.pieces
        stats.descriptors += work.descriptors

    def stats(self, transports: Iterable[TransportGauges]) -> RankStats:
        """Return the counts so far, with the gauges of the ranks' transports."""
        found = copy.deepcopy(self._stats)
        for each in dataclasses.fields(gauges := total(TransportGauges, transports)):
            setattr(found, each.name, getattr(gauges, each.name))
        return found
