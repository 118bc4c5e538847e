"""Registrations: the cache that a rank states, and the checks that it is consistent (R7); and an engine as its readers
see it, made of the registrations of its ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from kvferry._wire.geometry_codec import agent_to_proto, engine_to_proto, rank_to_proto
from kvferry._wire.version import OURS, OURS_ENCODED, Version, check_together
from kvferry.errors import BadAgentMetadata, CacheDiffers, Incompatible, InvalidField
from kvferry.geometry.model import AgentInfo, EngineGeometry, Group, RankGeometry, check_regions
from kvferry.geometry.overlap import check_apart
from kvferry.planner.coverage import Indexed, check_complete, diff_indexed
from kvferry.v1 import geometry_pb2
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.domain.limits import MAX_NOTED_READERS, MAX_REGION_CHECKS, RANK_PAGE_BYTES
from kvferry_server.domain.values import EngineRef

PLANE_BYTES = 512  # Bytes that a plane or group takes in memory beside its names, estimated
REGISTRATION_BYTES = 4096  # Bytes that a registration takes beside planes, groups, identity and agent; estimated


@dataclass(frozen=True, slots=True)
class Registration:
    """One rank's cache. `num_ranks`, `identity`, `groups` and `partial` are those of the engine, the same for every
    rank. The constructor raises `InvalidField` if the rank's index is not below `num_ranks`, or the agent has too many
    regions; `BadGeometry` if planes contradict the groups, lie over each other, or lie outside the agent's memory; and
    `BadAgentMetadata` if the agent's metadata does not match its digest."""

    engine: EngineRef
    num_ranks: int
    identity: Mapping[str, str]
    groups: tuple[Group, ...]
    geometry: RankGeometry
    agent: AgentInfo | None  # None for a rank that only reads
    version: Version = OURS  # Of the rank. A later registration of the rank may have another.
    partial: bool = False

    def __post_init__(self) -> None:
        if self.rank >= self.num_ranks:
            raise InvalidField("rank.rank", self.rank, f"below num_ranks, {self.num_ranks}")
        # Checks the planes against the groups, and the groups against each other.
        self.of_engine((self.geometry,))
        check_apart(self.groups, self.geometry.rank, self.geometry.planes, may_share=True)
        if self.agent is not None:
            self._check_agent(self.agent)

    def _check_agent(self, agent: AgentInfo) -> None:
        if not hmac.compare_digest(hashlib.sha256(agent.metadata).digest(), agent.metadata_sha256):
            problem, engine_id = "metadata_sha256 is not the SHA-256 of metadata", self.engine.engine_id
            message = f"{self.engine}, rank {self.rank}: {problem}"
            raise BadAgentMetadata(message, engine_id=engine_id, rank=self.rank, problem=problem)
        planes = len(self.geometry.planes)
        if planes * len(agent.regions) > MAX_REGION_CHECKS:
            most = MAX_REGION_CHECKS // planes
            raise InvalidField("agent.regions", f"{len(agent.regions)} regions", f"at most {most} for {planes} planes")
        check_regions(self.geometry, agent.regions)

    def of_engine(self, ranks: tuple[RankGeometry, ...] = ()) -> EngineGeometry:
        """Return the engine with these of its ranks."""
        engine_id, incarnation = self.engine.engine_id, self.engine.incarnation
        return EngineGeometry(engine_id, self.groups, ranks, self.identity, incarnation, self.partial)

    @property
    def rank(self) -> int:
        return self.geometry.rank

    @property
    def size(self) -> int:
        """Estimated bytes in memory. Texts count in full: peers choose them, so none are shared."""
        planes, groups, labels = self.geometry.planes, self.groups, self.geometry.labels
        named = [text for plane in planes for text in (plane.layer, plane.format, plane.dtype)]
        named += [text for group in groups for text in (group.name, group.pool)]
        # Labels are also in the rank as it is encoded, and in its pages with and without agents.
        texts = text_bytes(*named) + sum(text_bytes(*pair) for pair in self.identity.items()) + 4 * text_bytes(*labels)
        agent = 0 if self.agent is None else len(self.agent.metadata) + 256 * len(self.agent.regions)
        entries = 256 * (len(self.identity) + len(labels))
        return REGISTRATION_BYTES + PLANE_BYTES * (len(planes) + len(groups)) + texts + entries + agent

    @property
    def block_bytes(self) -> Mapping[str, int]:
        """Bytes of one block of each group, over the rank's planes."""
        sizes: Counter[str] = Counter()
        for plane in self.geometry.planes:
            sizes[plane.group] += plane.bytes_per_block
        return sizes

    @property
    def cache_bytes(self) -> int:
        """Bytes of the rank's planes, without gaps. Groups of one pool lie over each other: the largest counts."""
        sizes, largest = Counter[str](), dict[tuple[str, str], int]()
        for plane in self.geometry.planes:
            sizes[plane.group] += plane.num_blocks * plane.bytes_per_block
        for group in self.groups:
            pool = ("pool", group.pool) if group.pool else ("group", group.name)
            largest[pool] = max(largest.get(pool, 0), sizes[group.name])
        return sum(largest.values())


def text_bytes(*texts: str) -> int:
    """Return the bytes that the characters of texts take in memory: four each where one of a text is far from ASCII."""
    return sum(len(text) * (1 if text.isascii() else 4) for text in texts)


OF_ENGINE = ("num_ranks", "partial", "identity", "groups")  # What all ranks of an engine register alike
OF_RANK = (*OF_ENGINE, "geometry.labels", "geometry.planes", "agent")


def check_same(registration: Registration, before: Registration, fields: Iterable[str]) -> None:
    """Raise `CacheDiffers`, which names the first difference, unless two registrations are equal in these fields."""
    for name in fields:
        mine, theirs = attrgetter(name)(before), attrgetter(name)(registration)
        if mine != theirs:
            ref, rank = registration.engine, registration.rank
            field = _difference(name.replace("geometry", "rank"), mine, theirs)
            problem = f"rank {rank} of {ref} was registered before with another {field}"
            raise CacheDiffers(problem, engine_id=ref.engine_id, rank=rank, field=field)


def _difference(where: str, mine: Any, theirs: Any) -> str:
    """Return the name of the first part in which two values differ."""
    if isinstance(mine, Mapping):
        return f"{where}[{next(key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key))}]"
    if isinstance(mine, tuple) and [each.name for each in mine] == [each.name for each in theirs]:
        one, other = next(pair for pair in zip(mine, theirs, strict=True) if pair[0] != pair[1])
        return _difference(f"{where}[{one.name}]", one, other)
    if dataclasses.is_dataclass(mine) and type(mine) is type(theirs):
        names = (field.name for field in dataclasses.fields(mine))
        return f"{where}.{next(name for name in names if getattr(mine, name) != getattr(theirs, name))}"
    return where


class EngineDescription:
    """An engine as its readers see it, made from the registrations of its ranks (at least one, in order of rank). Not
    thread-safe: the node server's worker thread (`kvferry_server.home.time_slices`) makes each part when it is first
    needed."""

    def __init__(self, registrations: tuple[Registration, ...]) -> None:
        self._registrations = registrations
        self._pages: dict[bool, tuple[bytes, ...]] = {}
        self._readers: set[bytes] = set()

    @cached_property
    def geometry(self) -> EngineGeometry:
        return self._registrations[0].of_engine(tuple(each.geometry for each in self._registrations))

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
            check_together(reader, "the reader", version, f"the source {self._registrations[0].engine.engine_id!r}")

    def note_reader(self, digest: bytes) -> None:
        """Note the digest of a reader's geometry that was found compatible."""
        if len(self._readers) >= MAX_NOTED_READERS:
            self._readers.clear()
        self._readers.add(digest)

    def made_pages(self, digest: bytes, *, agents: bool) -> tuple[bytes, ...] | None:
        """Return the result of an earlier `pages`, for the digest of a geometry found compatible; else None."""
        return self._pages.get(agents) if digest in self._readers else None

    def pages(self, epoch: bytes, times: pb.Times, *, agents: bool) -> tuple[bytes, ...]:
        """Return the engine as encoded `HandshakeResponse` messages. `epoch` and `times` of the home do not change."""
        if agents not in self._pages:
            oldest = min((registration.version for registration in self._registrations), key=attrgetter("revision"))
            first = pb.HandshakeResponse(
                home_epoch=epoch,
                times=times,
                engine=engine_to_proto(self._registrations[0].of_engine()),
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
