"""One request's blocks, as offered by its source, and the rules an offer has to keep (R7)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import (
    BadBlock,
    InvalidField,
    KvferryError,
    PublicationAborted,
    PublicationReleased,
)
from kvferry.geometry import Group, GroupKind
from kvferry_server.agenda import NEVER
from kvferry_server.checksums import Checksums
from kvferry_server.identity import EngineRef
from kvferry_server.leases import Lease

MAX_PAYLOAD = 64 * 1024
"""Bytes of a publication's payload."""

PUBLICATION_BYTES = 2048
"""About what a publication takes in memory beside its steps, until it is forgotten."""


class Stage(enum.Enum):
    """Where a publication stands. It moves downwards only."""

    AWAITED = "awaited"
    """Asked for or declined, but not come yet."""
    PUBLISHING = "publishing"
    """More steps will come."""
    PUBLISHED = "published"
    """All blocks are offered."""
    ENDING = "ending"
    """No new leases; it is released with its last one."""
    RELEASED = "released"
    """The source may reuse the blocks, and has not acknowledged that yet."""
    FORGOTTEN = "forgotten"
    """No part of any book."""


class Outcome(enum.IntEnum):
    """How a publication ended, numbered as in the proto."""

    READ = 1
    UNREAD = 2
    DECLINED = 3
    ABORTED = 4
    FINAL = 5


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one group as runs of consecutive ids, with the tokens they hold.

    Attributes:
        group: name of the group.
        first_token, end_token: the tokens held, half-open; 0 for state groups.
        state_token: tokens that the state has seen; 0 but for state groups.
        starts, counts: first ids and lengths of the runs, as many of the one as of the other.
    """

    group: str
    first_token: int = 0
    end_token: int = 0
    state_token: int = 0
    starts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def blocks(self) -> int:
        """Number of block ids."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Offer:
    """One step of a publication, as its source sent it. Equal offers are one (PROTOCOL: idempotent by publication,
    step).

    Attributes:
        number: of the publication.
        request_id: at the source.
        step: from 0, without gaps.
        groups: that gain blocks.
        last: no step follows.
        expected_reads: reads that will be made.
        payload: for the readers; with the last step only.
        checksums: every rank will send the sums of its blocks.
    """

    number: int
    request_id: str
    step: int = 0
    groups: tuple[GroupBlocks, ...] = ()
    last: bool = True
    expected_reads: int = 1
    payload: bytes = field(default=b"", repr=False)
    checksums: bool = False

    @property
    def size(self) -> int:
        """About as many bytes as it takes in memory."""
        runs = sum(len(blocks.starts) for blocks in self.groups)
        return 512 + len(self.payload) + 512 * len(self.groups) + 80 * runs


@dataclass(frozen=True, slots=True)
class Extent:
    """What all steps of a publication hold of one group: the tokens, half-open, and how many blocks."""

    first_token: int
    end_token: int
    blocks: int


@dataclass(slots=True, eq=False)
class Publication:
    """A publication at its home.

    Attributes:
        source: the engine that offers it.
        number: rising per incarnation.
        stage: where it stands.
        request_id: as its first step said.
        steps: the offers so far; dropped when it is released.
        extents: what they hold together, by group: a step is checked without a look at all before it.
        step_count: how many came.
        blocks: offered so far, over all groups.
        expected_reads: the highest that anyone stated.
        valid_reads: distinct reads that ended VALID.
        outcome: why it ends; set with ENDING, the first reason counts.
        first_at: when the first step came.
        final_at: no lease reaches past it.
        hold_until: when it ends for want of a reader; counts while it has no live lease.
        release_floor: not released before: at a restarted home, readers that it does not know may still be reading.
        leases: the live ones.
        reads: all leases there ever were, in order.
        declined: before it came.
        awaited_until: until when that is remembered.
        tell_again_at: when its source is told of the release again, if it has not acknowledged it.
        checksums: of its blocks; dropped when it is released.
    """

    source: EngineRef
    number: int
    stage: Stage = Stage.AWAITED
    request_id: str = ""
    steps: list[Offer] = field(default_factory=list)
    extents: dict[str, Extent] = field(default_factory=dict)
    step_count: int = 0
    blocks: int = 0
    expected_reads: int = 1
    valid_reads: int = 0
    outcome: Outcome | None = None
    first_at: float = NEVER
    final_at: float = NEVER
    hold_until: float = NEVER
    release_floor: float = 0.0
    leases: set[Lease] = field(default_factory=set)
    reads: list[Lease] = field(default_factory=list)
    declined: bool = False
    awaited_until: float = NEVER
    tell_again_at: float = NEVER
    checksums: Checksums = field(default_factory=Checksums)
    scheduled: float = NEVER

    @property
    def offered(self) -> bool:
        """Whether new readers may have it."""
        return self.stage in (Stage.PUBLISHING, Stage.PUBLISHED)

    @property
    def complete(self) -> bool:
        """Whether all blocks are offered."""
        return bool(self.steps) and self.steps[-1].last

    @property
    def size(self) -> int:
        """About as many bytes as it takes in memory."""
        return sum(offer.size for offer in self.steps)

    @property
    def awaits_checksums(self) -> bool:
        """Whether its source has said that its ranks send sums. What was sent to this home's predecessor is not sent
        again."""
        return self.release_floor == 0.0 and any(offer.checksums for offer in self.steps)

    def add(self, offer: Offer) -> None:
        """Take the next step."""
        self.steps.append(offer)
        self.step_count += 1
        for new in offer.groups:
            self.blocks += new.blocks
            before = self.extents.get(new.group) or Extent(new.first_token, new.end_token, 0)
            self.extents[new.group] = Extent(
                min(before.first_token, new.first_token),
                max(before.end_token, new.end_token),
                before.blocks + new.blocks,
            )

    def drop_steps(self) -> None:
        """Nobody will be told them any more."""
        self.steps.clear()
        self.extents.clear()

    def due(self) -> float:
        """When it ends, is released or forgotten, or its source is told again."""
        if self.stage is Stage.FORGOTTEN:
            return NEVER
        if self.stage is Stage.RELEASED:
            return self.tell_again_at
        if self.offered:
            return self.final_at if self.leases else min(self.final_at, self.hold_until)
        if self.leases:
            return NEVER
        return self.release_floor if self.stage is Stage.ENDING else self.awaited_until

    def refusal(self) -> KvferryError:
        """Why nobody can have it any more: it is ending, or released."""
        engine_id, outcome = self.source.engine_id, self.outcome.name if self.outcome else ""
        if self.stage is Stage.ENDING and self.outcome is Outcome.ABORTED:
            return PublicationAborted(f"{self} was aborted", engine_id=engine_id, publication=self.number)
        message = f"{self} is released: {outcome}"
        return PublicationReleased(message, engine_id=engine_id, publication=self.number, outcome=outcome)

    def __str__(self) -> str:
        return f"publication {self.number} of engine {self.source.engine_id!r}"


def check_offer(groups: Mapping[str, Group], offer: Offer) -> None:
    """Check an offer against the groups of its engine.

    Raises:
        InvalidField: a group that the engine does not have or named twice, tokens and block ids that do not fit each
            other, or something that may only come with the last step.
        BadBlock: a block id out of range, or the null block.
    """
    names = [blocks.group for blocks in offer.groups]
    if len(set(names)) != len(names):
        raise InvalidField("publish.groups", names, "each group once")
    for blocks in offer.groups:
        group = groups.get(blocks.group)
        if group is None:
            raise InvalidField("publish.groups.group", blocks.group, f"one of {sorted(groups)}")
        _check_tokens(group, blocks, offer.last)
        _check_ids(group, blocks)


def check_follows(publication: Publication | None, offer: Offer) -> None:
    """Check that a step goes on where the ones before it ended; raises `InvalidField`."""
    steps = publication.steps if publication is not None else []
    if offer.step != len(steps):
        raise InvalidField("publish.step", offer.step, f"{len(steps)}, the next one")
    if publication is None or not steps:
        return
    if steps[-1].last:
        raise InvalidField("publish.step", offer.step, f"at most {len(steps) - 1}, which was the last")
    if offer.request_id != publication.request_id:
        raise InvalidField("publish.request_id", "another one", "the same in every step")
    for blocks in offer.groups:
        before = publication.extents.get(blocks.group)
        if before is not None and blocks.first_token != before.end_token:
            problem = f"{before.end_token}, going on"
            raise InvalidField(f"publish.groups[{blocks.group}].first_token", blocks.first_token, problem)


def _check_tokens(group: Group, blocks: GroupBlocks, last: bool) -> None:
    where = f"publish.groups[{group.name}]"
    if group.kind is GroupKind.STATE:
        if blocks.first_token or blocks.end_token:
            raise InvalidField(where, (blocks.first_token, blocks.end_token), "no token range in a state group")
    elif blocks.state_token:
        raise InvalidField(f"{where}.state_token", blocks.state_token, "0 but in a state group")
    else:
        end_block = -(-blocks.end_token // group.block_tokens)
        needed = 0
        if blocks.end_token > blocks.first_token:
            needed = end_block - blocks.first_token // group.block_tokens
        if blocks.blocks != needed:
            tokens = f"tokens [{blocks.first_token}, {blocks.end_token})"
            raise InvalidField(where, f"{blocks.blocks} block ids", f"{needed} for {tokens} of {group.block_tokens}")
    if last:
        return
    # What the source may still write to is not offered early (PROTOCOL, What the source promises when it publishes).
    if group.kind is not GroupKind.TOKENS:
        raise InvalidField(where, group.kind.name, "groups that are never rewritten, before the last step")
    if blocks.end_token % group.block_tokens:
        raise InvalidField(where, blocks.end_token, f"full blocks of {group.block_tokens} tokens, before the last step")


def _check_ids(group: Group, blocks: GroupBlocks) -> None:
    """The rules of `kvferry.blocks.check_ids`, on runs: a peer's few bytes must not become a million ids here."""
    null = group.null_block
    # There may be many, and everybody waits for them.
    starts, counts = np.array(blocks.starts, np.int64), np.array(blocks.counts, np.int64)
    beyond = starts[starts + counts > group.num_blocks]
    if len(beyond):
        block = max(int(beyond[0]), group.num_blocks)
        raise BadBlock(group.name, "source", block, group.num_blocks, "out of range")
    if null is not None and bool(((starts <= null) & (null < starts + counts)).any()):
        raise BadBlock(group.name, "source", null, group.num_blocks, "the null block holds nothing")
