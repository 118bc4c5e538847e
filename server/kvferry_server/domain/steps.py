"""One step of a publication, as its source sent it, and the rules it has to keep (R7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import BadBlock, InvalidField
from kvferry.geometry.model import Group, GroupKind

MAX_PAYLOAD = 64 * 1024
"""Bytes of a publication's payload."""


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
class PublicationStep:
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
class PublishedExtent:
    """What all steps of a publication hold of one group: the tokens, half-open, and how many blocks."""

    first_token: int
    end_token: int
    blocks: int


def check_step(groups: Mapping[str, Group], offer: PublicationStep) -> None:
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
    """As `kvferry.geometry.blocks.check_ids`, on runs: a peer's few bytes must not become a million ids here."""
    null = group.null_block
    # There may be many, and everybody waits for them.
    starts, counts = np.array(blocks.starts, np.int64), np.array(blocks.counts, np.int64)
    beyond = starts[starts + counts > group.num_blocks]
    if len(beyond):
        block = max(int(beyond[0]), group.num_blocks)
        raise BadBlock(group.name, "source", block, group.num_blocks, "out of range")
    if null is not None and bool(((starts <= null) & (null < starts + counts)).any()):
        raise BadBlock(group.name, "source", null, group.num_blocks, "the null block holds nothing")
