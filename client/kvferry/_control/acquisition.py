"""One acquisition: the calls and pauses from a reference to a lease and the blocks that it covers.

Once its first blocks were granted, the lease belongs to the read: an acquisition that fails then does not end it, and
one whose home has restarted continues only if the home grants the lease again before its deadline (PROTOCOL, Home
restart).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvferry._clock import from_duration, to_duration
from kvferry._control.acquire_request import Acquired, AcquireRequest
from kvferry._control.backoff import BACKOFF_FIRST, CALL_TIMEOUT, SILENCE, Backoff
from kvferry._control.connection import Control
from kvferry._control.granted_steps import GrantedPart, GrantedSteps
from kvferry._control.reader_lease import LEASE_ID_BYTES, RENEW_LEAST, ReaderLease
from kvferry._control.renewals import Renewals
from kvferry._logs import Log
from kvferry._loop import Loop
from kvferry.errors import InternalError, InvalidField, KvferryError, LeaseEnded, Unreachable
from kvferry.v1 import kv_transfer_pb2 as pb

logger = Log(__name__)

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


class Acquisition:
    """The acquisition of one read: a sequence of calls and pauses. Belongs to the client's event loop.

    Args:
        asked: the request of the calls.
        let_go: stops the renewals of a lease that is not needed, and ends it at its home.
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
        let_go: Callable[[Control, ReaderLease, pb.RankOutcome.ValueType], object],
        aside: Callable[[Coroutine[Any, Any, None]], object],
        turns: asyncio.Semaphore,
        changed: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._request = request
        self._asked = asked
        self._renewals = renewals
        self._let_go = let_go
        self._aside = aside
        self._turns = turns
        self._changed = changed
        self._backoff = Backoff()
        self._began, self._said = loop.now(), False
        self._left = 0.0
        self._before: KvferryError | None = None
        """The seconds that the last call could take, and the error before its own."""

        self._lease: ReaderLease | None = None
        """Of the current attempt."""
        self._accepted_at = 0.0
        self._told_under = b""
        """The lease_id under which the reader has received `_steps`. A lease that was acquired again has another id,
        under which the home may count the steps differently."""
        self._had = ReaderLease.without_end()
        """The last lease of all attempts, once there is one."""
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
        """Wait for the lease and its blocks: all of them, or the first, if the request is progressive. Raises what
        repeating cannot help: `PromptMismatch`, `PublicationTimeout` (the publication was not complete in time),
        `PublicationAborted` (the source withdrew it), or another error from the home."""
        outcome: pb.RankOutcome.ValueType = pb.RANK_OUTCOME_CANCELLED
        request = self._request
        try:
            request.prompt.refuse(request.reference)
            await self._take_turn()
            try:
                part = await self._next()
            finally:
                self._turns.release()
            if request.asked is not None:
                request.asked.check(part.blocks, complete=part.complete)
            self._granted, self._over = True, part.complete
        except KvferryError:
            outcome = pb.RANK_OUTCOME_FAILED
            raise
        finally:
            if not self._granted:
                self._over = True
                if self._had.lease_id:
                    # So that the source need not wait until the lease expires.
                    self._let_go(request.home, self._had, outcome)
        return Acquired(self._had, self._source, self._request_id, part, self._accepted_at)

    async def _take_turn(self) -> None:
        if not self._turns.locked():
            await self._turns.acquire()
            return
        taking = asyncio.ensure_future(self._turns.acquire())
        try:
            await asyncio.wait((taking,), timeout=max(0.0, self._request.deadline - self._loop.now()))
            if not taking.done():
                raise self._request.timed_out()
        except BaseException:
            # The turn may come in the same moment.
            taking.add_done_callback(self._give_turn_back)
            taking.cancel()
            raise

    def _give_turn_back(self, taking: asyncio.Future[Any]) -> None:
        if not taking.cancelled():
            self._turns.release()

    async def more(self) -> GrantedPart:
        """Wait for the blocks that the source has published since. Raises as `first`; the lease stays the read's."""
        try:
            found = await self._next()
        except BaseException:
            self._over = True
            raise
        self._over = found.complete
        return found

    async def _next(self) -> GrantedPart:
        """Ask until there are blocks that the reader has not received."""
        while True:
            try:
                if (pause := self._next_call - self._loop.now()) > 0:
                    await asyncio.sleep(pause)
                if (found := await self._ask()) is not None:
                    return found
            except KvferryError as error:
                await self._pause_after(error)
            except Exception as error:
                address = self._request.home.address
                logger.exception("asking %s for %s failed", address, self._request.named)
                await self._pause_after(InternalError(f"asking {address} failed: {error!r}", address=address))

    async def _ask(self) -> GrantedPart | None:
        request, lease, sent_at = self._request, self._lease, self._loop.now()
        left = request.deadline - sent_at
        if lease is not None and left <= 0:
            raise request.timed_out()
        left = self._left = max(0.001, left)
        asked = pb.ReadBlocksRequest(lease_id=self._told_under, next_step=len(self._steps), wait=to_duration(left))
        asked.MergeFrom(self._asked)
        with request.span.calling():
            call = request.home.read_blocks(asked, left)
        try:
            # Not the call itself, which would be cancelled with the read: it may still be granted a lease.
            await asyncio.wait([call])
            answer = call.result()
        except asyncio.CancelledError:
            # A home that has restarted has granted another lease in answer to a call with the old one.
            if lease is None or call.done():
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
            self._let_go(self._request.home, _lease(accepted, sent_at), pb.RANK_OUTCOME_CANCELLED)

    async def _pause_after(self, error: KvferryError) -> None:
        """Pause after the failure of an attempt; raises the error if another attempt cannot help."""
        request, lease = self._request, self._lease
        self._calls, self._pace, self._next_call = 0.0, Backoff(), 0.0
        if self._granted and isinstance(error, LeaseEnded):
            error = request.expired(f"the lease on {request.named} ended before the last step")
        elif lease is not None and (
            isinstance(error, LeaseEnded) or (error.retryable and request.deadline - self._loop.now() < BACKOFF_FIRST)
        ):
            # The home answered without all blocks until the wait or the deadline of the call ended.
            error = request.timed_out()
        if lease is not None and not self._granted:
            self._renewals.drop(lease)
            self._lease, self._told_under, self._steps = None, b"", GrantedSteps()
        pause = self._backoff.next(error.retry_after)
        hopeless = isinstance(error, Unreachable) and request.home.unreachable_for > HOME_PATIENCE
        if not error.retryable or self._loop.now() + pause >= request.deadline or hopeless:
            if self._before is not None and self._left < SILENCE and isinstance(error, Unreachable):
                # The deadline has cut this call short; what the home said before is the reason.
                raise self._before
            raise error
        self._before = error.with_traceback(None)
        if not self._said and self._loop.now() - self._began >= SILENCE:
            self._said = True
            request.home.complain(error, f"still waiting for {request.named}")
        await asyncio.sleep(pause)

    # Answers of the home.

    def _take(self, answer: pb.ReadBlocksResponse, sent_at: float) -> GrantedPart | None:
        if answer.HasField("accepted") and not self._accept(answer.accepted, sent_at):
            return None
        request, complete = self._request, answer.HasField("complete")
        if self._lease is None:
            raise Unreachable(f"{request.home.address} did not accept the read", address=request.home.address)
        self._steps.add(answer.blocks, answer.complete if complete else None)
        request.prompt.told(self._steps.marks, request.reference, self._request_id, complete=complete)
        if answer.HasField("revoked") and not complete:
            raise request.revoked(self._request_id, answer.revoked.reason)
        return self._steps.take() if complete or (request.progressive and self._steps.gained) else None

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
            self._had = _lease(accepted, sent_at)
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
            self._let_go(self._request.home, _lease(accepted, sent_at), pb.RANK_OUTCOME_CANCELLED)
            raise self._request.expired(f"the lease on {self._request.named} was granted again too late")
        self._told_under = accepted.lease_id
        self._steps.again()
        # A transfer that is under way must not end with the lease that the home has lost.
        self._keep(lease)

    # Keeping the lease.

    def _keep(self, lease: ReaderLease) -> None:
        name = f"the read of {self._request.named}"

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
                        what = self._request.named
                        logger.warning("the lease on %s was lost and could not be acquired again: %s", what, error)
                    return
                await asyncio.sleep(pause)
                continue
            remaining = from_duration(accepted.remaining)
            if lease.acquired_again(accepted.lease_id, sent_at, self._loop.now(), remaining):
                self._keep(lease)
            elif lease is self._had and (self._over or (self._granted and lease.ended)):
                # The lease pins the source. A read that still waits uses it, or will, and so does one that has asked
                # again by itself meanwhile.
                self._let_go(home, _lease(accepted, sent_at), pb.RANK_OUTCOME_CANCELLED)
            return


def _lease(accepted: pb.Accepted, sent_at: float) -> ReaderLease:
    remaining, every = from_duration(accepted.remaining), from_duration(accepted.renew_every)
    return ReaderLease(accepted.lease_id, sent_at, remaining, max(RENEW_LEAST, every))
