"""One acquisition: the calls and pauses from a reference to a lease and the blocks that it covers, without a thread.

It tells of the lease with the first blocks, or with all of them, and then of more blocks until they are complete. Once
it has told of its lease, the lease belongs to the read: an acquisition that fails does not end it, and one whose home
has restarted continues only if the home grants the lease again before its deadline (PROTOCOL, Home restart).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from kvferry._clock import from_duration, now, to_duration
from kvferry._control.backoff import BACKOFF_FIRST, Backoff
from kvferry._control.cancellation import Cancellation
from kvferry._control.connection import SILENCE, Control
from kvferry._control.granted_steps import GrantedSteps
from kvferry._control.reacquisition import Reacquisition
from kvferry._control.reader_lease import LEASE_ID_BYTES, RENEW_LEAST, ReaderLease
from kvferry._control.renewals import Renewals
from kvferry._control.right_prompt import ReaderPrompt
from kvferry._control.waits import Waits
from kvferry._threads import guarded
from kvferry._tracing import NO_SPAN, Span
from kvferry._wire.reference import engine_ids, format_reference, parse_reference
from kvferry._work_queue import WorkQueue
from kvferry.errors import (
    InternalError,
    InvalidField,
    KvferryError,
    LeaseEnded,
    NotPublished,
    PromptMismatch,
    PublicationAborted,
    PublicationTimeout,
    TransferCancelled,
    TransferExpired,
    Unreachable,
)
from kvferry.geometry.blocks import Blocks, Unfinished
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

HOME_PATIENCE = 15.0
"""Seconds after which a read gives up on an unreachable home. A restart takes less, and so does an engine's ttl. The
engine can then recompute instead of waiting for the whole timeout of the read."""

CALLS_AT_ONCE = 128
"""How many calls of one attempt that are answered at once may follow each other without a pause: as many as the largest
publication takes. A call that waits for its answer counts less, since the reader of a long prompt must not pause when
its source publishes the last of many parts."""

ACCEPTED_PATIENCE = 1.0
"""Seconds for which a cancelled read waits for its lease, to end it."""


@dataclass(slots=True, eq=False)
class AcquireRequest:
    """Asks for one read of one publication. Once a read with a router's reference is accepted, it has the publication's
    own.

    Attributes:
        home: connection to the source's home.
        reference: the parsed reference.
        text: the reference as a string.
        read_id: the name that the ranks of the read share; the home gets a value derived from it.
        parties: how many ranks will report.
        expected_reads: how many reads will be made of the publication; 0: the number that its source gave.
        deadline: time on `kvferry._clock` until which to wait for the publication.
        prompt: what the publication has to be of.
        span: the span of a trace that the calls belong to.
        progressive: tell of the lease with the first blocks; if False, with all blocks.
        given: the reference as the engine gave it, if that is another one than `text` now.
    """

    home: Control
    reference: pb.Reference = field(repr=False)
    text: str = field(repr=False)
    read_id: str
    parties: int
    expected_reads: int
    deadline: float
    prompt: ReaderPrompt = field(default_factory=ReaderPrompt)
    span: Span = NO_SPAN
    progressive: bool = False
    given: str = field(default="", repr=False)

    def is_for(self, reference: str) -> bool:
        """Whether the engine gave this reference, or it is the publication's own."""
        return reference in (self.text, self.given)

    def found(self, reference: str, source: pb.EngineRef, publication: int) -> None:
        """Use the publication's own reference from now on. Its home stays the one that was asked, also in the string:
        what another home says must not direct this client, or who gets the string from it, anywhere.

        Raises:
            InvalidField, BadReference: the home's answer contradicts itself, or is about another engine.
        """
        parsed, asked = parse_reference(reference), self.reference
        named = (parsed.engine_id, parsed.incarnation, parsed.publication)
        if parsed.router_key or named != (source.engine_id, source.incarnation, publication):
            raise InvalidField("reference of a publication", "another publication's", "that of the one accepted")
        engines = engine_ids(asked.engine_id, asked.data_parallel_rank)
        if parsed.engine_id not in engines:
            raise InvalidField("source of a publication", parsed.engine_id, f"{' or '.join(engines)}, as asked")
        parsed.home, self.given = asked.home, self.text
        self.reference, self.text = parsed, format_reference(parsed)


@dataclass(frozen=True, slots=True, eq=False)
class Acquired:
    """A lease, and the blocks that it covers so far.

    Attributes:
        lease: the lease; renewed until it is dropped from the renewals.
        source: the source engine and its incarnation.
        request_id: the source's name for the request.
        blocks: the source's blocks by group.
        payload: opaque bytes from the source; empty until the blocks are complete.
        accepted_at: when the home's promise arrived, on `kvferry._clock`; for metrics.
        complete: these are all blocks. If False, `MoreBlocks` follow.
        unfinished: the blocks after these of which only some layers are complete.
    """

    lease: ReaderLease
    source: pb.EngineRef
    request_id: str
    blocks: dict[str, Blocks]
    payload: bytes
    accepted_at: float = 0.0
    complete: bool = True
    unfinished: Unfinished | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MoreBlocks:
    """The blocks that a source has published since those before.

    Attributes:
        blocks: what groups have gained, each from where it ended.
        payload: opaque bytes from the source; empty until the blocks are complete.
        complete: no more follow.
        unfinished: the blocks after these of which only some layers are complete.
    """

    blocks: dict[str, Blocks]
    payload: bytes
    complete: bool
    unfinished: Unfinished | None = None


Told: TypeAlias = "Acquired | MoreBlocks | KvferryError"
"""What an acquisition tells: first `Acquired` or an error, and after blocks that are not complete `MoreBlocks` or an
error. Nothing follows an error, or blocks that are complete."""


class Acquisition:
    """The acquisition of one read: a sequence of calls and pauses.

    Answers are handled on gRPC's thread for that home, so that a home with large answers delays no other home. The ends
    of pauses are handled on the thread of `work`. The two never overlap: each begins when the other has ended.
    """

    def __init__(
        self,
        request: AcquireRequest,
        asked: pb.ReadBlocksRequest,
        cancellation: Cancellation,
        work: WorkQueue,
        renewals: Renewals,
        gave_up: Callable[[Control, ReaderLease, pb.RankOutcome.ValueType], object],
        extended: Callable[[float], None],
        tell: Callable[[Told], None],
    ) -> None:
        self._request = request
        self._asked = asked
        self._cancellation = cancellation
        self._work = work
        self._renewals = renewals
        self._gave_up = gave_up
        self._extended = extended
        self._tell = tell
        self._backoff = Backoff()
        self._began, self._said = now(), False

        self._lease: ReaderLease | None = None
        """The lease of the current attempt."""
        self._accepted_at = 0.0
        self._told_under = b""
        """The lease_id when it was granted. The steps that the reader has were told under it: a lease that was acquired
        again has another id, under which the home may count them differently."""
        self._had: ReaderLease | None = None
        """The last lease of all attempts."""
        self._source, self._request_id = pb.EngineRef(), request.reference.request_id
        self._steps = GrantedSteps()
        self._asked_again = False
        """What is left of the lease was asked for."""
        self._told = False
        """The lease was told of: it belongs to the read."""
        self._calls, self._pace = 0.0, Backoff()
        """Calls of the current attempt, see `CALLS_AT_ONCE`, and the pauses after calls that were answered with
        nothing."""
        self._over = False

        self._waits = Waits()

    def begin(self) -> None:
        """Make the first call."""
        self._cancellation.interrupt_by(self._waits.interrupt)
        try:
            self._request.prompt.refuse(self._request.reference)
        except PromptMismatch as error:
            self._end(error)
            return
        self._ask()

    # Waiting for a call or a pause.

    def _ask(self) -> None:
        """Make a call."""
        left, lease = self._request.deadline - now(), self._lease
        if self._cancellation.cancelled or (lease is not None and left <= 0):
            self._failed(timed_out(self._request))
            return
        left = max(0.001, left)
        call = pb.ReadBlocksRequest(lease_id=self._told_under, next_step=len(self._steps), wait=to_duration(left))
        call.MergeFrom(self._asked)
        wait = self._waits.begin()
        try:
            with self._request.span.calling():
                cancel = self._request.home.read_blocks_later(call, left, partial(self._answered, wait, now()))
        except Exception as error:
            if self._waits.ends(wait):
                self._failed(self._unexpected(error))
            return
        # Wait a moment for the answer: a lease that was granted and never seen would pin the source until it ends.
        stop = partial(self._work.do_later, ACCEPTED_PATIENCE, cancel) if lease is None else cancel
        self._waits.stop_by(wait, stop)

    def _pause(self, seconds: float) -> None:
        """Make the next call after this time, or when the read is cancelled."""
        wait = self._waits.begin()
        resume = partial(self._resumed, wait)
        self._work.do_later(seconds, resume)
        self._waits.stop_by(wait, partial(self._work.do, resume))

    def _resumed(self, wait: int) -> None:
        if self._waits.ends(wait):
            self._ask()

    def _answered(self, wait: int, sent_at: float, answer: pb.ReadBlocksResponse | KvferryError) -> None:
        if not self._waits.ends(wait):
            return
        if isinstance(answer, KvferryError):
            self._failed(answer)
            return
        news = bool(answer.blocks) or self._lease is None
        try:
            found = self._take(answer, sent_at)
        except Exception as error:
            self._failed(self._unexpected(error))
            return
        if found is not None and found.complete:
            self._end(found)
            return
        if found is not None:
            self._call(found)
        if news:
            self._pace = Backoff()
        self._calls = max(0.0, self._calls + 1.0 - (now() - sent_at) / BACKOFF_FIRST)
        # Pause even so: a home may answer every call at once, with nothing or next to nothing.
        pace = self._pace.next() if not news else 0.0 if self._calls <= CALLS_AT_ONCE else BACKOFF_FIRST
        pause = min(sent_at + pace, self._request.deadline) - now()
        if pause > 0:
            self._pause(pause)
        else:
            self._ask()

    def _unexpected(self, error: Exception) -> KvferryError:
        """Convert an unexpected exception to an error of the client, and log it."""
        if isinstance(error, KvferryError):
            return error
        address = self._request.home.address
        logger.error("asking %s for %s failed", address, _named(self._request), exc_info=error)
        return InternalError(f"asking {address} failed: {error!r}", address=address)

    # Answers of the home.

    def _take(self, answer: pb.ReadBlocksResponse, sent_at: float) -> Acquired | MoreBlocks | None:
        if answer.HasField("accepted") and not self._accept(answer.accepted, sent_at):
            return None
        lease, home = self._lease, self._request.home
        if lease is None:
            raise Unreachable(f"{home.address} did not accept the read", address=home.address)
        self._steps.add(answer.blocks)
        complete = answer.HasField("complete")
        self._request.prompt.told(self._steps.marks, self._request.reference, self._request_id, complete=complete)
        if complete and answer.complete.steps != len(self._steps):
            expected = f"{len(self._steps)}, the steps that came before it"
            raise InvalidField("number of a publication's steps", answer.complete.steps, expected)
        if answer.HasField("revoked") and not complete:
            raise _aborted(self._request, self._request_id, answer.revoked.reason)
        if not complete and not (self._request.progressive and self._steps.gained):
            return None
        blocks, payload, unfinished = self._steps.take(), answer.complete.payload, self._steps.unfinished
        if self._told:
            return MoreBlocks(blocks, payload, complete, unfinished)
        source, at = self._source, self._accepted_at
        return Acquired(lease, source, self._request_id, blocks, payload, at, complete, unfinished)

    def _accept(self, accepted: pb.Accepted, sent_at: float) -> bool:
        """Take a lease; return whether the answer has all that goes with it. If not, it has to be asked for again."""
        home = self._request.home
        if len(accepted.lease_id) != LEASE_ID_BYTES:
            raise InvalidField("lease_id", f"{len(accepted.lease_id)} bytes", f"{LEASE_ID_BYTES} bytes")
        if self._told:
            self._accept_again(accepted, sent_at)
            return True
        if self._lease is not None:
            # The home has lost the lease and begins with the first step again: start another attempt after a pause.
            raise Unreachable(f"{home.address} granted the read again", address=home.address)
        remaining, every = from_duration(accepted.remaining), from_duration(accepted.renew_every)
        lease = ReaderLease(accepted.lease_id, sent_at, remaining, max(RENEW_LEAST, every))
        self._lease = self._had = lease
        self._accepted_at = now()
        self._told_under = accepted.lease_id
        self._source, self._request_id = accepted.source, accepted.request_id or self._request_id
        if self._request.reference.router_key:
            self._request.found(accepted.reference, accepted.source, accepted.publication)
            # What asks again, asks for this publication.
            self._asked.reference = self._request.text
        if not self._asked_again and lease.deadline - now() < lease.renew_every:
            # The answer was late: the home has waited for a router's publication first, or could not be reached for a
            # while. The lease counts from when it was asked for, and may seem to be over. The home says at once what is
            # left of it.
            self._lease, self._told_under, self._asked_again = None, b"", True
            return False
        self._keep(lease)
        self._cancellation.check()
        return True

    def _accept_again(self, accepted: pb.Accepted, sent_at: float) -> None:
        """Go on under the lease that a restarted home has granted, if it came in time."""
        lease, remaining = self._lease, from_duration(accepted.remaining)
        if lease is None or not lease.acquired_again(accepted.lease_id, sent_at, now(), remaining):
            self._gave_up(
                self._request.home,
                ReaderLease(accepted.lease_id, sent_at, remaining, remaining),
                pb.RANK_OUTCOME_CANCELLED,
            )
            raise _expired(self._request, "was granted again too late")
        self._told_under = accepted.lease_id
        self._steps.again()
        # A transfer that is under way must not end with the lease that the home has lost.
        self._kept_again(lease)

    # The end of an attempt, and of the acquisition.

    def _failed(self, error: KvferryError) -> None:
        """Handle the failure of an attempt: start another one if that can help."""
        request, lease = self._request, self._lease
        self._calls, self._pace = 0.0, Backoff()
        if self._told and isinstance(error, LeaseEnded):
            error = _expired(request, "ended before the last step")
        elif lease is not None and (
            isinstance(error, LeaseEnded) or (error.retryable and request.deadline - now() < BACKOFF_FIRST)
        ):
            # The home answered without all blocks until the wait or the deadline of the call ended.
            error = timed_out(request)
        if lease is not None and not self._told:
            self._renewals.drop(lease)
            self._lease, self._told_under, self._steps = None, b"", GrantedSteps()
        try:
            self._cancellation.check()
        except TransferCancelled as cancelled:
            error = cancelled
        pause = self._backoff.next(error.retry_after)
        hopeless = isinstance(error, Unreachable) and request.home.unreachable_for > HOME_PATIENCE
        if not error.retryable or now() + pause >= request.deadline or hopeless:
            self._end(error)
            return
        if not self._said and now() - self._began >= SILENCE:
            self._said = True
            request.home.complain(error, f"still waiting for {_named(request)}")
        self._pause(pause)

    def _end(self, outcome: Told) -> None:
        self._over, self._steps = True, GrantedSteps()
        self._cancellation.interrupt_by(None)
        try:
            if self._had is not None and isinstance(outcome, KvferryError) and not self._told:
                # End the lease, so that the source need not wait until it expires.
                cancelled = isinstance(outcome, TransferCancelled)
                why = pb.RANK_OUTCOME_CANCELLED if cancelled else pb.RANK_OUTCOME_FAILED
                self._gave_up(self._request.home, self._had, why)
        except Exception:
            logger.exception("the lease on %s could not be ended", _named(self._request))
        self._call(outcome)

    def _call(self, told: Told) -> None:
        self._told = self._told or isinstance(told, Acquired)
        guarded(partial(self._tell, told), f"a callback for the blocks of {_named(self._request)}")

    # Keeping the lease.

    def _keep(self, lease: ReaderLease) -> None:
        what, home = _named(self._request), self._request.home
        again, unneeded = partial(self._kept_again, lease), self._unneeded
        lost = Reacquisition(home, self._asked, what, lease, self._work, again, unneeded).ask
        self._renewals.keep(lease, home, self._asked.reader, f"the read of {what}", self._extended, lost)

    def _kept_again(self, lease: ReaderLease) -> None:
        self._keep(lease)
        self._extended(lease.deadline)

    def _unneeded(self, lease: ReaderLease) -> None:
        # The lease pins the source. A read that still waits uses it, or will.
        if self._over:
            self._gave_up(self._request.home, lease, pb.RANK_OUTCOME_CANCELLED)


def _named(request: AcquireRequest) -> str:
    if request.reference.router_key:
        return f"what engine {request.reference.engine_id!r} publishes as {request.reference.router_key!r}"
    return f"publication {request.reference.publication} of engine {request.reference.engine_id!r}"


def timed_out(request: AcquireRequest) -> PublicationTimeout:
    """Make the error for a publication that was not complete in time."""
    number, engine_id = request.reference.publication, request.reference.engine_id
    message = f"{_named(request)} was not complete in time"
    return PublicationTimeout(message, engine_id=engine_id, publication=number)


def _expired(request: AcquireRequest, how: str) -> TransferExpired:
    return TransferExpired(f"read {request.read_id}: the lease on {_named(request)} {how}", read_id=request.read_id)


def _aborted(request: AcquireRequest, request_id: str, number: int) -> NotPublished | PublicationAborted:
    if number == pb.REVOKE_REASON_NOT_PUBLISHED:
        return NotPublished(
            f"{_named(request)} was given up by its source, whose home did not take it; the source's log says why",
            engine_id=request.reference.engine_id,
            publication=request.reference.publication,
        )
    known = number in pb.RevokeReason.values()
    reason = pb.RevokeReason.Name(pb.RevokeReason.ValueType(number)) if known else f"{number}"
    return PublicationAborted(
        f"the publication of request {request_id!r} was revoked: {reason.removeprefix('REVOKE_REASON_')}",
        engine_id=request.reference.engine_id,
        publication=request.reference.publication,
    )
