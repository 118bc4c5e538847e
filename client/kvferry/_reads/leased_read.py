"""One read whose lease this process holds: how its shares have ended, and whether their bytes count (R1; PROTOCOL,
Endings). `LeasedReads` leads it."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from kvferry._control.acquire_request import Acquired, AcquireRequest
from kvferry._control.connection import NotificationAnswer
from kvferry._control.reader_lease import ReaderLease, ReaderVerdict, verdict_of
from kvferry._logs import Log
from kvferry._loop import Loop, Signal
from kvferry._tracing import NO_SPAN
from kvferry._wire.publication import Told
from kvferry._wire.status import reason_number
from kvferry.errors import (
    InternalError,
    KvferryError,
    PrefixMiss,
    PromptMismatch,
    TransferCancelled,
    TransferError,
    TransferExpired,
    TransferFailed,
    TransferStuck,
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
    """The end of one rank's share of a read. Without an error, all bytes have arrived; `quiet`: no write to the blocks
    is possible any more."""

    error: KvferryError | None
    quiet: bool
    bytes: int
    work: ShareWork = field(default_factory=ShareWork)


class LeasedRead:
    """One read. Only its `LeasedReads` changes it, with the lock held.

    Attributes:
        acquired: of a progressive read with the first blocks.
        lease: the lease that the bytes need now.
        not_validated: why the home did not validate a read from a hint.
        complete: all blocks are known.
        until: end of the tokens that are read, once known.
        told: what the source has told so far, beside its blocks.
        error: why the read fails.
        not_quiet: ranks whose share has ended, and whose blocks may still be written to.
        ended_at: when the last share ended, on the loop's clock.
        answered, verdict: the home has answered the report, with this verdict; None: with no verdict.
        confirmed: the home answered VALID. If False, the reader's own deadline decided.
        judging: the span of the wait for the verdict.
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
        self.answered = False
        self.verdict: pb.Verdict.ValueType | None = None
        self.confirmed = False
        self.stamps = Stamps(loop.now())
        self.span = self.judging = NO_SPAN
        self.news = Signal(loop)
        self.lead: asyncio.Task[None] | None = None

    @property
    def read_id(self) -> str:
        return self.request.read_id

    @property
    def hinted(self) -> bool:
        return self.acquired is not None and self.acquired.hinted

    @property
    def bytes(self) -> int:
        """Number of bytes that have arrived on the ranks that have ended."""
        return sum(end.bytes for end in self.ends.values())

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks that have not reported the end of their share."""
        return tuple(sorted(self.ranks - set(self.ends)))

    def uncovered(self, why: str) -> TransferExpired:
        """Make the error of a read whose blocks may have been released: only the home can know."""
        return self.request.expired(f"its bytes do not count: {why}")

    def overdue(self) -> TransferStuck:
        """Make the error of a read that did not end in time."""
        return TransferStuck(f"read {self.read_id} did not end in time", read_id=self.read_id)

    def failure_at(self, time: float) -> KvferryError | None:
        """Return why a read that has a lease cannot go on at this time; None: it can."""
        if self.lease.source_lost and self.silent:
            # A network card reports late, or never, that the source has stopped sending.
            engine_id, problem = self.request.reference.engine_id, "its home has lost it, so it cannot be read any more"
            return TransferFailed(f"engine {engine_id!r}: {problem}", peer=engine_id, problem=problem)
        if not self.lease.live(time):
            return self.request.expired("its lease ended before its last byte")
        if time >= self.request.deadline:
            return self.overdue() if self.complete else self.request.timed_out()
        return None

    def judge(self, time: float) -> None:
        """Give the reader's own verdict on a read whose ranks have ended."""
        self.stamps.ended = time
        if self.error is not None:
            return
        if not self.complete:
            self.error = TransferFailed(f"read {self.read_id} ended before its last block was published")
        elif self.ended_at >= self.request.deadline:
            self.error = self.overdue()
        elif not self.lease.live(self.ended_at):
            self.error = self.request.expired("it ended after its lease")

    def take_answer(self, answer: NotificationAnswer | None) -> None:
        """Take the home's answer to the report of the read; None: it has not answered, and is told again."""
        if answer is None and self.hinted:
            # There is no other verdict.
            return
        verdict = None
        if answer is not None and not isinstance(answer, KvferryError):
            if answer.HasField("read_ended"):
                verdict = answer.read_ended.verdict
            else:
                answer = InternalError(f"the end of a read was answered with {answer.WhichOneof('kind')}")
        self.judging.end(verdict="none" if verdict is None else _verdict_name(verdict))
        if isinstance(answer, KvferryError):
            self.not_validated = self.uncovered(answer.message) if answer.retryable else answer
        if not self.answered:
            self.answered, self.verdict = True, verdict
            self.news.set()
        good = self.stage is ReadStage.ENDED and self.error is None
        if verdict == pb.VERDICT_EXPIRED and good and not self.confirmed:
            logger.error(
                "read %s of publication %d of engine %s ended well by its own deadline, but its home says that its "
                "lease had ended: its bytes may be wrong. Was this machine paused?",
                self.read_id,
                self.request.reference.publication,
                self.request.reference.engine_id,
            )

    def decide(self, time: float) -> None:
        """Decide by the home's verdict; if there is none, the reader's own deadline decides."""
        self.stamps.decided = time
        verdict = verdict_of(self.ended_at, self.lease.deadline, self.verdict)
        self.confirmed = verdict is ReaderVerdict.CONFIRMED
        if self.hinted and not self.confirmed:
            late = self.uncovered("its home has not confirmed in time that its blocks were still published")
            self.error = self.error or self.not_validated or late
        elif verdict is ReaderVerdict.EXPIRED:
            self.error = self.request.expired("the home says that its lease ended")

    def set_quiet(self) -> None:
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


def _verdict_name(verdict: pb.Verdict.ValueType) -> str:
    known = verdict in pb.Verdict.values()
    return pb.Verdict.Name(verdict).removeprefix("VERDICT_").lower() if known else str(verdict)
