"""Whether a read's bytes count (R1; PROTOCOL, Leases 3 and Endings). Pure."""

from __future__ import annotations

import enum

from kvferry._arguments import described
from kvferry.errors import InvalidField
from kvferry.v1 import kv_transfer_pb2 as pb


class Confirm(enum.Enum):
    """When the engine is told of a read whose shares have all succeeded within its lease."""

    BEFORE = "before"
    """After the home has confirmed the lease, or has not answered in time."""
    AFTER = "after"
    """At once. The home's answer comes afterwards, and is an audit: if it says that the lease had ended, the read is
    disputed."""


def confirmed(text: object) -> Confirm:
    """Convert the argument `confirm` of a client; raises `InvalidField`."""
    for each in Confirm:
        if each.value == text:
            return each
    raise InvalidField("confirm", described(text), "'before' or 'after'")


class ReaderVerdict(enum.Enum):
    """The judgement on a read whose shares have all succeeded."""

    CONFIRMED = "confirmed"
    """Its bytes count, according to the reader's clock and the home."""
    TRUSTED = "trusted"
    """Its bytes count, according to the reader's clock: the home has no record of the lease, or did not answer."""
    EXPIRED = "expired"
    """Its bytes do not count."""


def verdict_of(ended_at: float, deadline: float, verdict: pb.Verdict.ValueType | None) -> ReaderVerdict:
    """Judge a read after the home has answered its report, or has not answered in time.

    Args:
        ended_at: time of the end of its last share, on the reader's clock.
        deadline: deadline of its lease, on the same clock.
        verdict: the home's verdict; None: it did not answer in time.
    """
    if ended_at >= deadline or verdict == pb.VERDICT_EXPIRED:
        return ReaderVerdict.EXPIRED
    return ReaderVerdict.CONFIRMED if verdict == pb.VERDICT_VALID else ReaderVerdict.TRUSTED
