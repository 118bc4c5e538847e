"""Decodes the messages of a handshake: the geometry of a source engine and its agents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry._wire.geometry_codec import PlaneDecoder, engine_from_proto, rank_from_proto
from kvferry._wire.version import OURS, Version, check_together
from kvferry.errors import BadGeometry, LimitReached
from kvferry.geometry.model import EngineGeometry, RankGeometry
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb

MAX_RANKS = 4096
MAX_BYTES = 1 << 30
MAX_PLANES = 1 << 20
"""Limits for one engine: a home must not fill the reader's memory. A decoded plane takes thirty times its message."""


@dataclass(frozen=True, slots=True)
class Handshaken:
    """The result of a handshake: the geometry of the whole engine, and its serving agents by rank. A rank with
    ``serve=False`` has no agent. Without `has_agents`, the home sent the geometry only."""

    geometry: EngineGeometry
    agents: dict[int, geometry_pb2.Agent] = field(repr=False)
    has_agents: bool


def put_together(messages: Iterable[pb.HandshakeResponse]) -> Handshaken:
    """Decode the messages of a handshake.

    Raises:
        BadGeometry: the messages contradict each other, or the geometry contradicts itself.
        LimitReached: the engine is larger than the limits.
        ContractDiffers: the engine and this release do not work together.
    """
    first: pb.HandshakeResponse | None = None
    ranks: list[RankGeometry] = []
    agents: dict[int, geometry_pb2.Agent] = {}
    size = num_agents = planes = 0
    planes_of = PlaneDecoder()
    for message in messages:
        size += message.ByteSize()
        if first is None:
            first = message
            if not message.HasField("engine"):
                raise BadGeometry("handshake", "its first message does not name the engine")
            source = Version.from_proto(message.source_version)
            check_together(source, f"the source {message.engine.engine_id!r}", OURS, "this reader")
        if size > MAX_BYTES or first.num_ranks > MAX_RANKS:
            so_far = f"{first.num_ranks} ranks, {size} bytes so far"
            problem = f"engine {first.engine.engine_id!r} is too large: {so_far}"
            raise LimitReached(problem, limit="handshake_bytes", value=MAX_BYTES)
        planes += sum(len(rank.planes) for rank in message.ranks)
        if planes > MAX_PLANES or len(ranks) + len(message.ranks) > first.num_ranks:
            raise BadGeometry("handshake", f"more than {first.num_ranks} ranks, or {MAX_PLANES} planes")
        if len(message.agents) not in (0, len(message.ranks)):
            raise BadGeometry("handshake", f"a page of {len(message.ranks)} ranks has {len(message.agents)} agents")
        ranks += (rank_from_proto(rank, planes_of) for rank in message.ranks)
        num_agents += len(message.agents)
        for rank, agent in zip(message.ranks, message.agents, strict=False):
            if agent.name:
                agents[rank.rank] = agent
    if first is None or len(ranks) != first.num_ranks:
        raise BadGeometry("handshake", f"it ended after {len(ranks)} of {first.num_ranks if first else 'its'} ranks")
    if num_agents not in (0, len(ranks)):
        raise BadGeometry("handshake", f"{num_agents} of {len(ranks)} ranks have agents")
    return Handshaken(engine_from_proto(first.engine, ranks), agents, num_agents > 0)
