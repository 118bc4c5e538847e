"""Reads whose leases this process holds, from the acquisition to the verdict (R1; PROTOCOL, Leases and Endings).

    acquire ──► WAITING ──► GRANTED ──(begin)──► READING ──(all ranks have ended)──► JUDGING ──► ENDED
                   └───────────┴──► REFUSED

One coroutine takes a read through these stages: `LeasedReads._lead`. A progressive read is GRANTED with the first
blocks; more come while the read is GRANTED and READING.

When a rank's share fails, the lease ends, or the read is cancelled, the other ranks are stopped; the read ends when all
ranks have reported. The reads of `Cache.read` have one rank, those of `SchedulerPort` all ranks of the engine.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Generic, TypeVar

from kvferry._control.acquire_request import Acquired
from kvferry._control.acquisition import HOME_PATIENCE, Acquisition
from kvferry._control.connection import NotificationAnswer
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.lease_holder import VERDICT_TIMEOUT, LeaseHolder
from kvferry._logs import Log
from kvferry._loop import Loop
from kvferry._reads.leased_read import LeasedRead, ReadStage, ShareEnd
from kvferry._reads.meters import ReadMeter, outcome_of
from kvferry._tracing import start_span
from kvferry._wire.publication import Told
from kvferry.errors import (
    BadReference,
    Closed,
    KvferryError,
    NotFound,
    TransferCancelled,
    TransferError,
    TransferFailed,
    TransferStuck,
)

logger = Log(__name__)

RANKS_GRACE = 10.0
"""Seconds after a read's deadline during which its ranks, which end their own shares, can still report."""

ANSWER_GRACE = 4.0
"""Seconds after `VERDICT_TIMEOUT`, which ends the call, until the answer counts as missing: with many reads, gRPC's
thread delivers answers late. Only the home's verdict shows that this machine was paused."""

LEASE_AFTER = 0.5
"""Seconds after which a read with the blocks of a hint gets a lease: a short read does not need one."""

BEGUN = (ReadStage.GRANTED, ReadStage.READING)
"""Stages in which a read holds a lease, and its bytes move or will move."""

SomeRead = TypeVar("SomeRead", bound=LeasedRead)


class LeasedReads(Generic[SomeRead]):
    """The reads of one cache, or of one engine's scheduler: each is a subclass, with methods for changes of a read's
    stage. The coroutines run on the client's event loop. `cancel_lead` may be called from any thread, and so may the
    other methods, with `lock` held, which all reads of the client share. Methods of subclasses are called with the lock
    held, on any thread, and do not block."""

    def __init__(self, loop: Loop, holder: LeaseHolder, meter: ReadMeter) -> None:
        self.lock = meter.lock
        self._loop = loop
        self._holder = holder
        self._meter = meter
        self._leads: set[asyncio.Task[None]] = set()

    # Methods of subclasses.

    def on_granted(self, read: SomeRead, acquired: Acquired) -> None:
        """Called when a read is GRANTED."""

    def on_more(self, read: SomeRead, more: GrantedPart) -> None:
        """Called when the source of a read that is GRANTED or READING has published more blocks."""

    def on_extended(self, read: SomeRead) -> None:
        """Called when the lease of a read that is GRANTED or READING has a new deadline."""

    def on_refused(self, read: SomeRead) -> None:
        """Called when a read is REFUSED, before it began; `LeasedRead.error` has the reason."""

    def on_stop(self, read: SomeRead) -> None:
        """Called when a read has failed and some of its ranks have not ended: stop these."""

    def on_ended(self, read: SomeRead) -> None:
        """Called when a read is ENDED. If `LeasedRead.not_quiet` is not empty, `on_quiesced` follows."""

    def on_quiesced(self, read: SomeRead) -> None:
        """Called when a read that had ended without being quiet is quiet."""

    # Called with the lock held.

    def start(self, read: SomeRead) -> None:
        """Start to acquire the lease of a read. Raises `Closed`, or `LimitReached` if the system refused the loop's
        thread."""
        if not self._loop.call(partial(self._begin, read)):
            raise Closed("the client is closed")
        request = read.request
        read.span = start_span(
            "kvferry.read",
            request.span.traceparent,
            source=request.reference.engine_id,
            publication=request.reference.publication,
        )
        request.span = start_span("kvferry.acquire", read.span.traceparent)
        self._meter.begun(read)
        try:
            hinted = self._holder.hinted(request)
        except KvferryError as error:
            self._refuse(read, error)
            return
        if hinted is not None:
            self._granted(read, hinted)

    def begin(self, read: SomeRead) -> None:
        """Mark a granted read as READING: its ranks are about to start."""
        read.stage, read.stamps.begun = ReadStage.READING, self._loop.now()
        read.news.set()

    def takes(self, read: SomeRead, until: int) -> KvferryError | None:
        """Compare the prompt of a granted read with the marks up to `until`, the end of its tokens. Returns why the
        read is REFUSED; None: it may begin."""
        read.until = until
        self._compare_prompt(read)
        if read.error is not None:
            self._refuse(read, read.error)
        return read.error

    def withdraw(self, read: SomeRead) -> None:
        """End a read that no rank has started, and give its lease back."""
        read.error = TransferCancelled(f"read {read.read_id} was withdrawn", read_id=read.read_id)
        read.stage = ReadStage.ENDED
        self._meter.ended(read)
        read.request.span.end()
        read.span.end(outcome="cancelled")
        self.cancel_lead(read)

    def fail(self, read: SomeRead, error: KvferryError) -> None:
        """Mark a read as failed, and stop its ranks that have not ended. The first error is kept."""
        if read.error is None:
            read.error = error
            if read.stage is ReadStage.READING and read.silent:
                self.on_stop(read)
            read.news.set()

    def cancel_validation(self, read: SomeRead, error: KvferryError) -> None:
        """End a cancelled read from a hint whose ranks have ended, and which may wait for its home for long. One with a
        lease ends soon, by its own deadline."""
        if read.hinted and read.stage in (ReadStage.READING, ReadStage.JUDGING) and not read.silent:
            self.fail(read, error)

    def refuse(self, read: SomeRead, error: KvferryError) -> None:
        """End a read that waits for its lease."""
        if read.stage is ReadStage.WAITING:
            self._refuse(read, error)
            self.cancel_lead(read)

    def share_ended(self, read: SomeRead, rank: int, end: ShareEnd, at: float) -> None:
        """Record the end of a rank's share, at a time on the loop's clock no earlier than the arrival of the last byte.
        Of later reports of the same rank only `quiet` counts."""
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
        else:
            if end.error is not None:
                self.fail(read, end.error)
            read.news.set()

    def share_quiet(self, read: SomeRead, rank: int) -> None:
        """Record that a rank's share, which had ended without being quiet, is quiet."""
        read.not_quiet.discard(rank)
        self._settle(read)

    # Called without the lock.

    def cancel_lead(self, read: SomeRead) -> None:
        """End the coroutine of a read, which gives the lease back."""
        self._loop.call(lambda: read.lead is not None and read.lead.cancel())

    async def wait_ended(self, timeout: float) -> None:
        """Wait until the coroutines of all reads have ended, and with them their leases."""
        if self._leads:
            await asyncio.wait(self._leads, timeout=timeout)

    # The rest runs on the loop.

    def _begin(self, read: SomeRead) -> None:
        # The lock waits for the end of `start`, on another thread.
        with self.lock:
            wanted = read.stage is ReadStage.WAITING or read.stage in BEGUN
        if wanted:
            read.lead = self._loop.spawn(self._lead(read), f"read {read.read_id}")
            self._leads.add(read.lead)
            read.lead.add_done_callback(partial(self._lead_ended, read))

    async def _lead(self, read: SomeRead) -> None:
        """Take a read from its reference, or from the blocks of its hint, to its verdict."""
        read_all = self._read_leased if read.acquired is None else self._read_hinted
        reported = False
        try:
            if await read_all(read):
                verdict_by = self._report(read)
                reported = True
                await self._conclude(read, verdict_by)
        finally:
            self._end_lease(read, reported=reported)

    async def _read_leased(self, read: SomeRead) -> bool:
        """Acquire the lease of a read; then as `_all_ended`."""
        acquisition = self._holder.acquire(read.request, partial(self._lease_changed, read))
        overdue = self._loop.at(read.request.deadline + RANKS_GRACE, partial(self._never_heard, read))
        try:
            acquired = await acquisition.first()
        except KvferryError as error:
            with self.lock:
                self.refuse(read, error.with_traceback(None))
            return False
        finally:
            overdue.cancel()
        with self.lock:
            self._granted(read, acquired)
        more: asyncio.Task[None] | None = None
        if not acquired.part.complete:
            more = self._loop.spawn(self._follow(read, acquisition), f"the steps of read {read.read_id}")
        try:
            ended = await self._all_ended(read)
        finally:
            if more is not None:
                more.cancel()
        if ended and not self._holder.reports_first(read.request, acquired.lease):
            # The lease may have ended with the earlier read.
            problem = "its rank has reported on the same lease before, for another read of this name"
            with self.lock:
                self.fail(read, read.uncovered(f"{problem}: give each its own read_id"))
        return ended

    async def _read_hinted(self, read: SomeRead) -> bool:
        """As `_all_ended`; meanwhile a read that takes long gets a lease."""
        leasing = list[asyncio.Task[None]]()

        def lease() -> None:
            leasing.append(self._loop.spawn(self._lease(read), f"the lease of read {read.read_id}"))

        timer = self._loop.at(self._loop.now() + LEASE_AFTER, lease)
        try:
            return await self._all_ended(read)
        finally:
            timer.cancel()
            for task in leasing:
                task.cancel()

    async def _lease(self, read: SomeRead) -> None:
        """Lease a publication that is read from a hint, because the read takes long or has not begun: its source must
        not release the blocks meanwhile. From then on, the read is like any other with a lease: what was copied before
        counts as well, since the publication had not been released when the lease was granted."""
        late = self._loop.at(self._loop.now() + HOME_PATIENCE, partial(self._not_leased, read, None))
        try:
            leased = await self._holder.acquire(read.request, partial(self._lease_changed, read)).first()
        except KvferryError as error:
            self._not_leased(read, error.with_traceback(None))
            return
        finally:
            late.cancel()
        with self.lock:
            begun = read.stage in BEGUN and read.error is None
            if begun and read.acquired is not None and read.acquired.promises_as(leased):
                read.acquired, read.lease = leased, leased.lease
                # The marks are the home's now, and the lease has an end.
                if read.stage is ReadStage.READING:
                    self._compare_prompt(read)
                read.news.set()
                return
            if begun:
                self.fail(read, BadReference("its hint is not that of the publication"))
        self._holder.let_go(read.request.home, leased.lease)

    def _not_leased(self, read: SomeRead, error: KvferryError | None) -> None:
        """End a read from a hint that needs a lease and gets none. `error` is None if its home was not heard."""
        with self.lock:
            if read.stage not in BEGUN:
                return
            if error is None:
                error = read.uncovered("its home was not heard")
            elif read.stage is ReadStage.READING and (error.retryable or isinstance(error, NotFound)):
                # As if the home had said so at the read's end.
                error = read.uncovered(error.message)
            self.fail(read, error)

    def _end_lease(self, read: SomeRead, *, reported: bool) -> None:
        acquired = read.acquired
        if acquired is None or acquired.hinted:
            return
        if reported and not read.silent:
            self._holder.drop(acquired.lease)
        else:
            # The home would wait for the reports of the others until the lease expires.
            self._holder.let_go(read.request.home, acquired.lease)
        if read.request.asked is not None and (read.error is not None or not reported):
            # Nobody else reads the answer to this engine's question.
            self._holder.withdraw(read.request)

    def _never_heard(self, read: SomeRead) -> None:
        """Refuse a read whose acquisition has not ended by its deadline: gRPC may get no thread to report the end."""
        read_id = read.read_id
        with self.lock:
            self.refuse(read, TransferStuck(f"read {read_id}: its home was not heard in time", read_id=read_id))

    def _lead_ended(self, read: SomeRead, lead: asyncio.Task[None]) -> None:
        """End a read whose coroutine has ended early: the client or its port was closed, or there is a bug."""
        self._leads.discard(lead)
        failure, read_id = None if lead.cancelled() else lead.exception(), read.read_id
        error: KvferryError = TransferFailed(f"read {read_id}: {failure!r}")
        if failure is None:
            error = TransferCancelled(f"read {read_id}: the client is closed", read_id=read_id)
        with self.lock:
            if read.stage in (ReadStage.WAITING, ReadStage.GRANTED):
                self._refuse(read, error)
            elif read.stage is ReadStage.READING:
                self.fail(read, error)
                read.not_quiet.update(read.silent)
                self._end(read)
            elif read.stage is ReadStage.JUDGING:
                self._decide(read)

    async def _follow(self, read: SomeRead, acquisition: Acquisition) -> None:
        """Take the blocks that the source publishes after the first ones."""
        while not read.complete:
            try:
                found = await acquisition.more()
            except KvferryError as error:
                with self.lock:
                    if read.stage in BEGUN:
                        self.fail(read, error.with_traceback(None))
                return
            with self.lock:
                if read.stage not in BEGUN or read.error is not None:
                    return
                read.complete, read.told = found.complete, found.told
                if read.stage is ReadStage.READING:
                    self._compare_prompt(read)
                if read.error is None:
                    self.on_more(read, found)

    async def _all_ended(self, read: SomeRead) -> bool:
        """Wait until all ranks have ended, or are given up. Returns False for a read that was withdrawn or refused,
        which has no end to report."""
        deadline = read.request.deadline
        while True:
            with self.lock:
                time = self._loop.now()
                if read.stage in BEGUN and read.error is None and (error := read.failure_at(time)) is not None:
                    self.fail(read, error)
                if read.stage is ReadStage.GRANTED and read.error is not None:
                    self._refuse(read, read.error)
                if read.stage not in BEGUN:
                    return False
                if read.stage is ReadStage.READING and not read.silent:
                    return True
                if read.stage is ReadStage.READING and time >= deadline + RANKS_GRACE:
                    read.not_quiet.update(read.silent)
                    read.ended_at = time
                    return True
                wake_at = deadline + RANKS_GRACE if read.error is not None else min(deadline, read.lease.deadline)
            await read.news.wait(wake_at)

    def _report(self, read: SomeRead) -> float:
        """Judge a read whose ranks have ended by the reader's own clock, and report its end to its home. Returns until
        when to wait for the home's verdict."""
        with self.lock:
            read.judge(self._loop.now())
        read.judging = start_span("kvferry.judge", read.span.traceparent)
        answered = partial(self._answered, read)
        try:
            with self.lock:
                reports = read.reports()
            self._holder.report(read.request, read.lease, reports, answered, read.judging)
        except Exception:
            logger.exception("the end of read %s could not be reported", read.read_id)
            answered(None)
        # Counted from now: the machine may have been paused since the end of the read, and only the home can know.
        verdict_by = self._loop.now() + VERDICT_TIMEOUT
        if read.hinted:
            verdict_by = max(verdict_by, self._holder.validated_by(read.request))
        return verdict_by + ANSWER_GRACE

    def _answered(self, read: SomeRead, answer: NotificationAnswer | None) -> None:
        with self.lock:
            read.take_answer(answer)

    async def _conclude(self, read: SomeRead, verdict_by: float) -> None:
        """End a read that was reported, mostly when the home has answered."""
        with self.lock:
            if read.error is not None:
                self._end(read)
                return
            read.stage = ReadStage.JUDGING
        while not read.answered and read.error is None and self._loop.now() < verdict_by:
            await read.news.wait(verdict_by)
        with self.lock:
            self._decide(read)

    def _lease_changed(self, read: SomeRead) -> None:
        with self.lock:
            if read.stage in BEGUN:
                self.on_extended(read)
        read.news.set()

    # Call these with the lock held.

    def _granted(self, read: SomeRead, acquired: Acquired) -> None:
        # Also of a read that was refused meanwhile, so that it gives the lease back.
        read.acquired, read.lease = acquired, acquired.lease
        if read.stage is not ReadStage.WAITING:
            return
        read.stage = ReadStage.GRANTED
        read.complete, read.told = acquired.part.complete, acquired.part.told
        read.request.span.end(request_id=acquired.request_id)
        read.stamps.accepted, read.stamps.granted = acquired.accepted_at, self._loop.now()
        self.on_granted(read, acquired)

    def _compare_prompt(self, read: SomeRead) -> None:
        try:
            read.request.prompt.judge(read.until, complete=read.complete)
        except TransferError as error:
            # The payload may begin the answer to another prompt.
            read.told = Told()
            self.fail(read, error)

    def _refuse(self, read: SomeRead, error: KvferryError) -> None:
        read.error, read.stage = error, ReadStage.REFUSED
        read.log_end("was not granted")
        self._meter.ended(read)
        read.request.span.end(error)
        read.span.end(error)
        read.news.set()
        self.on_refused(read)

    def _decide(self, read: SomeRead) -> None:
        read.decide(self._loop.now())
        self._end(read)

    def _end(self, read: SomeRead) -> None:
        read.stage = ReadStage.ENDED
        if read.error is not None and read.hinted:
            # A router may have written it.
            read.told = Told()
        read.set_quiet()
        read.log_end("ended")
        self._meter.ended(read)
        prompt = read.request.prompt.found
        read.span.end(read.error, outcome=outcome_of(read), bytes=read.bytes, prompt=prompt)
        self.on_ended(read)

    def _settle(self, read: SomeRead) -> None:
        """Report the read as quiet if it has ended and all of its ranks are quiet."""
        if read.stage is ReadStage.ENDED and not read.not_quiet:
            read.set_quiet()
            self.on_quiesced(read)
