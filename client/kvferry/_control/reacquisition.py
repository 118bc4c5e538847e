"""Acquires a lease again after its home has restarted and lost it, so that a transfer in progress can continue."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from kvferry._clock import from_duration, now
from kvferry._control.backoff import Backoff
from kvferry._control.connection import CALL_TIMEOUT, Control
from kvferry._control.reader_lease import LEASE_ID_BYTES, ReaderLease
from kvferry._work_queue import WorkQueue
from kvferry.errors import KvferryError, Unreachable
from kvferry.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)


class Reacquisition:
    """Asks for a lease until it is granted again, or its deadline has passed. Never blocks.

    Args:
        home: connection to the home.
        asked: the request of the read, without a wait.
        what: name of the publication, for logs.
        lease: the lease that was lost.
        work: makes the pauses.
        again: called when the lease was granted again.
        unneeded: called with a lease that was granted too late.
    """

    def __init__(
        self,
        home: Control,
        asked: pb.ReadBlocksRequest,
        what: str,
        lease: ReaderLease,
        work: WorkQueue,
        again: Callable[[], None],
        unneeded: Callable[[ReaderLease], None],
    ) -> None:
        self._home = home
        self._asked = asked
        self._what = what
        self._lease = lease
        self._work = work
        self._again = again
        self._unneeded = unneeded
        self._backoff = Backoff(jitter=0.5)

    def ask(self) -> None:
        """Ask for the lease, unless its read has ended."""
        if not self._lease.ended:
            left = max(0.001, min(CALL_TIMEOUT, self._lease.deadline - now()))
            self._home.read_blocks_later(self._asked, left, partial(self._answered, now()))

    def _answered(self, sent_at: float, answer: pb.ReadBlocksResponse | KvferryError) -> None:
        if isinstance(answer, KvferryError):
            self._failed(answer)
        elif len(answer.accepted.lease_id) != LEASE_ID_BYTES:
            address = self._home.address
            self._failed(Unreachable(f"{address} did not accept the read", address=address))
        else:
            lease_id, remaining = answer.accepted.lease_id, from_duration(answer.accepted.remaining)
            if self._lease.acquired_again(lease_id, sent_at, now(), remaining):
                self._again()
            else:
                self._unneeded(ReaderLease(lease_id, sent_at, remaining, remaining))

    def _failed(self, error: KvferryError) -> None:
        pause = self._backoff.next(error.retry_after)
        if error.retryable and now() + pause < self._lease.deadline:
            self._work.do_later(pause, self.ask)
        elif not self._lease.ended:
            logger.warning("the lease on %s was lost and could not be acquired again: %s", self._what, error)
