"""What a home tells of an engine: made once from its registrations, for however many ask.

To compare and encode an engine of a hundred ranks takes tenths of a second, so it is not done for each of a hundred
readers anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from kvferry._wire.geometry_codec import engine_to_proto, rank_to_proto, region_to_proto
from kvferry.errors import Incompatible
from kvferry.geometry.model import EngineGeometry
from kvferry.planner.compatibility import diff_indexed
from kvferry.planner.coverage import Indexed
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.registrations import Agent, Registration

PAGE_BYTES = 1 << 20
"""Bytes of a page of ranks: small beside what a message may have, so that sending one holds nobody up."""

MAX_RANK_BYTES = 7 << 19
"""Bytes of a rank and its agent as they are told, 3.5 MiB: they fit a message together with `MAX_HEADER_BYTES`."""

MAX_HEADER_BYTES = 1 << 18
"""Bytes of an engine without its ranks as it is told."""


class Source:
    """An engine as its readers see it.

    Threading: for the node server's worker (`kvferry_server.servicers.worker`) only, where each part is made when it is
    first needed.

    Args:
        ref: the engine.
        registrations: of its ranks, by rising rank; at least one.
    """

    def __init__(self, ref: EngineRef, registrations: tuple[Registration, ...]) -> None:
        self._ref = ref
        self._registrations = registrations
        self._pages: dict[bool, tuple[bytes, ...]] = {}

    @cached_property
    def geometry(self) -> EngineGeometry:
        """The whole engine."""
        first, ranks = self._registrations[0], tuple(registration.geometry for registration in self._registrations)
        return EngineGeometry(self._ref.engine_id, first.groups, ranks, first.identity, self._ref.incarnation)

    def check_readable_by(self, reader: EngineGeometry) -> None:
        """Raise `Incompatible` unless the ranks of a reader can read this engine's cache."""
        mismatches = diff_indexed(self._indexed, reader)
        if mismatches:
            raise Incompatible(mismatches)

    def pages(self, epoch: bytes, times: pb.Times, *, agents: bool) -> tuple[bytes, ...]:
        """The engine as encoded messages of a handshake (`HandshakeResponse`).

        Args:
            epoch, times: of the home; they do not change.
            agents: whether the ranks' agents are told.
        """
        if agents not in self._pages:
            engine = engine_header(self._ref, self._registrations[0])
            first = pb.HandshakeResponse(
                home_epoch=epoch, times=times, engine=engine, num_ranks=len(self._registrations)
            )
            head = pb.HandshakeResponse(home_epoch=epoch).SerializeToString()
            self._pages[agents] = (first.SerializeToString(), *self._rank_pages(head, agents=agents))
        return self._pages[agents]

    def ranks(self) -> Iterator[tuple[int, bytes]]:
        """The encoded geometry of each rank, by rising rank."""
        numbers = (registration.rank for registration in self._registrations)
        return zip(numbers, self._encoded, strict=True)

    @cached_property
    def _indexed(self) -> Indexed:
        return Indexed(self.geometry)

    @cached_property
    def _encoded(self) -> tuple[bytes, ...]:
        return tuple(rank_bytes(registration) for registration in self._registrations)

    def _rank_pages(self, head: bytes, *, agents: bool) -> Iterator[bytes]:
        parts, size = [head], 0
        for registration, geometry in zip(self._registrations, self._encoded, strict=True):
            rank = embedded(pb.HandshakeResponse.RANKS_FIELD_NUMBER, geometry)
            if agents:
                rank += embedded(pb.HandshakeResponse.AGENTS_FIELD_NUMBER, agent_bytes(registration.agent))
            if size and size + len(rank) > PAGE_BYTES:
                yield b"".join(parts)
                parts, size = [head], 0
            parts.append(rank)
            size += len(rank)
        yield b"".join(parts)


def engine_header(ref: EngineRef, registration: Registration) -> geometry_pb2.EngineGeometry:
    """An engine without its ranks, as any of them registered it."""
    bare = EngineGeometry(ref.engine_id, registration.groups, (), registration.identity, ref.incarnation)
    return engine_to_proto(bare)


def rank_bytes(registration: Registration) -> bytes:
    """The encoded geometry of a rank."""
    return rank_to_proto(registration.geometry).SerializeToString()


def agent_bytes(agent: Agent | None) -> bytes:
    """An encoded agent; one without a name for a rank that serves nothing."""
    if agent is None:
        return b""
    return geometry_pb2.Agent(
        name=agent.name,
        metadata=agent.metadata,
        metadata_sha256=agent.metadata_sha256,
        regions=[region_to_proto(region) for region in agent.regions],
    ).SerializeToString()


def embedded(number: int, message: bytes) -> bytes:
    """A field of this number that holds an encoded message, as protobuf writes it: what is encoded need not be parsed
    again to become part of a page."""
    return _varint(number << 3 | 2) + _varint(len(message)) + message


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))
