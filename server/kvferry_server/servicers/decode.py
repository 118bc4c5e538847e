"""Requests as values of the domain. Whatever bytes a peer sent end in a checked value or in a typed error."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry._wire.geometry_codec import groups_from_proto, rank_from_proto, region_from_proto
from kvferry._wire.reference import ENGINE_PREFIX, parse_engine_reference, parse_reference
from kvferry.errors import InvalidField, NotImplementedHere
from kvferry.geometry.blocks import MAX_BLOCKS
from kvferry.geometry.model import EngineGeometry
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.identity import EngineRef, Names
from kvferry_server.domain.reads import Ask, RankOutcome, RankReport, ReadKey
from kvferry_server.domain.registrations import Agent, Registration
from kvferry_server.domain.sources import MAX_HEADER_BYTES, MAX_RANK_BYTES, agent_bytes, engine_header, rank_bytes
from kvferry_server.domain.steps import MAX_PAYLOAD, GroupBlocks, PublicationStep
from kvferry_server.domain.watch_feed import Process, Role
from kvferry_server.servicers.checks import engine_ref, positive, random_bytes, session_secret, text

MAX_METADATA = 2 << 20
"""Bytes of a NIXL agent's metadata."""

MAX_AGENT_NAME = 512
"""Bytes of an agent's name, which holds an engine_id, an incarnation and more."""

MAX_IDENTITY = 256
"""Entries of an identity."""

MAX_GROUPS = 256
"""Groups of one step of a publication."""

MAX_RUNS = 1 << 17
"""Runs of one step of a publication, over all groups: what a step costs to check, and to send to each reader at once.
Two million tokens in blocks of 16, no two of which are neighbours; more go into a further step."""

TOKEN_LIMIT = 1 << 62
"""Token numbers stay below, so that sums of them fit 64 bits."""


def registration(request: pb.RegisterCacheRequest) -> Registration:
    """A rank's cache, checked in itself, and for whether a message can tell it. Takes milliseconds for many planes."""
    if not request.HasField("rank"):
        raise InvalidField("rank", None, "the geometry of a rank")
    made = Registration(
        engine=engine_ref("engine", request.engine),
        num_ranks=positive("num_ranks", request.num_ranks),
        identity=_identity(request.identity),
        groups=groups_from_proto(request.groups),
        geometry=rank_from_proto(request.rank),
        agent=_agent(request.agent) if request.HasField("agent") else None,
    )
    size = len(rank_bytes(made)) + len(agent_bytes(made.agent))
    if size > MAX_RANK_BYTES:
        raise InvalidField("rank", f"{size} bytes with its agent", f"at most {MAX_RANK_BYTES} bytes")
    header = engine_header(made.engine, made).ByteSize()
    if header > MAX_HEADER_BYTES:
        raise InvalidField("groups", f"{header} bytes with the identity", f"at most {MAX_HEADER_BYTES} bytes")
    return made


def reader_geometry(request: pb.HandshakeRequest) -> EngineGeometry:
    """The engine of the one rank that asks. Takes milliseconds for many planes."""
    if not request.HasField("rank"):
        raise InvalidField("rank", None, "the geometry of the rank that asks")
    return EngineGeometry(
        engine_id=request.reader.engine_id,
        groups=groups_from_proto(request.groups),
        ranks=(rank_from_proto(request.rank),),
        identity=_identity(request.identity),
        incarnation=request.reader.incarnation,
    )


def ask(request: pb.ReadBlocksRequest, max_parties: int, names: Names, peer: str = "") -> Ask:
    """What a reader asks for; raises `NotImplementedHere` for a reference that a router made."""
    if not 1 <= request.parties <= max_parties:
        raise InvalidField("parties", request.parties, f"1 to {max_parties}")
    source, number, key = reference(request.reference)
    read = ReadKey(source, number, engine_ref("reader", request.reader), random_bytes("read_id", request.read_id))
    return Ask(read, key, request.parties, request.expected_reads, names, peer)


def reference(given: str) -> tuple[EngineRef, int, bytes]:
    """Source, publication number and key of a reference; raises `BadReference`, `NotImplementedHere`."""
    parsed = parse_reference(given)
    if parsed.router_key:
        what = "references that a router made (router_key)"
        raise NotImplementedHere(f"this node server does not offer {what}", what=what)
    source = pb.EngineRef(engine_id=parsed.engine_id, incarnation=parsed.incarnation)
    return engine_ref("reference", source), parsed.publication, parsed.key


def handshake_reference(request: pb.HandshakeRequest) -> tuple[EngineRef, int, bytes] | None:
    """What a handshake shows to be told agents: source, publication number and key, 0 for the engine's own reference;
    None if it shows nothing. Raises `BadReference`, `InvalidField` for a reference to another engine."""
    if not request.reference:
        return None
    if request.reference.startswith(ENGINE_PREFIX):
        parsed = parse_engine_reference(request.reference)
        named = pb.EngineRef(engine_id=parsed.engine_id, incarnation=parsed.incarnation)
        source, number, key = engine_ref("reference", named), 0, parsed.key
    else:
        source, number, key = reference(request.reference)
    if source.engine_id != request.engine_id:
        raise InvalidField("reference", f"one to engine {source.engine_id!r}", f"one to engine {request.engine_id!r}")
    return source, number, key


def process(request: pb.WatchRequest) -> Process:
    """Whose Watch this is."""
    try:
        role = Role(request.role)
    except ValueError:
        raise InvalidField("role", request.role, "WATCH_ROLE_SCHEDULER or WATCH_ROLE_RANK") from None
    if role is Role.SCHEDULER and request.rank:
        raise InvalidField("rank", request.rank, "0 for a scheduler")
    session_secret(request.session_secret)
    random_bytes("resume_epoch", request.resume_epoch, optional=True)
    node = text("relayed_by", request.relayed_by, least=0)
    return Process(engine_ref("engine", request.engine), role, request.rank, node)


def offer(message: pb.Publish, max_reads: int) -> PublicationStep:
    """One step of a publication, checked in itself; `check_step` knows the engine's groups."""
    if len(message.payload) > MAX_PAYLOAD:
        raise InvalidField("publish.payload", f"{len(message.payload)} bytes", f"at most {MAX_PAYLOAD} bytes")
    runs = sum(len(blocks.run_starts) for blocks in message.groups)
    if runs > MAX_RUNS or len(message.groups) > MAX_GROUPS:
        given, most = f"{runs} runs in {len(message.groups)} groups", f"at most {MAX_RUNS} in {MAX_GROUPS}"
        raise InvalidField("publish.groups", given, most)
    if message.expected_reads > max_reads:
        raise InvalidField("publish.expected_reads", message.expected_reads, f"at most {max_reads}")
    if message.payload and not message.last:
        raise InvalidField("publish.payload", f"{len(message.payload)} bytes", "none before the last step")
    return PublicationStep(
        number=positive("publish.publication", message.publication),
        request_id=text("publish.request_id", message.request_id),
        step=message.step,
        groups=tuple(_group_blocks(blocks) for blocks in message.groups),
        last=message.last,
        expected_reads=message.expected_reads or 1,
        payload=message.payload,
        checksums=message.checksums,
    )


def reports(message: pb.ReadDone, max_parties: int) -> tuple[RankReport, ...]:
    """The reports of a notification, at least one and no more than a read has parties."""
    if not 1 <= len(message.reports) <= max_parties:
        raise InvalidField("read_done.reports", f"{len(message.reports)}", f"1 to {max_parties}")
    return tuple(_report(report) for report in message.reports)


def _report(message: pb.RankReport) -> RankReport:
    try:
        outcome = RankOutcome(message.outcome)
    except ValueError:
        raise InvalidField("read_done.reports.outcome", message.outcome, "a RankOutcome") from None
    return RankReport(message.rank, outcome, message.bytes)


def _identity(entries: Mapping[str, str]) -> dict[str, str]:
    identity = dict(entries)
    if len(identity) > MAX_IDENTITY:
        raise InvalidField("identity", f"{len(identity)} entries", f"at most {MAX_IDENTITY}")
    return identity


def _agent(message: geometry_pb2.Agent) -> Agent:
    if not 1 <= len(message.metadata) <= MAX_METADATA:
        raise InvalidField("agent.metadata", f"{len(message.metadata)} bytes", f"1 to {MAX_METADATA} bytes")
    if len(message.metadata_sha256) != 32:
        raise InvalidField("agent.metadata_sha256", f"{len(message.metadata_sha256)} bytes", "32 bytes")
    return Agent(
        name=text("agent.name", message.name, most=MAX_AGENT_NAME),
        metadata=message.metadata,
        metadata_sha256=message.metadata_sha256,
        regions=tuple(region_from_proto(region) for region in message.regions),
    )


def _group_blocks(message: pb.GroupBlocks) -> GroupBlocks:
    where = f"publish.groups[{message.group}]"
    starts, counts = tuple(message.run_starts), tuple(message.run_counts)
    if len(starts) != len(counts):
        raise InvalidField(where, f"{len(starts)} starts, {len(counts)} counts", "as many run_starts as run_counts")
    if starts and (min(counts) < 1 or sum(counts) > MAX_BLOCKS or max(starts) >= 1 << 31):
        raise InvalidField(where, "run_counts", f"counts of at least 1, together at most {MAX_BLOCKS}, ids below 2**31")
    if not message.first_token <= message.end_token < TOKEN_LIMIT:
        tokens = (message.first_token, message.end_token)
        raise InvalidField(where, tokens, "0 <= first_token <= end_token < 2**62")
    if message.state_token >= TOKEN_LIMIT:
        raise InvalidField(f"{where}.state_token", message.state_token, "below 2**62")
    return GroupBlocks(
        group=text("publish.groups.group", message.group),
        first_token=message.first_token,
        end_token=message.end_token,
        state_token=message.state_token,
        starts=starts,
        counts=counts,
    )
