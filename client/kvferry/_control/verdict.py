"""The reader's verdict on whether the bytes of a read count (R1; PROTOCOL, Leases 3 and Endings). Pure."""

from __future__ import annotations

import enum

from kvferry._arguments import described
from kvferry.errors import InvalidField
from kvferry.v1 import kv_transfer_pb2 as pb


class Confirm(enum.Enum):
    """When a read whose shares have all succeeded within its lease ends for the engine."""

    BEFORE = "before"
    """After the home has confirmed the lease, or has not answered in time."""
    AFTER = "after"
    """At once. The home's answer comes afterwards, and is an audit: if the lease had ended at the home, the read is
    disputed."""


def confirmed(text: object) -> Confirm:
    """Convert the argument `confirm` of a client; raises `InvalidField`."""
    for each in Confirm:
        if each.value == text:
            return each
    raise InvalidField("confirm", described(text), "'before' or 'after'")


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
