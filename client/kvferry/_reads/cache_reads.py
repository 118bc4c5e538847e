"""The reads of `Cache.read`: the rank's own process acquires and holds their leases."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from kvferry._clock import now
from kvferry._control.acquisition import Acquired, AcquireRequest, MoreBlocks
from kvferry._control.lease_holder import LeaseHolder
from kvferry._prompt import Prompt
from kvferry._reads.callbacks import Callbacks
from kvferry._reads.leased_read import LeasedRead, ShareEnd
from kvferry._reads.leased_reads import LeasedReads
from kvferry._reads.meters import ReadMeter
from kvferry._reads.rank_read import RankOrder, RankRead, Wanted
from kvferry._reads.rank_reads import RankReads
from kvferry._reads.read import ReadResult, ReadTask
from kvferry._reads.source_engines import SourceEngines
from kvferry._work_queue import WorkQueue
from kvferry.errors import (
    Closed,
    EngineUnknown,
    KvferryError,
    LimitReached,
    PeerRestarted,
    TransferStuck,
)
from kvferry.geometry.blocks import taken_end


class _OwnRead(LeasedRead):
    """A read of a cache, and the rank's share of it once it is granted."""

    def __init__(self, request: AcquireRequest, rank: int, task: ReadTask, wanted: Wanted) -> None:
        super().__init__(request, frozenset((rank,)), task.cancellation)
        self.task = task
        self.wanted = wanted
        self.share: RankRead | None = None


class CacheReads:
    """The reads of one destination rank.

    Threading: every method may be called from any thread; only `close` waits.

    Args:
        rank: index of the rank.
        holder: holds the leases.
        sources: the source engines that it reads from.
        work: the queue on whose thread messages to homes are sent, and shares are changed.
        max_reads: how many reads may run at once; more are refused.
        shares: makes the `RankReads`, given its callbacks for shares that have ended and for shares that became quiet.
        meter: measures the reads.
    """

    def __init__(
        self,
        rank: int,
        holder: LeaseHolder,
        sources: SourceEngines,
        work: WorkQueue,
        max_reads: int,
        shares: Callable[[Callable[[RankRead], None], Callable[[RankRead], None]], RankReads],
        meter: ReadMeter,
    ) -> None:
        self._rank = rank
        self._holder = holder
        self._sources = sources
        self._work = work
        self._max_reads = max_reads
        self._shares = shares(self._share_ended, self._share_quiet)
        self._reads: LeasedReads[_OwnRead] = LeasedReads(holder, work, self, meter)
        self._callbacks = Callbacks(f"kvferry-callbacks-{rank}")
        self._changed = threading.Condition(self._reads.lock)
        self._running: set[_OwnRead] = set()
        """Reads that have not ended."""
        self._by_share: dict[RankRead, _OwnRead] = {}
        """Reads whose shares may still write to their blocks, by share."""
        self._closed = False

    def request(
        self,
        reference: str,
        read_id: str,
        *,
        parties: int,
        expected_reads: int,
        timeout: float,
        traceparent: str,
        progressive: bool,
        prompt: Prompt,
    ) -> AcquireRequest:
        """What `start` takes. Makes no RPC. Errors as `LeaseHolder.request`."""
        return self._holder.request(
            reference,
            read_id,
            parties=parties,
            expected_reads=expected_reads,
            timeout=timeout,
            traceparent=traceparent,
            progressive=progressive,
            prompt=prompt,
            request_id=read_id,
        )

    def start(self, request: AcquireRequest, wanted: Wanted) -> ReadTask:
        """Start a read. Returns at once.

        Raises:
            LimitReached: `max_reads` reads are running.
            Closed: the cache is closed.
        """
        task = ReadTask(request.read_id, request.text, self._callbacks)
        read = _OwnRead(request, self._rank, task, wanted)
        with self._reads.lock:
            if self._closed:
                raise Closed("the cache is closed")
            if len(self._running) >= self._max_reads:
                limit = self._max_reads
                raise LimitReached(f"{limit} reads are running", retry_after=0.1, limit="max_reads", value=limit)
            self._running.add(read)
            self._reads.acquire(read)
        return task

    def close(self, timeout: float) -> None:
        """Cancel all reads, and wait at most `timeout` seconds until they have ended and are quiet. Idempotent."""
        until = now() + timeout
        with self._reads.lock:
            self._closed = True
            tasks = tuple(read.task for read in self._running)
        for task in tasks:
            task.cancel()
        self._shares.close(timeout)
        self._reads.wait_acquired(max(0.0, until - now()))
        with self._changed:
            self._changed.wait_for(lambda: not self._running, max(0.0, until - now()))
        for task in tasks:
            if task.share is not None:
                task.share.wait_quiet(max(0.0, until - now()))
        self._callbacks.close(max(0.0, until - now()))

    # `LeasedReads` calls these with the lock held.

    def on_granted(self, read: _OwnRead) -> None:
        """See `leased_reads.Owner`."""
        if read.acquired is None:
            return
        wanted = read.wanted
        if self._reads.takes(read, taken_end(read.acquired.blocks, wanted.blocks, wanted.tokens)) is not None:
            return
        self._reads.begin(read)
        share = RankRead(_order(read, read.acquired), read.cancellation)
        read.share = share
        self._by_share[share] = read
        # The task must have the share before it can begin: see `ReadTask.cancel`.
        read.task.granted(share, partial(self._shares.cancel, share))
        try:
            self._shares.start(share)
        except KvferryError as error:
            del self._by_share[share]
            share.refuse(error)
            self._reads.share_ended(read, self._rank, ShareEnd(error, quiet=True, bytes=0), share.ended_at)

    def on_more(self, read: _OwnRead, more: MoreBlocks) -> None:
        """See `leased_reads.Owner`."""
        if read.share is not None:
            self._shares.add(read.share, more.blocks, more.unfinished, last=more.complete)

    def on_renewed(self, read: _OwnRead) -> None:
        """See `leased_reads.Owner`."""
        share = read.share
        if share is not None:
            share.extend()

    def on_refused(self, read: _OwnRead) -> None:
        """See `leased_reads.Owner`."""
        if isinstance(read.error, (PeerRestarted, EngineUnknown)):
            home, reference = read.request.home, read.request.reference
            self._work.do(partial(self._sources.gone, home.address, reference.engine_id, reference.incarnation))
        self._forget(read, None, read.error)

    def on_stop(self, read: _OwnRead) -> None:
        """See `leased_reads.Owner`."""
        if read.share is not None:
            self._shares.cancel(read.share)

    def overdue(self, read: _OwnRead) -> TransferStuck:
        """See `leased_reads.Owner`."""
        return TransferStuck(f"read {read.read_id} did not end in time", read_id=read.read_id)

    def on_ended(self, read: _OwnRead) -> None:
        """See `leased_reads.Owner`."""
        self._forget(read, _result(read), read.error)

    def on_quiesced(self, read: _OwnRead) -> None:
        """See `leased_reads.Owner`."""

    def on_disputed(self, read: _OwnRead) -> None:
        """See `leased_reads.Owner`."""
        read.task.disputed = True

    # `RankReads` calls these.

    def _share_ended(self, share: RankRead) -> None:
        with self._reads.lock:
            read = self._by_share[share]
            if share.quiet:
                del self._by_share[share]
            end = ShareEnd(share.error, share.quiet, share.bytes, share.work)
            self._reads.share_ended(read, self._rank, end, share.ended_at)

    def _share_quiet(self, share: RankRead) -> None:
        with self._reads.lock:
            read = self._by_share.pop(share, None)
            if read is not None:
                self._reads.share_quiet(read, self._rank)

    def _forget(self, read: _OwnRead, result: ReadResult | None, error: KvferryError | None) -> None:
        if read in self._running:
            self._running.remove(read)
            self._changed.notify_all()
            read.task.end(result, error)


def _order(read: _OwnRead, acquired: Acquired) -> RankOrder:
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


def _result(read: _OwnRead) -> ReadResult | None:
    share, acquired = read.share, read.acquired
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
