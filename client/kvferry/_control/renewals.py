"""Keeps the leases of a client's reads alive: one thread, and for each home and reader as few calls as the limits of a
message allow."""

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
from kvferry._threads import start_thread
from kvferry._wire.status import from_notification_error
from kvferry.errors import Closed, InternalError, KvferryError, LeaseEnded
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

RENEW_TIMEOUT = 2.0

RENEW_AGAIN = 1.0
"""Seconds after which a renewal that was not answered, or was refused, is sent again."""

LONGEST_SLEEP = 1.0
"""Seconds after which leases are looked at again: what a thread sleeps does not count suspends, and leases do."""

CLOSE_TIMEOUT = 1.0
"""Seconds for the thread to end."""

NAMED = 8
"""Leases that a warning names; the rest it counts."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A lease that is renewed. `name` is what logs call it: its id is a secret."""

    lease: ReaderLease
    home: Control
    sender: pb.EngineRef
    name: str
    extended: Callable[[float], None]
    lost: Callable[[], None]


class Renewals:
    """Renews leases until they are dropped. Thread-safe. Without leases its thread sleeps, and before the first there
    is none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: dict[ReaderLease, _Kept] = {}
        self._failing: set[ReaderLease] = set()
        """Leases of which a warning said that they are not renewed."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._wakes_at = 0.0
        """When the thread looks at the leases next without being told to."""

    def keep(
        self,
        lease: ReaderLease,
        home: Control,
        sender: pb.EngineRef,
        name: str,
        extended: Callable[[float], None],
        lost: Callable[[], None],
    ) -> None:
        """Renew a lease from now on. One that has ended, or that comes after `close`, is not renewed.

        Args:
            lease: the lease.
            home: who granted it.
            sender: the reader.
            name: what to call it in logs. No secret.
            extended: called with the new deadline after each acknowledged renewal.
            lost: called once if the home has no record of the lease, which is renewed no more then. Neither may block.

        Raises:
            LimitReached: the system gives no thread to renew on.
        """
        with self._changed:
            if self._closed or lease.ended:
                return
            if self._thread is None:
                self._thread = start_thread(self._run, "kvferry-renewals")
            self._kept[lease] = _Kept(lease, home, sender, name, extended, lost)
            due = lease.next_renewal
            if due is not None and due < self._wakes_at:
                # Else the thread looks in time by itself; waking it for each of many leases would cost their square.
                self._changed.notify()

    def drop(self, lease: ReaderLease) -> None:
        """Renew it no more: its read has ended."""
        lease.end()
        with self._changed:
            self._kept.pop(lease, None)
            self._failing.discard(lease)

    def close(self) -> None:
        """Renew nothing any more, and wait for the end of the thread, which waits for nothing itself. Idempotent."""
        with self._changed:
            self._closed = True
            self._kept.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        while True:
            with self._changed:
                due = self._wait_due()
            if due is None:
                return
            # A home knows its leases by their reader, and an engine may speak for itself only.
            turns: dict[tuple[Control, bytes], list[_Kept]] = {}
            for kept in due:
                turns.setdefault((kept.home, kept.sender.SerializeToString(deterministic=True)), []).append(kept)
            for turn in turns.values():
                try:
                    self._renew(turn)
                except Exception:
                    # The other leases must not pay for it; these are due again after their usual time.
                    logger.exception("%s could not be renewed", _names(turn))

    def _wait_due(self) -> list[_Kept] | None:
        """With the lock held: the leases to renew now; None once closed."""
        while not self._closed:
            times = [(kept.lease.next_renewal, kept) for kept in self._kept.values()]
            pending = [(at, kept) for at, kept in times if at is not None]
            time = now()
            due = [kept for at, kept in pending if at <= time]
            if due:
                return due
            first = min((at for at, _ in pending), default=None)
            pause = None if first is None else max(0.0, min(LONGEST_SLEEP, first - time))
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
            # Not waited for: a home that hangs must not delay the renewals at others (R10).
            home.notify_later(request, RENEW_TIMEOUT, partial(self._answered, batch, sent_at))

    def _answered(
        self, batch: Sequence[_Kept], sent_at: float, answer: list[pb.NotificationResult] | KvferryError
    ) -> None:
        """On gRPC's thread, or the one that sent it."""
        if isinstance(answer, KvferryError):
            self._refused(batch, answer)
            return
        if len(answer) != len(batch):
            short = InternalError(f"{len(answer)} results for {len(batch)} renewals")
            self._not_renewed(batch[len(answer) :], short)
        for kept, result in zip(batch, answer, strict=False):
            try:
                self._take(kept, sent_at, result)
            except Exception:
                logger.exception("the renewal of %s was not taken", kept.name)

    def _refused(self, batch: Sequence[_Kept], error: KvferryError) -> None:
        """The call failed. What cannot be repeated as it is goes again in halves, so that one lease which the home will
        not hear of takes no other with it."""
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
                # What was refused for good is tried again all the same, but at its usual pace.
                for kept in wanted:
                    kept.lease.not_renewed(again_at)
            new = [kept for kept in wanted if kept.lease not in self._failing]
            self._failing.update(kept.lease for kept in new)
            self._changed.notify()
        if new:
            message = "%s: the renewal at %s failed and is tried again: %s"
            logger.warning(message, _names(new), new[0].home.address, error.message)

    def _take(self, kept: _Kept, sent_at: float, result: pb.NotificationResult) -> None:
        kind = result.WhichOneof("kind")
        if kind == "renewed":
            remaining = from_duration(result.renewed.remaining)
            more = result.renewed.revoked == pb.REVOKE_REASON_UNSPECIFIED
            kept.lease.renewed(sent_at, now(), remaining, more=more)
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
                # Dropped, or acquired again, since this renewal was sent.
                return
            del self._kept[kept.lease]
        logger.warning("%s: %s has no record of the lease; it is asked for again", kept.name, kept.home.address)
        try:
            kept.lost()
        except KvferryError as failure:
            with self._changed:
                if not self._closed and not kept.lease.ended:
                    # The next renewal finds it lost again.
                    self._kept.setdefault(kept.lease, kept)
            self._not_renewed([kept], failure)


def _names(batch: Sequence[_Kept]) -> str:
    named = ", ".join(kept.name for kept in batch[:NAMED])
    return named if len(batch) <= NAMED else f"{named} and {len(batch) - NAMED} more"
