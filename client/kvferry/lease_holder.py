"""For the process that holds an engine's leases: asks for them, speaks for all of its ranks, and is their only judge
(PROTOCOL, Leases 4)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.acquiring import Acquirer, AcquireRequest, Cancellation, Granted
from kvferry.clock import now
from kvferry.control import CALL_TIMEOUT, Control, retrying
from kvferry.errors import InvalidField, KvferryError
from kvferry.homes import Homes
from kvferry.leases import ReaderLease
from kvferry.reference import parse_reference
from kvferry.renewals import Renewals
from kvferry.reporting import VERDICT_TIMEOUT, Reporter
from kvferry.spec import EngineToken
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)


class LeaseHolder:
    """The leases of one destination engine.

    Threading: `acquire` and `end` wait; everything else makes a call and returns at once.

    Args:
        homes: node servers that may be dialled.
        renewals: keeps the leases alive.
        token: of the engine.
    """

    def __init__(self, homes: Homes, renewals: Renewals, token: EngineToken) -> None:
        self._homes = homes
        self._renewals = renewals
        self._reader = token.ref()
        self._reporter = Reporter(self._reader)
        self._acquirer = Acquirer(token, renewals, lambda home, lease, _: self.cancel(home, lease))

    def request(
        self, reference: str, read_id: str, *, parties: int, expected_reads: int, timeout: float
    ) -> AcquireRequest:
        """A read of a publication; makes no call.

        Raises:
            BadReference: not a reference.
            HomeNotAllowed: its home may not be dialled.
            InvalidField: an argument is out of range.
        """
        if not timeout > 0:
            raise InvalidField("timeout", timeout, "more than 0 seconds")
        parsed = parse_reference(reference)
        home = self._homes.get(parsed.home)
        return AcquireRequest(home, parsed, reference, read_id, parties, expected_reads, now() + timeout)

    def check(self, reference: str) -> None:
        """Raise `BadReference` or `HomeNotAllowed` for what cannot be read; makes no call."""
        self._homes.get(parse_reference(reference).home)

    def acquire(self, request: AcquireRequest, cancellation: Cancellation) -> Granted:
        """Wait for the publication. Errors as `Acquirer.acquire`. The lease is renewed until `drop`."""
        return self._acquirer.acquire(request, cancellation, _nothing_to_tell)

    def drop(self, granted: Granted) -> None:
        """Renew it no more: its read has ended."""
        self._renewals.drop(granted.lease)

    def report(
        self,
        home: Control,
        lease: ReaderLease,
        reports: Sequence[pb.RankReport],
        answered: Callable[[pb.Verdict.ValueType | None], None],
    ) -> None:
        """Tell how all shares ended; `answered` is called on another thread with the home's verdict, or None.

        A home that does not answer in time is told again in the background, for as long as the lease runs.
        """
        done = pb.Notification(read_done=pb.ReadDone(lease_id=lease.lease_id, reports=reports))

        def on_results(results: list[pb.NotificationResult] | None) -> None:
            if results is not None:
                kind = results[0].WhichOneof("kind")
                answered(results[0].read_ended.verdict if kind == "read_ended" else None)
                return
            answered(None)
            again = partial(self._reporter.report_until_answered, home, lease, tuple(reports))
            threading.Thread(target=again, name="kvferry-report", daemon=True).start()

        request = pb.NotifyRequest(sender=self._reader, notifications=[done])
        home.notify_later(request, VERDICT_TIMEOUT, on_results)

    def cancel(self, home: Control, lease: ReaderLease) -> None:
        """End a lease at its home, at once if it can be reached, else with its time (PROTOCOL, Leases 7)."""
        self._tell(home, [pb.Notification(cancel=pb.CancelRead(lease_id=lease.lease_id))])

    def end(self, home: Control, granted: Granted, timeout: float) -> None:
        """`drop` and `cancel`, and wait until the home has heard it; what fails is logged."""
        self.drop(granted)
        cancel = pb.Notification(cancel=pb.CancelRead(lease_id=granted.lease.lease_id))
        try:
            home.notify(pb.NotifyRequest(sender=self._reader, notifications=[cancel]), timeout)
        except KvferryError as error:
            logger.info("%s was not told of the end: %s", home.address, error)

    def decline(self, reference: str, leases: Sequence[ReaderLease] = ()) -> None:
        """Say that nobody will read a publication, and end the leases on it (PROTOCOL, Leases 8). A home that cannot be
        reached releases it by time.

        Raises:
            BadReference, HomeNotAllowed: as `request`.
        """
        home = self._homes.get(parse_reference(reference).home)
        cancels = [pb.Notification(cancel=pb.CancelRead(lease_id=lease.lease_id)) for lease in leases]
        self._tell(home, [*cancels, pb.Notification(decline=pb.Decline(reference=reference))])

    def _tell(self, home: Control, notifications: Sequence[pb.Notification]) -> None:
        """Without waiting; what was not answered is told again in the background for a while."""
        request = pb.NotifyRequest(sender=self._reader, notifications=notifications)

        def again() -> None:
            try:
                retrying(lambda left: home.notify(request, left), now() + CALL_TIMEOUT)
            except KvferryError as error:
                logger.info("%s was not told: %s", home.address, error)

        def on_results(results: list[pb.NotificationResult] | None) -> None:
            if results is None:
                threading.Thread(target=again, name="kvferry-tell", daemon=True).start()

        home.notify_later(request, CALL_TIMEOUT, on_results)


def _nothing_to_tell(_: float) -> None:
    """Deadlines are looked up when they are needed."""
