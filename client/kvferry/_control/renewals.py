"""Renews the leases of a client's reads on one thread, with as few calls for each home and reader as possible."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvferry._clock import from_duration, now
from kvferry._control.batches import batches
from kvferry._control.connection import Control
from kvferry._control.reader_lease import ReaderLease
from kvferry._threads import guarded, start_loop
from kvferry._wire.status import from_notification_error
from kvferry.errors import Closed, InternalError, KvferryError, LeaseEnded
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

RENEW_TIMEOUT = 2.0
"""Shortest seconds for which the answer to a renewal is awaited. It is awaited until the lease ends: a home that is
overloaded answers late, and so does every repetition. Others go out in each third of the lease's time meanwhile."""

RENEW_AGAIN = 1.0
"""Seconds after which a renewal without an answer, or a refused one, is repeated."""

LONGEST_SLEEP = 1.0
"""Seconds after which the thread checks the leases again: a sleeping thread does not notice that its host was
suspended, while leases run on."""

CLOSE_TIMEOUT = 1.0
"""Seconds for the thread to end."""

NAMED = 8
"""How many leases a warning names; it counts the rest."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A lease that is renewed; see `Renewals.keep`."""

    lease: ReaderLease
    home: Control
    sender: pb.EngineRef
    name: str
    extended: Callable[[float], None]
    lost: Callable[[], None]


class Renewals:
    """Renews leases until they are dropped. Thread-safe. Its thread starts with the first lease, and sleeps when there
    is none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: dict[ReaderLease, _Kept] = {}
        self._failing: set[ReaderLease] = set()
        """Leases whose failed renewal was logged already."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._wakes_at = 0.0
        """When the thread checks the leases next without a notification."""

    def keep(
        self,
        lease: ReaderLease,
        home: Control,
        sender: pb.EngineRef,
        name: str,
        extended: Callable[[float], None],
        lost: Callable[[], None],
    ) -> None:
        """Renew a lease from now on. Does nothing for a lease that has ended, or after `close`.

        Args:
            lease: the lease.
            home: connection to the home that granted it.
            sender: the reader.
            name: name of the lease in logs. Must not contain its id, which is a secret.
            extended: called with the new deadline after each acknowledged renewal, when `ReaderLease.source_lost` is
                known. Must not block.
            lost: called once if the home has no record of the lease; it is then no longer renewed. Must not block.

        Raises:
            LimitReached: the system refused another thread.
        """
        with self._changed:
            if self._closed or lease.ended:
                return
            if self._thread is None:
                self._thread = start_loop(self._turn, "kvferry-renewals")
            self._kept[lease] = _Kept(lease, home, sender, name, extended, lost)
            due = lease.next_renewal
            if due is not None and due < self._wakes_at:
                # Otherwise the thread wakes in time by itself. Waking it for each lease would take quadratic time.
                self._changed.notify()

    def drop(self, lease: ReaderLease) -> None:
        """Stop renewing a lease whose read has ended."""
        lease.end()
        with self._changed:
            self._kept.pop(lease, None)
            self._failing.discard(lease)

    def close(self) -> None:
        """Stop renewing, and wait for the end of the thread, which waits for nothing itself. Idempotent."""
        with self._changed:
            self._closed = True
            self._kept.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_TIMEOUT)

    def _turn(self) -> bool:
        with self._changed:
            due = self._wait_due()
        # One request is sent by one reader, and can renew only that reader's leases.
        turns: dict[tuple[Control, str, bytes], list[_Kept]] = {}
        for kept in due or ():
            reader = kept.home, kept.sender.engine_id, kept.sender.incarnation
            turns.setdefault(reader, []).append(kept)
        for turn in turns.values():
            # If it fails, other leases are still renewed; these are due again after `renew_every`.
            guarded(partial(self._renew, turn), f"the renewal of {_names(turn)}")
        return due is not None

    def _wait_due(self) -> list[_Kept] | None:
        """Wait for leases that are due, and return them; None: closed. Called with the lock held."""
        while not self._closed:
            times = [(kept.lease.next_renewal, kept) for kept in self._kept.values()]
            pending = [(at, kept) for at, kept in times if at is not None]
            time = now()
            due = [kept for at, kept in pending if at <= time]
            if due:
                return due
            first = min((at for at, _ in pending), default=None)
            pause = None if first is None else min(LONGEST_SLEEP, first - time)
            self._wakes_at = math.inf if pause is None else time + pause
            self._changed.wait(pause)
        return None

    def _renew(self, due: Sequence[_Kept]) -> None:
        """Send the renewals of leases of one reader at one home."""
        sent_at = now()
        for kept in due:
            kept.lease.renewing(sent_at)
        home, sender = due[0].home, due[0].sender
        notifications = (pb.Notification(renew=pb.Renew(lease_id=kept.lease.lease_id)) for kept in due)
        first = 0
        for request in batches(sender, notifications):
            batch = due[first : first + len(request.notifications)]
            first += len(batch)
            # Without waiting, since a home that hangs must not delay renewals at other homes (R10).
            left = max(kept.lease.deadline for kept in batch) - sent_at
            home.notify_later(request, max(RENEW_TIMEOUT, left), partial(self._answered, batch, sent_at))

    def _answered(
        self, batch: Sequence[_Kept], sent_at: float, answer: list[pb.NotificationResult] | KvferryError
    ) -> None:
        """Handle an answer, on gRPC's thread or the one that sent the renewals."""
        if isinstance(answer, KvferryError):
            self._refused(batch, answer)
            return
        if len(answer) != len(batch):
            short = InternalError(f"{len(answer)} results for {len(batch)} renewals")
            self._not_renewed(batch[len(answer) :], short)
        for kept, result in zip(batch, answer, strict=False):
            guarded(partial(self._take, kept, sent_at, result), f"the answer to the renewal of {kept.name}")

    def _refused(self, batch: Sequence[_Kept], error: KvferryError) -> None:
        """Handle a failed call. If repeating it cannot help, its halves are sent separately, so that a lease which the
        home refuses does not affect the others."""
        if len(batch) > 1 and not error.retryable and not isinstance(error, Closed):
            middle = len(batch) // 2
            self._renew(batch[:middle])
            self._renew(batch[middle:])
        else:
            self._not_renewed(batch, error)

    def _not_renewed(self, batch: Sequence[_Kept], error: KvferryError) -> None:
        again_at = now() + max(RENEW_AGAIN, error.retry_after or 0.0)
        with self._changed:
            wanted = [kept for kept in batch if self._kept.get(kept.lease) is kept]
            if error.retryable:
                # After a refusal for good the renewal is repeated too, but not before `renew_every`.
                for kept in wanted:
                    kept.lease.not_renewed(again_at)
            new = [kept for kept in wanted if kept.lease not in self._failing]
            self._failing.update(kept.lease for kept in new)
            self._changed.notify()
        if new:
            message = "%s: the renewal at %s failed and is repeated: %s"
            logger.warning(message, _names(new), new[0].home.address, error.message)

    def _take(self, kept: _Kept, sent_at: float, result: pb.NotificationResult) -> None:
        kind = result.WhichOneof("kind")
        if kind == "renewed":
            remaining = from_duration(result.renewed.remaining)
            more = result.renewed.revoked == pb.REVOKE_REASON_UNSPECIFIED
            kept.lease.renewed(sent_at, now(), remaining, more=more)
            if result.renewed.revoked == pb.REVOKE_REASON_SOURCE_LOST:
                kept.lease.lose_source()
            with self._changed:
                self._failing.discard(kept.lease)
            kept.extended(kept.lease.deadline)
            return
        error: KvferryError = InternalError(f"a renewal was answered with {kind}")
        if kind == "error":
            error = from_notification_error(result.error)
        if not isinstance(error, LeaseEnded):
            self._not_renewed([kept], error)
            return
        with self._changed:
            if self._kept.get(kept.lease) is not kept:
                # The lease was dropped, or acquired again, after this renewal was sent.
                return
            del self._kept[kept.lease]
        logger.warning("%s: %s has no record of the lease; acquiring it again", kept.name, kept.home.address)
        try:
            kept.lost()
        except KvferryError as failure:
            with self._changed:
                if not self._closed and not kept.lease.ended:
                    # The next renewal finds again that it is lost.
                    self._kept.setdefault(kept.lease, kept)
            self._not_renewed([kept], failure)


def _names(batch: Sequence[_Kept]) -> str:
    named = ", ".join(kept.name for kept in batch[:NAMED])
    return named if len(batch) <= NAMED else f"{named} and {len(batch) - NAMED} more"
