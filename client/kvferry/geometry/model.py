"""An engine's geometry for the planner: its groups, and the planes of its ranks.

Frozen values that check themselves: making a geometry that contradicts itself raises `BadGeometry`. They import
neither torch nor NIXL nor gRPC; `kvferry.geometry.formats` makes them from tensors, and `kvferry._wire.geometry_codec`
turns them into protos and back.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from kvferry._arguments import check_fields, integer_map, several, showable, string_map
from kvferry.errors import BadGeometry
from kvferry.geometry.plane import ADDRESS_LIMIT, MemoryKind, Plane


class GroupKind(enum.IntEnum):
    """The content of a group's block table, numbered as in the proto."""

    TOKENS = 1
    WINDOW = 2
    STATE = 3


@dataclass(frozen=True, slots=True)
class Group:
    """A KV-cache group: the planes that share one block table.

    Attributes:
        name: unique in its engine; the same name on both engines of a read.
        kind: how the block table is read.
        block_tokens: tokens per block, over all token shards; 0 for `GroupKind.STATE`.
        num_blocks: block ids run from 0 to num_blocks - 1.
        null_block: the id that stands for "no block", if there is such an id; never read or written.
        window_tokens: for `GroupKind.WINDOW`, the number of tokens that a token attends to, itself included; else 0.
            With 12, token 30, after tokens 0 to 29, needs tokens 19 to 29: a read without them raises `BlocksShort`.
            Token 18 is moved as well where both sides' blocks hold it, for engines that count the keys before the
            query, such as FlashAttention's ``window_size=(12, 0)``; they declare 13 to have it in any case.
        pool: groups of one rank with the same pool share one space of block ids; empty: a pool of its own.
    """

    name: str
    kind: GroupKind = GroupKind.TOKENS
    block_tokens: int = 0
    num_blocks: int = 0
    null_block: int | None = None
    window_tokens: int = 0
    pool: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        where = f"group {self.name!r}"
        if not 1 <= len(self.name.encode()) <= 128:
            raise BadGeometry(where, "the name has 1 to 128 bytes")
        if not (showable(self.name) and showable(self.pool)):
            raise BadGeometry(where, f"the name, or the pool {self.pool!a}, has control characters")
        if (self.kind is GroupKind.STATE) != (self.block_tokens == 0) or not 0 <= self.block_tokens <= 1 << 20:
            raise BadGeometry(where, f"block_tokens is {self.block_tokens} for a group of kind {self.kind.name}")
        if not 1 <= self.num_blocks < 1 << 31:
            raise BadGeometry(where, f"num_blocks is {self.num_blocks}, not in 1 ... 2**31 - 1")
        if self.null_block is not None and not 0 <= self.null_block < self.num_blocks:
            raise BadGeometry(where, f"null_block {self.null_block} is not one of {self.num_blocks} blocks")
        if (self.kind is GroupKind.WINDOW) != (self.window_tokens > 0) or self.window_tokens < 0:
            raise BadGeometry(where, f"window_tokens is {self.window_tokens} for a group of kind {self.kind.name}")


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """The planes of the rank with the index `rank` in its engine; their names are unique. `labels`, such as tp_rank and
    pp_rank, are for people and tools; the planner does not use them."""

    rank: int
    planes: tuple[Plane, ...]
    labels: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "planes", several("planes", self.planes, Plane, "several Planes"))
        object.__setattr__(self, "labels", integer_map("labels", self.labels))
        if self.rank < 0:
            raise BadGeometry("rank", f"{self.rank} is negative")
        for label in self.labels:
            if not showable(label):
                raise BadGeometry(f"rank {self.rank}", f"label {label[:80]!a} has control characters")
        for name, count in Counter(plane.name for plane in self.planes).items():
            if count > 1:
                raise BadGeometry(f"rank {self.rank}", f"plane {name} is declared twice")

    @property
    def label(self) -> str:
        """``tp0 pp1`` or, without labels, ``rank 3``."""
        return " ".join(f"{k.removesuffix('_rank')}{v}" for k, v in self.labels.items()) or f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class EngineGeometry:
    """All that the planner needs to know about an engine.

    Attributes:
        engine_id: the engine's name.
        groups: its groups; names are unique, and every plane's group is among them.
        ranks: by rising rank; may be incomplete.
        identity: the inputs of the cache's computation: model, revision digest, quantisation, rope … Equal on both
            engines.
        incarnation: 16 bytes; empty for a geometry that is not of a running engine.
        partial: the engine holds a part of the model: its ranks together need not hold all units and tokens of each of
            their planes.
    """

    engine_id: str
    groups: tuple[Group, ...]
    ranks: tuple[RankGeometry, ...]
    identity: Mapping[str, str] = field(default_factory=dict)
    incarnation: bytes = b""
    partial: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "groups", several("groups", self.groups, Group, "several Groups"))
        object.__setattr__(self, "ranks", several("ranks", self.ranks, RankGeometry, "several RankGeometry"))
        object.__setattr__(self, "identity", string_map("identity", self.identity))
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise BadGeometry(f"engine {self.engine_id!r}", "two groups have the same name")
        indices = [rank.rank for rank in self.ranks]
        if sorted(set(indices)) != indices:
            raise BadGeometry(f"engine {self.engine_id!r}", f"ranks {indices} do not rise")
        for rank in self.ranks:
            check_rank(self.groups, rank)

    def group(self, name: str) -> Group:
        """The group of this name; KeyError if there is no such group."""
        return {group.name: group for group in self.groups}[name]

    def planes(self) -> Iterator[tuple[RankGeometry, Plane]]:
        """All planes of all ranks, by rising rank."""
        return ((rank, plane) for rank in self.ranks for plane in rank.planes)


def check_rank(groups: Iterable[Group], rank: RankGeometry) -> None:
    """Raise `BadGeometry` if the planes of a rank contradict the groups of its engine."""
    by_name = {group.name: group for group in groups}
    # Planes that share their value objects, as decoded planes do, are checked once: fractions are slow.
    checked: set[tuple[str, int, int, int, int]] = set()
    for plane in rank.planes:
        alike = plane.group, plane.num_blocks, plane.block_states, id(plane.token_shard), id(plane.tokens_per_state)
        if alike in checked:
            continue
        checked.add(alike)
        where = f"rank {rank.rank}, plane {plane.name}"
        group = by_name.get(plane.group)
        if group is None:
            raise BadGeometry(where, f"group {plane.group!r} is not one of {sorted(by_name)}")
        if plane.num_blocks < group.num_blocks:
            raise BadGeometry(where, f"{plane.num_blocks} blocks, its group has {group.num_blocks}")
        if group.kind is GroupKind.STATE:
            if plane.token_shard.count > 1:
                raise BadGeometry(where, f"a state has no tokens to shard, but it holds {plane.token_shard}")
            continue
        shard = plane.token_shard
        if group.block_tokens % (shard.count * shard.interleave):
            raise BadGeometry(where, f"blocks of {group.block_tokens} tokens do not hold whole turns of {shard}")
        states = Fraction(group.block_tokens, shard.count) / plane.tokens_per_state
        if states != plane.block_states:
            declared = f"{group.block_tokens} tokens per block, {shard}, {plane.tokens_per_state} tokens per state"
            raise BadGeometry(where, f"block_states is {plane.block_states}, but {declared} make {states}")


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A contiguous range registered with NIXL."""

    memory_kind: MemoryKind
    device: int
    base: int
    length: int

    def __post_init__(self) -> None:
        check_fields(self)
        if self.base < 0 or self.length < 1 or self.base + self.length >= ADDRESS_LIMIT or self.device < 0:
            raise BadGeometry("memory region", f"{self.length} bytes at {self.base:#x}, device {self.device}")

    def holds(self, plane: Plane) -> bool:
        """Whether every byte of the plane lies in this region."""
        first, last = plane.extent
        same_space = self.memory_kind is plane.memory_kind and self.device == plane.device
        return same_space and self.base <= first and last <= self.base + self.length


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """The NIXL agent that serves a rank's memory, as the rank announces it. Nothing outside `regions`, its registered
    memory, is ever read.

    `metadata` are NIXL's opaque bytes; their digest is checked before NIXL gets them.
    """

    name: str
    metadata: bytes = field(repr=False)
    metadata_sha256: bytes
    regions: tuple[MemoryRegion, ...]


def check_regions(rank: RankGeometry, regions: Iterable[MemoryRegion]) -> None:
    """Raise `BadGeometry` if a plane is not within one region: NIXL would not read it, or read past the region."""
    regions = tuple(regions)
    for plane in rank.planes:
        if not any(region.holds(plane) for region in regions):
            raise BadGeometry(f"rank {rank.rank}, plane {plane.name}", "it lies in no registered memory region")
