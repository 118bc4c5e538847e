"""For the process that holds an engine's leases: asks for them, speaks for all of its ranks, and is their only judge
(PROTOCOL, Leases 4)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvferry._clock import LONGEST, now
from kvferry._control.acquisition import Acquired, Acquirer, AcquireRequest, Cancellation
from kvferry._control.batches import read_done
from kvferry._control.connection import Control
from kvferry._control.homes import Homes
from kvferry._control.reader_lease import ReaderLease
from kvferry._control.renewals import Renewals
from kvferry._control.teller import Teller
from kvferry._forks import OneProcess
from kvferry._wire.reference import parse_reference
from kvferry._wire.token import EngineToken
from kvferry.errors import InvalidField, KvferryError
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

VERDICT_TIMEOUT = 1.0
"""Seconds for the home's verdict; without one the reader's own deadline decides (PROTOCOL, Endings)."""

DECLINE_PATIENCE = 120.0
"""Seconds for which a decline is told again: after them a publication that nobody reads is released anyway."""


class LeaseHolder(OneProcess):
    """The leases of one destination engine.

    Threading: nothing but `close` waits. Everything else may make a call, and returns at once.

    Args:
        homes: node servers that may be dialled.
        renewals: keeps the leases alive.
        token: of the engine.
        rank: the one that it speaks for, where each rank has a holder of its own; None: all ranks.
    """

    def __init__(self, homes: Homes, renewals: Renewals, token: EngineToken, rank: int | None = None) -> None:
        self._homes = homes
        self._rank = rank
        self._renewals = renewals
        self._reader = token.ref()
        self._teller = Teller(self._reader)
        self._acquirer = Acquirer(token, renewals, self._give_up)

    def request(
        self, reference: str, read_id: str, *, parties: int, expected_reads: int, timeout: float
    ) -> AcquireRequest:
        """A read of a publication; makes no call.

        Raises:
            BadReference: not a reference.
            HomeNotAllowed: its home may not be dialled.
            InvalidField: an argument is out of range.
        """
        if not 0 < timeout < LONGEST:
            raise InvalidField("timeout", timeout, f"more than 0 seconds, and less than {LONGEST:g}")
        parsed = parse_reference(reference)
        home = self._homes.get(parsed.home)
        return AcquireRequest(home, parsed, reference, read_id, parties, expected_reads, now() + timeout)

    def check(self, reference: str) -> None:
        """Raise `BadReference` or `HomeNotAllowed` for what cannot be read; makes no call."""
        self._homes.get(parse_reference(reference).home)

    def acquire(
        self,
        request: AcquireRequest,
        cancellation: Cancellation,
        renewed: Callable[[float], None],
        ended: Callable[[Acquired | KvferryError], None],
    ) -> None:
        """Wait for the publication; returns at once.

        Args:
            request: what to read.
            cancellation: interrupts the wait.
            renewed: called with the new deadline of the lease after each acknowledged renewal, until `drop`.
            ended: called once with what was granted, or with why nothing is, see `Acquirer.start`. Both on any thread;
                neither may block.
        """
        self._acquirer.start(request, cancellation, renewed, ended)

    def drop(self, granted: Acquired) -> None:
        """Renew it no more: its read has ended."""
        self._renewals.drop(granted.lease)

    def let_go(self, home: Control, granted: Acquired) -> None:
        """Give back a lease whose read will not begin: renew it no more, and tell its home."""
        self.drop(granted)
        self._give_up(home, granted.lease, pb.RANK_OUTCOME_CANCELLED)

    def report(
        self,
        home: Control,
        lease: ReaderLease,
        reports: Sequence[pb.RankReport],
        answered: Callable[[pb.Verdict.ValueType | None], None],
    ) -> None:
        """Tell how all shares ended; `answered` is called, on any thread, with the home's verdict, or with None for
        each attempt that gave none.

        A home that does not answer in time is told again in the background, for as long as the lease runs.
        """

        def on_result(result: pb.NotificationResult | None) -> None:
            ended = result is not None and result.WhichOneof("kind") == "read_ended"
            answered(result.read_ended.verdict if result is not None and ended else None)

        self._teller.tell(home, read_done(lease.lease_id, reports), lease.deadline, on_result, timeout=VERDICT_TIMEOUT)

    def cancel(self, home: Control, lease: ReaderLease) -> None:
        """End a lease at its home, at once if it can be reached, else with its time (PROTOCOL, Leases 7)."""
        self._teller.tell(home, [_cancelled(lease)], lease.deadline)

    def decline(self, reference: str, leases: Sequence[ReaderLease] = ()) -> None:
        """Say that nobody will read a publication, and end the leases on it (PROTOCOL, Leases 8). A home that recovers,
        or cannot be reached, is told again for `DECLINE_PATIENCE`; after that the publication is released by time.

        Raises:
            BadReference, HomeNotAllowed: as `request`.
        """
        home = self._homes.get(parse_reference(reference).home)
        cancels = [_cancelled(lease) for lease in leases]
        decline = pb.Notification(decline=pb.Decline(reference=reference))
        self._teller.tell(home, [*cancels, decline], now() + DECLINE_PATIENCE)

    def close(self, timeout: float) -> None:
        """Acquire and tell nothing again any more, and wait at most `timeout` seconds for what was told already.
        Idempotent."""
        until = now() + timeout
        self._acquirer.close(timeout)
        self._teller.close(max(0.0, until - now()))

    def _give_up(self, home: Control, lease: ReaderLease, outcome: pb.RankOutcome.ValueType) -> None:
        """End a lease that was had, and is not needed. Where other ranks share it, it ends for this one only."""
        if self._rank is None:
            self.cancel(home, lease)
        else:
            report = pb.RankReport(rank=self._rank, outcome=outcome)
            self._teller.tell(home, read_done(lease.lease_id, [report]), lease.deadline)


def _cancelled(lease: ReaderLease) -> pb.Notification:
    return pb.Notification(cancel=pb.CancelRead(lease_id=lease.lease_id))
