"""Registrations: the cache that a rank states, and the checks that it is consistent (R7)."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry._wire.version import OURS, Version
from kvferry.errors import BadAgentMetadata, CacheDiffers, InvalidField
from kvferry.geometry.model import AgentInfo, EngineGeometry, Group, RankGeometry, check_regions
from kvferry.geometry.overlap import check_apart
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
        """Bytes of the rank's planes, without gaps between blocks. Groups of one pool lie over each other: the largest
        counts."""
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


def first_difference(one: Registration, other: Registration) -> str:
    """Return the name of the first field in which two registrations of one rank differ; empty if equal."""
    mine, theirs = one.geometry, other.geometry
    of_rank = (
        ("rank.labels", mine.labels, theirs.labels),
        ("rank.planes", mine.planes, theirs.planes),
        ("agent", one.agent, other.agent),
    )
    found = (name for field in of_rank for name in _differences(*field))
    return engine_difference(one, other) or next(found, "")


def engine_difference(one: Registration, other: Registration) -> str:
    """Return the name of the first field in which two ranks disagree about their engine; empty if they agree."""
    names = ("num_ranks", "partial", "identity", "groups")
    return next((found for name in names for found in _differences(name, getattr(one, name), getattr(other, name))), "")


def check_same(registration: Registration, difference: str) -> None:
    """Raise `CacheDiffers` if a registration differs from an earlier one, in the field named `difference`."""
    if difference:
        ref, rank = registration.engine, registration.rank
        problem = f"rank {rank} of {ref} was registered before with another {difference}"
        raise CacheDiffers(problem, engine_id=ref.engine_id, rank=rank, field=difference)


def _differences(where: str, mine: Any, theirs: Any) -> Iterator[str]:
    """Yield the names of the fields in which two values differ: fields of groups, planes and agents, and of tuples of
    these, by their names; entries of mappings; otherwise `where`."""
    if mine == theirs:
        return
    if isinstance(mine, Mapping):
        yield from (f"{where}[{key}]" for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key))
    elif isinstance(mine, Group | Plane | AgentInfo) and type(mine) is type(theirs):
        names = (field.name for field in dataclasses.fields(mine))
        yield from (f"{where}.{name}" for name in names if getattr(mine, name) != getattr(theirs, name))
    elif isinstance(mine, tuple) and [each.name for each in mine] == [each.name for each in theirs]:
        for one, other in zip(mine, theirs, strict=True):
            yield from _differences(f"{where}[{one.name}]", one, other)
    else:
        yield where
