"""The tail of a read: the tokens of its blocks behind the last one that it moved, and, where a window begins inside a
block, those before the first."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from kvferry._memory.rank_memory import RankMemory
from kvferry.errors import InvalidField
from kvferry.geometry.blocks import BlockIds, Blocks
from kvferry.geometry.model import Group, GroupKind
from kvferry.geometry.plane import Plane
from kvferry.planner.request_blocks import GroupRequest
from kvferry.planner.rows import Int64s
from kvferry.planner.summed_blocks import AlikeBlocks, StateRun
from kvferry.planner.token_line import StateLayout


class Tails(enum.Enum):
    """Whether the tokens of a read's blocks that it did not move are kept or cleared: those behind the last one moved,
    and, in the block in which a window begins, those before the first."""

    KEEP = "keep"
    """They stay as they were."""
    ZERO = "zero"
    """They are cleared once every byte has arrived: for kernels that read whole blocks, since old bytes may be NaNs."""


def clear_tails(
    planes: Iterable[Plane],
    groups: Mapping[str, Group],
    blocks: Mapping[str, Blocks],
    moved: Mapping[str, GroupRequest],
    memory: RankMemory,
) -> None:
    """Clear the tails of a read.

    Args:
        planes: of the destination rank.
        groups: of the destination, by name.
        blocks: the read's destination blocks, by group.
        moved: what the read moved, by group; a group of which nothing was moved has no tail.
        memory: the rank's.

    Raises:
        InvalidField: a plane lies in device memory that is not backed by a registered tensor.
    """
    for plane in planes:
        group = groups[plane.group]
        if plane.group not in moved or group.kind is GroupKind.STATE:
            continue
        request = moved[plane.group]
        unmoved = (
            *head_of(plane, group, blocks[plane.group], request.begin, request.floor),
            *tail_of(plane, group, blocks[plane.group], request.end),
        )
        for alike in unmoved:
            access = memory.of(plane)
            if access is None:
                raise InvalidField("tails", plane.name, "host memory, or a tensor's, to be cleared")
            access.clear(plane, alike)


def tail_of(plane: Plane, group: Group, blocks: Blocks, end: int) -> Iterator[AlikeBlocks]:
    """The states of a plane behind token `end`, in whole granules: what a read up to there does not write."""
    layout = StateLayout.of(plane, group)
    per_block, granule = layout.held_per_block, plane.token_granule
    first_block = blocks.first_token // group.block_tokens
    moved = layout.held_before(-int(-end // plane.tokens_per_state))
    moved = -(-moved // granule) * granule
    place, at = divmod(moved, per_block)
    place = max(place, first_block)
    ids = blocks.ids[place - first_block :]
    places = np.arange(place, place + len(ids), dtype=np.int64)
    if at and len(ids):
        yield from _some(places[:1], ids[:1], StateRun(at, per_block - at), group)
        places, ids = places[1:], ids[1:]
    yield from _some(places, ids, StateRun(0, per_block), group)


def head_of(plane: Plane, group: Group, blocks: Blocks, begin: int, floor: int) -> Iterator[AlikeBlocks]:
    """The states of a plane before token `begin`, in its block and in whole granules: what a read from there does not
    write. Tokens before `floor` are not the read's."""
    layout = StateLayout.of(plane, group)
    per_block, granule = layout.held_per_block, plane.token_granule
    moved = layout.held_before(int(begin // plane.tokens_per_state)) // granule * granule
    own = -(-layout.held_before(-int(-floor // plane.tokens_per_state)) // granule) * granule
    place = begin // group.block_tokens
    at = max(own - place * per_block, 0)
    count = moved - place * per_block - at
    if count > 0:
        index = place - blocks.first_token // group.block_tokens
        places = np.array([place], np.int64)
        yield from _some(places, blocks.ids[index : index + 1], StateRun(at, count), group)


def _some(places: Int64s, ids: BlockIds, run: StateRun, group: Group) -> Iterator[AlikeBlocks]:
    if group.null_block is not None:
        places, ids = places[ids != group.null_block], ids[ids != group.null_block]
    if len(ids):
        yield AlikeBlocks(places, (run,), ids[:, None])
