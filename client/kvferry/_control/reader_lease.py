"""The reader's side of a lease: its deadline on the reader's own clock, and the verdict on whether the bytes of a read
count (R1; PROTOCOL, Leases 3 and 4, and Endings). Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

from kvferry.v1 import kv_transfer_pb2 as pb

MARGIN_SECONDS = 0.010
MARGIN_SHARE = 0.01

LEASE_ID_BYTES = 16

RENEW_LEAST = 0.05
"""Shortest seconds between renewals: a home that asked for 0 would keep a thread busy."""

LONGEST_LEASE = 3600.0
"""Most seconds that a reader accepts for a lease, so that every wait for its end is bounded."""


def deadline_after(sent_at: float, remaining: float) -> float:
    """Return the reader's deadline of a lease with `remaining` seconds in the home's answer. This deadline is always
    earlier than the home's, which counts from a later moment than `sent_at`, when the reader sent the request."""
    remaining = min(remaining, LONGEST_LEASE)
    return sent_at + remaining - max(MARGIN_SECONDS, MARGIN_SHARE * remaining)


class ReaderLease:
    """The reader's record of one lease. The client's event loop changes the record; any thread may read it.

    The deadline only moves forward, and only until it has passed: a late acknowledgement does not revive the lease.

    Attributes:
        lease_id: changes when the lease is acquired again.
        deadline: time on the reader's clock; bytes that arrive later do not count.
        ended: the read has ended, so that the lease is no longer needed.
        source_lost: according to the home, the source is lost: bytes that have not arrived will not arrive.
        changed: called after each change of the deadline, or of `source_lost`.
    """

    def __init__(self, lease_id: bytes, sent_at: float, remaining: float, renew_every: float) -> None:
        self.lease_id = lease_id
        self.renew_every = min(renew_every, LONGEST_LEASE / 3)
        self.deadline = deadline_after(sent_at, remaining)
        self.ended = self.source_lost = False
        self.changed: Callable[[], object] = lambda: None
        self._next_renewal = sent_at + self.renew_every
        self._renewable = True

    @classmethod
    def without_end(cls, lease_id: bytes = b"") -> ReaderLease:
        """Make the record of a lease that another process holds and judges, or of a read without a lease."""
        lease = cls(lease_id, 0.0, 0.0, LONGEST_LEASE)
        lease.deadline, lease._renewable = math.inf, False
        return lease

    @property
    def next_renewal(self) -> float | None:
        """Time of the next renewal on the reader's clock; None: the home does not renew the lease any more."""
        return self._next_renewal if self._renewable else None

    def live(self, now: float) -> bool:
        """Whether bytes that arrive now count."""
        return now < self.deadline

    def renewing(self, sent_at: float) -> None:
        """Record that a renewal is being sent. The next one is due after `renew_every`."""
        self._next_renewal = sent_at + self.renew_every

    def not_renewed(self, again_at: float) -> None:
        """Record a renewal without an answer, or a refused one. The next one is due at `again_at` at the latest."""
        self._next_renewal = min(self._next_renewal, again_at)

    def renewed(self, sent_at: float, now: float, remaining: float, *, more: bool, source_lost: bool = False) -> None:
        """Record an acknowledged renewal. A home may extend a lease by less than a whole term, or not at all: while it
        has lost the source, or the publication has not come. Then the next renewal is due sooner, so that there are
        more of them before the end.

        `sent_at` and `now`, the times of request and answer, are on the reader's clock; `remaining` is in seconds, and
        0 if the lease has ended. `more`: the home will renew the lease again.
        """
        self._renewable = more and remaining > 0
        self.source_lost |= source_lost
        if now < self.deadline:
            self.deadline = max(self.deadline, deadline_after(sent_at, remaining))
            left = self.deadline - now
            if left < 2 * self.renew_every:
                self._next_renewal = min(self._next_renewal, now + max(RENEW_LEAST, left / 3))
        self.changed()

    def end(self) -> None:
        self.ended = True

    def acquired_again(self, lease_id: bytes, sent_at: float, now: float, remaining: float) -> bool:
        """Record that a home which had lost the lease has granted the same read again. Returns whether the read may
        continue: only if the new lease came before the old deadline. If not, the source may have changed its blocks in
        between, and everything must be read again (PROTOCOL, Home restart)."""
        if self.ended or now >= self.deadline:
            return False
        self.lease_id = lease_id
        self.deadline = max(self.deadline, deadline_after(sent_at, remaining))
        self._next_renewal = sent_at + self.renew_every
        self._renewable = True
        self.changed()
        return True


class ReaderVerdict(enum.Enum):
    """The verdict on a read whose shares have all succeeded."""

    CONFIRMED = "confirmed"
    """Its bytes count, according to the reader's clock and the home."""
    TRUSTED = "trusted"
    """Its bytes count, according to the reader's clock: the home has no record of the lease, or did not answer."""
    EXPIRED = "expired"
    """Its bytes do not count."""


def verdict_of(ended_at: float, deadline: float, verdict: pb.Verdict.ValueType | None) -> ReaderVerdict:
    """Return the reader's verdict. The last share ended at `ended_at`, the lease at `deadline`, both on the reader's
    clock; `verdict` is the home's, and None if the home did not answer in time."""
    if ended_at >= deadline or verdict == pb.VERDICT_EXPIRED:
        return ReaderVerdict.EXPIRED
    return ReaderVerdict.CONFIRMED if verdict == pb.VERDICT_VALID else ReaderVerdict.TRUSTED
