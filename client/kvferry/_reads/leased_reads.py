"""Reads whose leases this process holds, from the acquisition to the verdict (R1; PROTOCOL, Leases and Endings).

    acquire ──► WAITING ──► GRANTED ──(begin)──► READING ──(all shares have ended)──► JUDGING ──► ENDED
                   └───────────┴──► REFUSED

When a share fails, the lease ends, or the read is cancelled, the other ranks are stopped; the read ends when all ranks
have reported. The reads of `Cache.read` have one rank, those of `SchedulerPort` all ranks of the engine.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from kvferry._clock import now
from kvferry._control.acquisition import Acquired, AcquireRequest
from kvferry._control.cancellation import Cancellation
from kvferry._control.judgement import Judgement, judge
from kvferry._control.lease_holder import VERDICT_TIMEOUT, LeaseHolder
from kvferry._reads.read_times import ShareWork, Stamps
from kvferry._threads import start_thread
from kvferry._work_queue import WorkQueue
from kvferry.errors import (
    KvferryError,
    LimitReached,
    TransferCancelled,
    TransferError,
    TransferExpired,
    TransferFailed,
    TransferStuck,
)
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.25
"""Seconds between two checks of the deadlines of reads in progress."""

RANKS_GRACE = 10.0
"""Seconds after a read's deadline during which its ranks can still report; they end their shares by themselves."""

ANSWER_GRACE = 4.0
"""Seconds after `VERDICT_TIMEOUT`, which ends the call, until the answer counts as missing: with many reads, gRPC's
thread delivers it late. Without the home's verdict, nobody would notice that this machine was paused."""


class ReadStage(enum.Enum):
    """The stage of a read; see the module."""

    WAITING = "waiting"
    GRANTED = "granted"
    REFUSED = "refused"
    READING = "reading"
    JUDGING = "judging"
    ENDED = "ended"


UNDER_WAY = (ReadStage.GRANTED, ReadStage.READING, ReadStage.JUDGING)
"""Stages in which a read holds a lease."""


@dataclass(frozen=True, slots=True)
class ShareEnd:
    """Says how one rank's share of a read ended.

    Attributes:
        error: why its bytes do not count; None: all have arrived.
        quiet: nothing can write to its blocks any more.
        bytes: number of bytes that have arrived.
        work: how much work it was.
    """

    error: KvferryError | None
    quiet: bool
    bytes: int
    work: ShareWork = field(default_factory=ShareWork)


@dataclass(slots=True, eq=False)
class LeasedRead:
    """One read. Only its `LeasedReads` changes it, with the lock held.

    Attributes:
        request: the request for its lease.
        ranks: the ranks that read a share.
        cancellation: interrupts the wait for its lease.
        stage: its stage.
        acquired: its lease and the blocks that the lease covers, once granted.
        error: why the read fails; None: it has not failed so far.
        ends: how the shares have ended, by rank.
        not_quiet: ranks whose share has ended, and whose blocks may still be written to.
        ended_at: when the last share ended, on `kvferry._clock`.
        confirmed: the home answered VALID. If False, the reader's own deadline decided.
        stamps: when it reached its stages.
    """

    request: AcquireRequest
    ranks: frozenset[int]
    cancellation: Cancellation
    stage: ReadStage = ReadStage.WAITING
    acquired: Acquired | None = None
    error: KvferryError | None = None
    ends: dict[int, ShareEnd] = field(default_factory=dict)
    not_quiet: set[int] = field(default_factory=set)
    ended_at: float = 0.0
    confirmed: bool = False
    stamps: Stamps = field(default_factory=Stamps)
    _judging_since: float = 0.0

    @property
    def read_id(self) -> str:
        """The name that its ranks share."""
        return self.request.read_id

    @property
    def bytes(self) -> int:
        """Number of bytes that have arrived on the ranks that have ended."""
        return sum(end.bytes for end in self.ends.values())

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks that have not reported the end of their share."""
        return tuple(sorted(self.ranks - set(self.ends)))


SomeRead = TypeVar("SomeRead", bound=LeasedRead)
AnyRead = TypeVar("AnyRead", bound=LeasedRead, contravariant=True)


class Owner(Protocol[AnyRead]):
    """The callbacks of a `LeasedReads`. All but `on_renewed` are called with the lock held. None may block."""

    def on_granted(self, read: AnyRead) -> None:
        """Called when a read is GRANTED."""

    def on_renewed(self, read: AnyRead) -> None:
        """Called when a read's lease has a new deadline, on any thread and without the lock."""

    def on_refused(self, read: AnyRead) -> None:
        """Called when a read is REFUSED: it will not be granted, or its lease has ended before it began. The reason is
        in `LeasedRead.error`."""

    def on_stop(self, read: AnyRead) -> None:
        """Called when a read has failed and some of its shares have not ended: stop these."""

    def overdue(self, read: AnyRead) -> TransferStuck:
        """Return the error for a read that did not end in time."""

    def on_ended(self, read: AnyRead) -> None:
        """Called when a read is ENDED. If `LeasedRead.not_quiet` is not empty, `on_quiesced` follows."""

    def on_quiesced(self, read: AnyRead) -> None:
        """Called when a read that had ended without being quiet is quiet."""


class LeasedReads(Generic[SomeRead]):
    """The reads of one owner.

    Threading: nothing here waits but `wait_acquired`. RPCs are started on the work queue. The owner is called on any
    thread. Callers hold `lock`, except for `wait_acquired`.

    Args:
        holder: holds the leases.
        work: the queue on whose thread messages to homes are sent.
        owner: called when the stage of a read changes.
    """

    def __init__(self, holder: LeaseHolder, work: WorkQueue, owner: Owner[SomeRead]) -> None:
        self.lock = threading.Lock()
        """Guards the reads; callers of the methods hold it."""
        self._holder = holder
        self._work = work
        self._owner = owner
        self._under_way: set[SomeRead] = set()
        self._looking = False
        self._acquiring = 0
        """Number of acquisitions that have not ended, those of withdrawn reads included."""
        self._acquisition_ended = threading.Condition(self.lock)

    def acquire(self, read: SomeRead) -> None:
        """Start to acquire the lease of a read."""
        self._acquiring += 1
        self._under_way.add(read)
        self._look_later()
        self._do(partial(self._acquire, read))

    def begin(self, read: SomeRead) -> None:
        """Mark a granted read as READING; its ranks are about to start."""
        read.stage, read.stamps.begun = ReadStage.READING, now()

    def withdraw(self, read: SomeRead) -> None:
        """End a read that is no longer wanted and that no rank has started. The caller ends its lease at the home."""
        read.stage = ReadStage.ENDED
        self._under_way.discard(read)
        self._do(read.cancellation.cancel)
        if read.acquired is not None:
            self._holder.drop(read.acquired)

    def fail(self, read: SomeRead, error: KvferryError) -> None:
        """Mark a read as failed, and stop its shares that have not ended. The first error is kept."""
        if read.error is None:
            read.error = error
            if read.stage is ReadStage.READING and read.silent:
                self._owner.on_stop(read)

    def share_ended(self, read: SomeRead, rank: int, end: ShareEnd, at: float) -> None:
        """Record how a rank's share has ended. Later reports of the same rank are ignored.

        Args:
            read: the read.
            rank: one of its ranks.
            end: how the share has ended.
            at: time on `kvferry._clock`, no earlier than the arrival of the last byte.
        """
        if rank in read.ends:
            return
        read.ends[rank] = end
        read.ended_at = max(read.ended_at, at)
        if end.quiet:
            read.not_quiet.discard(rank)
        else:
            read.not_quiet.add(rank)
        if read.stage is ReadStage.ENDED:
            # The read was given up before this rank reported.
            self._settle(read)
            return
        if end.error is not None:
            self.fail(read, end.error)
        if read.stage is ReadStage.READING and not read.silent:
            self._all_ended(read)

    def share_quiet(self, read: SomeRead, rank: int) -> None:
        """Record that a rank's share, which had ended without being quiet, is quiet."""
        read.not_quiet.discard(rank)
        self._settle(read)

    def wait_acquired(self, timeout: float) -> bool:
        """Wait until no acquisition is in progress; returns whether that is so. Call this without the lock."""
        with self.lock:
            return self._acquisition_ended.wait_for(lambda: not self._acquiring, timeout)

    # These run on the work queue's thread, or on the one on which an acquisition ends.

    def _acquire(self, read: SomeRead) -> None:
        try:
            self._holder.acquire(
                read.request, read.cancellation, lambda _: self._owner.on_renewed(read), partial(self._acquired, read)
            )
        except KvferryError as error:
            self._acquired(read, error)
        except Exception as error:
            logger.exception("read %s could not be acquired", read.read_id)
            self._acquired(read, TransferFailed(f"read {read.read_id}: {error!r}"))

    def _acquired(self, read: SomeRead, found: Acquired | KvferryError) -> None:
        with self.lock:
            wanted = read.stage is ReadStage.WAITING
            if wanted and isinstance(found, Acquired):
                read.acquired, read.stage = found, ReadStage.GRANTED
                read.stamps.accepted, read.stamps.granted = found.accepted_at, now()
                self._owner.on_granted(read)
            elif wanted and isinstance(found, KvferryError):
                self._refuse(read, found)
        if not wanted and isinstance(found, Acquired):
            self._holder.let_go(read.request.home, found)
        with self.lock:
            self._acquiring -= 1
            self._acquisition_ended.notify_all()

    def _look(self) -> None:
        with self.lock:
            self._looking = False
            for read in tuple(self._under_way):
                self._judge_time(read)
            self._look_later()

    def _report(self, read: SomeRead, acquired: Acquired) -> None:
        # If the read failed although no share did, for example because it was cancelled or its lease ended, its good
        # shares are reported with the error of the read: the source then keeps the blocks for another reader.
        of_share = any(end.error is read.error for end in read.ends.values())
        error = None if of_share else read.error
        reports = [
            pb.RankReport(rank=rank, outcome=_outcome(end.error or error), bytes=end.bytes)
            for rank, end in sorted(read.ends.items())
        ]
        with self.lock:
            read._judging_since = now()
        try:
            self._holder.report(read.request.home, acquired.lease, reports, partial(self._answered, read))
        except Exception:
            logger.exception("the end of read %s could not be reported", read.read_id)
            self._answered(read, None)

    def _answered(self, read: SomeRead, verdict: pb.Verdict.ValueType | None) -> None:
        with self.lock:
            self._judged(read, verdict)

    # Call these with the lock held.

    def _do(self, work: Callable[[], None]) -> bool:
        """Do work on the work queue, or on a new thread if that has ended, so that homes learn of every end.

        Returns:
            Whether it will be done.
        """
        if self._work.do(work):
            return True
        try:
            start_thread(work, "kvferry-reads-late")
        except LimitReached as error:
            logger.warning("the end of a read cannot be reported to its home: %s", error.message)
            return False
        return True

    def _look_later(self) -> None:
        if self._under_way and not self._looking:
            self._looking = True
            self._work.do_later(LOOK_EVERY, self._look)

    def _judge_time(self, read: SomeRead) -> None:
        time, read_id = now(), read.read_id
        if read.stage is ReadStage.WAITING and time >= read.request.deadline + RANKS_GRACE:
            # The acquisition ends by the deadline, unless gRPC got no thread to report its end.
            self._do(read.cancellation.cancel)
            self._refuse(read, TransferStuck(f"read {read_id}: its home was not heard in time", read_id=read_id))
        if read.acquired is None:
            return
        if read.stage is ReadStage.JUDGING:
            if time >= read._judging_since + VERDICT_TIMEOUT + ANSWER_GRACE:
                self._judged(read, None)
            return
        if read.error is None and not read.acquired.lease.live(time):
            self.fail(read, TransferExpired(f"read {read_id}: its lease ended before its last byte", read_id=read_id))
        elif read.error is None and time >= read.request.deadline:
            self.fail(read, self._owner.overdue(read))
        if read.stage is ReadStage.GRANTED and read.error is not None:
            self._do(partial(self._holder.let_go, read.request.home, read.acquired))
            self._refuse(read, read.error)
        elif read.stage is ReadStage.READING and time >= read.request.deadline + RANKS_GRACE:
            read.not_quiet.update(read.silent)
            read.ended_at = time
            self._all_ended(read)

    def _refuse(self, read: SomeRead, error: KvferryError) -> None:
        read.error, read.stage = error, ReadStage.REFUSED
        self._under_way.discard(read)
        self._owner.on_refused(read)

    def _all_ended(self, read: SomeRead) -> None:
        if read.acquired is None:
            return
        read.stamps.ended = now()
        if read.error is None and not read.acquired.lease.live(read.ended_at):
            read.error = TransferExpired(f"read {read.read_id} ended after its lease", read_id=read.read_id)
        reporting = self._do(partial(self._report, read, read.acquired))
        if read.error is None:
            # The time for the verdict starts with the report, which may wait behind other work.
            read.stage, read._judging_since = ReadStage.JUDGING, math.inf
            if not reporting:
                self._judged(read, None)
        else:
            self._end(read)

    def _judged(self, read: SomeRead, verdict: pb.Verdict.ValueType | None) -> None:
        """Judge a read by the home's verdict; None: there is none, and the reader's own deadline decides."""
        if read.stage is not ReadStage.JUDGING or read.acquired is None:
            return
        read.stamps.judged = now()
        judgement = judge(read.ended_at, read.acquired.lease.deadline, verdict)
        if judgement is Judgement.EXPIRED:
            read_id = read.read_id
            read.error = TransferExpired(f"read {read_id}: the home says that its lease ended", read_id=read_id)
        read.confirmed = judgement is Judgement.CONFIRMED
        self._end(read)

    def _end(self, read: SomeRead) -> None:
        read.stage = ReadStage.ENDED
        self._under_way.discard(read)
        if read.acquired is not None:
            self._holder.drop(read.acquired)
        _set_quiet(read)
        self._owner.on_ended(read)

    def _settle(self, read: SomeRead) -> None:
        """Report the read as quiet if it has ended and all of its ranks are quiet."""
        if read.stage is ReadStage.ENDED and not read.not_quiet:
            _set_quiet(read)
            self._owner.on_quiesced(read)


def _set_quiet(read: LeasedRead) -> None:
    """Set `quiet` of the read's error to that of the read."""
    if isinstance(read.error, TransferError):
        read.error.quiet = not read.not_quiet


def _outcome(error: KvferryError | None) -> pb.RankOutcome.ValueType:
    """Return the outcome to report for a share that ended with this error."""
    if error is None:
        return pb.RANK_OUTCOME_DONE
    if isinstance(error, TransferExpired):
        return pb.RANK_OUTCOME_EXPIRED
    return pb.RANK_OUTCOME_CANCELLED if isinstance(error, TransferCancelled) else pb.RANK_OUTCOME_FAILED
