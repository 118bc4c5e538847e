"""One rank's share of a read: its order, and its progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kvferry._clock import now
from kvferry._control.connection import Control
from kvferry._control.granted_steps import GrantedPart
from kvferry._control.reader_lease import ReaderLease
from kvferry._integrity.summed_blocks import Verification
from kvferry._loop import Loop, Signal
from kvferry._memory.rank_memory import Tails
from kvferry._reads.leased_read import ShareWork
from kvferry._reads.source_engines import SourceEngine, SourceKey
from kvferry._tracing import NO_SPAN, Span
from kvferry._transport.transport import Transfer
from kvferry.errors import KvferryError, TransferCancelled
from kvferry.geometry.blocks import Blocks
from kvferry.planner.expansion import Expansion
from kvferry.planner.plan import ReadPlan, RequestParts
from kvferry.planner.request_blocks import GroupRequest, needed


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The part of a publication that a read wants, and the blocks that it writes to; see `Cache.read` and
    `WorkerPort.start`."""

    blocks: Mapping[str, Blocks]
    tokens: tuple[int, int] | None = None
    layers: frozenset[str] | None = None
    tails: Tails = Tails.KEEP


@dataclass(frozen=True, slots=True, eq=False)
class RankOrder:
    """The order for one rank's share of a read from the engine `engine_id`, whose home is `home`.

    Attributes:
        lease: the transfer ends with it; one that the engine's scheduler holds, in another process, has no end here.
        granted: the source's blocks, as far as they were known; `RankRead.add` adds the others.
        wanted: its `tokens` are given unless `granted` is complete.
        deadline: time on the loop's clock at which the share fails.
        traceparent: of the read's span; empty: not traced.
    """

    read_id: str
    request_id: str
    home: Control
    engine_id: str
    incarnation: bytes
    publication: int
    reference: str = field(repr=False)
    lease: ReaderLease
    granted: GrantedPart
    wanted: Wanted
    deadline: float
    traceparent: str = ""

    @property
    def source(self) -> SourceKey:
        return self.home.address, self.engine_id, self.incarnation


Phase: TypeAlias = Literal["handshake", "plan", "move", "steps"]
"""The phases of a share that are measured, named like their fields in `ShareWork`."""


class RankRead:
    """One rank's share of a read, from its order to its end. The coroutine of `RankReads` changes the share; any thread
    may read, `stop` and `extend` it. One transfer moves the share, or, if its source publishes in steps, several, one
    after the other: each moves the blocks that were published during the transfer before.

    Attributes:
        entered: the coroutine (`task`) has begun to run.
        interrupted: the error with which the coroutine was ended early.
        error: why the bytes do not count; None: they count, or the share has not ended.
        ended_at: when the share ended, on the loop's clock; if all bytes have arrived, when the last was seen.
        verification: the result of integrity mode; None: not compared.
        parts: expands the request; None before the first expansion.
        received: blocks of the source that were not expanded, in the order of their steps.
        unfinished: the source's blocks after those received of which only some layers are complete.
        complete: `received` and the expanded blocks are all blocks.
        cleared: whether the tails were cleared; False: a device may still be clearing them, which cannot be found out.
        news: wakes the coroutine.
    """

    def __init__(self, loop: Loop, order: RankOrder) -> None:
        self.order = order
        self.task: asyncio.Task[None] | None = None
        self.entered = self.cancelled = self.ended = False
        self.interrupted: KvferryError | None = None
        self.error: KvferryError | None = None
        self.ended_at = 0.0
        self.source_ranks: frozenset[int] = frozenset()
        self.verification: Verification | None = None
        self.span: Span = NO_SPAN
        self.engine: SourceEngine | None = None
        self.parts: RequestParts | None = None
        self.received: list[Mapping[str, Blocks]] = [order.granted.blocks]
        self.unfinished = order.granted.unfinished
        self.complete = order.granted.complete
        self.cleared: Future[bool] | None = None
        self.news = Signal(loop)
        self._loop = loop
        self._phase: Phase | None = None
        self._since = 0.0
        self._seconds: dict[Phase, float] = {}
        self._pieces = self._descriptors = self._staged_bytes = 0
        self._starting = False
        """The transfer is being started: it may write already, and `transfer` is not known yet."""
        self._moving: tuple[Transfer | None, int] = None, 0
        """The last transfer; and the bytes of the transfers before, which are DONE, and so quiet."""

    @property
    def transfer(self) -> Transfer | None:
        """The last transfer; None: none was started."""
        return self._moving[0]

    @property
    def granted(self) -> Mapping[str, Blocks]:
        """The source's blocks that were expanded, by group."""
        return {} if self.parts is None else self.parts.granted

    @property
    def clearing(self) -> bool:
        """Whether the tails may still be written to."""
        return self.cleared is not None and not (self.cleared.done() and self.cleared.result())

    @property
    def quiet(self) -> bool:
        """Whether no write to the blocks is possible any more (R4)."""
        transfer = self.transfer
        return self.ended and not self.clearing and (transfer is None or transfer.quiet)

    @property
    def bytes(self) -> int:
        """Number of bytes that have arrived."""
        transfer, before = self._moving
        return before if transfer is None else before + transfer.bytes_done

    @property
    def bytes_total(self) -> int:
        """Number of bytes of the transfers so far, the present one included."""
        transfer, before = self._moving
        return before if transfer is None else before + transfer.bytes_total

    @property
    def work(self) -> ShareWork:
        compared = self.verification or Verification(0, 0)
        return ShareWork(
            **self._seconds,
            pieces=self._pieces,
            descriptors=self._descriptors,
            staged_bytes=self._staged_bytes,
            verified=compared.verified,
            unverified=compared.unverified,
        )

    @property
    def expanded(self) -> bool:
        """Whether the transfers so far, the present one included, move the whole share."""
        return self.complete and not self.received

    def set_phase(self, phase: Phase | None, at: float | None = None) -> None:
        """Begin a phase now, or at `at`; None: the share does nothing that is measured."""
        at = self._loop.now() if at is None else at
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + max(0.0, at - self._since)
        self._phase, self._since = phase, at

    def count(self, expansion: Expansion) -> None:
        self._pieces += expansion.pieces
        self._descriptors += expansion.descriptors
        for source in expansion.sources:
            self._staged_bytes += sum(staged.total_bytes for staged in source.staged)
            self.source_ranks |= {source.source_rank}

    def wait_quiet(self, timeout: float | None) -> bool:
        """Wait, at most `timeout` seconds, until an ended share is quiet; returns whether it is."""
        transfer, until = self.transfer, None if timeout is None else now() + timeout
        if transfer is not None and not transfer.wait_quiet(timeout):
            return False
        if self.cleared is not None:
            wait([self.cleared], None if until is None else max(0.0, until - now()))
        return self.quiet

    def extend(self) -> None:
        transfer = self.transfer
        if transfer is not None:
            transfer.extend(self.order.lease.deadline)

    def add(self, more: GrantedPart) -> None:
        """Add blocks that the source has published since; on the loop. Has no effect on a share that has ended, or
        whose blocks are complete."""
        if not (self.ended or self.complete):
            self.received.append(more.blocks)
            self.unfinished, self.complete = more.unfinished, more.complete
            self.news.set()

    def stop(self) -> bool:
        """Post nothing more; returns whether the blocks are quiet already. Only `RankReads.cancel`, which calls this,
        ends the share."""
        self.cancelled = True
        # `begin` sets `_starting` before it reads `cancelled`: one of the two sees the other.
        if self._starting:
            return False
        transfer = self.transfer
        return transfer is None or (transfer.cancel() and not self.clearing)

    def check(self) -> None:
        if self.cancelled:
            read_id = self.order.read_id
            raise TransferCancelled(f"read {read_id} was cancelled", read_id=read_id)

    def moved(self, plan: ReadPlan) -> dict[str, GroupRequest]:
        """The blocks that an expanded share moves, by group."""
        wanted = self.order.wanted
        return needed(plan.groups, plan.groups_by_name[0], self.granted, wanted.blocks, wanted.tokens)

    def begin(self, start: Callable[[], Transfer]) -> Transfer:
        """Start the transfer; raises `TransferCancelled` if the read was cancelled."""
        before = self.bytes
        self._starting = True
        try:
            self.check()
            transfer = start()
            self._moving = transfer, before
        finally:
            self._starting = False
        # While the transfer was starting, the lease may have been renewed, or the read cancelled.
        self.extend()
        if self.cancelled:
            transfer.cancel()
        return transfer
