"""One rank's share of a read: what to read, and its progress."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvferry._clock import now
from kvferry._control.cancellation import Cancellation
from kvferry._control.connection import Control
from kvferry._control.reader_lease import ReaderLease
from kvferry._memory.tails import Tails
from kvferry._reads.read_times import ShareWork
from kvferry._reads.source_engines import SourceEngine
from kvferry._tracing import NO_SPAN, Span
from kvferry._transport.transport import Transfer, TransferProgress
from kvferry.errors import KvferryError
from kvferry.geometry.blocks import Blocks
from kvferry.planner.expansion import Expansion
from kvferry.planner.summed_blocks import Verification


@dataclass(frozen=True, slots=True)
class SchedulersLease:
    """A lease that another process, the engine's scheduler, holds and judges."""

    lease_id: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class RankOrder:
    """Says what a rank shall read as its share of a read.

    Attributes:
        read_id, request_id: of the read.
        home: connection to the source's home.
        engine_id, incarnation, publication: the source engine, and the number of its publication.
        reference: the publication's reference, for the handshake with the source.
        lease: the lease of the read. If this process holds it, the transfer ends with the lease.
        granted: the source's blocks by group.
        blocks: the blocks to read into, by group.
        tokens: the tokens wanted, ``[a, b)``; None: all that was granted.
        layers: names of the layers wanted; None: all.
        tails: whether the bytes behind the last token read are kept or cleared.
        deadline: time on `kvferry._clock` at which the share fails.
        traceparent: of the read's span; empty: it is not traced.
    """

    read_id: str
    request_id: str
    home: Control
    engine_id: str
    incarnation: bytes
    publication: int
    reference: str = field(repr=False)
    lease: ReaderLease | SchedulersLease
    granted: Mapping[str, Blocks]
    blocks: Mapping[str, Blocks]
    tokens: tuple[int, int] | None
    tails: Tails
    deadline: float
    layers: frozenset[str] | None = None
    traceparent: str = ""

    @property
    def source(self) -> tuple[str, str, bytes]:
        """The key of the source engine in `SourceEngines`."""
        return self.home.address, self.engine_id, self.incarnation

    @property
    def lease_deadline(self) -> float | None:
        """The lease's deadline on `kvferry._clock`; None: another process judges it."""
        return self.lease.deadline if isinstance(self.lease, ReaderLease) else None


@dataclass(frozen=True, slots=True)
class Planned:
    """Counts of a share's expansion; see `ReadResult`."""

    staged_bytes: int
    descriptors: int
    pieces: int
    source_ranks: tuple[int, ...]

    @classmethod
    def of(cls, expansion: Expansion) -> Planned:
        """Count an expansion."""
        return cls(
            staged_bytes=sum(staged.total_bytes for source in expansion.sources for staged in source.staged),
            descriptors=expansion.descriptors,
            pieces=expansion.pieces,
            source_ranks=tuple(source.source_rank for source in expansion.sources),
        )


class RankRead:
    """One rank's share of a read, from its order to its end. The thread of its `RankReads` changes it; any thread may
    read it.

    Args:
        order: what to read.
        cancellation: the cancellation of the read; None: the share has one of its own.

    Attributes:
        order: what to read.
        ended: whether it has ended.
        error: why its bytes do not count; None: they count, or it has not ended.
        ended_at: when it ended, on `kvferry._clock`; if all bytes have arrived, when the last was seen.
        planned: counts of its expansion; None before it.
        verification: the result of integrity mode; None: not compared.
        waits_since, moves_since: when it began to wait for a handshake, and to transfer, on `kvferry._clock`; 0: it has
            not.
        span: of a trace, of its transfer.
        plan_seconds: how long its descriptors were made; 0: they were not.
    """

    def __init__(self, order: RankOrder, cancellation: Cancellation | None = None) -> None:
        self.order = order
        self.ended = False
        self.error: KvferryError | None = None
        self.ended_at = 0.0
        self.planned: Planned | None = None
        self.verification: Verification | None = None
        self.waits_since = self.moves_since = self.plan_seconds = 0.0
        self.span: Span = NO_SPAN
        self._cancellation = Cancellation(order.read_id) if cancellation is None else cancellation
        self._lock = threading.Lock()
        self._starting = False
        """The transfer is being started: it may write already, and `_transfer` is not set yet."""
        self._transfer: Transfer | None = None
        self._engine: SourceEngine | None = None
        self._clearing = False
        """A device may still be clearing its tails, and there is no way to find out."""

    @property
    def quiet(self) -> bool:
        """Whether nothing can write to its blocks any more (R4)."""
        return self.ended and not self._clearing and (self._transfer is None or self._transfer.quiet)

    @property
    def bytes(self) -> int:
        """Number of bytes that have arrived."""
        return 0 if self._transfer is None else self._transfer.progress().bytes_done

    @property
    def work(self) -> ShareWork:
        """How much work it was; call this when it has ended."""
        met = self.moves_since - self.plan_seconds if self.moves_since else self.ended_at
        return ShareWork(
            handshake=max(0.0, met - self.waits_since) if self.waits_since else 0.0,
            plan=self.plan_seconds,
            move=max(0.0, self.ended_at - self.moves_since) if self.moves_since else 0.0,
            pieces=0 if self.planned is None else self.planned.pieces,
            descriptors=0 if self.planned is None else self.planned.descriptors,
            staged_bytes=0 if self.planned is None else self.planned.staged_bytes,
            verified=0 if self.verification is None else self.verification.verified,
            unverified=0 if self.verification is None else self.verification.unverified,
        )

    def progress(self) -> TransferProgress | None:
        """Return the progress of its transfer; None before the transfer began."""
        transfer = self._transfer
        return None if transfer is None else transfer.progress()

    def wait_quiet(self, timeout: float | None) -> bool:
        """Wait until nothing can write to the blocks of an ended share; returns whether that is so.

        Args:
            timeout: seconds; None: no limit.
        """
        transfer = self._transfer
        return (transfer is None or transfer.wait_quiet(timeout)) and self.quiet

    def extend(self) -> None:
        """Extend the deadline of the transfer after a renewal of the lease."""
        transfer, deadline = self._transfer, self.order.lease_deadline
        if transfer is not None and deadline is not None:
            transfer.extend(deadline)

    def stop(self) -> bool:
        """Post nothing more. Only `RankReads.cancel`, which calls this, ends the share.

        Returns:
            Whether its blocks are quiet already.
        """
        self._cancellation.cancel()
        with self._lock:
            # `begin` checks the cancellation under the same lock: either it has seen the cancellation, or `_starting`
            # or `_transfer` is set here.
            transfer, starting = self._transfer, self._starting
        if transfer is None:
            return not starting
        return transfer.cancel() and not self._clearing

    def refuse(self, error: KvferryError) -> None:
        """End a share that was never begun."""
        self.ended_at, self.error, self.ended = now(), error, True

    def begin(self, start: Callable[[], Transfer]) -> Transfer:
        """Start the transfer; raises `TransferCancelled` if the read was cancelled."""
        with self._lock:
            self._cancellation.check()
            self._starting = True
        transfer: Transfer | None = None
        try:
            transfer = start()
        finally:
            with self._lock:
                self._starting = False
                self._transfer = transfer
        # While the transfer was starting, the lease may have been renewed, or the read cancelled.
        self.extend()
        if self._cancellation.cancelled:
            transfer.cancel()
        return transfer
