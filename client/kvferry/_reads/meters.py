"""Counts and measures reads and their shares, for `Client.stats`. Called once per read or share, never per block."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol
from weakref import WeakSet

from kvferry._reads.leased_read import UNDER_WAY, LeasedRead, ReadStage
from kvferry._reads.read_times import ShareWork
from kvferry._transport.transport import TransportGauges
from kvferry.errors import KvferryError, TransferCancelled, TransferExpired
from kvferry.stats import SIZES, Measured, RankStats, ReadStats

STAGES = (ReadStage.WAITING, *UNDER_WAY)
OUTCOMES = ("done", "failed", "cancelled", "expired", "not_granted")


def kind_of(error: KvferryError | None) -> str:
    """Return under which kind the end of a read is counted."""
    if error is None:
        return "done"
    if isinstance(error, TransferExpired):
        return "expired"
    return "cancelled" if isinstance(error, TransferCancelled) else "failed"


class HasReads(Protocol):
    """Something that has reads in progress."""

    def stages(self) -> Mapping[ReadStage, int]:
        """Count the reads in progress by stage. Takes their lock."""


class ReadMeter:
    """Measures the reads of one client. Thread-safe; its lock is the innermost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: WeakSet[HasReads] = WeakSet()
        self._outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._failures: Counter[str] = Counter()
        self._prompts: Counter[str] = Counter(matched=0, unmarked=0, unknown=0)
        self._disputed = 0
        self._wait, self._grant, self._attach, self._judge = Measured(), Measured(), Measured(), Measured()
        self._size = Measured(SIZES)

    def add_owner(self, owner: HasReads) -> None:
        """Count the reads in progress of this owner, too, as long as it is referenced."""
        with self._lock:
            self._owners.add(owner)

    def ended(self, read: LeasedRead) -> None:
        """Count a read that has ended."""
        times = read.stamps.times(())
        kind = kind_of(read.error)
        with self._lock:
            self._count(kind, read.error)
            if kind == "done":
                self._prompts[read.request.prompt.found] += 1
                self._wait.add(times.wait)
                self._grant.add(times.grant)
                self._attach.add(times.attach)
                if times.judge:
                    self._judge.add(times.judge)
                self._size.add(read.bytes)

    def refused(self, read: LeasedRead) -> None:
        """Count a read that got no lease, or whose lease ended before it began."""
        cancelled = isinstance(read.error, TransferCancelled)
        with self._lock:
            self._count("cancelled" if cancelled else "not_granted", read.error)

    def withdrawn(self) -> None:
        """Count a read that its engine took back before a rank had begun."""
        with self._lock:
            self._outcomes["cancelled"] += 1

    def disputed(self) -> None:
        """Count a read that was counted as done, of which the home says that its lease had ended."""
        with self._lock:
            self._disputed += 1

    def stats(self) -> ReadStats:
        """Return the counts so far."""
        with self._lock:
            owners = tuple(self._owners)
        stages: Counter[ReadStage] = Counter()
        for owner in owners:
            stages.update(owner.stages())
        with self._lock:
            return ReadStats(
                outcomes=dict(self._outcomes),
                failures=dict(self._failures),
                disputed=self._disputed,
                prompts=dict(self._prompts),
                stages={stage.value: stages[stage] for stage in STAGES},
                wait=self._wait.distribution(),
                grant=self._grant.distribution(),
                attach=self._attach.distribution(),
                judge=self._judge.distribution(),
                size=self._size.distribution(),
            )

    def _count(self, outcome: str, error: KvferryError | None) -> None:
        self._outcomes[outcome] += 1
        if outcome not in ("done", "cancelled"):
            self._failures[type(error).__name__] += 1


class ShareMeter:
    """Measures the shares of all ranks of one client. Thread-safe; its lock is the innermost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handshake, self._plan, self._move, self._steps = Measured(), Measured(), Measured(), Measured()
        self._bytes = self._staged_bytes = self._pieces = self._descriptors = 0

    def ended(self, work: ShareWork, arrived: int) -> None:
        """Count a share that has ended.

        Args:
            work: how much work it was.
            arrived: number of its bytes that have arrived.
        """
        with self._lock:
            if work.handshake:
                self._handshake.add(work.handshake)
            if work.plan:
                self._plan.add(work.plan)
            if work.move:
                self._move.add(work.move)
            if work.steps:
                self._steps.add(work.steps)
            self._bytes += arrived
            # What is staged arrives with the rest, or not at all: of a share that failed, the part is not known.
            self._staged_bytes += min(work.staged_bytes, arrived)
            self._pieces += work.pieces
            self._descriptors += work.descriptors

    def stats(self, transports: Iterable[TransportGauges]) -> RankStats:
        """Return the counts so far, with the gauges of the ranks' transports."""
        gauges = tuple(transports)
        with self._lock:
            return RankStats(
                handshake=self._handshake.distribution(),
                plan=self._plan.distribution(),
                move=self._move.distribution(),
                steps=self._steps.distribution(),
                bytes=self._bytes,
                staged_bytes=self._staged_bytes,
                pieces=self._pieces,
                descriptors=self._descriptors,
                transfers=sum(gauge.active for gauge in gauges),
                uncertain_bytes=sum(gauge.uncertain_bytes for gauge in gauges),
                quarantined_bytes=sum(gauge.quarantined_bytes for gauge in gauges),
                agents=sum(gauge.agents for gauge in gauges),
                retired_agents=sum(gauge.retired_agents for gauge in gauges),
                agents_retired=sum(gauge.agents_retired for gauge in gauges),
                staging_slots=sum(gauge.staging_slots for gauge in gauges),
            )
