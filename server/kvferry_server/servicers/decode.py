"""Decoding: requests become values of the domain. Any content ends in a checked value or in a typed error."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry._prompt import MARK_BYTES
from kvferry._wire.authority import AGENT_KEY_BYTES, SECRET_BYTES, proves_agent
from kvferry._wire.channel import MAX_NOTIFY_BYTES
from kvferry._wire.geometry_codec import (
    agent_from_proto,
    agent_to_proto,
    engine_to_proto,
    groups_from_proto,
    rank_from_proto,
    rank_to_proto,
    runs_from_proto,
)
from kvferry._wire.outcomes import MissReason
from kvferry._wire.publication import blocks_of
from kvferry._wire.reference import (
    ENGINE_PREFIX,
    HINT_DIGEST_BYTES,
    engine_ids,
    parse_engine_reference,
    parse_reference,
)
from kvferry._wire.status import reason_name
from kvferry._wire.version import Version
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import BlockRuns, Unfinished
from kvferry.geometry.model import AgentInfo, EngineGeometry
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.engine import Process, Role
from kvferry_server.domain.limits import MAX_HEADER_BYTES, MAX_PAYLOAD, MAX_RANK_BYTES
from kvferry_server.domain.registrations import Registration
from kvferry_server.domain.router_keys import Ask
from kvferry_server.domain.steps import PublicationStep
from kvferry_server.domain.values import (
    EngineRef,
    LeaseRequest,
    Names,
    RankOutcome,
    RankReport,
    ReadKey,
    RouterKey,
    RouterReference,
)
from kvferry_server.servicers import checks, limits


def registration(request: pb.RegisterCacheRequest) -> Registration:
    """Decode a rank's cache. Takes milliseconds for many planes. Raises `InvalidField` if a field is malformed, or the
    rank does not fit the messages for readers, and as `Registration`."""
    if not request.HasField("rank"):
        raise InvalidField("rank", None, "the geometry of a rank")
    made = Registration(
        engine=checks.engine_ref("engine", request.engine),
        num_ranks=checks.positive("num_ranks", request.num_ranks),
        identity=_identity(request.identity),
        groups=groups_from_proto(request.groups),
        geometry=rank_from_proto(request.rank),
        agent=_agent(request.agent, request.agent_key) if request.HasField("agent") else None,
        version=Version.from_proto(request.version),
        partial=request.partial,
    )
    agent = 0 if made.agent is None else agent_to_proto(made.agent).ByteSize()
    size = rank_to_proto(made.geometry).ByteSize() + agent
    if size > MAX_RANK_BYTES:
        raise InvalidField("rank", f"{size} bytes with its agent", f"at most {MAX_RANK_BYTES} bytes")
    header = engine_to_proto(made.of_engine()).ByteSize()
    if header > MAX_HEADER_BYTES:
        raise InvalidField("groups", f"{header} bytes with the identity", f"at most {MAX_HEADER_BYTES} bytes")
    return made


def reader_geometry(request: pb.HandshakeRequest) -> EngineGeometry:
    """Decode the geometry of a handshaking reader: an engine with one rank. Takes milliseconds for many planes."""
    if not request.HasField("rank"):
        raise InvalidField("rank", None, "the geometry of the rank that asks")
    return EngineGeometry(
        engine_id=request.reader.engine_id,
        groups=groups_from_proto(request.groups),
        ranks=(rank_from_proto(request.rank),),
        identity=_identity(request.identity),
        incarnation=request.reader.incarnation,
    )


def reader_digest(request: pb.HandshakeRequest) -> bytes:
    """Return a digest of all that `reader_geometry` decodes, but for the reader's name, and of unknown fields."""
    geometry = pb.HandshakeRequest()
    geometry.CopyFrom(request)
    for name in ("engine_id", "incarnation", "reader", "reference"):
        geometry.ClearField(name)
    return hashlib.sha256(geometry.SerializeToString(deterministic=True)).digest()


def lease_request(request: pb.ReadBlocksRequest, max_parties: int, names: Names, host: str = "") -> LeaseRequest:
    """Decode a ReadBlocks call, with at most `max_parties`. Raises `InvalidField` or `BadReference`."""
    checks.within("parties", request.parties, max_parties, least=1)
    named, routed = reference(request.reference), None
    if isinstance(named, RouterReference):
        routed, named = named, Named(named.home, EngineRef(named.engine_ids[0], b""), 0, b"")
    reader, read_id = checks.engine_ref("reader", request.reader), checks.random_bytes("read_id", request.read_id)
    read = ReadKey(named.source, named.publication, reader, read_id)
    return LeaseRequest(read, named.key, request.parties, request.expected_reads, names, host, routed)


@dataclass(frozen=True, slots=True)
class Named:
    """A reference to a publication, or with the number 0 to an engine."""

    home: str  # the address in the reference
    source: EngineRef
    publication: int
    key: bytes = field(repr=False)


def reference(given: str) -> Named | RouterReference:
    """Decode a reference; raises `BadReference` and `InvalidField`."""
    parsed = parse_reference(given)
    if parsed.router_key:
        engine_id = checks.text("reference.engine_id", parsed.engine_id)
        key = RouterKey(checks.text("reference.router_key", parsed.router_key), parsed.key)
        return RouterReference(parsed.home, engine_ids(engine_id, parsed.data_parallel_rank), key)
    return Named(parsed.home, checks.engine_ref("reference", parsed), parsed.publication, parsed.key)


def handshake_reference(request: pb.HandshakeRequest) -> Named | None:
    """Decode the reference that entitles a handshake to agents; None: the handshake has none. Raises as `reference`,
    and `InvalidField` if it is to another engine, or a router made it, so that it names no incarnation."""
    if not request.reference:
        return None
    whole_engine = request.reference.startswith(ENGINE_PREFIX)
    found = engine_reference("reference", request.reference) if whole_engine else reference(request.reference)
    if isinstance(found, RouterReference):
        raise InvalidField("reference", "one that a router made", "that of the publication, as in `Accepted.reference`")
    if found.source.engine_id != request.engine_id:
        expected = f"a reference to engine {request.engine_id!r}"
        raise InvalidField("reference", f"a reference to engine {found.source.engine_id!r}", expected)
    return found


def engine_reference(field: str, given: str) -> Named:
    """Decode an engine's own reference; raises as `reference`."""
    parsed = parse_engine_reference(given)
    return Named(parsed.home, checks.engine_ref(field, parsed), 0, parsed.key)


def ask(message: pb.Ask, asker: EngineRef, host: str) -> tuple[tuple[str, ...], Named | None, Ask]:
    """Decode a question, the names that the engine that is asked may have, and its own reference; None: the caller has
    none. Raises `InvalidField` or `BadReference` if a field is malformed."""
    named, prompt = reference(message.reference), message.prompt
    if not isinstance(named, RouterReference) or not named.router_key.of_question:
        expected = "one that its asker made, whose router_key is derived from its key"
        raise InvalidField("ask.reference", "another reference", expected)
    names, engine = named.engine_ids, None
    if message.engine_reference:
        engine = engine_reference("ask.engine_reference", message.engine_reference)
        if engine.source.engine_id not in names:
            asked, expected = engine.source.engine_id, f"of engine {names[0]!r}, as in ask.reference"
            raise InvalidField("ask.engine_reference", f"of engine {asked!r}", expected)
    tokens = checks.within("ask.prompt.token_ids", len(prompt.token_ids), MAX_NOTIFY_BYTES, least=1, unit="tokens")
    checks.within("ask.prompt.adapter", len(prompt.adapter.encode()), limits.MAX_TEXT, unit="bytes")
    checks.within("ask.prompt.inputs", len(prompt.inputs), limits.MAX_INPUTS, unit="inputs")
    for given in prompt.inputs:
        checks.within("ask.prompt.inputs.offset", given.offset, limits.MAX_PLACE)
        checks.within("ask.prompt.inputs.length", given.length, limits.MAX_PLACE)
        size = len(given.identifier.encode())
        checks.within("ask.prompt.inputs.identifier", size, limits.MAX_TEXT, least=1, unit="bytes")
    checks.within("ask.first_token", message.first_token, tokens - 1)
    wait = checks.seconds("ask.wait", message.wait) or limits.DEFAULT_ASK_WAIT
    if wait > limits.MAX_ASK_WAIT:
        raise InvalidField("ask.wait", f"{wait} s", f"at most {limits.MAX_ASK_WAIT:g} s")
    prompt.DiscardUnknownFields()
    encoded = prompt.SerializeToString()
    return names, engine, Ask(named.router_key, message.reference, encoded, message.first_token, wait, asker, host)


_MISSES = {reason.value: reason for reason in MissReason if reason is not MissReason.NO_ANSWER}


def miss_reason(message: pb.Miss) -> MissReason:
    """Decode a source's reason; raises `InvalidField`."""
    reason = _MISSES.get(message.reason)
    if reason is None:
        raise InvalidField("miss.reason", message.reason, "a value of MissReason that sources say")
    return reason


def process(request: pb.WatchRequest) -> Process:
    """Decode the process that opens a Watch; raises `InvalidField`."""
    try:
        role = Role(request.role)
    except ValueError:
        raise InvalidField("role", request.role, "WATCH_ROLE_SCHEDULER or WATCH_ROLE_RANK") from None
    if role is Role.SCHEDULER and request.rank:
        raise InvalidField("rank", request.rank, "0 for a scheduler")
    checks.exactly("session_secret", request.session_secret, SECRET_BYTES)
    checks.random_bytes("resume_epoch", request.resume_epoch, optional=True)
    node = checks.text("relayed_by", request.relayed_by, least=0)
    return Process(checks.engine_ref("engine", request.engine), role, request.rank, node)


def publication_step(message: pb.Publish, max_reads: int) -> PublicationStep:
    """Decode a step of a publication; raises `InvalidField`. `check_step` checks it against the engine's groups."""
    checks.within("publish.payload", len(message.payload), MAX_PAYLOAD, unit="bytes")
    checks.within("publish.expected_reads", message.expected_reads, max_reads)
    groups = len(message.groups) + len(message.unfinished.groups)
    listed = (*message.groups, *message.unfinished.groups) if groups <= limits.MAX_GROUPS else ()
    runs = sum(len(blocks.run_starts) for blocks in listed)
    if runs > limits.MAX_RUNS or groups > limits.MAX_GROUPS:
        most = f"at most {limits.MAX_RUNS} in {limits.MAX_GROUPS}"
        raise InvalidField("publish.groups", f"{runs} runs in {groups} groups", most)
    if message.hint_digest and (message.step or not message.last):
        raise InvalidField("publish.hint_digest", f"in step {message.step}", "with a publication of one step only")
    if message.payload and not message.last:
        raise InvalidField("publish.payload", f"{len(message.payload)} bytes", "none before the last step")
    unfinished = None
    if message.HasField("unfinished"):
        layers = message.unfinished.layers
        checks.within("publish.unfinished.layers", len(layers), limits.MAX_LAYERS, least=1, unit="layers")
        unfinished = Unfinished(
            groups=tuple(map(_group_blocks, message.unfinished.groups)),
            layers=tuple(checks.text("publish.unfinished.layers", name) for name in layers),
        )
    return PublicationStep(
        number=checks.positive("publish.publication", message.publication),
        request_id=checks.text("publish.request_id", message.request_id),
        index=message.step,
        groups=tuple(map(_group_blocks, message.groups)),
        last=message.last,
        expected_reads=message.expected_reads or 1,
        payload=message.payload,
        checksums=message.checksums,
        router_key=_router_key(message),
        unfinished=unfinished,
        mark_ends=_mark_ends(message.marks),
        encoded=pb.ReadBlocksResponse(blocks=[blocks_of(message)]).SerializeToString(),
        hint_digest=checks.exactly("publish.hint_digest", message.hint_digest, HINT_DIGEST_BYTES, optional=True),
    )


def _mark_ends(messages: Sequence[pb.PromptMark]) -> tuple[int, ...]:
    if len(messages) > limits.MAX_MARKS:
        raise InvalidField("publish.marks", f"{len(messages)} marks", f"at most {limits.MAX_MARKS} over all steps")
    for mark in messages:
        checks.positive("publish.marks.end", mark.end)
        checks.exactly("publish.marks.digest", mark.digest, MARK_BYTES)
    return tuple(mark.end for mark in messages)


def _router_key(message: pb.Publish) -> RouterKey | None:
    if not message.router_key:
        if message.key:
            raise InvalidField("publish.key", f"{len(message.key)} bytes", "none without a router_key")
        return None
    if message.step:
        raise InvalidField("publish.router_key", f"in step {message.step}", "in the first step only")
    name = checks.text("publish.router_key", message.router_key)
    return RouterKey(name, checks.random_bytes("publish.key", message.key))


def reports(message: pb.ReadDone | pb.Validate, max_parties: int) -> tuple[RankReport, ...]:
    """Decode the reports of a notification: at least one, at most `max_parties`."""
    checks.within("reports", len(message.reports), max_parties, least=1, unit="reports")
    return tuple(_report(report) for report in message.reports)


def hinted_read(
    message: pb.Validate, reader: EngineRef, max_parties: int, names: Names, host: str
) -> tuple[LeaseRequest, bytes]:
    """Decode the read that a Validate ends, and the digest of its hint. Raises `InvalidField` or `BadReference`."""
    checks.within("validate.parties", message.parties, max_parties, least=1)
    named, read_id = reference(message.reference), checks.random_bytes("validate.read_id", message.read_id)
    if isinstance(named, RouterReference):
        raise InvalidField("validate.reference", "one that a router made", "that of a publication, which has a hint")
    digest = checks.exactly("validate.hint_digest", message.hint_digest, HINT_DIGEST_BYTES)
    read = ReadKey(named.source, named.publication, reader, read_id)
    return LeaseRequest(read, named.key, message.parties, names=names, host=host), digest


_OUTCOMES = {outcome.value: outcome for outcome in RankOutcome}


def _report(message: pb.RankReport) -> RankReport:
    outcome = _OUTCOMES.get(message.outcome)
    if outcome is None:
        raise InvalidField("reports.outcome", message.outcome, "a value of RankOutcome")
    return RankReport(message.rank, outcome, message.bytes, reason_name(message.reason))


def _identity(entries: Mapping[str, str]) -> dict[str, str]:
    checks.within("identity", len(entries), limits.MAX_IDENTITY, unit="entries")
    return dict(entries)


def _agent(message: geometry_pb2.Agent, key: bytes) -> AgentInfo:
    checks.within("agent.metadata", len(message.metadata), limits.MAX_METADATA, least=1, unit="bytes")
    checks.exactly("agent.metadata_sha256", message.metadata_sha256, 32)
    name = checks.text("agent.name", message.name, most=limits.MAX_AGENT_NAME)
    if not proves_agent(checks.exactly("agent_key", key, AGENT_KEY_BYTES, optional=True), name):
        # NIXL knows agents by name: readers would take this agent for the agent of the rank that has the key.
        raise InvalidField("agent_key", f"{len(key)} bytes", f"the key that agent {name[:80]!r} is named after")
    return agent_from_proto(message)


def _group_blocks(message: pb.GroupBlocks) -> BlockRuns:
    checks.text("publish.groups.group", message.group)
    runs = runs_from_proto(message)
    runs.check(f"publish.groups[{message.group}]")
    return runs
