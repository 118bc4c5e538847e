"""The pages of a handshake, put together: a source engine as its home tells it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry._wire.geometry_codec import groups_from_proto, rank_from_proto
from kvferry.errors import BadGeometry, LimitReached
from kvferry.geometry.model import EngineGeometry, RankGeometry
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb

MAX_RANKS = 4096
MAX_BYTES = 1 << 30
MAX_PLANES = 1 << 20
"""What is taken of one engine: a home that told more would fill our memory. A plane takes thirty times what it takes on
the wire."""


@dataclass(frozen=True, slots=True)
class Handshaken:
    """A source engine.

    Attributes:
        geometry: the whole engine.
        agents: serving agents by rank; none of a rank that serves nothing.
        has_agents: whether the home told agents at all, not the geometry alone.
    """

    geometry: EngineGeometry
    agents: dict[int, geometry_pb2.Agent] = field(repr=False)
    has_agents: bool


def put_together(messages: Iterable[pb.HandshakeResponse]) -> Handshaken:
    """The engine that the messages of a handshake tell.

    Raises:
        BadGeometry: they do not fit each other, or what they tell contradicts itself.
        LimitReached: they are more than is taken of one engine.
    """
    first: pb.HandshakeResponse | None = None
    ranks: list[RankGeometry] = []
    agents: dict[int, geometry_pb2.Agent] = {}
    size = told = planes = 0
    for message in messages:
        size += message.ByteSize()
        if first is None:
            first = message
            if not message.HasField("engine"):
                raise BadGeometry("handshake", "its first message does not say which engine it is")
        if size > MAX_BYTES or first.num_ranks > MAX_RANKS:
            what = f"{first.num_ranks} ranks, {size} bytes so far"
            raise LimitReached(
                f"engine {first.engine.engine_id!r} tells too much: {what}", limit="handshake_bytes", value=MAX_BYTES
            )
        planes += sum(len(rank.planes) for rank in message.ranks)
        if planes > MAX_PLANES or len(ranks) + len(message.ranks) > first.num_ranks:
            raise BadGeometry("handshake", f"more than {first.num_ranks} ranks, or {MAX_PLANES} planes")
        if len(message.agents) not in (0, len(message.ranks)):
            raise BadGeometry("handshake", f"a page of {len(message.ranks)} ranks has {len(message.agents)} agents")
        ranks += map(rank_from_proto, message.ranks)
        told += len(message.agents)
        for rank, agent in zip(message.ranks, message.agents, strict=False):
            if agent.name:
                agents[rank.rank] = agent
    if first is None or len(ranks) != first.num_ranks:
        raise BadGeometry("handshake", f"it ended after {len(ranks)} of {first.num_ranks if first else 'its'} ranks")
    if told not in (0, len(ranks)):
        raise BadGeometry("handshake", f"{told} of {len(ranks)} ranks have agents")
    engine = first.engine
    geometry = EngineGeometry(
        engine_id=engine.engine_id,
        groups=groups_from_proto(engine.groups),
        ranks=tuple(ranks),
        identity=dict(engine.identity),
        incarnation=engine.incarnation,
    )
    return Handshaken(geometry, agents, told > 0)
