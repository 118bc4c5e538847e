"""Encodes a read plan for the answer of `Introspection.PlanRead`."""

from __future__ import annotations

from kvferry._wire.geometry_codec import token_shard_to_proto
from kvferry.planner.explain import explain
from kvferry.planner.plan import ReadPlan
from kvferry.v1 import introspection_pb2 as pb

ALIKE = ("group", "layers", "components", "bytes_per_token", "bytes_per_request", "descriptors_per_block", "path")
"""Fields with the same name and value in a line of a plan and in a message."""


def plan_to_proto(plan: ReadPlan) -> pb.RankPlan:
    """Encode a plan."""
    answer = pb.RankPlan(rank=plan.rank.rank, labels=plan.rank.labels, uncovered=plan.uncovered)
    for line in explain(plan):
        read = answer.reads.add(
            source_rank=line.source.rank,
            source_labels=line.source.labels,
            unit_begin=line.units.begin,
            unit_end=line.units.end,
            path_reason=line.reason,
            **{name: getattr(line, name) for name in ALIKE},
        )
        if line.tokens.count > 1:
            read.token_shard.CopyFrom(token_shard_to_proto(line.tokens))
        if not line.stripe.whole:
            read.stripe_begin, read.stripe_end, read.stripe_of = line.stripe.begin, line.stripe.end, line.stripe.of
    return answer
