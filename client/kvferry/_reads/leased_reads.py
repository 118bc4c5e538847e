"""Reads whose leases this process holds, from the acquisition to the verdict (R1; PROTOCOL, Leases and Endings).

    acquire ──► WAITING ──► GRANTED ──(begin)──► READING ──(all shares have ended)──► JUDGING ──► ENDED
                   └───────────┴──► REFUSED

A progressive read is GRANTED with the first blocks, and its acquisition goes on while it is GRANTED and READING: its
owner hands on more blocks as they come. Its shares end after the last; it is judged once, like any other.

With `Confirm.AFTER` there is no JUDGING: the reader's own deadline decides, and the home's verdict is compared with it
when it comes.

When a share fails, the lease ends, or the read is cancelled, the other ranks are stopped; the read ends when all ranks
have reported. The reads of `Cache.read` have one rank, those of `SchedulerPort` all ranks of the engine.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from kvferry._clock import now
from kvferry._control.acquisition import Acquired, MoreBlocks, Told, timed_out
from kvferry._control.connection import Control
from kvferry._control.judgement import Confirm, Judgement, judge
from kvferry._control.lease_holder import VERDICT_TIMEOUT, LeaseHolder, ReadReport
from kvferry._reads.leased_read import LeasedRead, ReadStage, ShareEnd, log_end, set_quiet
from kvferry._reads.looks import Looks
from kvferry._reads.meters import ReadMeter, kind_of
from kvferry._threads import start_thread
from kvferry._tracing import NO_SPAN, start_span
from kvferry._wire.status import reason_number
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

RANKS_GRACE = 10.0
"""Seconds after a read's deadline during which its ranks can still report; they end their shares by themselves."""

ANSWER_GRACE = 4.0
"""Seconds after `VERDICT_TIMEOUT`, which ends the call, until the answer counts as missing: with many reads, gRPC's
thread delivers it late. Without the home's verdict, nobody would notice that this machine was paused."""


SomeRead = TypeVar("SomeRead", bound=LeasedRead)
AnyRead = TypeVar("AnyRead", bound=LeasedRead, contravariant=True)


class Owner(Protocol[AnyRead]):
    """The callbacks of a `LeasedReads`. All but `on_renewed` are called with the lock held. None may block."""

    def on_granted(self, read: AnyRead) -> None:
        """Called when a read is GRANTED."""

    def on_more(self, read: AnyRead, more: MoreBlocks) -> None:
        """Called when the source of a read that is GRANTED or READING has published more blocks."""

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

    def on_disputed(self, read: AnyRead) -> None:
        """Called when the home says that the lease of a read had ended, after the read ended well without its word."""


class LeasedReads(Generic[SomeRead]):
    """The reads of one owner.

    Threading: nothing here waits but `wait_acquired`. RPCs are started on the work queue. The owner is called on any
    thread. Callers hold `lock`, except for `wait_acquired` and `stages`.

    Args:
        holder: holds the leases.
        work: the queue on whose thread messages to homes are sent.
        owner: called when the stage of a read changes.
        meter: measures the reads.
    """

    def __init__(self, holder: LeaseHolder, work: WorkQueue, owner: Owner[SomeRead], meter: ReadMeter) -> None:
        self.lock = threading.Lock()
        """Guards the reads; callers of the methods hold it."""
        self._holder = holder
        self._work = work
        self._owner = owner
        self._meter = meter
        self._under_way: set[SomeRead] = set()
        self._unreported: list[tuple[SomeRead, Acquired]] = []
        """Reads whose ends wait to be reported: those of one home in one call."""
        self._looks = Looks(work, self._look)
        self._acquiring = 0
        """Number of acquisitions that have not ended, those of withdrawn reads included."""
        self._acquisition_ended = threading.Condition(self.lock)
        meter.add_owner(self)

    def acquire(self, read: SomeRead) -> None:
        """Start to acquire the lease of a read."""
        self._acquiring += 1
        request = read.request
        read.span = start_span(
            "kvferry.read",
            request.span.traceparent,
            source=request.reference.engine_id,
            publication=request.reference.publication,
        )
        read.acquiring = start_span("kvferry.acquire", read.span.traceparent)
        read.request = replace(request, span=read.acquiring)
        self._under_way.add(read)
        self._looks.by(request.deadline)
        self._do(partial(self._acquire, read))

    def begin(self, read: SomeRead) -> None:
        """Mark a granted read as READING; its ranks are about to start."""
        read.stage, read.stamps.begun = ReadStage.READING, now()

    def takes(self, read: SomeRead, until: int) -> KvferryError | None:
        """Judge a granted read by its prompt, now that the end of the tokens is known that it takes.

        Returns:
            Why it is REFUSED; None: it may begin.
        """
        read.until = until
        self._judge_prompt(read)
        return read.error

    def withdraw(self, read: SomeRead) -> None:
        """End a read that is no longer wanted and that no rank has started. The caller ends its lease at the home."""
        read.stage = ReadStage.ENDED
        self._under_way.discard(read)
        self._meter.withdrawn()
        read.acquiring.end()
        read.span.end(outcome="cancelled")
        self._do(read.cancellation.cancel)
        if read.acquired is not None:
            self._holder.drop(read.acquired)

    def fail(self, read: SomeRead, error: KvferryError) -> None:
        """Mark a read as failed, and stop its shares that have not ended. The first error is kept."""
        if read.error is None:
            read.error = error
            if not read.complete:
                self._do(read.cancellation.cancel)
            if read.stage is ReadStage.READING and read.silent:
                self._owner.on_stop(read)

    def share_ended(self, read: SomeRead, rank: int, end: ShareEnd, at: float) -> None:
        """Record how a rank's share has ended. Of later reports of the same rank only counts that it is quiet.

        Args:
            read: the read.
            rank: one of its ranks.
            end: how the share has ended.
            at: time on `kvferry._clock`, no earlier than the arrival of the last byte.
        """
        if rank in read.ends:
            if end.quiet:
                self.share_quiet(read, rank)
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

    def stages(self) -> Counter[ReadStage]:
        """Count the reads in progress by stage. Call this without the lock."""
        with self.lock:
            return Counter(read.stage for read in self._under_way)

    def wait_acquired(self, timeout: float) -> bool:
        """Wait until no acquisition is in progress; returns whether that is so. Call this without the lock."""
        with self.lock:
            return self._acquisition_ended.wait_for(lambda: not self._acquiring, timeout)

    # These run on the work queue's thread, or on the one on which an acquisition ends.

    def _acquire(self, read: SomeRead) -> None:
        try:
            self._holder.acquire(
                read.request, read.cancellation, lambda _: self._renewed(read), partial(self._told, read)
            )
        except KvferryError as error:
            self._told(read, error)
        except Exception as error:
            logger.exception("read %s could not be acquired", read.read_id)
            self._told(read, TransferFailed(f"read {read.read_id}: {error!r}"))

    def _renewed(self, read: SomeRead) -> None:
        """Take a renewal of the lease of a read."""
        acquired = read.acquired
        if acquired is not None and acquired.lease.source_lost:
            with self.lock:
                self._lose_source(read)
        self._owner.on_renewed(read)

    def _told(self, read: SomeRead, told: Told) -> None:
        """Take what an acquisition tells."""
        unwanted: Acquired | None = None
        with self.lock:
            if read.stage is ReadStage.WAITING:
                if isinstance(told, Acquired):
                    self._granted(read, told)
                    if told.lease.source_lost:
                        # A renewal has said so, which comes no more, before there was a read to end.
                        self._lose_source(read)
                elif isinstance(told, KvferryError):
                    self._refuse(read, told)
            elif isinstance(told, Acquired):
                unwanted = told
            elif read.stage in (ReadStage.GRANTED, ReadStage.READING) and read.error is None:
                self._follow(read, told)
        if unwanted is not None:
            self._holder.let_go(read.request.home, unwanted)
        if isinstance(told, KvferryError) or told.complete:
            with self.lock:
                self._acquiring -= 1
                self._acquisition_ended.notify_all()

    def _look(self) -> list[float]:
        with self.lock:
            for read in tuple(self._under_way):
                self._judge_time(read)
            return [read.request.deadline for read in self._under_way]

    def _report_all(self) -> None:
        with self.lock:
            ended, self._unreported = self._unreported, []
            for read, _ in ended:
                read._judging_since = now()
        by_home: dict[Control, list[ReadReport]] = {}
        # A call belongs to one trace, those that carry the ends of several reads to none.
        span = ended[0][0].judging if len(ended) == 1 else NO_SPAN
        unreported: list[Callable[[None], None]] = []
        for read, acquired in ended:
            try:
                by_home.setdefault(read.request.home, []).append(self._report(read, acquired))
            except Exception:
                logger.exception("the end of read %s could not be reported", read.read_id)
                unreported.append(partial(self._answered, read))
        for home, reports in by_home.items():
            try:
                with span.calling():
                    self._holder.report(home, reports)
            except Exception:
                logger.exception("the ends of %d reads could not be reported", len(reports))
                unreported += [report.answered for report in reports]
        for answered in unreported:
            answered(None)

    def _report(self, read: SomeRead, acquired: Acquired) -> ReadReport:
        with self.lock:
            error, ends = read.error, dict(read.ends)
        # If the read failed although no share did, for example because its time was up or its lease ended, its good
        # shares and those that were cancelled for it are reported with the error of the read: the source then keeps the
        # blocks for another reader, and its home can say why.
        if any(end.error is error for end in ends.values()):
            error = None
        shares = [_share(rank, end.error, error, end.bytes) for rank, end in sorted(ends.items())]
        return ReadReport(acquired.lease, shares, partial(self._answered, read))

    def _answered(self, read: SomeRead, verdict: pb.Verdict.ValueType | None) -> None:
        read.judging.end(verdict="none" if verdict is None else _verdict_name(verdict))
        with self.lock:
            if read.stage is ReadStage.ENDED:
                self._audit(read, verdict)
            else:
                self._judged(read, verdict)

    # Call these with the lock held.

    def _granted(self, read: SomeRead, acquired: Acquired) -> None:
        read.acquired, read.stage = acquired, ReadStage.GRANTED
        read.complete, read.payload = acquired.complete, acquired.payload
        read.acquiring.end(request_id=acquired.request_id)
        read.stamps.accepted, read.stamps.granted = acquired.accepted_at, now()
        self._owner.on_granted(read)

    def _follow(self, read: SomeRead, told: MoreBlocks | KvferryError) -> None:
        """Take what follows the first blocks of a read that is GRANTED or READING."""
        if isinstance(told, KvferryError):
            self.fail(read, told)
            self._judge_time(read)
            return
        read.complete, read.payload = told.complete, told.payload
        if read.stage is ReadStage.READING:
            self._judge_prompt(read)
        if read.error is None:
            self._owner.on_more(read, told)

    def _lose_source(self, read: SomeRead) -> None:
        """End a read whose source is lost: a network card tells late, or never, that nobody sends any more."""
        if read.stage in (ReadStage.GRANTED, ReadStage.READING) and read.silent:
            engine_id, problem = read.request.reference.engine_id, "its home has lost it, so it cannot be read any more"
            self.fail(read, TransferFailed(f"engine {engine_id!r}: {problem}", peer=engine_id, problem=problem))
            self._judge_time(read)

    def _judge_prompt(self, read: SomeRead) -> None:
        try:
            read.request.prompt.judge(read.until, complete=read.complete)
        except TransferError as error:
            # It may begin the answer to another prompt.
            read.payload = b""
            self.fail(read, error)
            self._judge_time(read)

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

    def _report_later(self, read: SomeRead, acquired: Acquired) -> bool:
        """Report the end of a read on the work queue; returns whether that will be done."""
        self._unreported.append((read, acquired))
        if len(self._unreported) > 1 or self._do(self._report_all):
            return True
        self._unreported.clear()
        return False

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
            self.fail(read, self._owner.overdue(read) if read.complete else timed_out(read.request))
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
        log_end(read, "was not granted")
        self._meter.refused(read)
        read.acquiring.end(error)
        read.span.end(error)
        self._owner.on_refused(read)

    def _all_ended(self, read: SomeRead) -> None:
        if read.acquired is None:
            return
        read.stamps.ended = now()
        read.judging = start_span("kvferry.judge", read.span.traceparent)
        if read.error is None and not read.complete:
            self.fail(read, TransferFailed(f"read {read.read_id} ended before its last block was published"))
        if read.error is None and read.ended_at >= read.request.deadline:
            read.error = self._owner.overdue(read)
        if read.error is None and not read.acquired.lease.live(read.ended_at):
            read.error = TransferExpired(f"read {read.read_id} ended after its lease", read_id=read.read_id)
        reporting = self._report_later(read, read.acquired)
        if read.error is None and self._holder.confirm is Confirm.BEFORE:
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
        read.judging.end(verdict="none")
        judgement = judge(read.ended_at, read.acquired.lease.deadline, verdict)
        if judgement is Judgement.EXPIRED:
            read_id = read.read_id
            read.error = TransferExpired(f"read {read_id}: the home says that its lease ended", read_id=read_id)
        read.confirmed = judgement is Judgement.CONFIRMED
        self._end(read)

    def _audit(self, read: SomeRead, verdict: pb.Verdict.ValueType | None) -> None:
        """Compare the home's verdict with the end of a read that did not wait for it."""
        if verdict == pb.VERDICT_EXPIRED and read.error is None and not (read.confirmed or read.disputed):
            read.disputed = True
            reference = read.request.reference
            logger.error(
                "read %s of publication %d of engine %s ended well by its own deadline, but its home says that its "
                "lease had ended: its bytes may be wrong. Was this machine paused?",
                read.read_id,
                reference.publication,
                reference.engine_id,
            )
            self._meter.disputed()
            self._owner.on_disputed(read)

    def _end(self, read: SomeRead) -> None:
        read.stage = ReadStage.ENDED
        self._under_way.discard(read)
        if read.acquired is not None:
            self._holder.drop(read.acquired)
        set_quiet(read)
        log_end(read, "ended")
        self._meter.ended(read)
        prompt = read.request.prompt.found
        read.span.end(read.error, outcome=kind_of(read.error), bytes=read.bytes, prompt=prompt)
        self._owner.on_ended(read)

    def _settle(self, read: SomeRead) -> None:
        """Report the read as quiet if it has ended and all of its ranks are quiet."""
        if read.stage is ReadStage.ENDED and not read.not_quiet:
            set_quiet(read)
            self._owner.on_quiesced(read)


def _verdict_name(verdict: pb.Verdict.ValueType) -> str:
    known = verdict in pb.Verdict.values()
    return pb.Verdict.Name(verdict).removeprefix("VERDICT_").lower() if known else str(verdict)


def _share(rank: int, own: KvferryError | None, of_read: KvferryError | None, moved: int) -> pb.RankReport:
    """Return the report of a share that ended with an error of its own, or with that of the read."""
    error = of_read or own if isinstance(own, TransferCancelled) else own or of_read
    reason = "" if error is None else error.reason
    return pb.RankReport(rank=rank, outcome=_outcome(error), bytes=moved, reason=reason_number(reason))


def _outcome(error: KvferryError | None) -> pb.RankOutcome.ValueType:
    """Return the outcome to report for a share that ended with this error."""
    if error is None:
        return pb.RANK_OUTCOME_DONE
    if isinstance(error, TransferExpired):
        return pb.RANK_OUTCOME_EXPIRED
    return pb.RANK_OUTCOME_CANCELLED if isinstance(error, TransferCancelled) else pb.RANK_OUTCOME_FAILED
