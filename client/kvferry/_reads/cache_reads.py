"""The reads of `Cache.read`: the rank's own process acquires and holds their leases."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from kvferry._control.acquisition import Acquired, AcquireRequest
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.lease_holder import LeaseHolder
from kvferry._loop import Loop
from kvferry._reads.leased_read import ShareEnd
from kvferry._reads.leased_reads import LeasedReads
from kvferry._reads.meters import ReadMeter
from kvferry._reads.rank_read import RankOrder, RankRead, Wanted
from kvferry._reads.rank_reads import RankReads
from kvferry._reads.read import OwnRead, ReadResult
from kvferry._reads.source_engines import SourceEngines
from kvferry._threads import settle
from kvferry._wire.publication import told_fields
from kvferry.errors import (
    Closed,
    EngineUnknown,
    KvferryError,
    PeerRestarted,
    TransferCancelled,
    TransferFailed,
)
from kvferry.geometry.blocks import taken_end


class CacheReads(LeasedReads[OwnRead]):
    """The reads of one destination rank.

    Threading: `begin_read`, `cancel` and `close` may be called from any thread; only `close` waits.
    """

    def __init__(
        self,
        loop: Loop,
        rank: int,
        holder: LeaseHolder,
        sources: SourceEngines,
        shares: RankReads,
        meter: ReadMeter,
    ) -> None:
        super().__init__(loop, holder, meter)
        self._rank = rank
        self._sources = sources
        self._shares = shares
        self._running: set[OwnRead] = set()
        """Reads that have not ended."""
        self._closed = False

    def begin_read(self, request: AcquireRequest, wanted: Wanted) -> OwnRead:
        """Start a read. Returns at once.

        Raises:
            Closed: the cache is closed.
        """
        read = OwnRead(self._loop, request, self._rank, wanted, self.cancel)
        with self.lock:
            if self._closed:
                raise Closed("the cache is closed")
            self._running.add(read)
            try:
                self.start(read)
            except KvferryError:
                self._running.discard(read)
                raise
        return read

    def cancel(self, read: OwnRead) -> bool:
        """See `Read.cancel`."""
        if read.over:
            return read.quiet
        read.cancelled = True
        # Looked at after `cancelled` is set: a share that is made later finds the cancellation, and does not begin.
        quiet = read.share is None or self._shares.cancel(read.share)
        self._loop.call(partial(self._end_cancelled, read))
        return quiet

    def close(self, until: float) -> None:
        """Cancel all reads, and wait until they have ended and are quiet, at most until this time on the loop's clock.
        Idempotent."""
        with self.lock:
            self._closed = True
            reads = tuple(self._running)
        for read in reads:
            self.cancel(read)
        self._shares.close(until)
        with suppress(Closed):
            self._loop.run(self.wait_ended(max(0.001, until - self._loop.now())))
        for read in reads:
            if read.share is not None:
                read.share.wait_quiet(max(0.0, until - self._loop.now()))

    def on_granted(self, read: OwnRead, acquired: Acquired) -> None:
        wanted = read.wanted
        if self.takes(read, taken_end(acquired.part.blocks, wanted.blocks, wanted.tokens)) is not None:
            return
        self.begin(read)
        share = RankRead(self._loop, _order(read, acquired))
        # Before the share can begin: see `cancel`.
        read.share = share
        if read.cancelled:
            share.stop()
        try:
            self._shares.start(share, partial(self._share_ended, read), partial(self._share_quiet, read))
        except KvferryError as error:
            share.refuse(error)
            self.share_ended(read, self._rank, ShareEnd(error, quiet=True, bytes=0), share.ended_at)

    def on_more(self, read: OwnRead, more: GrantedPart) -> None:
        if read.share is not None:
            read.share.add(more)

    def on_extended(self, read: OwnRead) -> None:
        if read.share is not None:
            read.share.extend()

    def on_refused(self, read: OwnRead) -> None:
        self.on_ended(read)

    def on_stop(self, read: OwnRead) -> None:
        if read.share is not None:
            self._shares.cancel(read.share)

    def on_ended(self, read: OwnRead) -> None:
        if isinstance(read.error, (PeerRestarted, EngineUnknown)):
            home, reference = read.request.home, read.request.reference
            source = (home.address, reference.engine_id, reference.incarnation)
            self._loop.call(partial(self._sources.gone, source))
        self._running.discard(read)
        settle(read.ended, read.error or _result(read))

    def _end_cancelled(self, read: OwnRead) -> None:
        error = TransferCancelled(f"read {read.read_id} was cancelled", read_id=read.read_id)
        with self.lock:
            self.refuse(read, error)
            self.cancel_validation(read, error)

    def _share_ended(self, read: OwnRead, share: RankRead) -> None:
        end = ShareEnd(share.error, share.quiet, share.bytes, share.work)
        with self.lock:
            self.share_ended(read, self._rank, end, share.ended_at)

    def _share_quiet(self, read: OwnRead, _: RankRead) -> None:
        with self.lock:
            self.share_quiet(read, self._rank)


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
        granted=acquired.part,
        wanted=read.wanted,
        deadline=request.deadline,
        traceparent=read.span.traceparent,
    )


def _result(read: OwnRead) -> ReadResult | TransferFailed:
    share, acquired = read.share, read.acquired
    if share is None or acquired is None:
        return TransferFailed(f"read {read.read_id} has no result")
    work = share.work
    return ReadResult(
        request_id=acquired.request_id,
        **told_fields(read.told),
        bytes=read.bytes,
        staged_bytes=work.staged_bytes,
        descriptors=work.descriptors,
        pieces=work.pieces,
        source_ranks=tuple(sorted(share.source_ranks)),
        confirmed=read.confirmed,
        verification=share.verification,
        prompt=read.request.prompt.found,
        end_token=read.until,
    )
