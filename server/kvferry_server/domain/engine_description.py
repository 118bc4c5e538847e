"""The description of an engine for its readers: its geometry and agents, encoded once for all of them. Comparing and
encoding an engine of a hundred ranks takes tenths of a second, too long to repeat for each of a hundred readers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from operator import attrgetter

from kvferry._wire.geometry_codec import agent_to_proto, engine_to_proto, rank_to_proto
from kvferry._wire.version import OURS_ENCODED, Version, check_together
from kvferry.errors import Incompatible
from kvferry.geometry.model import EngineGeometry
from kvferry.planner.coverage import Indexed, check_complete, diff_indexed
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.limits import MAX_NOTED_READERS, RANK_PAGE_BYTES
from kvferry_server.domain.registrations import Registration


class EngineDescription:
    """An engine as its readers see it, made from the registrations of its ranks (at least one, in order of rank).

    Not thread-safe: the node server's worker thread (`kvferry_server.servicers.worker`) makes each part when it is
    first needed.
    """

    def __init__(self, ref: EngineRef, registrations: tuple[Registration, ...]) -> None:
        self._ref = ref
        self._registrations = registrations
        self._pages: dict[bool, tuple[bytes, ...]] = {}
        self._readers: set[bytes] = set()

    @cached_property
    def geometry(self) -> EngineGeometry:
        first, ranks = self._registrations[0], tuple(registration.geometry for registration in self._registrations)
        return EngineGeometry(
            self._ref.engine_id, first.groups, ranks, first.identity, self._ref.incarnation, first.partial
        )

    def check_complete(self) -> None:
        """Raise `BadGeometry` unless the ranks, all of which are there, together hold all heads and channels (R8)."""
        check_complete(self._indexed)

    def check_readable_by(self, reader: EngineGeometry) -> None:
        """Raise `Incompatible` unless the ranks of `reader` can read this engine's cache."""
        mismatches = diff_indexed(self._indexed, reader)
        if mismatches:
            raise Incompatible(mismatches)

    def check_version(self, reader: Version) -> None:
        """Raise `ContractDiffers` unless a reader's version works with that of every rank."""
        for version in {registration.version for registration in self._registrations}:
            check_together(reader, "the reader", version, f"the source {self._ref.engine_id!r}")

    def note_reader(self, digest: bytes) -> None:
        """Note the digest of a reader's geometry that was found compatible."""
        if len(self._readers) >= MAX_NOTED_READERS:
            self._readers.clear()
        self._readers.add(digest)

    def made_pages(self, digest: bytes, *, agents: bool) -> tuple[bytes, ...] | None:
        """Return the result of an earlier `pages`, if the digest is that of a geometry found compatible; else None. Any
        thread may call this."""
        return self._pages.get(agents) if digest in self._readers else None

    def pages(self, epoch: bytes, times: pb.Times, *, agents: bool) -> tuple[bytes, ...]:
        """Return the engine as encoded `HandshakeResponse` messages, with the ranks' agents if `agents`. `epoch` and
        `times` of the home do not change."""
        if agents not in self._pages:
            engine = engine_header(self._ref, self._registrations[0])
            oldest = min((registration.version for registration in self._registrations), key=attrgetter("revision"))
            first = pb.HandshakeResponse(
                home_epoch=epoch,
                times=times,
                engine=engine,
                num_ranks=len(self._registrations),
                version=OURS_ENCODED,
                source_version=oldest.to_proto(),
            )
            head = pb.HandshakeResponse(home_epoch=epoch).SerializeToString()
            self._pages[agents] = (first.SerializeToString(), *self._rank_pages(head, agents=agents))
        return self._pages[agents]

    def ranks(self) -> Iterator[tuple[int, bytes]]:
        """Yield the index and encoded geometry of each rank, in order of rank."""
        numbers = (registration.rank for registration in self._registrations)
        return zip(numbers, self._encoded, strict=True)

    @cached_property
    def _indexed(self) -> Indexed:
        return Indexed(self.geometry)

    @cached_property
    def _encoded(self) -> tuple[bytes, ...]:
        return tuple(rank_to_proto(each.geometry).SerializeToString() for each in self._registrations)

    def _rank_pages(self, head: bytes, *, agents: bool) -> Iterator[bytes]:
        parts, size = [head], 0
        for registration, geometry in zip(self._registrations, self._encoded, strict=True):
            one = pb.HandshakeResponse()
            one.ranks.add().MergeFromString(geometry)
            if agents:
                # One without a name for a rank that serves nothing.
                agent = registration.agent
                one.agents.append(geometry_pb2.Agent() if agent is None else agent_to_proto(agent))
            # An encoded message is the sum of its encoded parts.
            rank = one.SerializeToString()
            if size and size + len(rank) > RANK_PAGE_BYTES:
                yield b"".join(parts)
                parts, size = [head], 0
            parts.append(rank)
            size += len(rank)
        yield b"".join(parts)


def engine_header(ref: EngineRef, registration: Registration) -> geometry_pb2.EngineGeometry:
    """Return an engine without its ranks, as any of them registered it."""
    bare = EngineGeometry(
        ref.engine_id, registration.groups, (), registration.identity, ref.incarnation, registration.partial
    )
    return engine_to_proto(bare)
