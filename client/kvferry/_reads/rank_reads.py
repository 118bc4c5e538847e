"""One rank's shares of reads whose lease another process holds: begun, ended and cleaned up without anybody waiting.

Threading: `start` and `cancel` only put work on a queue (R11). One thread expands, hands the descriptors to the
transport, and notices ends; what has to wait, a handshake with a new source or the sums of integrity mode, waits on a
thread of its own, so that it holds nobody else up (R10).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from kvferry._clock import now
from kvferry._control.acquisition import Cancellation
from kvferry._control.connection import Control
from kvferry._forks import OneProcess
from kvferry._memory.access import StillCopying
from kvferry._memory.rank_memory import RankMemory
from kvferry._memory.tails import Tails, clear_tails
from kvferry._reads.source_engines import SourceEngine, SourceEngines
from kvferry._reads.verifier import Arrived, Verifier
from kvferry._threads import start_thread
from kvferry._transport.transport import Transfer, TransferPart, TransferState, Transport
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
from kvferry.geometry.blocks import Blocks
from kvferry.planner.request_blocks import needed

logger = logging.getLogger(__name__)

REFERENCE_GONE = (WrongKey, PublicationStale, PublicationReleased)
"""Why a source's home does not accept a reference any more, or never did."""
LONGEST_SLEEP = 1.0
"""Seconds after which deadlines are looked at again while shares run: what a thread sleeps does not count suspends."""


@dataclass(frozen=True, slots=True, eq=False)
class RankOrder:
    """One rank's share of a read.

    Attributes:
        read_id, request_id: of the read.
        home: the source's.
        engine_id, incarnation, publication: the source and what it offers.
        reference: to the publication, for a handshake with the source.
        lease_id: of the lease, for questions to the home.
        granted: the source's blocks by group.
        blocks: the local ones.
        tokens: the tokens wanted, ``[a, b)``; None: what was granted.
        tails: what becomes of what is not transferred.
        deadline: on `kvferry._clock`, until when to try. The lease is not this process's to judge.
    """

    read_id: str
    request_id: str
    home: Control
    engine_id: str
    incarnation: bytes
    publication: int
    reference: str = field(repr=False)
    lease_id: bytes = field(repr=False)
    granted: Mapping[str, Blocks]
    blocks: Mapping[str, Blocks]
    tokens: tuple[int, int] | None
    tails: Tails
    deadline: float

    @property
    def source(self) -> tuple[str, str, bytes]:
        """The source as `SourceEngines` knows it."""
        return self.home.address, self.engine_id, self.incarnation


@dataclass(slots=True, eq=False)
class RankRead:
    """A share under way, or ended. Changed by the thread of its `RankReads` only.

    Attributes:
        order: what was ordered.
        ended: whether it has.
        error: why its bytes do not count.
    """

    order: RankOrder
    ended: bool = False
    error: KvferryError | None = None
    _transfer: Transfer | None = None
    _peer: SourceEngine | None = None
    _clearing: bool = False
    """A device may be clearing its tails still, and cannot be asked any more."""
    _cancellation: Cancellation = field(init=False)

    def __post_init__(self) -> None:
        self._cancellation = Cancellation(self.order.read_id)

    @property
    def quiet(self) -> bool:
        """Whether nothing can write to its blocks any more (R4)."""
        return self.ended and not self._clearing and (self._transfer is None or self._transfer.quiet)

    @property
    def bytes(self) -> int:
        """Bytes that have arrived."""
        return 0 if self._transfer is None else self._transfer.progress().bytes_done


class RankReads(OneProcess):
    """The shares of one destination rank.

    Args:
        transport: moves the bytes.
        peers: source engines.
        summers: of the rank's memory.
        verifier: compares what has arrived; None: integrity mode is off.
        ended: called once with each share when it has ended.
        quiesced: called once with each share that ended without being quiet, when it is. Neither may block.
    """

    def __init__(
        self,
        transport: Transport,
        peers: SourceEngines,
        summers: RankMemory,
        verifier: Verifier | None,
        ended: Callable[[RankRead], None],
        quiesced: Callable[[RankRead], None],
    ) -> None:
        self._transport = transport
        self._peers = peers
        self._summers = summers
        self._verifier = verifier
        self._on_ended = ended
        self._on_quiesced = quiesced
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: set[RankRead] = set()
        self._meeting: dict[tuple[str, str, bytes], list[RankRead]] = {}
        self._closed = False
        self._closing = threading.Lock()
        """Nothing is begun after what ends the thread."""
        self._thread = start_thread(self._run, "kvferry-rank")

    def start(self, order: RankOrder) -> RankRead:
        """Begin a share. Returns at once; whatever goes wrong is its `error`. Raises `Closed`."""
        read = RankRead(order)
        with self._closing:
            if self._closed:
                raise Closed("the cache is closed")
            self._queue.put(partial(self._begin, read))
        return read

    def cancel(self, read: RankRead) -> None:
        """Stop a share. Returns at once; one that has ended stays as it is."""
        read._cancellation.cancel()
        self._queue.put(partial(self._cancelled, read))

    def close(self, timeout: float) -> None:
        """Cancel everything, and end the thread. Idempotent."""
        with self._closing:
            self._closed = True
            self._queue.put(self._close)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # What follows runs on the thread.

    def _run(self) -> None:
        while not self._closed or self._running:
            try:
                self._step()
            except Exception:
                logger.exception("a step of a rank's reads failed")

    def _step(self) -> None:
        first = min((read.order.deadline for read in self._running), default=None)
        try:
            work = self._queue.get(timeout=None if first is None else max(0.0, min(LONGEST_SLEEP, first - now())))
        except queue.Empty:
            for read in [read for read in self._running if read.order.deadline <= now()]:
                self._overdue(read)
        else:
            work()

    def _begin(self, read: RankRead) -> None:
        if read.ended:
            # Cancelled, or its time was up, while its source was being handshaken.
            return
        self._running.add(read)
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
            self._queue.put(partial(self._not_met, order, error))
        except Exception as error:
            logger.exception("the handshake with %s failed", order.engine_id)
            self._queue.put(partial(self._not_met, order, TransferFailed(f"handshake: {error!r}")))
        else:
            self._queue.put(partial(self._met, order, peer))

    def _met(self, order: RankOrder, peer: SourceEngine) -> None:
        for read in self._meeting.pop(order.source, ()):
            self._go(read, peer)

    def _not_met(self, order: RankOrder, error: KvferryError) -> None:
        if isinstance(error, (PeerRestarted, EngineUnknown)):
            self._peers.gone(*order.source)
        for read in self._meeting.pop(order.source, ()):
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
            expansion = peer.plan.expand(order.granted, order.blocks, order.tokens)
            parts = [TransferPart.of(peer.agents[source.source_rank], source) for source in expansion.sources]
            transfer = self._transport.start(parts, deadline=None, label=order.read_id)
        except KvferryError as error:
            self._end(read, error)
            return
        except Exception as error:
            logger.exception("read %s failed", order.read_id)
            self._end(read, TransferFailed(f"read {order.read_id}: {error!r}"))
            return
        read._peer, read._transfer = peer, transfer
        transfer.add_done_callback(lambda _: self._queue.put(partial(self._moved, read)))

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
                verifier.verify(
                    Arrived(
                        home=order.home,
                        lease=order,
                        publication=order.publication,
                        plan=peer.plan,
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
        self._queue.put(partial(self._arrived, read, error))

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
        plan = peer.plan
        sources = {group.name: group for group in plan.source.groups}
        moved = needed(plan.groups, sources, order.granted, order.blocks, order.tokens)
        groups = {group.name: group for group in plan.groups}
        clear_tails(plan.rank.planes, groups, order.blocks, moved, self._summers)

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
        read.ended, read.error = True, error
        transfer = read._transfer
        quiet = read.quiet
        self._tell(self._on_ended, read)
        if not quiet and not read._clearing and transfer is not None:
            # Not by way of the queue: after `close` nobody takes from it, and the transport ends later.
            transfer.add_quiet_callback(lambda _: self._tell(self._on_quiesced, read))

    def _tell(self, told: Callable[[RankRead], None], read: RankRead) -> None:
        try:
            told(read)
        except Exception:
            logger.exception("the end of read %s was not taken", read.order.read_id)

    def _close(self) -> None:
        for read in tuple(self._running):
            try:
                self._cancelled(read)
            except Exception:
                # It ends by its deadline.
                logger.exception("read %s was not cancelled", read.order.read_id)
