"""One acquisition: the calls and pauses from a reference to a lease and the blocks that it covers.

Once its first blocks were granted, the lease belongs to the read: an acquisition that fails then does not end it, and
one whose home has restarted continues only if the home grants the lease again before its deadline (PROTOCOL, Home
restart).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry import _arguments as arguments
from kvferry._clock import from_duration, to_duration
from kvferry._control.backoff import BACKOFF_FIRST, Backoff
from kvferry._control.connection import CALL_TIMEOUT, SILENCE, Control
from kvferry._control.granted_steps import GrantedPart, GrantedSteps
from kvferry._control.questions import AskedPrefix
from kvferry._control.reader_lease import LEASE_ID_BYTES, RENEW_LEAST, ReaderLease
from kvferry._control.renewals import Renewals
from kvferry._control.right_prompt import ReaderPrompt
from kvferry._logs import Log
from kvferry._loop import Loop
from kvferry._prompt import Prompt
from kvferry._tracing import NO_SPAN, Span
from kvferry._wire.reference import engine_ids, format_reference, parse_reference
from kvferry.errors import (
    InternalError,
    InvalidField,
    KvferryError,
    LeaseEnded,
    NotPublished,
    PublicationAborted,
    PublicationTimeout,
    TransferExpired,
    Unreachable,
)
from kvferry.v1 import kv_transfer_pb2 as pb

logger = Log(__name__)

Found = TypeVar("Found", "Acquired", "GrantedPart")

HOME_PATIENCE = 15.0
"""Seconds after which a read gives up on an unreachable home. A restart takes less, and so does an engine's ttl. The
engine can then recompute instead of waiting for the whole timeout of the read."""

CALLS_AT_ONCE = 128
"""Calls of one attempt that may follow each other without a pause although each is answered at once: as many as the
largest publication takes. A call that waits for its answer counts less, since the reader of a long prompt must not
pause when its source publishes the last of many parts."""

ASKED_AT_ONCE = 256
"""Requests of one engine for whose publications its home is asked at once. Further ones wait for their turn: an engine
that publishes nothing must not take all the places that its home has for the reads of this host (R10)."""

ACCEPTED_PATIENCE = 1.0
"""Seconds for which a cancelled read waits for its lease, in order to end the lease."""


@dataclass(frozen=True, slots=True)
class ReadTerms:
    """How a publication is acquired: arguments that `Cache.read` explains. They are checked here."""

    timeout: float
    traceparent: str = ""
    prompt: Prompt = Prompt.unknown
    progressive: bool = False
    expected_reads: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", arguments.seconds("timeout", self.timeout))
        arguments.check_fields(self)
        arguments.integer("expected_reads", self.expected_reads, 0, 2**31 - 1)


@dataclass(slots=True, eq=False)
class AcquireRequest:
    """Asks for one read of one publication. Once a read with a router's reference is accepted, `reference` and `text`
    are the publication's own, and `given` is the router's.

    Attributes:
        read_id: the name that the ranks of the read share; the home gets a value derived from this name.
        parties: number of ranks that will report.
        expected_reads: number of reads that will be made of the publication; 0: the number that its source gave.
        deadline: time on `kvferry._clock` until which to wait for the publication.
        progressive: return the lease with the first blocks; if False, with all blocks.
        given: the reference that the reader was given, if it is another one than `text`.
        hint: the hint in the given reference; empty: none, or it must not be used.
        asked: what the source is asked to publish under the reference; None: nothing, since somebody else has.
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
    hint: bytes = field(default=b"", repr=False)
    asked: AskedPrefix | None = None

    def is_for(self, reference: str) -> bool:
        """Whether this reference is the publication's own, or the one that the engine gave."""
        return reference in (self.text, self.given)

    def found(self, reference: str, source: pb.EngineRef, publication: int) -> None:
        """Use the publication's own reference from now on. Its home stays the one that was asked, also in the string:
        the answer of a home must not direct this client, or a later owner of the string, to another host.

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
    """A lease, and the first blocks that the lease covers.

    Attributes:
        lease: renewed until it is dropped from the renewals.
        request_id: the source's name for the request.
        part: if it is not `complete`, further parts follow.
        accepted_at: when the home's promise arrived, on `kvferry._clock`; for metrics.
    """

    lease: ReaderLease
    source: pb.EngineRef
    request_id: str
    part: GrantedPart
    accepted_at: float = 0.0

    @property
    def hinted(self) -> bool:
        """Whether there is no lease: the blocks are from a hint, and count only once the home has validated the
        read."""
        return not self.lease.lease_id

    def promises_as(self, other: Acquired) -> bool:
        """Whether both are the same but for their leases."""
        mine, theirs = self.part, other.part
        promised = (self.source, self.request_id, mine.blocks, mine.told, mine.complete)
        return promised == (other.source, other.request_id, theirs.blocks, theirs.told, theirs.complete)


class Acquisition:
    """The acquisition of one read: a sequence of calls and pauses. Belongs to the client's event loop.

    Args:
        asked: the request of the calls.
        renewals: renews the lease from its acceptance on.
        give_up: ends a lease that is no longer needed, at its home.
        aside: runs a coroutine that outlives a cancelled acquisition.
        turns: `ASKED_AT_ONCE`, for all acquisitions from the same engine.
        changed: called after each change of the lease; see `ReaderLease.changed`.
    """

    def __init__(
        self,
        loop: Loop,
        request: AcquireRequest,
        asked: pb.ReadBlocksRequest,
        renewals: Renewals,
        give_up: Callable[[Control, ReaderLease, pb.RankOutcome.ValueType], object],
        aside: Callable[[Coroutine[Any, Any, None]], object],
        turns: asyncio.Semaphore,
        changed: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._request = request
        self._asked = asked
        self._renewals = renewals
        self._give_up = give_up
        self._aside = aside
        self._turns = turns
        self._changed = changed
        self._backoff = Backoff()
        self._began, self._said = loop.now(), False

        self._lease: ReaderLease | None = None
        """Of the current attempt."""
        self._accepted_at = 0.0
        self._told_under = b""
        """The lease_id under which the reader has received `_steps`. A lease that was acquired again has another id,
        under which the home may count the steps differently."""
        self._had: ReaderLease | None = None
        """The last lease of all attempts."""
        self._source, self._request_id = pb.EngineRef(), request.reference.request_id
        self._steps = GrantedSteps()
        self._asked_again = False
        """The home was asked for the remaining time of the lease."""
        self._granted = False
        """The first blocks were granted: the lease belongs to the read."""
        self._over = False
        self._calls, self._pace = 0.0, Backoff()
        """Calls of the current attempt, see `CALLS_AT_ONCE`, and the pauses after answers without news."""
        self._next_call = 0.0

    async def first(self) -> Acquired:
        """Wait for the lease and its blocks: all of them, or the first, if the request is progressive.

        Raises:
            KvferryError: repeating cannot help: `PromptMismatch`, `PublicationTimeout` (the publication was not
                complete in time), `PublicationAborted` (the source withdrew it), or another error from the home.
        """
        outcome: pb.RankOutcome.ValueType = pb.RANK_OUTCOME_CANCELLED
        try:
            self._request.prompt.refuse(self._request.reference)
            await self._take_turn()
            try:
                acquired = await self._next(Acquired)
            finally:
                self._turns.release()
            self._check(acquired)
            self._granted, self._over = True, acquired.part.complete
        except KvferryError:
            outcome = pb.RANK_OUTCOME_FAILED
            raise
        finally:
            if not self._granted:
                self._over = True
                if self._lease is not None:
                    self._renewals.drop(self._lease)
                if self._had is not None:
                    # So that the source need not wait until the lease expires.
                    self._give_up(self._request.home, self._had, outcome)
        return acquired

    async def _take_turn(self) -> None:
        if not self._turns.locked():
            await self._turns.acquire()
            return
        taking = asyncio.ensure_future(self._turns.acquire())
        try:
            await asyncio.wait((taking,), timeout=max(0.0, self._request.deadline - self._loop.now()))
            if not taking.done():
                raise timed_out(self._request)
        except BaseException:
            # The turn may come in the same moment.
            taking.add_done_callback(self._give_turn_back)
            taking.cancel()
            raise

    def _give_turn_back(self, taking: asyncio.Future[Any]) -> None:
        if not taking.cancelled():
            self._turns.release()

    def _check(self, acquired: Acquired) -> None:
        """Raise an error for blocks that are of no use; the lease is given back then."""

    async def more(self) -> GrantedPart:
        """Wait for the blocks that the source has published since.

        Raises:
            KvferryError: see `first`. The lease stays the read's.
        """
        try:
            found = await self._next(GrantedPart)
        except BaseException:
            self._over = True
            raise
        self._over = found.complete
        return found

    async def _next(self, kind: type[Found]) -> Found:
        """Ask until there are blocks that the reader has not received."""
        while True:
            try:
                if (pause := self._next_call - self._loop.now()) > 0:
                    await asyncio.sleep(pause)
                found = await self._ask()
            except Exception as error:
                await self._pause_after(self._typed(error))
            else:
                if isinstance(found, kind):
                    return found

    async def _ask(self) -> Acquired | GrantedPart | None:
        request, lease, sent_at = self._request, self._lease, self._loop.now()
        left = request.deadline - sent_at
        if lease is not None and left <= 0:
            raise timed_out(request)
        left = max(0.001, left)
        asked = pb.ReadBlocksRequest(lease_id=self._told_under, next_step=len(self._steps), wait=to_duration(left))
        asked.MergeFrom(self._asked)
        with request.span.calling():
            call = request.home.read_blocks(asked, left)
        try:
            # Not the call itself, which would be cancelled with the read: it may still be granted a lease.
            await asyncio.wait([call])
            answer = call.result()
        except asyncio.CancelledError:
            if lease is None:
                self._aside(self._end_unseen(call, sent_at))
            else:
                call.cancel()
            raise
        news = bool(answer.blocks) or lease is None
        found = self._take(answer, sent_at)
        if news:
            self._pace = Backoff()
        self._calls = max(0.0, self._calls + 1.0 - (self._loop.now() - sent_at) / BACKOFF_FIRST)
        # Pause even so: a home may answer every call at once, with nothing or next to nothing.
        pace = self._pace.next() if not news else 0.0 if self._calls <= CALLS_AT_ONCE else BACKOFF_FIRST
        self._next_call = min(sent_at + pace, request.deadline)
        return found

    async def _end_unseen(self, call: asyncio.Future[pb.ReadBlocksResponse], sent_at: float) -> None:
        """Wait a moment for the answer of a call whose read was cancelled: a lease that was granted and never seen
        would pin the source's blocks until the lease ends."""
        stop = self._loop.at(self._loop.now() + ACCEPTED_PATIENCE, call.cancel)
        try:
            accepted = (await call).accepted
        except KvferryError:
            return
        finally:
            stop.cancel()
        if len(accepted.lease_id) == LEASE_ID_BYTES:
            self._give_up(self._request.home, _lease(accepted, sent_at), pb.RANK_OUTCOME_CANCELLED)

    def _typed(self, error: Exception) -> KvferryError:
        if isinstance(error, KvferryError):
            return error
        address = self._request.home.address
        logger.error("asking %s for %s failed", address, _named(self._request), exc_info=error)
        return InternalError(f"asking {address} failed: {error!r}", address=address)

    async def _pause_after(self, error: KvferryError) -> None:
        """Pause after the failure of an attempt; raises the error if another attempt cannot help."""
        request, lease = self._request, self._lease
        self._calls, self._pace, self._next_call = 0.0, Backoff(), 0.0
        if self._granted and isinstance(error, LeaseEnded):
            error = _expired(request, "ended before the last step")
        elif lease is not None and (
            isinstance(error, LeaseEnded) or (error.retryable and request.deadline - self._loop.now() < BACKOFF_FIRST)
        ):
            # The home answered without all blocks until the wait or the deadline of the call ended.
            error = timed_out(request)
        if lease is not None and not self._granted:
            self._renewals.drop(lease)
            self._lease, self._told_under, self._steps = None, b"", GrantedSteps()
        pause = self._backoff.next(error.retry_after)
        hopeless = isinstance(error, Unreachable) and request.home.unreachable_for > HOME_PATIENCE
        if not error.retryable or self._loop.now() + pause >= request.deadline or hopeless:
            raise error
        if not self._said and self._loop.now() - self._began >= SILENCE:
            self._said = True
            request.home.complain(error, f"still waiting for {_named(request)}")
        await asyncio.sleep(pause)

    # Answers of the home.

    def _take(self, answer: pb.ReadBlocksResponse, sent_at: float) -> Acquired | GrantedPart | None:
        if answer.HasField("accepted") and not self._accept(answer.accepted, sent_at):
            return None
        lease, home = self._lease, self._request.home
        if lease is None:
            raise Unreachable(f"{home.address} did not accept the read", address=home.address)
        complete = answer.HasField("complete")
        self._steps.add(answer.blocks, answer.complete if complete else None)
        self._request.prompt.told(self._steps.marks, self._request.reference, self._request_id, complete=complete)
        if answer.HasField("revoked") and not complete:
            raise _aborted(self._request, self._request_id, answer.revoked.reason)
        if not complete and not (self._request.progressive and self._steps.gained):
            return None
        part = self._steps.take()
        if self._granted:
            return part
        return Acquired(lease, self._source, self._request_id, part, self._accepted_at)

    def _accept(self, accepted: pb.Accepted, sent_at: float) -> bool:
        """Take a lease; return whether the rest of the answer can be used. If not, the home has to be asked again."""
        home = self._request.home
        if len(accepted.lease_id) != LEASE_ID_BYTES:
            raise InvalidField("lease_id", f"{len(accepted.lease_id)} bytes", f"{LEASE_ID_BYTES} bytes")
        if self._granted:
            self._accept_again(accepted, sent_at)
            return True
        if self._lease is not None:
            # The home has lost the lease and begins with the first step again: start another attempt after a pause.
            raise Unreachable(f"{home.address} granted the read again", address=home.address)
        lease = self._lease = self._had = _lease(accepted, sent_at)
        lease.changed = self._changed
        self._accepted_at = self._loop.now()
        self._told_under = accepted.lease_id
        self._source, self._request_id = accepted.source, accepted.request_id or self._request_id
        if self._request.reference.router_key:
            self._request.found(accepted.reference, accepted.source, accepted.publication)
            # Later calls ask for this publication.
            self._asked.reference = self._request.text
        if not self._asked_again and lease.deadline - self._loop.now() < lease.renew_every:
            # The answer was late: the home has waited for a router's publication first, or could not be reached for a
            # while. The lease counts from when the call was sent, and may seem to be over. Another call returns its
            # remaining time at once.
            self._lease, self._told_under, self._asked_again = None, b"", True
            return False
        self._keep(lease)
        return True

    def _accept_again(self, accepted: pb.Accepted, sent_at: float) -> None:
        """Go on under the lease that a restarted home has granted, if it came in time."""
        lease, remaining = self._lease, from_duration(accepted.remaining)
        if lease is None or not lease.acquired_again(accepted.lease_id, sent_at, self._loop.now(), remaining):
            self._give_up(self._request.home, _lease(accepted, sent_at), pb.RANK_OUTCOME_CANCELLED)
            raise _expired(self._request, "was granted again too late")
        self._told_under = accepted.lease_id
        self._steps.again()
        # A transfer that is under way must not end with the lease that the home has lost.
        self._keep(lease)

    # Keeping the lease.

    def _keep(self, lease: ReaderLease) -> None:
        name = f"the read of {_named(self._request)}"

        def lost() -> None:
            self._loop.spawn(self._acquire_again(lease), name)

        self._renewals.keep(lease, self._request.home, self._asked.reader, name, lost)

    async def _acquire_again(self, lease: ReaderLease) -> None:
        """Ask for a lease that its home has lost in a restart, until the home grants it again or its deadline has
        passed. A transfer that is under way goes on meanwhile."""
        home, backoff = self._request.home, Backoff(jitter=0.5)
        while not lease.ended:
            sent_at = self._loop.now()
            try:
                left = max(0.001, min(CALL_TIMEOUT, lease.deadline - sent_at))
                accepted = (await home.read_blocks(self._asked, left)).accepted
                if len(accepted.lease_id) != LEASE_ID_BYTES:
                    raise Unreachable(f"{home.address} did not accept the read", address=home.address)
            except KvferryError as error:
                pause = backoff.next(error.retry_after)
                if not error.retryable or self._loop.now() + pause >= lease.deadline:
                    if not lease.ended:
                        what = _named(self._request)
                        logger.warning("the lease on %s was lost and could not be acquired again: %s", what, error)
                    return
                await asyncio.sleep(pause)
                continue
            remaining = from_duration(accepted.remaining)
            if lease.acquired_again(accepted.lease_id, sent_at, self._loop.now(), remaining):
                self._keep(lease)
            elif self._over or (self._granted and lease.ended):
                # The lease pins the source. A read that still waits uses it, or will.
                self._give_up(home, _lease(accepted, sent_at), pb.RANK_OUTCOME_CANCELLED)
            return


def _lease(accepted: pb.Accepted, sent_at: float) -> ReaderLease:
    remaining, every = from_duration(accepted.remaining), from_duration(accepted.renew_every)
    return ReaderLease(accepted.lease_id, sent_at, remaining, max(RENEW_LEAST, every))


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
