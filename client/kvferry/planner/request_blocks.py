"""The part of each group that a request moves, and every check of R7, made before anything is expanded.

This checks the groups, the block ids (range, null block, each destination once per pool), the token ranges, and that
both sides' blocks hold the needed tokens. Sums are Python integers, so no number wraps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry._arguments import token_range
from kvferry.errors import BadBlock, BlocksShort, InvalidField
from kvferry.geometry.blocks import TOKEN_LIMIT, AnyIds, Blocks, check_ids, repeated
from kvferry.geometry.model import Group, GroupKind


@dataclass(frozen=True, slots=True, eq=False)
class NeededBlocks:
    """The blocks of one side that hold the needed tokens; `first` is the block index of the first of them in the
    request; a block of state counts as one token. The `ids`, ``int64[n]``, are a copy of the caller's, in 64 bits
    because before numpy 2 an int32 array times an ``np.int64`` stays int32, and wraps in caches above 2 GiB."""

    ids: npt.NDArray[np.int64]
    first: int
    block_tokens: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class GroupRequest:
    """The part of one group that a request moves: the tokens from `begin` to `end`, 0 and 1 for state groups, and the
    blocks that hold them. `required` is the first token without which the read is refused: `begin`, or the token after
    it. `floor` is the first token that may be written; below `begin` only if a window begins later than asked."""

    begin: int
    end: int
    required: int
    floor: int
    source: NeededBlocks
    destination: NeededBlocks


def needed(
    groups: Iterable[Group],
    source_groups: Mapping[str, Group],
    source: Mapping[str, Blocks],
    destination: Mapping[str, Blocks],
    tokens: tuple[int, int] | None,
) -> dict[str, GroupRequest]:
    """The part of each of the destination's `groups` that is moved; groups of which nothing is needed are absent. See
    `ReadPlan.expand` for the blocks and tokens, and for the errors."""
    asked = token_range(tokens)
    found: dict[str, GroupRequest] = {}
    given: list[tuple[Group, AnyIds]] = []
    for group in groups:
        if group.name not in destination:
            raise missing(group.name)
        if group.name not in source:
            raise BlocksShort(group.name, "source", "blocks", "none of this group")
        theirs, mine, source_group = source[group.name], destination[group.name], source_groups[group.name]
        check_ids(group.name, "source", theirs.ids, source_group.num_blocks, None)
        check_ids(group.name, "destination", mine.ids, group.num_blocks, None)
        is_state = group.kind is GroupKind.STATE
        wanted = _state(group, theirs, mine) if is_state else _tokens(group, source_group, theirs, mine, asked)
        if wanted is None:
            continue
        # In tables the null block stands for absent blocks: before a window, say. No needed token may be in it.
        for side, of, blocks in (("source", source_group, wanted.source), ("destination", group, wanted.destination)):
            if of.null_block is not None:
                check_ids(group.name, side, blocks.ids, of.num_blocks, of.null_block)
        found[group.name] = wanted
        given.append((group, wanted.destination.ids))
    _check_once(given)
    return found


def written(
    groups: Iterable[Group],
    source: Mapping[str, Blocks] | None,
    destination: Mapping[str, Blocks],
    tokens: tuple[int, int] | None,
    *,
    more: bool = False,
) -> dict[str, AnyIds]:
    """The destination blocks that a read will write, by group, and the blocks behind its last token, which the read may
    clear (`kvferry._memory.rank_memory`); checked as far as that is possible before the source's geometry is known.

    See `needed` for the arguments and errors. If `source` is None, the granted blocks are not known yet. Then the
    result may hold more blocks than are written, and only `needed` checks whether they are enough and given once. With
    `more`, `source` has the blocks of the first steps, and later ones may have all further tokens of all groups.
    """
    asked = token_range(tokens)
    by_name = {group.name: group for group in groups}
    check_groups(by_name.values(), destination)
    found: dict[str, AnyIds] = {}
    given: list[tuple[Group, AnyIds]] = []
    for name, group in by_name.items():
        mine, theirs = destination.get(name), None if source is None else source.get(name)
        is_read = source is None or theirs is not None or more
        if mine is None and is_read and source is not None:
            raise missing(name)
        if mine is None or not is_read:
            continue
        check_ids(name, "destination", mine.ids, group.num_blocks, None)
        ids: AnyIds = mine.ids
        behind = mine.ids[:0]
        if source is None:
            ids = _perhaps(group, mine, asked)
        elif group.kind is GroupKind.STATE:
            ids = _state(group, mine if more or theirs is None else theirs, mine).destination.ids
        else:
            first, end = (theirs.first_token, theirs.end_token or 0) if theirs else (0, 0)
            span = _wanted(group, (first, TOKEN_LIMIT if more else max(first, end)), mine, asked)
            if span is None:
                continue
            begin, _, end, _ = span
            ids = _holding(group.block_tokens, mine, begin, end).ids
            behind = mine.ids[-(-end // group.block_tokens) - mine.first_token // group.block_tokens :]
        if source is not None:
            check_ids(name, "destination", ids, group.num_blocks, group.null_block)
            given.append((group, ids))
            ids = np.concatenate((ids, behind))
        if group.null_block is not None:
            ids = ids[ids != group.null_block]
        found[name] = ids
    _check_once(given)
    return found


def _check_once(given: Iterable[tuple[Group, AnyIds]]) -> None:
    """Raise `BadBlock` if an id occurs twice in the destination blocks of a pool: in NIXL the last write would win."""
    pools: dict[tuple[bool, str], list[AnyIds]] = {}
    for group, ids in given:
        pools.setdefault((bool(group.pool), group.pool or group.name), []).append(ids)
    for (_, pool), lists in pools.items():
        if (twice := repeated(lists)) is not None:
            most = max(int(ids.max()) for ids in lists if len(ids))
            raise BadBlock(pool, "destination", twice, most + 1, "it is given twice")


def check_groups(groups: Iterable[Group], destination: Mapping[str, Blocks]) -> None:
    """Raise `InvalidField` for blocks of groups that the destination does not have."""
    known = {group.name for group in groups}
    if unknown := sorted(set(destination) - known):
        expected = f"one of the groups of this engine: {sorted(known)}"
        raise InvalidField("group of the destination blocks", unknown[0], expected)


def missing(group: str) -> InvalidField:
    """The error for a group that has no blocks to read into."""
    return InvalidField(f"group {group!r} of the destination blocks", None, "Blocks to read this group into")


def _perhaps(group: Group, mine: Blocks, asked: tuple[int, int] | None) -> AnyIds:
    """The blocks that may be written, whatever the source offers."""
    if group.kind is GroupKind.STATE:
        return mine.ids
    skipped, first, last = mine.first_token // group.block_tokens, 0, len(mine.ids)
    end = mine.end_token
    if asked is not None:
        first, end = max(0, asked[0] // group.block_tokens - skipped), asked[1]
    if end is not None:
        last = max(0, -(-end // group.block_tokens) - skipped)
        if group.kind is GroupKind.WINDOW:
            first = max(first, (end - group.window_tokens) // group.block_tokens - skipped)
    return mine.ids[first:last]


def _state(group: Group, theirs: Blocks, mine: Blocks) -> GroupRequest:
    for side, blocks in (("destination", mine), ("source", theirs)):
        if len(blocks.ids) != 1:
            raise InvalidField(f"number of {side} blocks of state group {group.name!r}", len(blocks.ids), "1")
    if theirs.state_token != mine.state_token:
        raise BlocksShort(group.name, "source", f"a state at token {mine.state_token}", f"one at {theirs.state_token}")
    source, destination = (NeededBlocks(blocks.ids.astype(np.int64), 0) for blocks in (theirs, mine))
    return GroupRequest(0, 1, 0, 0, source, destination)


def _tokens(
    group: Group, source_group: Group, theirs: Blocks, mine: Blocks, asked: tuple[int, int] | None
) -> GroupRequest | None:
    span = _wanted(group, _span(source_group, "source", theirs), mine, asked)
    if span is None:
        return None
    begin, required, end, floor = span
    if begin < required and not _has_block(source_group, theirs, begin):
        begin = required
    if begin >= end:
        return None
    source = _holding(source_group.block_tokens, theirs, begin, end)
    return GroupRequest(begin, end, required, floor, source, _holding(group.block_tokens, mine, begin, end))


def _wanted(
    group: Group, offered: tuple[int, int], mine: Blocks, asked: tuple[int, int] | None
) -> tuple[int, int, int, int] | None:
    """The tokens that are moved: `begin`, `required`, `end` and `floor` of a `GroupRequest`; None: nothing is moved."""
    room = _span(group, "destination", mine)
    floor = mine.first_token
    if asked is not None:
        floor, end = max(floor, asked[0]), asked[1]
    else:
        end = offered[1] if mine.end_token is None else mine.end_token
    begin = required = floor
    if group.kind is GroupKind.WINDOW:
        # The next token, at position `end`, attends to itself and the window_tokens - 1 tokens before it. Some engines
        # do not count the token itself: they need one more token, which is moved if both sides have it.
        begin = required = max(floor, end - group.window_tokens + 1)
        more = end - group.window_tokens
        if max(floor, offered[0]) <= more < min(offered[1], room[1]) and _has_block(group, mine, more):
            begin = more
    if begin >= end:
        return None
    for side, held in (("source", offered), ("destination", room)):
        if required < held[0] or end > held[1]:
            raise BlocksShort(group.name, side, f"tokens [{required}, {end})", f"tokens [{held[0]}, {held[1]})")
    return begin, required, end, floor


def _has_block(group: Group, blocks: Blocks, token: int) -> bool:
    """Whether a token for which the blocks have room has a block other than the null block."""
    block = int(blocks.ids[token // group.block_tokens - blocks.first_token // group.block_tokens])
    return block != group.null_block


def _holding(block_tokens: int, blocks: Blocks, begin: int, end: int) -> NeededBlocks:
    """The blocks that hold tokens ``[begin, end)``."""
    first, last = begin // block_tokens, -(-end // block_tokens)
    skipped = blocks.first_token // block_tokens
    return NeededBlocks(blocks.ids[first - skipped : last - skipped].astype(np.int64), first, block_tokens)


def _span(group: Group, side: str, blocks: Blocks) -> tuple[int, int]:
    """The tokens that the blocks declare; raises `BlocksShort` if they have no room for them."""
    room = (blocks.first_token // group.block_tokens + len(blocks.ids)) * group.block_tokens
    end = room if blocks.end_token is None else blocks.end_token
    if end > room:
        asked, held = f"tokens [{blocks.first_token}, {end})", f"{len(blocks.ids)} blocks of {group.block_tokens}"
        raise BlocksShort(group.name, side, asked, held)
    return blocks.first_token, end
