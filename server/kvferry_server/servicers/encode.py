"""Encoding: values of the domain become answers."""

from __future__ import annotations

from kvferry._clock import to_duration
from kvferry._wire.geometry_codec import token_shard_to_proto
from kvferry._wire.status import reason_number
from kvferry.planner.explain import explain
from kvferry.planner.plan import ReadPlan
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Engine
from kvferry_server.domain.limits import MAX_NAMED_RANKS
from kvferry_server.domain.publications import Lease, PublicationRecord, PublicationStage
from kvferry_server.domain.router_keys import WaitingRead
from kvferry_server.domain.times import Times
from kvferry_server.domain.values import EngineRef, LeaseState

READ_FIELDS = ("group", "layers", "components", "bytes_per_token", "bytes_per_request", "descriptors_per_block", "path")
"""Fields with the same name and value in a line of a plan and in `kvferry.v1.PlannedRead`."""

MOST = (1 << 64) - 1  # The most that a field of 64 bits holds: peers state numbers whose sum is larger


def engine_ref(ref: EngineRef) -> pb.EngineRef:
    """Encode an engine reference."""
    return pb.EngineRef(engine_id=ref.engine_id, incarnation=ref.incarnation)


def times(values: Times) -> pb.Times:
    """Encode the durations in force."""
    return pb.Times(**{name: to_duration(getattr(values, name)) for name in pb.Times.DESCRIPTOR.fields_by_name})


def request_state(publication: PublicationRecord) -> ipb.RequestState.ValueType:
    """Encode the state of a publication that has arrived. One that was forgotten meanwhile was released before."""
    forgotten = publication.stage is PublicationStage.FORGOTTEN
    return ipb.RequestState.Value(f"REQUEST_STATE_{'RELEASED' if forgotten else publication.stage.name}")


def engine_summary(engine: Engine) -> ipb.EngineSummary:
    """Encode the summary of an engine; within a turn."""
    return ipb.EngineSummary(
        engine=engine_ref(engine.ref),
        # A dead engine is neither listed nor found.
        state=ipb.EngineState.Value(f"ENGINE_STATE_{engine.state.upper()}"),
        num_ranks=engine.num_ranks,
        missing_ranks=engine.missing_ranks(MAX_NAMED_RANKS),
        num_missing=engine.num_missing,
        publications=len(engine.pinned),
        leases=engine.live_leases,
        cache_bytes=min(engine.cache_bytes, MOST),
    )


def request_summary(publication: PublicationRecord, now: float) -> ipb.RequestSummary:
    """Encode the summary of a publication; `now` is in seconds on the home's clock."""
    return ipb.RequestSummary(
        engine=engine_ref(publication.source),
        publication=publication.number,
        request_id=publication.request_id,
        state=request_state(publication),
        blocks=publication.blocks,
        leases=len(publication.leases),
        reads_valid=publication.valid_reads,
        expected_reads=publication.expected_reads,
        age=to_duration(now - publication.first_at),
        router_key=_router_key(publication),
        last_failure=reason_number(publication.last_failure),
        marks=publication.mark_ends,
    )


def transfer_summary(read: Lease | WaitingRead, now: float) -> ipb.TransferSummary:
    """Encode the summary of a read; `now` is in seconds on the home's clock."""
    if isinstance(read, WaitingRead):
        reader, state = engine_ref(read.request.read.reader), pb.READ_STATE_WAITING
        return ipb.TransferSummary(
            source=engine_ref(read.sources[0]),
            read=pb.ReadSummary(reader=reader, state=state, parties=read.request.parties),
            router_key=read.router_key.name,
            waited=to_duration(now - read.since),
        )
    lease, publication = read, read.publication
    return ipb.TransferSummary(
        source=engine_ref(publication.source),
        publication=publication.number,
        request_id=publication.request_id,
        read=read_summary(lease),
        lease_remaining=to_duration(lease.remaining(now)),
        reports=[
            pb.RankReport(
                rank=report.rank,
                outcome=pb.RankOutcome.ValueType(report.outcome),
                bytes=report.bytes,
                reason=reason_number(report.reason),
            )
            for report in lease.reports.values()
        ],
        router_key=_router_key(publication),
        parts=len(publication.steps) if lease.state is LeaseState.WAITING else 0,
    )


def _router_key(publication: PublicationRecord) -> str:
    return publication.router_key.name if publication.router_key is not None else ""


def read_summary(lease: Lease) -> pb.ReadSummary:
    """Encode the summary of a read with a lease."""
    return pb.ReadSummary(
        reader=engine_ref(lease.request.read.reader),
        lease_number=lease.number,
        state=pb.ReadState.ValueType(lease.state),
        parties=lease.request.parties,
        reported=len(lease.reports),
        bytes=min(sum(report.bytes for report in lease.reports.values()), MOST),
    )


def plan(of: ReadPlan) -> ipb.RankPlan:
    """Encode a plan."""
    answer = ipb.RankPlan(rank=of.rank.rank, labels=of.rank.labels, uncovered=of.uncovered)
    for line in explain(of):
        read = answer.reads.add(
            source_rank=line.source.rank,
            source_labels=line.source.labels,
            unit_begin=line.units.begin,
            unit_end=line.units.end,
            path_reason=line.reason,
            **{name: getattr(line, name) for name in READ_FIELDS},
        )
        if line.tokens.count > 1:
            read.token_shard.CopyFrom(token_shard_to_proto(line.tokens))
        if not line.stripe.whole:
            read.stripe_begin, read.stripe_end, read.stripe_of = line.stripe.begin, line.stripe.end, line.stripe.of
    return answer
