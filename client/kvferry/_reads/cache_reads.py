"""The reads of `Cache.read`: the rank's own process acquires and holds their leases."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from kvferry._control.acquisition import Acquired, AcquireRequest, MoreBlocks
from kvferry._control.lease_holder import LeaseHolder
from kvferry._loop import Loop
from kvferry._reads.callbacks import Callbacks
from kvferry._reads.leased_read import LeasedRead, ReadStage, ShareEnd
from kvferry._reads.leased_reads import LeasedReads
from kvferry._reads.meters import ReadMeter
from kvferry._reads.rank_read import RankOrder, RankRead, Wanted
from kvferry._reads.rank_reads import RankReads
from kvferry._reads.read import ReadResult, ReadTask
from kvferry._reads.source_engines import SourceEngines
from kvferry.errors import Closed, EngineUnknown, KvferryError, LimitReached, PeerRestarted, TransferCancelled
from kvferry.geometry.blocks import taken_end


class OwnRead(LeasedRead):
    """A read of a cache, and the rank's share of it once it is granted."""

    def __init__(self, loop: Loop, request: AcquireRequest, rank: int, task: ReadTask, wanted: Wanted) -> None:
        super().__init__(loop, request, frozenset((rank,)))
        self.task = task
        self.wanted = wanted


class CacheReads(LeasedReads[OwnRead]):
    """The reads of one destination rank. At most `max_reads` run at once; more are refused.

    Threading: `begin_read` and `close` may be called from any thread; only `close` waits.
    """

    def __init__(
        self,
        loop: Loop,
        rank: int,
        holder: LeaseHolder,
        sources: SourceEngines,
        shares: RankReads,
        max_reads: int,
        meter: ReadMeter,
    ) -> None:
        super().__init__(loop, holder, meter)
        self._rank = rank
        self._sources = sources
        self._shares = shares
        self._max_reads = max_reads
        self._callbacks = Callbacks(f"kvferry-callbacks-{rank}")
        self._running: set[OwnRead] = set()
        """Reads that have not ended."""
        self._closed = False

    def begin_read(self, request: AcquireRequest, wanted: Wanted) -> ReadTask:
        """Start a read. Returns at once.

        Raises:
            LimitReached: `max_reads` reads are running.
            Closed: the cache is closed.
        """
        task = ReadTask(request.read_id, request.text, self._callbacks)
        read = OwnRead(self._loop, request, self._rank, task, wanted)
        task.on_cancel = partial(self._loop.call, partial(self._cancelled, read))
        with self.lock:
            if self._closed:
                raise Closed("the cache is closed")
            if len(self._running) >= self._max_reads:
                limit = self._max_reads
                raise LimitReached(f"{limit} reads are running", retry_after=0.1, limit="max_reads", value=limit)
            self._running.add(read)
            try:
                self.start(read)
            except KvferryError:
                self._running.discard(read)
                raise
        return task

    def close(self, until: float) -> None:
        """Cancel all reads, and wait until they have ended and are quiet, at most until this time on the loop's clock.
        Idempotent."""
        with self.lock:
            self._closed = True
            tasks = tuple(read.task for read in self._running)
        for task in tasks:
            task.cancel()
        self._shares.close(until)
        with suppress(Closed):
            self._loop.run(self.wait_ended(max(0.001, until - self._loop.now())))
        for task in tasks:
            if task.share is not None:
                task.share.wait_quiet(max(0.0, until - self._loop.now()))
        self._callbacks.close(max(0.0, until - self._loop.now()))

    def on_granted(self, read: OwnRead) -> None:
        acquired, wanted = read.acquired, read.wanted
        if acquired is None or self.takes(read, taken_end(acquired.blocks, wanted.blocks, wanted.tokens)) is not None:
            return
        self.begin(read)
        share = RankRead(self._loop, _order(read, acquired))
        # The task must have the share before the share can begin: see `ReadTask.cancel`.
        read.task.share = share
        if read.task.cancelled:
            share.stop()
        try:
            self._shares.start(share, partial(self._share_ended, read), partial(self._share_quiet, read))
        except KvferryError as error:
            share.refuse(error)
            self.share_ended(read, self._rank, ShareEnd(error, quiet=True, bytes=0), share.ended_at)

    def on_more(self, read: OwnRead, more: MoreBlocks) -> None:
        if read.task.share is not None:
            read.task.share.add(more.blocks, more.unfinished, last=more.complete)

    def on_extended(self, read: OwnRead) -> None:
        if read.task.share is not None:
            read.task.share.extend()

    def on_refused(self, read: OwnRead) -> None:
        if isinstance(read.error, (PeerRestarted, EngineUnknown)):
            home, reference = read.request.home, read.request.reference
            self._loop.call(partial(self._sources.gone, home.address, reference.engine_id, reference.incarnation))
        self._forget(read, None)

    def on_stop(self, read: OwnRead) -> None:
        if read.task.share is not None:
            self._shares.cancel(read.task.share)

    def on_ended(self, read: OwnRead) -> None:
        self._forget(read, _result(read))

    def on_disputed(self, read: OwnRead) -> None:
        read.task.disputed = True

    def _cancelled(self, read: OwnRead) -> None:
        cancelled = TransferCancelled(f"read {read.read_id} was cancelled", read_id=read.read_id)
        with self.lock:
            if read.stage is ReadStage.WAITING:
                self.refuse(read, cancelled)
            elif read.task.share is not None:
                self._shares.cancel(read.task.share)

    def _share_ended(self, read: OwnRead, share: RankRead) -> None:
        end = ShareEnd(share.error, share.quiet, share.bytes, share.work)
        with self.lock:
            self.share_ended(read, self._rank, end, share.ended_at)

    def _share_quiet(self, read: OwnRead, _: RankRead) -> None:
        with self.lock:
            self.share_quiet(read, self._rank)

    def _forget(self, read: OwnRead, result: ReadResult | None) -> None:
        if read in self._running:
            self._running.remove(read)
            read.task.end(result, read.error)


def _order(read: OwnRead, acquired: Acquired) -> RankOrder:
    request = read.request
    return RankOrder(
        read_id=request.read_id,
        request_id=acquired.request_id,
        home=request.home,
        engine_id=acquired.source.engine_id,
        incarnation=acquired.source.incarnation,
        publication=request.reference.publication,
        reference=request.text,
        lease=acquired.lease,
        granted=acquired.blocks,
        complete=acquired.complete,
        unfinished=acquired.unfinished,
        wanted=read.wanted,
        deadline=request.deadline,
        traceparent=read.span.traceparent,
    )


def _result(read: OwnRead) -> ReadResult | None:
    share, acquired = read.task.share, read.acquired
    if read.error is not None or share is None or share.planned is None or acquired is None:
        return None
    return ReadResult(
        request_id=acquired.request_id,
        payload=read.payload,
        bytes=read.bytes,
        staged_bytes=share.planned.staged_bytes,
        descriptors=share.planned.descriptors,
        pieces=share.planned.pieces,
        source_ranks=share.planned.source_ranks,
        confirmed=read.confirmed,
        verification=share.verification,
        prompt=read.request.prompt.found,
    )
