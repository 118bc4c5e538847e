"""What people read of failed ranks."""

from __future__ import annotations

from kvferry._wire.status import failures_of
from kvferry.v1 import errors_pb2
from kvferry.v1 import kv_transfer_pb2 as pb


def report(rank: int, outcome: pb.RankOutcome.ValueType, reason: errors_pb2.ErrorReason.ValueType) -> pb.RankReport:
    return pb.RankReport(rank=rank, outcome=outcome, reason=reason)


def test_failed_ranks_are_counted_by_reason_and_others_left_out() -> None:
    nothing, loss = errors_pb2.ERROR_REASON_UNSPECIFIED, errors_pb2.DATA_LOSS
    failed = [report(rank, pb.RANK_OUTCOME_FAILED, loss) for rank in (9, 1, 3, 5, 7)]
    others = [
        report(0, pb.RANK_OUTCOME_DONE, nothing),
        report(2, pb.RANK_OUTCOME_CANCELLED, nothing),
        report(4, pb.RANK_OUTCOME_EXPIRED, nothing),
        report(6, pb.RANK_OUTCOME_FAILED, nothing),
    ]
    assert failures_of([*failed, *others]) == (
        "DATA_LOSS (ranks 1, 3, 5, 7 and 1 more), lease expired (rank 4), no reason given (rank 6)"
    )
    assert failures_of(others[:2]) == ""
