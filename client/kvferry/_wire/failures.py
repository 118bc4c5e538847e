"""Says why ranks failed, for people."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry._wire.status import reason_name
from kvferry.v1 import kv_transfer_pb2 as pb

NAMED_RANKS = 4
"""Most ranks that are named for each reason; the others are counted."""


def failures_of(reports: Iterable[pb.RankReport]) -> str:
    """Return why ranks failed, as ``TRANSFER_FAILED (ranks 1, 3), DATA_LOSS (rank 2)``; empty if none did.

    Args:
        reports: of the ranks of a read. A rank that was cancelled has not failed.
    """
    ranks: dict[str, list[int]] = {}
    for report in sorted(reports, key=lambda report: report.rank):
        if report.outcome not in (pb.RANK_OUTCOME_DONE, pb.RANK_OUTCOME_CANCELLED):
            expired = report.outcome == pb.RANK_OUTCOME_EXPIRED
            name = reason_name(report.reason) or ("lease expired" if expired else "no reason given")
            ranks.setdefault(name, []).append(report.rank)
    return ", ".join(f"{name} ({_ranks(of)})" for name, of in ranks.items())


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:NAMED_RANKS]))
    more = f" and {len(ranks) - NAMED_RANKS} more" if len(ranks) > NAMED_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"
