"""Renews the leases of a client's reads, with as few calls for each home and reader as possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvferry._clock import from_duration
from kvferry._control.connection import Control, NotificationAnswer
from kvferry._control.notifier import batches
from kvferry._control.reader_lease import ReaderLease
from kvferry._logs import Log
from kvferry._loop import Loop, Signal
from kvferry._threads import guarded
from kvferry.errors import Closed, InternalError, KvferryError, LeaseEnded
from kvferry.v1 import kv_transfer_pb2 as pb

logger = Log(__name__)

RENEW_TIMEOUT = 2.0
"""Least seconds to wait for the answer to a renewal. Otherwise the wait lasts until the lease ends: an overloaded home
answers late, and a repetition would be answered late as well. Meanwhile another renewal is sent in each third of the
lease's time."""

RENEW_AGAIN = 1.0
"""Seconds after which a renewal without an answer, or a refused one, is repeated."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A lease that is renewed; see `Renewals.keep`."""

    lease: ReaderLease
    home: Control
    sender: pb.EngineRef
    name: str
    lost: Callable[[], None]


class Renewals:
    """Renews leases until they are dropped, all by one coroutine. Belongs to the client's event loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._news = Signal(loop)
        self._kept: dict[ReaderLease, _Kept] = {}
        self._runs = self._closed = False
        self._wakes_at = 0.0
        """When the coroutine checks the leases next, unless it is woken."""

    def keep(
        self, lease: ReaderLease, home: Control, sender: pb.EngineRef, name: str, lost: Callable[[], None]
    ) -> None:
        """Renew a lease from now on. Does nothing for a lease that has ended, or after `close`. `name` is for logs, and
        must not contain the lease's id, which is a secret. `lost` is called once if the home has no record of the
        lease, which is then no longer renewed."""
        if self._closed or lease.ended:
            return
        self._kept[lease] = _Kept(lease, home, sender, name, lost)
        if not self._runs:
            self._runs = True
            self._loop.spawn_turns(self._turn, "the renewal of leases")
        else:
            self._wake_for(lease)

    def drop(self, lease: ReaderLease) -> None:
        """Stop renewing a lease whose read has ended."""
        lease.end()
        self._kept.pop(lease, None)

    def close(self) -> None:
        self._closed = True
        self._kept.clear()
        self._news.set()

    def _wake_for(self, lease: ReaderLease) -> None:
        """Wake the coroutine if it would sleep over a renewal; waking it for each lease would take quadratic time."""
        if lease.next_renewal is not None and lease.next_renewal < self._wakes_at:
            self._news.set()

    async def _turn(self) -> bool:
        """Send the renewals that are due, or wait for the next; returns whether there are leases."""
        self._runs = bool(self._kept)
        time = self._loop.now()
        pending = [(at, kept) for kept in self._kept.values() if (at := kept.lease.next_renewal) is not None]
        # One request is sent by one reader, and can renew only that reader's leases.
        due: dict[tuple[Control, str, bytes], list[_Kept]] = {}
        for at, kept in pending:
            if at <= time:
                reader = kept.home, kept.sender.engine_id, kept.sender.incarnation
                due.setdefault(reader, []).append(kept)
        for leases in due.values():
            self._renew(leases)
        if self._runs and not due:
            self._wakes_at = min((at for at, _ in pending), default=math.inf)
            await self._news.wait(self._wakes_at)
        return self._runs

    def _renew(self, due: Sequence[_Kept]) -> None:
        """Send the renewals of leases of one reader at one home."""
        sent_at = self._loop.now()
        for kept in due:
            kept.lease.renewing(sent_at)
        notifications = (pb.Notification(renew=pb.Renew(lease_id=kept.lease.lease_id)) for kept in due)
        first = 0
        for request in batches(due[0].sender, notifications):
            batch = due[first : first + len(request.notifications)]
            first += len(batch)
            # Without waiting, since a home that hangs must not delay renewals at other homes (R10).
            self._loop.spawn(self._ask(batch, request, sent_at), f"renewals at {batch[0].home.address}")

    async def _ask(self, batch: Sequence[_Kept], request: pb.NotifyRequest, sent_at: float) -> None:
        left = max(kept.lease.deadline for kept in batch) - sent_at
        try:
            answers = await batch[0].home.notify(request, max(RENEW_TIMEOUT, left))
        except KvferryError as error:
            if len(batch) == 1 or error.retryable or isinstance(error, Closed):
                self._not_renewed(batch, error)
            else:
                # A lease that the home refuses must not affect the others.
                middle = len(batch) // 2
                self._renew(batch[:middle])
                self._renew(batch[middle:])
            return
        for kept, answer in zip(batch, answers, strict=True):
            # A lease passes the new deadline to its read; a failure there must not cost other leases their renewal.
            guarded(partial(self._take, kept, sent_at, answer), f"the renewal of {kept.name}")

    def _not_renewed(self, batch: Sequence[_Kept], error: KvferryError) -> None:
        again_at = self._loop.now() + max(RENEW_AGAIN, error.retry_after or 0.0)
        wanted = [kept for kept in batch if self._kept.get(kept.lease) is kept]
        if error.retryable:
            # After a refusal for good the renewal is repeated too, but not before `renew_every`.
            for kept in wanted:
                kept.lease.not_renewed(again_at)
        self._news.set()
        if wanted:
            first = wanted[0]
            first.home.complain(error, f"renewals of {len(wanted)} leases are repeated, the first for {first.name}")

    def _take(self, kept: _Kept, sent_at: float, answer: NotificationAnswer) -> None:
        if isinstance(answer, LeaseEnded):
            # Otherwise the lease was dropped, or acquired again, after this renewal was sent.
            if self._kept.get(kept.lease) is kept:
                del self._kept[kept.lease]
                logger.warning("%s: %s has no record of the lease; acquiring it again", kept.name, kept.home.address)
                kept.lost()
        elif isinstance(answer, KvferryError):
            self._not_renewed([kept], answer)
        elif not answer.HasField("renewed"):
            self._not_renewed([kept], InternalError(f"a renewal was answered with {answer.WhichOneof('kind')}"))
        else:
            kept.lease.renewed(
                sent_at,
                self._loop.now(),
                from_duration(answer.renewed.remaining),
                more=answer.renewed.revoked == pb.REVOKE_REASON_UNSPECIFIED,
                source_lost=answer.renewed.revoked == pb.REVOKE_REASON_SOURCE_LOST,
            )
            # A home that did not extend the lease is asked sooner.
            self._wake_for(kept.lease)
