"""Keeps the leases of a client's reads alive: one thread, one call per home and turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvferry.clock import from_duration, now
from kvferry.control import Control
from kvferry.leases import ReaderLease
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.errors_pb2 import ERROR_REASON_LEASE_ENDED

RENEW_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    lease: ReaderLease
    home: Control
    sender: pb.EngineRef
    extended: Callable[[float], None]
    lost: Callable[[], None]


class Renewals:
    """Renews leases until they are dropped. Thread-safe. Without leases its thread sleeps, and before the first there
    is none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: dict[bytes, _Kept] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def keep(
        self,
        lease: ReaderLease,
        home: Control,
        sender: pb.EngineRef,
        extended: Callable[[float], None],
        lost: Callable[[], None],
    ) -> None:
        """Renew a lease from now on.

        Args:
            lease: the lease.
            home: who granted it.
            sender: the reader.
            extended: called with the new deadline after each acknowledged renewal.
            lost: called once if the home has no record of the lease, which is renewed no more then. Neither may block.
        """
        with self._changed:
            self._kept[lease.lease_id] = _Kept(lease, home, sender, extended, lost)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kvferry-renewals", daemon=True)
                self._thread.start()
            self._changed.notify()

    def drop(self, lease: ReaderLease) -> None:
        """Renew it no more: its read has ended."""
        lease.end()
        with self._changed:
            self._kept.pop(lease.lease_id, None)

    def close(self) -> None:
        """Renew nothing any more."""
        with self._changed:
            self._closed = True
            self._kept.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                due = self._wait_due()
            if due is None:
                return
            for home in {kept.home.address: kept.home for kept in due}.values():
                self._renew(home, [kept for kept in due if kept.home is home])

    def _wait_due(self) -> list[_Kept] | None:
        """With the lock held: the leases to renew now; None once closed."""
        while not self._closed:
            times = [(kept.lease.next_renewal, kept) for kept in self._kept.values()]
            pending = [(at, kept) for at, kept in times if at is not None]
            due = [kept for at, kept in pending if at <= now()]
            if due:
                return due
            first = min((at for at, _ in pending), default=None)
            self._changed.wait(None if first is None else max(0.0, first - now()))
        return None

    def _renew(self, home: Control, due: list[_Kept]) -> None:
        sent_at = now()
        for kept in due:
            kept.lease.renewing(sent_at)
        notifications = [pb.Notification(renew=pb.Renew(lease_id=kept.lease.lease_id)) for kept in due]
        request = pb.NotifyRequest(sender=due[0].sender, notifications=notifications)
        # Not waited for: a home that hangs must not delay the renewals at others (R10). The next turn tries again.
        home.notify_later(request, RENEW_TIMEOUT, partial(self._answered, due, sent_at))

    def _answered(self, due: list[_Kept], sent_at: float, results: list[pb.NotificationResult] | None) -> None:
        for kept, result in zip(due, results or (), strict=False):
            if result.WhichOneof("kind") == "error" and result.error.reason == ERROR_REASON_LEASE_ENDED:
                with self._changed:
                    known = self._kept.pop(kept.lease.lease_id, None) is not None
                if known:
                    kept.lost()
            if result.WhichOneof("kind") != "renewed":
                continue
            remaining = from_duration(result.renewed.remaining)
            more = result.renewed.revoked == pb.REVOKE_REASON_UNSPECIFIED
            kept.lease.renewed(sent_at, now(), remaining, more=more)
            kept.extended(kept.lease.deadline)
