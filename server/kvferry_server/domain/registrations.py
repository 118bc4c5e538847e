"""Registrations: the cache that a rank states, and the checks that it is consistent (R7)."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry._wire.version import OURS, Version
from kvferry.errors import BadAgentMetadata, CacheDiffers, InvalidField
from kvferry.geometry.model import AgentInfo, EngineGeometry, Group, RankGeometry, check_regions
from kvferry.geometry.overlap import check_unshared
from kvferry.geometry.plane import Plane
from kvferry_server.domain.identity import EngineRef
from kvferry_server.domain.limits import MAX_REGION_CHECKS

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
        EngineGeometry(self.engine.engine_id, self.groups, (self.geometry,))
        check_unshared(self.groups, self.geometry)
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

    @property
    def rank(self) -> int:
        return self.geometry.rank

    @property
    def size(self) -> int:
        """Estimated bytes in memory. Names count in full: peers choose them, so none are shared."""
        names = sum(
            len(text.encode()) for plane in self.geometry.planes for text in (plane.layer, plane.format, plane.dtype)
        )
        identity = sum(256 + len(key.encode()) + len(value.encode()) for key, value in self.identity.items())
        agent = 0 if self.agent is None else len(self.agent.metadata) + 256 * len(self.agent.regions)
        planes = PLANE_BYTES * len(self.geometry.planes) + names
        return REGISTRATION_BYTES + planes + PLANE_BYTES * len(self.groups) + identity + agent

    @property
    def block_bytes(self) -> Mapping[str, int]:
        """Bytes of one block of each group, over the rank's planes."""
        sizes: Counter[str] = Counter()
        for plane in self.geometry.planes:
            sizes[plane.group] += plane.bytes_per_block
        return sizes

    @property
    def cache_bytes(self) -> int:
        """Bytes of the rank's planes, without gaps between blocks."""
        return sum(plane.num_blocks * plane.bytes_per_block for plane in self.geometry.planes)


def first_difference(one: Registration, other: Registration) -> str:
    """Return the name of the first field in which two registrations of one rank differ; empty if equal."""
    return (
        engine_difference(one, other) or _rank_difference(one.geometry, other.geometry) or _agent_difference(one, other)
    )


def engine_difference(one: Registration, other: Registration) -> str:
    """Return the name of the first field in which two ranks disagree about their engine; empty if they agree."""
    if one.num_ranks != other.num_ranks:
        return "num_ranks"
    if one.partial != other.partial:
        return "partial"
    for key in sorted({*one.identity, *other.identity}):
        if one.identity.get(key) != other.identity.get(key):
            return f"identity[{key}]"
    if len(one.groups) != len(other.groups):
        return "groups"
    return _first_differing("groups", one.groups, other.groups)


def check_same(registration: Registration, difference: str) -> None:
    """Raise `CacheDiffers` if a registration differs from an earlier one, in the field named `difference`."""
    if difference:
        ref, rank = registration.engine, registration.rank
        problem = f"rank {rank} of {ref} was registered before with another {difference}"
        raise CacheDiffers(problem, engine_id=ref.engine_id, rank=rank, field=difference)


def _rank_difference(one: RankGeometry, other: RankGeometry) -> str:
    if one.labels != other.labels:
        return "rank.labels"
    if [plane.name for plane in one.planes] != [plane.name for plane in other.planes]:
        return "rank.planes"
    return _first_differing("rank.planes", one.planes, other.planes)


def _agent_difference(one: Registration, other: Registration) -> str:
    if one.agent is None or other.agent is None:
        return "" if one.agent is other.agent else "agent"
    return next((f"agent.{name}" for name in _differing(one.agent, other.agent)), "")


def _first_differing(where: str, mine: Sequence[Group | Plane], theirs: Sequence[Group | Plane]) -> str:
    pairs = zip(mine, theirs, strict=True)
    return next((f"{where}[{one.name}].{name}" for one, other in pairs for name in _differing(one, other)), "")


def _differing(mine: Group | Plane | AgentInfo, theirs: Group | Plane | AgentInfo) -> Iterator[str]:
    """Yield the names of the fields in which two values differ."""
    names = (field.name for field in dataclasses.fields(mine))
    return (name for name in names if getattr(mine, name) != getattr(theirs, name))
