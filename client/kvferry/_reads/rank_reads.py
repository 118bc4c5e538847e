"""Moves one rank's shares of reads: one coroutine takes a share from its order to its end. Long computations, such as
the comparison of checksums, run on threads of their own, so that they delay no other read (R10)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from kvferry._forks import OneProcess
from kvferry._logs import Log
from kvferry._loop import Loop
from kvferry._memory.access import StillCopying
from kvferry._memory.rank_memory import RankMemory, Tails, clear_tails
from kvferry._reads.meters import ShareMeter
from kvferry._reads.rank_read import RankRead
from kvferry._reads.source_engines import SourceEngine, SourceEngines
from kvferry._reads.verifier import Verifier
from kvferry._threads import guarded, settle
from kvferry._tracing import start_span
from kvferry._transport.transport import TransferState, Transport
from kvferry.errors import (
    Closed,
    KvferryError,
    LimitReached,
    PublicationTimeout,
    TransferCancelled,
    TransferError,
    TransferFailed,
    TransferStuck,
)
from kvferry.geometry.blocks import joined

logger = Log(__name__)

EXPAND_FOR = 0.002
"""Seconds of expansions after which the loop does all else that is due."""

GIVE_UP = 1.0
"""Seconds that `RankReads.close` waits for overdue shares."""

ShareCallback: TypeAlias = Callable[[RankRead], None]


class RankReads(OneProcess):
    """The shares of one destination rank. `start`, `cancel` and `close` may be called from any thread; only `close`
    waits (R11). Without a `verifier`, integrity mode is off."""

    def __init__(
        self,
        loop: Loop,
        transport: Transport,
        sources: SourceEngines,
        memory: RankMemory,
        verifier: Verifier | None,
        meter: ShareMeter,
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._sources = sources
        self._memory = memory
        self._verifier = verifier
        self._meter = meter
        self._running: set[RankRead] = set()
        self._clearing: set[Future[bool]] = set()
        """Tails that are being cleared: `close` waits for them, since afterwards the memory may be unmapped."""
        self._turn = asyncio.Lock()
        """Held by the share that expands: one at a time."""
        self._pause_at: float | None = None
        """When the loop gets its turn, so that one expansion after the other does not keep it; None: it has just had
        one."""
        self._closed = False
        """Set by `close`, on any thread: shares that reach the loop later are refused there."""

    def start(self, share: RankRead, ended: ShareCallback, quiesced: ShareCallback) -> None:
        """Start a share. Returns at once; later errors end the share. Raises `Closed`, or `LimitReached` if the system
        refused the loop's thread.

        `ended` is called once at the end of the share, on the loop; `quiesced` once when a share that ended without
        being quiet is quiet, on a thread of the transport, or on the thread that clears the tails. Neither may block.
        """
        if self._closed or not self._loop.call(partial(self._begin, share, ended, quiesced)):
            raise Closed("the cache is closed")

    def cancel(self, share: RankRead) -> bool:
        """Cancel a share; has no effect on a share that has ended. Does not wait; returns whether the blocks are quiet
        already."""
        if share.ended:
            return share.quiet
        quiet = share.stop()
        self._loop.call(partial(self._cancelled, share))
        return quiet

    def close(self, until: float) -> None:
        """Cancel all shares, and wait for their ends, and for the clearing of tails. Shares that have not ended by
        `until`, on the loop's clock, end as overdue. Idempotent."""
        self._closed = True
        # A client that has ended has ended all shares.
        with suppress(Closed):
            self._loop.run(self._close(until))
        if self._clearing:
            wait(tuple(self._clearing), max(0.0, until - self._loop.now()))

    # The rest runs on the loop.

    async def _close(self, until: float) -> None:
        for share in tuple(self._running):
            self.cancel(share)
        tasks = {share.task for share in self._running if share.task is not None}
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, until - self._loop.now()))
        for share in tuple(self._running):
            self._overdue(share)
        if tasks:
            await asyncio.wait(tasks, timeout=GIVE_UP)

    def _begin(self, share: RankRead, ended: ShareCallback, quiesced: ShareCallback) -> None:
        if self._closed:
            self._interrupt(share, Closed("the cache is closed"))
        self._running.add(share)
        share.task = self._loop.spawn(self._run(share, ended, quiesced), f"read {share.order.read_id}")

    async def _run(self, share: RankRead, ended: ShareCallback, quiesced: ShareCallback) -> None:
        order, error = share.order, None
        overdue = self._loop.at(order.deadline, partial(self._overdue, share))
        try:
            share.entered = True
            if share.interrupted is not None:
                raise share.interrupted
            share.check()
            await self._read(share)
        except KvferryError as failure:
            # The error's traceback would keep the descriptors.
            error = failure.with_traceback(None)
        except asyncio.CancelledError:
            error = share.interrupted or TransferCancelled(f"read {order.read_id}: the client is closed")
        except Exception as failure:
            logger.exception("read %s failed", order.read_id)
            error = TransferFailed(f"read {order.read_id}: {failure!r}", quiet=not share.clearing)
        overdue.cancel()
        self._end(share, error)
        transfer, quiet = share.transfer, share.quiet
        guarded(partial(ended, share), f"a callback for the end of read {order.read_id}")
        # Not through the loop, which ends with the client: the transport ends later.
        if not quiet and share.cleared is not None:
            share.cleared.add_done_callback(lambda _: None if share.clearing else quiesced(share))
        elif not quiet and transfer is not None:
            transfer.add_quiet_callback(lambda _: quiesced(share))

    async def _read(self, share: RankRead) -> None:
        """Move the whole share; raises an error if its bytes do not count."""
        order = share.order
        engine = self._sources.known(order.source)
        if engine is None:
            share.set_phase("handshake")
            engine = await self._sources.get(
                order.home, order.source, order.reference, order.deadline, order.traceparent
            )
        share.span = start_span("kvferry.move", order.traceparent, source=order.engine_id)
        share.engine = engine
        while not share.expanded:
            if share.received:
                await self._move(share, engine)
            if not share.expanded and not share.received:
                share.set_phase("steps")
                await share.news.wait(math.inf)
                share.check()
        # Set before the long computations: the lease only has to cover the arrival of the bytes.
        transfer = share.transfer
        share.ended_at = self._loop.now() if transfer is None or transfer.ended_at is None else transfer.ended_at
        share.set_phase(None, share.ended_at)
        if self._verifier is not None:
            share.verification = await self._verifier.verify(share, engine.plan_of(order.wanted.layers))
        if order.wanted.tails is Tails.ZERO:
            await self._clear_tails(share, engine)

    async def _move(self, share: RankRead, engine: SourceEngine) -> None:
        order = share.order
        share.set_phase("plan")
        async with self._turn:
            if self._pause_at is not None and self._loop.now() >= self._pause_at:
                # The loop does all else that is due in between: thousands of shares may wait for one handshake, and
                # leases have to be renewed meanwhile.
                await asyncio.sleep(0)
            if self._pause_at is None:
                self._pause_at = self._loop.now() + EXPAND_FOR
                self._loop.soon(self._had_turn)
            if share.parts is None:
                share.parts = engine.plan_of(order.wanted.layers).in_parts(order.wanted.blocks, order.wanted.tokens)
            expansion = share.parts.next(joined(share.received), share.unfinished, last=share.complete)
        share.count(expansion)
        share.received = []
        if not expansion.sources and not share.complete:
            return
        parts = [(engine.agents[source.source_rank], source) for source in expansion.sources]
        share.set_phase("move")
        transfer = share.begin(lambda: self._transport.start(parts, deadline=order.lease.deadline, label=order.read_id))
        transfer.add_done_callback(lambda _: share.news.set())
        while not transfer.state.final:
            await share.news.wait(math.inf)
        if transfer.state is TransferState.DONE:
            self._sources.succeeded(order.source)
            share.set_phase("steps", transfer.ended_at)
            return
        if transfer.state is TransferState.FAILED:
            self._sources.failed(order.source)
        raise transfer.error or TransferFailed(f"read {order.read_id} failed")

    def _had_turn(self) -> None:
        self._pause_at = None

    async def _clear_tails(self, share: RankRead, engine: SourceEngine) -> None:
        """Clear the tails on a thread, which may have to wait for a device. A share that ends meanwhile is quiet when
        the clearing has ended."""
        order, plan = share.order, engine.plan_of(share.order.wanted.layers)
        moved, cleared = share.moved(plan), Future[bool]()

        def clear() -> None:
            ended = True
            try:
                clear_tails(plan.rank.planes, plan.groups_by_name[1], order.wanted.blocks, moved, self._memory)
            except StillCopying:
                # As in `kvferry._transport.staging_pool`: blocks that a device still writes to are never quiet.
                ended = False
                raise
            finally:
                settle(cleared, ended)

        share.cleared = cleared
        self._clearing.add(cleared)
        cleared.add_done_callback(self._clearing.discard)
        try:
            await self._loop.on_thread(clear, f"kvferry-tails-{order.engine_id}-{order.publication}")
        except LimitReached:
            # The system refused the thread: no tails are being cleared.
            self._clearing.discard(cleared)
            share.cleared = None
            raise

    def _cancelled(self, share: RankRead) -> None:
        transfer, read_id = share.transfer, share.order.read_id
        if transfer is None or transfer.state is TransferState.DONE:
            # Otherwise the end of the transfer, which was cancelled, wakes the coroutine.
            self._interrupt(share, TransferCancelled(f"read {read_id} was cancelled", read_id=read_id))

    def _overdue(self, share: RankRead) -> None:
        read_id, transfer = share.order.read_id, share.transfer
        stuck: KvferryError = TransferStuck(f"read {read_id} did not end in time", read_id=read_id)
        moving = transfer is not None and not transfer.state.final
        if share.engine is not None and not share.complete and not moving:
            problem = f"read {read_id}: its source did not publish all of its blocks in time"
            stuck = PublicationTimeout(problem, engine_id=share.order.engine_id, publication=share.order.publication)
        self._interrupt(share, stuck)
        if transfer is not None:
            transfer.cancel()
            if isinstance(stuck, TransferError):
                transfer.tell(stuck)

    def _interrupt(self, share: RankRead, error: KvferryError) -> None:
        """End the coroutine of a share with an error."""
        if share.interrupted is None:
            # `cancelled` also ends work on threads.
            share.interrupted, share.cancelled = error, True
            if share.task is not None and share.entered:
                share.task.cancel()

    def _end(self, share: RankRead, error: KvferryError | None) -> None:
        self._running.discard(share)
        if error is not None or not share.ended_at:
            share.ended_at = self._loop.now()
        share.ended, share.error = True, error
        share.set_phase(None, share.ended_at)
        work = share.work
        self._meter.ended(work, share.bytes)
        share.span.end(
            error,
            bytes=share.bytes,
            pieces=work.pieces,
            descriptors=work.descriptors,
            staged_bytes=work.staged_bytes,
        )
