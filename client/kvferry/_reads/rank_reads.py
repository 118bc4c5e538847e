"""Runs one rank's shares of reads.

Threading: `start` and `cancel` only queue work (R11). The queue's thread expands requests, hands descriptors to the
transport, and handles ends. Work that waits, such as a handshake with a new source or the comparison of checksums, runs
on a thread of its own, so that it delays no other read (R10).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial

from kvferry._clock import now
from kvferry._forks import OneProcess
from kvferry._memory.access import StillCopying
from kvferry._memory.rank_memory import RankMemory
from kvferry._memory.tails import Tails, clear_tails
from kvferry._reads.looks import Looks
from kvferry._reads.meters import ShareMeter
from kvferry._reads.rank_read import Doing, Planned, RankOrder, RankRead
from kvferry._reads.source_engines import SourceEngine, SourceEngines
from kvferry._reads.verifier import Arrived, Verifier
from kvferry._threads import guarded, start_thread
from kvferry._tracing import start_span
from kvferry._transport.transport import TransferState, Transport
from kvferry._work_queue import WorkQueue
from kvferry.errors import (
    Closed,
    EngineUnknown,
    KvferryError,
    PeerRestarted,
    PublicationReleased,
    PublicationStale,
    PublicationTimeout,
    TransferCancelled,
    TransferError,
    TransferFailed,
    TransferStuck,
    WrongKey,
)
from kvferry.geometry.blocks import Blocks, Unfinished, joined
from kvferry.planner.request_blocks import needed

logger = logging.getLogger(__name__)

REFERENCE_GONE = (WrongKey, PublicationStale, PublicationReleased)
"""Errors with which a home rejects a reference for good."""


class RankReads(OneProcess):
    """The shares of one destination rank.

    Args:
        transport: moves the bytes.
        sources: the source engines.
        memory: accesses the rank's memory.
        verifier: compares checksums; None: integrity mode is off.
        work: the queue on whose thread the shares are changed.
        ended: called once with each share when it has ended. Must not block.
        quiesced: called once with each share that ended without being quiet, when it is quiet. Must not block.
        meter: measures the shares.
    """

    def __init__(
        self,
        transport: Transport,
        sources: SourceEngines,
        memory: RankMemory,
        verifier: Verifier | None,
        work: WorkQueue,
        ended: Callable[[RankRead], None],
        quiesced: Callable[[RankRead], None],
        meter: ShareMeter,
    ) -> None:
        self._transport = transport
        self._sources = sources
        self._memory = memory
        self._verifier = verifier
        self._work = work
        self._on_ended = ended
        self._on_quiesced = quiesced
        self._meter = meter
        self._running: set[RankRead] = set()
        self._handshaking: dict[tuple[str, str, bytes], list[RankRead]] = {}
        self._looks = Looks(work, self._look)
        self._closed = False
        self._changed = threading.Condition()
        self._started = 0
        """Number of shares that were started and have not ended."""

    def start(self, read: RankRead) -> None:
        """Start a share. Returns at once; later errors end the share. Raises `Closed`."""
        with self._changed:
            if self._closed:
                raise Closed("the cache is closed")
            self._started += 1
            self._work.do(partial(self._begin, read))

    def add(
        self, read: RankRead, blocks: Mapping[str, Blocks], unfinished: Unfinished | None = None, *, last: bool
    ) -> None:
        """Add blocks that the source of a share has published since. Returns at once; has no effect on a share that has
        ended.

        Args:
            read: a share whose blocks are not complete.
            blocks: what groups have gained, each from where it ended.
            unfinished: the blocks after these of which only some layers are complete.
            last: no more follow.
        """
        self._work.do(partial(self._add, read, blocks, unfinished, last))

    def cancel(self, read: RankRead) -> bool:
        """Cancel a share. Returns at once; has no effect on a share that has ended.

        Returns:
            Whether its blocks are quiet already.
        """
        if read.ended:
            return read.quiet
        quiet = read.stop()
        self._work.do(partial(self._cancelled, read))
        return quiet

    def close(self, timeout: float) -> None:
        """Cancel all shares, and wait for their ends. Idempotent.

        Args:
            timeout: seconds to wait; shares that have not ended by then end as overdue.
        """
        with self._changed:
            self._closed = True
            self._work.do(self._cancel_all)
            if not self._changed.wait_for(lambda: not self._started, timeout):
                self._work.do(self._give_up_all)

    # The methods below run on the queue's thread unless they say otherwise.

    def _look(self) -> list[float]:
        time = now()
        for read in [read for read in self._running if read.order.deadline <= time]:
            self._overdue(read)
        return [read.order.deadline for read in self._running]

    def _begin(self, read: RankRead) -> None:
        if read.ended:
            # It was cancelled, or its deadline passed, during the handshake with its source.
            return
        self._running.add(read)
        self._looks.by(read.order.deadline)
        if read._cancellation.cancelled:
            self._cancelled(read)
            return
        source = read.order.source
        engine = self._sources.known(*source)
        if engine is not None:
            self._start_transfer(read, engine)
            return
        read.turn_to(Doing.HANDSHAKE)
        if source in self._handshaking:
            self._handshaking[source].append(read)
        else:
            self._start_handshake(read)

    def _start_handshake(self, read: RankRead) -> None:
        """Start the handshake with a new source, once for all shares that wait for it."""
        order = read.order
        self._handshaking[order.source] = [read]
        try:
            start_thread(partial(self._handshake, order), f"kvferry-handshake-{order.engine_id}")
        except KvferryError as error:
            del self._handshaking[order.source]
            self._end(read, error)

    def _handshake(self, order: RankOrder) -> None:
        """Do the handshake, on a thread of its own."""
        span = start_span("kvferry.handshake", order.traceparent, source=order.engine_id)
        failure: Exception | None = None
        try:
            with span.calling():
                engine = self._sources.get(
                    order.home, order.engine_id, order.incarnation, order.reference, order.deadline
                )
        except KvferryError as error:
            failure = error
            self._work.do(partial(self._handshake_failed, order, error))
        except Exception as error:
            failure = error
            logger.exception("the handshake with %s failed", order.engine_id)
            self._work.do(partial(self._handshake_failed, order, TransferFailed(f"handshake: {error!r}")))
        else:
            self._work.do(partial(self._handshake_done, order, engine))
        span.end(failure)

    def _handshake_done(self, order: RankOrder, engine: SourceEngine) -> None:
        for read in self._handshaking.pop(order.source, ()):
            self._start_transfer(read, engine)

    def _handshake_failed(self, order: RankOrder, error: KvferryError) -> None:
        if isinstance(error, (PeerRestarted, EngineUnknown)):
            self._sources.gone(*order.source)
        # The share with the latest deadline does the next handshake, so that the others retry at most once.
        for read in sorted(self._handshaking.pop(order.source, ()), key=lambda read: -read.order.deadline):
            waits_longer = error.retryable and read.order.deadline > max(order.deadline, now())
            if waits_longer or (isinstance(error, REFERENCE_GONE) and read.order.reference != order.reference):
                # Its deadline is later than that of the share which gave up, or its own reference may still be good.
                self._begin(read)
            else:
                self._end(read, error)

    def _start_transfer(self, read: RankRead, engine: SourceEngine) -> None:
        """Start to move what was published so far."""
        if read.ended:
            return
        read.span = start_span("kvferry.move", read.order.traceparent, source=read.order.engine_id)
        read.engine = engine
        self._move_on(read)

    def _add(self, read: RankRead, blocks: Mapping[str, Blocks], unfinished: Unfinished | None, last: bool) -> None:
        if read.ended or read.complete:
            return
        read.told.append(blocks)
        read.unfinished, read.complete = unfinished, last
        self._move_on(read)

    def _move_on(self, read: RankRead) -> None:
        """Move what can be moved now, unless a transfer is under way: then it is moved when that has ended, with what
        comes until then."""
        order, engine = read.order, read.engine
        if engine is None or read.moving or not read.told:
            return
        read.turn_to(Doing.PLAN)
        try:
            if read.parts is None:
                read.parts = engine.plan_of(order.wanted.layers).in_parts(order.wanted.blocks, order.wanted.tokens)
            expansion = read.parts.next(joined(read.told), read.unfinished, last=read.complete)
            read.planned = (read.planned or Planned()).plus(Planned.of(expansion))
            if not expansion.sources and not read.complete:
                read.told = []
                read.turn_to(Doing.STEPS)
                return
            parts = [(engine.agents[source.source_rank], source) for source in expansion.sources]
            read.turn_to(Doing.MOVE)
            transfer = read.begin(
                lambda: self._transport.start(parts, deadline=order.lease_deadline, label=order.read_id)
            )
        except KvferryError as error:
            self._end(read, error)
            return
        except Exception as error:
            logger.exception("read %s failed", order.read_id)
            self._end(read, TransferFailed(f"read {order.read_id}: {error!r}"))
            return
        read.told, read.moving = [], True
        transfer.add_done_callback(lambda _: self._transferred(read))

    def _transferred(self, read: RankRead) -> None:
        """Called when a transfer has ended, on a thread of the transport."""
        self._work.do(partial(self._moved, read))

    def _moved(self, read: RankRead) -> None:
        transfer = read._transfer
        if read.ended or transfer is None:
            return
        if transfer.state is not TransferState.DONE:
            if transfer.state is TransferState.FAILED:
                self._sources.failed(*read.order.source)
            self._end(read, transfer.error or TransferFailed(f"read {read.order.read_id} failed"))
            return
        self._sources.succeeded(*read.order.source)
        read.moving = False
        if not read.expanded:
            read.turn_to(Doing.STEPS, transfer.ended_at)
            self._move_on(read)
            return
        # Set before anything that takes time: the lease only has to cover the arrival of the bytes.
        read.ended_at = now() if transfer.ended_at is None else transfer.ended_at
        read.turn_to(Doing.NOTHING, read.ended_at)
        if self._verifier is None:
            self._arrived(read, None)
            return
        try:
            start_thread(
                partial(self._verify, read, self._verifier),
                f"kvferry-verify-{read.order.engine_id}-{read.order.publication}",
            )
        except KvferryError as error:
            self._end(read, error)

    def _verify(self, read: RankRead, verifier: Verifier) -> None:
        """Compare checksums, on a thread of its own."""
        order, engine, parts = read.order, read.engine, read.parts
        error: KvferryError | None = None
        try:
            if engine is not None and parts is not None:
                read.verification = verifier.verify(
                    Arrived(
                        home=order.home,
                        lease=order.lease,
                        publication=order.publication,
                        plan=engine.plan_of(order.wanted.layers),
                        granted=parts.granted,
                        blocks=order.wanted.blocks,
                        tokens=order.wanted.tokens,
                        deadline=order.deadline,
                        check=read._cancellation.check,
                    )
                )
        except KvferryError as failure:
            error = failure
        except Exception as failure:
            logger.exception("read %s could not be verified", order.read_id)
            error = TransferFailed(f"read {order.read_id}: {failure!r}")
        self._work.do(partial(self._arrived, read, error))

    def _arrived(self, read: RankRead, error: KvferryError | None) -> None:
        """Finish a share whose bytes have all arrived and were compared."""
        if read.ended:
            return
        if error is None and read.order.wanted.tails is Tails.ZERO:
            try:
                self._clear_tails(read)
            except KvferryError as failure:
                error = failure
            except Exception as failure:
                logger.exception("the tails of read %s could not be cleared", read.order.read_id)
                # As in `kvferry._transport.staging_pool`: blocks that a device still writes to are never quiet.
                read._clearing = isinstance(failure, StillCopying)
                error = TransferFailed(f"read {read.order.read_id}: {failure!r}", quiet=not read._clearing)
        self._end(read, error)

    def _clear_tails(self, read: RankRead) -> None:
        order, engine, parts = read.order, read.engine, read.parts
        if engine is None or parts is None:
            return
        plan = engine.plan_of(order.wanted.layers)
        sources = {group.name: group for group in plan.source.groups}
        moved = needed(plan.groups, sources, parts.granted, order.wanted.blocks, order.wanted.tokens)
        groups = {group.name: group for group in plan.groups}
        clear_tails(plan.rank.planes, groups, order.wanted.blocks, moved, self._memory)

    def _cancelled(self, read: RankRead) -> None:
        if read._transfer is not None:
            # `_transferred` is called when the transport has ended it.
            read._transfer.cancel()
        if read._transfer is None or read._transfer.state is TransferState.DONE:
            read_id = read.order.read_id
            self._end(read, TransferCancelled(f"read {read_id} was cancelled", read_id=read_id))

    def _overdue(self, read: RankRead) -> None:
        read_id = read.order.read_id
        stuck: KvferryError = TransferStuck(f"read {read_id} did not end in time", read_id=read_id)
        if read.engine is not None and not read.complete and not read.moving:
            problem = f"read {read_id}: its source did not publish all of its blocks in time"
            stuck = PublicationTimeout(problem, engine_id=read.order.engine_id, publication=read.order.publication)
        try:
            if read._transfer is not None:
                read._transfer.cancel()
                if isinstance(stuck, TransferError):
                    read._transfer.tell(stuck)
        finally:
            # Also after an exception: a share that stayed in `_running` would be overdue again at every check. Before
            # the cancel, which ends the acquisition of this read: it would tell first that the read was cancelled.
            self._end(read, stuck)
            read._cancellation.cancel()

    def _end(self, read: RankRead, error: KvferryError | None) -> None:
        self._running.discard(read)
        if read.ended:
            return
        if error is not None or not read.ended_at:
            read.ended_at = now()
        read.ended, read.error = True, error
        read.turn_to(Doing.NOTHING, read.ended_at)
        transfer = read._transfer
        quiet = read.quiet
        work = read.work
        self._meter.ended(work, read.bytes)
        read.span.end(
            error,
            bytes=read.bytes,
            pieces=work.pieces,
            descriptors=work.descriptors,
            staged_bytes=work.staged_bytes,
        )
        self._notify(self._on_ended, read)
        if not quiet and not read._clearing and transfer is not None:
            # Not through the queue: it ends with `close`, and the transport ends later.
            transfer.add_quiet_callback(lambda _: self._notify(self._on_quiesced, read))
        with self._changed:
            self._started -= 1
            self._changed.notify_all()

    def _notify(self, callback: Callable[[RankRead], None], read: RankRead) -> None:
        guarded(partial(callback, read), f"a callback for the end of read {read.order.read_id}")

    def _cancel_one(self, read: RankRead) -> None:
        read.stop()
        self._cancelled(read)

    def _cancel_all(self) -> None:
        for read in tuple(self._running):
            # One that fails ends at its deadline.
            guarded(partial(self._cancel_one, read), f"the cancel of read {read.order.read_id}")

    def _give_up_all(self) -> None:
        for read in tuple(self._running):
            self._overdue(read)
