"""One rank's shares of reads: begun, ended and cleaned up without anybody waiting.

Threading: `start` and `cancel` only put work on a queue (R11). Its thread expands, hands the descriptors to the
transport, and notices ends; what has to wait, a handshake with a new source or the sums of integrity mode, waits on a
thread of its own, so that it holds nobody else up (R10).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from kvferry._clock import now
from kvferry._forks import OneProcess
from kvferry._memory.access import StillCopying
from kvferry._memory.rank_memory import RankMemory
from kvferry._memory.tails import Tails, clear_tails
from kvferry._reads.leased_reads import LOOK_EVERY
from kvferry._reads.rank_read import Planned, RankOrder, RankRead
from kvferry._reads.source_engines import SourceEngine, SourceEngines
from kvferry._reads.verifier import Arrived, Verifier
from kvferry._threads import start_thread
from kvferry._transport.transport import TransferPart, TransferState, Transport
from kvferry._work_queue import WorkQueue
from kvferry.errors import (
    Closed,
    EngineUnknown,
    KvferryError,
    PeerRestarted,
    PublicationReleased,
    PublicationStale,
    TransferCancelled,
    TransferFailed,
    TransferStuck,
    WrongKey,
)
from kvferry.planner.request_blocks import needed

logger = logging.getLogger(__name__)

REFERENCE_GONE = (WrongKey, PublicationStale, PublicationReleased)
"""Why a source's home does not accept a reference any more, or never did."""


class RankReads(OneProcess):
    """The shares of one destination rank.

    Args:
        transport: moves the bytes.
        peers: source engines.
        memory: of the rank's memory.
        verifier: compares what has arrived; None: integrity mode is off.
        work: on whose thread the shares are changed.
        ended: called once with each share when it has ended.
        quiesced: called once with each share that ended without being quiet, when it is. Neither may block.
    """

    def __init__(
        self,
        transport: Transport,
        peers: SourceEngines,
        memory: RankMemory,
        verifier: Verifier | None,
        work: WorkQueue,
        ended: Callable[[RankRead], None],
        quiesced: Callable[[RankRead], None],
    ) -> None:
        self._transport = transport
        self._peers = peers
        self._memory = memory
        self._verifier = verifier
        self._work = work
        self._on_ended = ended
        self._on_quiesced = quiesced
        self._running: set[RankRead] = set()
        self._meeting: dict[tuple[str, str, bytes], list[RankRead]] = {}
        self._looking = False
        self._closed = False
        self._changed = threading.Condition()
        self._started = 0
        """Shares that were started and have not ended."""

    def start(self, read: RankRead) -> None:
        """Begin a share. Returns at once; whatever goes wrong is its `error`. Raises `Closed`."""
        with self._changed:
            if self._closed:
                raise Closed("the cache is closed")
            self._started += 1
            self._work.do(partial(self._begin, read))

    def cancel(self, read: RankRead) -> bool:
        """Stop a share; returns at once, whether nothing can write to its blocks already. One that has ended stays as
        it is."""
        if read.ended:
            return read.quiet
        quiet = read.stop()
        self._work.do(partial(self._cancelled, read))
        return quiet

    def close(self, timeout: float) -> None:
        """Cancel everything, and wait at most `timeout` seconds until all has ended; what has not by then is given up.
        Idempotent."""
        with self._changed:
            self._closed = True
            self._work.do(self._cancel_all)
            if not self._changed.wait_for(lambda: not self._started, timeout):
                self._work.do(self._give_up_all)

    # What follows runs on the thread.

    def _look(self) -> None:
        self._looking = False
        time = now()
        for read in [read for read in self._running if read.order.deadline <= time]:
            self._overdue(read)
        self._look_later()

    def _look_later(self) -> None:
        if self._running and not self._looking:
            self._looking = True
            self._work.do_later(LOOK_EVERY, self._look)

    def _begin(self, read: RankRead) -> None:
        if read.ended:
            # Cancelled, or its time was up, while its source was being handshaken.
            return
        self._running.add(read)
        self._look_later()
        if read._cancellation.cancelled:
            self._cancelled(read)
            return
        source = read.order.source
        peer = self._peers.known(*source)
        if peer is not None:
            self._go(read, peer)
        elif source in self._meeting:
            self._meeting[source].append(read)
        else:
            self._meet(read)

    def _meet(self, read: RankRead) -> None:
        """Handshake with a source that is not known, once for all that wait for it."""
        order = read.order
        self._meeting[order.source] = [read]
        try:
            start_thread(partial(self._handshake, order), f"kvferry-meet-{order.engine_id}")
        except KvferryError as error:
            del self._meeting[order.source]
            self._end(read, error)

    def _handshake(self, order: RankOrder) -> None:
        """On its own thread."""
        try:
            peer = self._peers.get(order.home, order.engine_id, order.incarnation, order.reference, order.deadline)
        except KvferryError as error:
            self._work.do(partial(self._not_met, order, error))
        except Exception as error:
            logger.exception("the handshake with %s failed", order.engine_id)
            self._work.do(partial(self._not_met, order, TransferFailed(f"handshake: {error!r}")))
        else:
            self._work.do(partial(self._met, order, peer))

    def _met(self, order: RankOrder, peer: SourceEngine) -> None:
        for read in self._meeting.pop(order.source, ()):
            self._go(read, peer)

    def _not_met(self, order: RankOrder, error: KvferryError) -> None:
        if isinstance(error, (PeerRestarted, EngineUnknown)):
            self._peers.gone(*order.source)
        # The one that waits the longest asks next, so that the others ask once more at most.
        for read in sorted(self._meeting.pop(order.source, ()), key=lambda read: -read.order.deadline):
            waits_longer = error.retryable and read.order.deadline > max(order.deadline, now())
            if waits_longer or (isinstance(error, REFERENCE_GONE) and read.order.reference != order.reference):
                # It may wait for longer than the one whose time was up; and one reference says nothing of another.
                self._begin(read)
            else:
                self._end(read, error)

    def _go(self, read: RankRead, peer: SourceEngine) -> None:
        if read.ended:
            return
        order = read.order
        try:
            expansion = peer.plan_of(order.layers).expand(order.granted, order.blocks, order.tokens)
            parts = [TransferPart.of(peer.agents[source.source_rank], source) for source in expansion.sources]
            read._peer, read.planned = peer, Planned.of(expansion)
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

        transfer.add_done_callback(lambda _: self._transferred(read))

    def _transferred(self, read: RankRead) -> None:
        """On a thread of the transport."""
        self._work.do(partial(self._moved, read))

    def _moved(self, read: RankRead) -> None:
        transfer = read._transfer
        if read.ended or transfer is None:
            return
        if transfer.state is not TransferState.DONE:
            if transfer.state is TransferState.FAILED:
                self._peers.failed(*read.order.source)
            self._end(read, transfer.error or TransferFailed(f"read {read.order.read_id} failed"))
            return
        self._peers.succeeded(*read.order.source)
        # Before anything that takes time: the lease need not last for it.
        read.ended_at = now() if transfer.ended_at is None else transfer.ended_at
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
        """On its own thread."""
        order, peer = read.order, read._peer
        error: KvferryError | None = None
        try:
            if peer is not None:
                read.verification = verifier.verify(
                    Arrived(
                        home=order.home,
                        lease=order.lease,
                        publication=order.publication,
                        plan=peer.plan_of(order.layers),
                        granted=order.granted,
                        blocks=order.blocks,
                        tokens=order.tokens,
                        deadline=order.deadline,
                        check=read._cancellation.check,
                    )
                )
        except KvferryError as failure:
            error = failure
        except Exception as failure:
            logger.exception("read %s was not verified", order.read_id)
            error = TransferFailed(f"read {order.read_id}: {failure!r}")
        self._work.do(partial(self._arrived, read, error))

    def _arrived(self, read: RankRead, error: KvferryError | None) -> None:
        """Every byte is there, and compared."""
        if read.ended:
            return
        if error is None and read.order.tails is Tails.ZERO:
            try:
                self._clear_tails(read)
            except KvferryError as failure:
                error = failure
            except Exception as failure:
                logger.exception("the tails of read %s were not cleared", read.order.read_id)
                # As in `kvferry._transport.staging_pool`: what is still written to is never quiet.
                read._clearing = isinstance(failure, StillCopying)
                error = TransferFailed(f"read {read.order.read_id}: {failure!r}", quiet=not read._clearing)
        self._end(read, error)

    def _clear_tails(self, read: RankRead) -> None:
        order, peer = read.order, read._peer
        if peer is None:
            return
        plan = peer.plan_of(order.layers)
        sources = {group.name: group for group in plan.source.groups}
        moved = needed(plan.groups, sources, order.granted, order.blocks, order.tokens)
        groups = {group.name: group for group in plan.groups}
        clear_tails(plan.rank.planes, groups, order.blocks, moved, self._memory)

    def _cancelled(self, read: RankRead) -> None:
        if read._transfer is not None:
            # Its own end tells, when the transport has noticed.
            read._transfer.cancel()
        if read._transfer is None or read._transfer.state is TransferState.DONE:
            read_id = read.order.read_id
            self._end(read, TransferCancelled(f"read {read_id} was cancelled", read_id=read_id))

    def _overdue(self, read: RankRead) -> None:
        read_id = read.order.read_id
        stuck = TransferStuck(f"read {read_id} did not end in time", read_id=read_id)
        try:
            read._cancellation.cancel()
            if read._transfer is not None:
                read._transfer.cancel()
                read._transfer.tell(stuck)
        finally:
            # Whatever that raised: one that stayed among the running would be overdue again at once, and for ever.
            self._end(read, stuck)

    def _end(self, read: RankRead, error: KvferryError | None) -> None:
        self._running.discard(read)
        if read.ended:
            return
        if error is not None or not read.ended_at:
            read.ended_at = now()
        read.ended, read.error = True, error
        transfer = read._transfer
        quiet = read.quiet
        self._tell(self._on_ended, read)
        if not quiet and not read._clearing and transfer is not None:
            # Not by way of the queue: after `close` nobody takes from it, and the transport ends later.
            transfer.add_quiet_callback(lambda _: self._tell(self._on_quiesced, read))
        with self._changed:
            self._started -= 1
            self._changed.notify_all()

    def _tell(self, told: Callable[[RankRead], None], read: RankRead) -> None:
        try:
            told(read)
        except Exception:
            logger.exception("the end of read %s was not taken", read.order.read_id)

    def _cancel_all(self) -> None:
        for read in tuple(self._running):
            try:
                read.stop()
                self._cancelled(read)
            except Exception:
                # It ends by its deadline.
                logger.exception("read %s was not cancelled", read.order.read_id)

    def _give_up_all(self) -> None:
        for read in tuple(self._running):
            self._overdue(read)
