"""One read whose lease this process holds, and how its shares have ended. `LeasedReads` has its lifecycle."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field

from kvferry._control.acquisition import Acquired, AcquireRequest
from kvferry._control.cancellation import Cancellation
from kvferry._reads.read_times import ShareWork, Stamps
from kvferry._tracing import NO_SPAN, Span
from kvferry.errors import KvferryError, PromptMismatch, TransferCancelled, TransferError

logger = logging.getLogger(__name__)


class ReadStage(enum.Enum):
    """The stage of a read; see `kvferry._reads.leased_reads`."""

    WAITING = "waiting"
    GRANTED = "granted"
    REFUSED = "refused"
    READING = "reading"
    JUDGING = "judging"
    ENDED = "ended"


UNDER_WAY = (ReadStage.GRANTED, ReadStage.READING, ReadStage.JUDGING)
"""Stages in which a read holds a lease."""


@dataclass(frozen=True, slots=True)
class ShareEnd:
    """Says how one rank's share of a read ended.

    Attributes:
        error: why its bytes do not count; None: all have arrived.
        quiet: nothing can write to its blocks any more.
        bytes: number of bytes that have arrived.
        work: how much work it was.
    """

    error: KvferryError | None
    quiet: bool
    bytes: int
    work: ShareWork = field(default_factory=ShareWork)


@dataclass(slots=True, eq=False)
class LeasedRead:
    """One read. Only its `LeasedReads` changes it, with the lock held.

    Attributes:
        request: the request for its lease.
        ranks: the ranks that read a share.
        cancellation: interrupts the wait for its lease.
        stage: its stage.
        acquired: its lease and the blocks that the lease covers, once granted; of a progressive read the first of them.
        complete: all blocks are known.
        until: end of the tokens that it takes, once that is known.
        payload: opaque bytes from the source, once all blocks are known.
        error: why the read fails; None: it has not failed so far.
        ends: how the shares have ended, by rank.
        not_quiet: ranks whose share has ended, and whose blocks may still be written to.
        ended_at: when the last share ended, on `kvferry._clock`.
        confirmed: the home answered VALID. If False, the reader's own deadline decided.
        disputed: it ended well on the reader's own deadline, and the home has said since that its lease had ended.
        stamps: when it reached its stages.
        span, acquiring, judging: the spans of a trace, of the whole read and of two of its parts.
    """

    request: AcquireRequest
    ranks: frozenset[int]
    cancellation: Cancellation
    stage: ReadStage = ReadStage.WAITING
    acquired: Acquired | None = None
    complete: bool = False
    until: int = 0
    payload: bytes = b""
    error: KvferryError | None = None
    ends: dict[int, ShareEnd] = field(default_factory=dict)
    not_quiet: set[int] = field(default_factory=set)
    ended_at: float = 0.0
    confirmed: bool = False
    disputed: bool = False
    stamps: Stamps = field(default_factory=Stamps)
    span: Span = NO_SPAN
    acquiring: Span = NO_SPAN
    judging: Span = NO_SPAN
    _judging_since: float = 0.0

    @property
    def read_id(self) -> str:
        """The name that its ranks share."""
        return self.request.read_id

    @property
    def bytes(self) -> int:
        """Number of bytes that have arrived on the ranks that have ended."""
        return sum(end.bytes for end in self.ends.values())

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks that have not reported the end of their share."""
        return tuple(sorted(self.ranks - set(self.ends)))


def log_end(read: LeasedRead, how: str) -> None:
    """Log the end of a read under the names that its home and its source use as well."""
    level = logging.DEBUG if read.error is None or isinstance(read.error, TransferCancelled) else logging.INFO
    if isinstance(read.error, PromptMismatch):
        level = logging.ERROR
    if not logger.isEnabledFor(level):
        return
    reference, acquired = read.request.reference, read.acquired
    logger.log(
        level,
        "read %r %s: request_id=%r publication=%d engine_id=%r bytes=%d confirmed=%s %s",
        read.read_id,
        how,
        reference.request_id if acquired is None else acquired.request_id,
        reference.publication,
        reference.engine_id,
        read.bytes,
        read.confirmed,
        "done" if read.error is None else f"{type(read.error).__name__}: {read.error}",
    )


def set_quiet(read: LeasedRead) -> None:
    """Set `quiet` of the read's error to that of the read."""
    if isinstance(read.error, TransferError):
        read.error.quiet = not read.not_quiet
