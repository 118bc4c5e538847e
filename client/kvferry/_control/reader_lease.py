"""The reader's side of a lease: until when bytes count, judged by the reader's own clock (R1; PROTOCOL, Leases 3 and
4)."""

from __future__ import annotations

import threading

MARGIN_SECONDS = 0.010
MARGIN_SHARE = 0.01

LONGEST_LEASE = 3600.0
"""Seconds that a home is believed at once: what waits for the end of a lease ends, whatever the home said."""


def deadline_after(sent_at: float, remaining: float) -> float:
    """The reader's deadline: always earlier than the home's end, since the home counted from a later moment.

    Args:
        sent_at: reader's clock when the attempt that was answered was sent.
        remaining: seconds that the home said remained when it answered.
    """
    remaining = min(remaining, LONGEST_LEASE)
    return sent_at + remaining - max(MARGIN_SECONDS, MARGIN_SHARE * remaining)


class ReaderLease:
    """One lease as its reader sees it. Thread-safe.

    The deadline only moves forward, and only while it has not passed: a renewal that is acknowledged late revives
        nothing.
    """

    def __init__(self, lease_id: bytes, sent_at: float, remaining: float, renew_every: float) -> None:
        self._lease_id = lease_id
        self.renew_every = min(renew_every, LONGEST_LEASE / 3)
        self._deadline = deadline_after(sent_at, remaining)
        self._next_renewal = sent_at + self.renew_every
        self._renewable = True
        self._ended = False
        self._lock = threading.Lock()

    @property
    def lease_id(self) -> bytes:
        """The home's name of it; another one once it was acquired again."""
        with self._lock:
            return self._lease_id

    @property
    def deadline(self) -> float:
        """Bytes of a read that ended after this, on the reader's clock, don't count."""
        with self._lock:
            return self._deadline

    @property
    def next_renewal(self) -> float | None:
        """When to renew next; None if the home renews no more."""
        with self._lock:
            return self._next_renewal if self._renewable else None

    @property
    def ended(self) -> bool:
        """Whether its read has ended, so that nobody needs it any more."""
        with self._lock:
            return self._ended

    def live(self, now: float) -> bool:
        """Whether a read that ended by now counts."""
        return now < self.deadline

    def renewing(self, sent_at: float) -> None:
        """A renewal is being sent; the next one is due after the usual time whatever becomes of it."""
        with self._lock:
            self._next_renewal = sent_at + self.renew_every

    def not_renewed(self, again_at: float) -> None:
        """A renewal was not answered, or refused: the next one is due at `again_at`, if not before."""
        with self._lock:
            self._next_renewal = min(self._next_renewal, again_at)

    def renewed(self, sent_at: float, now: float, remaining: float, *, more: bool) -> None:
        """A renewal was acknowledged.

        Args:
            sent_at: reader's clock when it was sent.
            now: reader's clock when the answer came.
            remaining: seconds of the lease, as answered; 0 if it has ended.
            more: whether the home will renew again.
        """
        with self._lock:
            self._renewable = more and remaining > 0
            if now < self._deadline:
                self._deadline = max(self._deadline, deadline_after(sent_at, remaining))

    def end(self) -> None:
        """The read has ended: nobody needs the lease any more."""
        with self._lock:
            self._ended = True

    def acquired_again(self, lease_id: bytes, sent_at: float, now: float, remaining: float) -> bool:
        """The home lost its record of the lease, and granted the same read anew.

        Returns:
            Whether the read may go on: only if the new grant came before the old deadline. Else the source may have
            changed its blocks in between, and everything is read again (PROTOCOL, Home restart).
        """
        with self._lock:
            if self._ended or now >= self._deadline:
                return False
            self._lease_id = lease_id
            self._deadline = max(self._deadline, deadline_after(sent_at, remaining))
            self._next_renewal = sent_at + self.renew_every
            self._renewable = True
            return True
