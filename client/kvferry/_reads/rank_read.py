"""One rank's share of a read: what is ordered, and how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvferry._clock import now
from kvferry._control.acquisition import Cancellation
from kvferry._control.connection import Control
from kvferry._control.reader_lease import ReaderLease
from kvferry._memory.tails import Tails
from kvferry._reads.source_engines import SourceEngine
from kvferry._transport.transport import Transfer, TransferProgress
from kvferry.errors import KvferryError
from kvferry.geometry.blocks import Blocks
from kvferry.planner.expansion import Expansion
from kvferry.planner.summed_blocks import Verification


@dataclass(frozen=True, slots=True)
class SchedulersLease:
    """A lease that another process holds and judges, the engine's scheduler."""

    lease_id: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class RankOrder:
    """One rank's share of a read.

    Attributes:
        read_id: of the read.
        request_id: of the read, for its engine.
        home: the source's.
        engine_id, incarnation, publication: the source and what it offers.
        reference: to the publication, for a handshake with the source.
        lease: of the read. One that this process holds ends the transfer with it.
        granted: the source's blocks by group.
        blocks: the local ones.
        tokens: the tokens wanted, ``[a, b)``; None: what was granted.
        layers: the layers wanted; None: all.
        tails: what becomes of what is not transferred.
        deadline: on `kvferry._clock`, until when to try.
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

    @property
    def source(self) -> tuple[str, str, bytes]:
        """The source as `SourceEngines` knows it."""
        return self.home.address, self.engine_id, self.incarnation

    @property
    def lease_deadline(self) -> float | None:
        """Until when bytes count, on `kvferry._clock`; None: that is not this process's to judge."""
        return self.lease.deadline if isinstance(self.lease, ReaderLease) else None


@dataclass(frozen=True, slots=True)
class Planned:
    """What a share was expanded to; see `ReadResult`."""

    staged_bytes: int
    descriptors: int
    pieces: int
    source_ranks: tuple[int, ...]

    @classmethod
    def of(cls, expansion: Expansion) -> Planned:
        """The counts of an expansion."""
        return cls(
            staged_bytes=sum(staged.total_bytes for source in expansion.sources for staged in source.staged),
            descriptors=expansion.descriptors,
            pieces=expansion.pieces,
            source_ranks=tuple(source.source_rank for source in expansion.sources),
        )


class RankRead:
    """A share: ordered, under way, or ended. Changed on the work queue of its `RankReads`; read from any thread.

    Args:
        order: what is ordered.
        cancellation: says that nobody wants it any more; None: one of its own.

    Attributes:
        order: what was ordered.
        ended: whether it has.
        error: why its bytes do not count.
        ended_at: when it ended, on `kvferry._clock`: when its last byte was seen, if all have arrived.
        planned: what it was expanded to; None before.
        verification: what integrity mode has compared.
    """

    def __init__(self, order: RankOrder, cancellation: Cancellation | None = None) -> None:
        self.order = order
        self.ended = False
        self.error: KvferryError | None = None
        self.ended_at = 0.0
        self.planned: Planned | None = None
        self.verification: Verification | None = None
        self._cancellation = Cancellation(order.read_id) if cancellation is None else cancellation
        self._lock = threading.Lock()
        self._starting = False
        """The transfer is being started: it may write, and is not known here yet."""
        self._transfer: Transfer | None = None
        self._peer: SourceEngine | None = None
        self._clearing = False
        """A device may be clearing its tails still, and cannot be asked any more."""

    @property
    def quiet(self) -> bool:
        """Whether nothing can write to its blocks any more (R4)."""
        return self.ended and not self._clearing and (self._transfer is None or self._transfer.quiet)

    @property
    def bytes(self) -> int:
        """Bytes that have arrived."""
        return 0 if self._transfer is None else self._transfer.progress().bytes_done

    def progress(self) -> TransferProgress | None:
        """How far it is; None before its transfer began."""
        transfer = self._transfer
        return None if transfer is None else transfer.progress()

    def wait_quiet(self, timeout: float | None) -> bool:
        """Once it has ended, wait until its blocks may be used again; whether they may."""
        transfer = self._transfer
        return (transfer is None or transfer.wait_quiet(timeout)) and self.quiet

    def extend(self) -> None:
        """Its lease was renewed."""
        transfer, deadline = self._transfer, self.order.lease_deadline
        if transfer is not None and deadline is not None:
            transfer.extend(deadline)

    def stop(self) -> bool:
        """Nothing is posted any more; whether nothing can write to its blocks already. `RankReads.cancel` has to be
        told, which ends it."""
        self._cancellation.cancel()
        with self._lock:
            # Whoever starts the transfer looks at the cancellation under the same lock: either he has seen it, or it is
            # seen here that he has begun.
            transfer, starting = self._transfer, self._starting
        if transfer is None:
            return not starting
        return transfer.cancel() and not self._clearing

    def refuse(self, error: KvferryError) -> None:
        """It is not begun, and never will be."""
        self.ended_at, self.error, self.ended = now(), error, True

    def begin(self, start: Callable[[], Transfer]) -> Transfer:
        """Start the transfer; raises `TransferCancelled` where nobody wants it any more."""
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
        # A renewal may have been acknowledged since the start was given the deadline, and a cancel have come.
        self.extend()
        if self._cancellation.cancelled:
            transfer.cancel()
        return transfer
