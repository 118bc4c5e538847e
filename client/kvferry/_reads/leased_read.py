"""One read whose lease this process holds, and how its shares have ended. `LeasedReads` has its lifecycle."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from kvferry._control.acquisition import Acquired, AcquireRequest
from kvferry._control.reader_lease import ReaderLease
from kvferry._logs import Log
from kvferry._loop import Loop, Signal
from kvferry._tracing import NO_SPAN
from kvferry._wire.publication import Told
from kvferry._wire.status import reason_number
from kvferry.errors import (
    KvferryError,
    PrefixMiss,
    PromptMismatch,
    TransferCancelled,
    TransferError,
    TransferExpired,
)
from kvferry.v1 import kv_transfer_pb2 as pb

logger = Log(__name__)


class ReadStage(enum.Enum):
    """The stage of a read; see `kvferry._reads.leased_reads`."""

    WAITING = "waiting"
    GRANTED = "granted"
    REFUSED = "refused"
    READING = "reading"
    JUDGING = "judging"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ShareWork:
    """The work of one rank's share of a read.

    Attributes:
        handshake: seconds of waiting for the handshake with a new source; 0: the source was known.
        plan: seconds of making descriptors of the request's blocks; 0: none were made.
        move: seconds from the start of the transfer until its last byte was seen; 0: no transfer was started. Of a
            progressive read: of its transfers together.
        steps: seconds of waiting for blocks of the source, after all published blocks were moved; 0 unless the read is
            progressive.
        pieces: number of contiguous ranges to read, before fusing and merging.
        descriptors: number of NIXL descriptors, after fusing and merging.
        staged_bytes: number of bytes that went through staging memory.
        verified, unverified: see `Verification`; 0 if integrity mode is off.
    """

    handshake: float = 0.0
    move: float = 0.0
    descriptors: int = 0
    staged_bytes: int = 0
    verified: int = 0
    unverified: int = 0
    plan: float = 0.0
    pieces: int = 0
    steps: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """Seconds that the stages of a read took; of `handshake`, `plan`, `move` and `steps` (see `ShareWork`) the longest
    that a rank took. A stage that was not reached took 0.

    Attributes:
        wait: from the request until the home promised the blocks; mostly the time that the source still computes.
        grant: from there until all blocks were known; of a progressive read, until the first were.
        attach: from there until the engine attached blocks to read into.
        steps: of a progressive read, the part of the source's computation that moving did not hide.
        judge: from the end of the last share until the home's verdict.
    """

    wait: float = 0.0
    grant: float = 0.0
    attach: float = 0.0
    handshake: float = 0.0
    move: float = 0.0
    judge: float = 0.0
    plan: float = 0.0
    steps: float = 0.0


class Stamps:
    """When a read has reached its stages, on the loop's clock; 0: not yet. See `ReadTimes`, which are the times between
    them; it has `ended` with its last share."""

    __slots__ = ("accepted", "asked", "begun", "decided", "ended", "granted")

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.accepted = self.granted = self.begun = self.ended = self.decided = 0.0

    def times(self, shares: Collection[ShareWork]) -> ReadTimes:
        """Return the seconds between the stages, with the longest of the shares."""
        longest = {
            name: max((getattr(share, name) for share in shares), default=0.0)
            for name in ("handshake", "plan", "move", "steps")
        }
        return ReadTimes(
            wait=_between(self.asked, self.accepted),
            grant=_between(self.accepted, self.granted),
            attach=_between(self.granted, self.begun),
            judge=_between(self.ended, self.decided),
            **longest,
        )


@dataclass(frozen=True, slots=True)
class ShareEnd:
    """The end of one rank's share of a read. `error`: why the bytes do not count; None: all have arrived. `quiet`: no
    write to the blocks is possible any more."""

    error: KvferryError | None
    quiet: bool
    bytes: int
    work: ShareWork = field(default_factory=ShareWork)


class LeasedRead:
    """One read. Only its `LeasedReads` changes it, with the lock held.

    Attributes:
        request: the request for the lease; of a router's reference, later that for the publication's own.
        acquired: the lease with its blocks, once granted; of a progressive read with the first blocks.
        lease: the lease that the bytes need now.
        not_validated: why the home did not validate a read from a hint.
        complete: all blocks are known.
        until: end of the tokens that are read, once known.
        told: what the source has told so far, beside its blocks.
        error: why the read fails; None: no failure so far.
        ends: by rank.
        not_quiet: ranks whose share has ended, and whose blocks may still be written to.
        ended_at: when the last share ended, on the loop's clock.
        verdict_by: until when to wait for the home's verdict, once the end was reported.
        answered, verdict: the home has answered the report, with this verdict; None: with no verdict.
        confirmed: the home answered VALID. If False, the reader's own deadline decided.
        span, acquiring, judging: the spans of a trace: the whole read, and two of its parts.
        news: wakes the read's coroutine (`lead`) after a change.
    """

    def __init__(self, loop: Loop, request: AcquireRequest, ranks: frozenset[int]) -> None:
        self.request = request
        self.ranks = ranks
        self.stage = ReadStage.WAITING
        self.acquired: Acquired | None = None
        self.lease = ReaderLease.without_end()
        self.not_validated: KvferryError | None = None
        self.complete = False
        self.until = 0
        self.told = Told()
        self.error: KvferryError | None = None
        self.ends: dict[int, ShareEnd] = {}
        self.not_quiet: set[int] = set()
        self.ended_at = 0.0
        self.verdict_by = math.inf
        self.answered = False
        self.verdict: pb.Verdict.ValueType | None = None
        self.confirmed = False
        self.stamps = Stamps(loop.now())
        self.span = self.acquiring = self.judging = NO_SPAN
        self.news = Signal(loop)
        self.lead: asyncio.Task[None] | None = None

    @property
    def read_id(self) -> str:
        return self.request.read_id

    @property
    def hinted(self) -> bool:
        """Whether the read has the blocks of a hint, and no lease."""
        return self.acquired is not None and self.acquired.hinted

    @property
    def bytes(self) -> int:
        """Number of bytes that have arrived on the ranks that have ended."""
        return sum(end.bytes for end in self.ends.values())

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks that have not reported the end of their share."""
        return tuple(sorted(self.ranks - set(self.ends)))

    def expired(self, problem: str) -> TransferExpired:
        return TransferExpired(f"read {self.read_id}: {problem}", read_id=self.read_id)

    def uncovered(self, why: str) -> TransferExpired:
        """Make the error of a read whose blocks may have been released: only the home can know."""
        return self.expired(f"its bytes do not count: {why}")

    def set_quiet(self) -> None:
        """Set `quiet` of the read's error to that of the read."""
        if isinstance(self.error, TransferError):
            self.error.quiet = not self.not_quiet

    def reports(self) -> list[pb.RankReport]:
        """Make the reports of the shares, of which each has ended with an error of its own, or with that of the read.

        If the read failed although no share did, for example at its deadline or at the end of its lease, its successful
        and its cancelled shares are reported with the error of the read: the source then keeps the blocks for another
        reader, and its home has the reason.
        """
        error = None if any(end.error is self.error for end in self.ends.values()) else self.error
        return [_report(rank, end, error) for rank, end in sorted(self.ends.items())]

    def log_end(self, how: str) -> None:
        """Log the end of the read under the names that its home and its source use as well."""
        ordinary = self.error is None or isinstance(self.error, (TransferCancelled, PrefixMiss))
        level = logging.DEBUG if ordinary else logging.INFO
        if isinstance(self.error, PromptMismatch):
            level = logging.ERROR
        if not logger.isEnabledFor(level):
            return
        reference, acquired = self.request.reference, self.acquired
        logger.log(
            level,
            "read %r %s: request_id=%r publication=%d engine_id=%r bytes=%d confirmed=%s %s",
            self.read_id,
            how,
            reference.request_id if acquired is None else acquired.request_id,
            reference.publication,
            reference.engine_id,
            self.bytes,
            self.confirmed,
            "done" if self.error is None else f"{type(self.error).__name__}: {self.error}",
        )


def _report(rank: int, end: ShareEnd, of_read: KvferryError | None) -> pb.RankReport:
    error = of_read or end.error if isinstance(end.error, TransferCancelled) else end.error or of_read
    outcome = pb.RANK_OUTCOME_DONE if error is None else pb.RANK_OUTCOME_FAILED
    if isinstance(error, TransferExpired):
        outcome = pb.RANK_OUTCOME_EXPIRED
    elif isinstance(error, TransferCancelled):
        outcome = pb.RANK_OUTCOME_CANCELLED
    reason = reason_number("" if error is None else error.reason)
    return pb.RankReport(rank=rank, outcome=outcome, bytes=end.bytes, reason=reason)


def _between(begin: float, end: float) -> float:
    return max(0.0, end - begin) if begin and end else 0.0
