"""Steps of publications as a source sends them, and the rules that a step must keep (R7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import BadBlock, InvalidField
from kvferry.geometry.blocks import BlockRuns, Unfinished, check_published
from kvferry.geometry.model import Group
from kvferry_server.domain.values import RouterKey


@dataclass(frozen=True, slots=True)
class PublicationStep:
    """One step of a publication, as its source sent it. Idempotent by publication and index."""

    number: int  # of the publication
    request_id: str
    index: int = 0  # from 0, without gaps
    groups: tuple[BlockRuns, ...] = ()  # blocks that groups gain with this step
    last: bool = True
    expected_reads: int = 1
    payload: bytes = field(default=b"", repr=False)  # opaque bytes for the readers; with the last step only
    checksums: bool = False  # every rank will send the checksums of its blocks
    router_key: RouterKey | None = None  # the key under which readers wait for the publication; in the first step only
    unfinished: Unfinished | None = None  # blocks that readers may read layer by layer; not in the last step
    mark_ends: tuple[int, ...] = ()  # ends of the prompt's marks, beside those of earlier steps
    hint_digest: bytes = b""  # of the hint in the reference, with the only step; empty: no hint
    encoded: bytes = field(default=b"", repr=False)  # part of an encoded ReadBlocksResponse, as readers get it
    size: int = field(init=False, repr=False, compare=False)  # estimated bytes in memory

    def __post_init__(self) -> None:
        # Computed once: a publication may have a hundred thousand steps, which are released together.
        object.__setattr__(self, "size", _size(self))


def _size(step: PublicationStep) -> int:
    groups, layers = step.groups, 0
    if step.unfinished is not None:
        groups += step.unfinished.groups
        # A character takes four bytes where one of the name is far from ASCII.
        layers = sum(144 + len(name) * (1 if name.isascii() else 4) for name in step.unfinished.layers)
    runs = sum(len(blocks.starts) for blocks in groups)
    marks = 64 * len(step.mark_ends)
    return 512 + len(step.payload) + len(step.encoded) + 512 * len(groups) + 80 * runs + layers + marks


@dataclass(frozen=True, slots=True)
class PublishedExtent:
    """The half-open range of tokens, and the number of blocks, of one group over all steps of a publication."""

    first_token: int
    end_token: int
    blocks: int


def check_step(groups: Mapping[str, Group], step: PublicationStep) -> None:
    """Check a step against the groups of its engine. Raises `InvalidField` if a group is unknown or named twice, its
    tokens and its number of blocks do not match, or the step has something that only the last step may have; and
    `BadBlock` if a block id is out of range, or the null block."""
    _check_groups(groups, "publish.groups", step.groups, last=step.last)
    if step.unfinished is not None:
        if step.last:
            raise InvalidField("publish.unfinished", f"layers {step.unfinished.layers[:3]}", "none in the last step")
        _check_groups(groups, "publish.unfinished.groups", step.unfinished.groups, last=False)


def _check_groups(groups: Mapping[str, Group], field: str, listed: Sequence[BlockRuns], *, last: bool) -> None:
    names = [blocks.group for blocks in listed]
    if len(set(names)) != len(names):
        raise InvalidField(field, names, "each group once")
    for blocks in listed:
        group = groups.get(blocks.group)
        if group is None:
            raise InvalidField(f"{field}.group", blocks.group, f"one of {sorted(groups)}")
        check_published(group, f"{field}[{group.name}]", blocks, last=last)
        _check_ids(group, blocks)


def _check_ids(group: Group, blocks: BlockRuns) -> None:
    """Check block ids as runs: a few bytes from a peer must not be expanded into a million ids."""
    null = group.null_block
    # The first test is enough for most steps. There may be many runs, and the event loop waits meanwhile.
    if max(blocks.starts, default=0) + max(blocks.counts, default=0) > group.num_blocks:
        runs = zip(blocks.starts, blocks.counts, strict=True)
        beyond = next((start for start, count in runs if start + count > group.num_blocks), None)
        if beyond is not None:
            block = max(beyond, group.num_blocks)
            raise BadBlock(group.name, "source", block, group.num_blocks, "out of range")
    if null is None:
        return
    starts, counts = np.array(blocks.starts, np.int64), np.array(blocks.counts, np.int64)
    if bool(((starts <= null) & (null < starts + counts)).any()):
        raise BadBlock(group.name, "source", null, group.num_blocks, "it is the null block, which holds no tokens")
