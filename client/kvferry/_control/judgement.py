"""Whether a read's bytes count (R1; PROTOCOL, Leases 3 and Endings). Pure."""

from __future__ import annotations

import enum

from kvferry.v1 import kv_transfer_pb2 as pb


class Judgement(enum.Enum):
    """What became of a read whose parts have all ended well."""

    CONFIRMED = "confirmed"
    """Its bytes count; the home says so too."""
    TRUSTED = "trusted"
    """Its bytes count by the reader's own clock: the home has no record of the lease, or did not answer."""
    EXPIRED = "expired"
    """Its bytes don't count."""


def judge(ended_at: float, deadline: float, verdict: pb.Verdict.ValueType | None) -> Judgement:
    """Judge a read after its report was answered, or was not.

    Args:
        ended_at: reader's clock when its last part ended.
        deadline: of its lease, on the same clock.
        verdict: the home's; None if it did not answer in time.
    """
    if ended_at >= deadline or verdict == pb.VERDICT_EXPIRED:
        return Judgement.EXPIRED
    return Judgement.CONFIRMED if verdict == pb.VERDICT_VALID else Judgement.TRUSTED
