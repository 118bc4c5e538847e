"""The blocks of a request: block ids per group, with the tokens they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry._arguments import described, instance, integer, mapping, text
from kvferry.errors import BadBlock, BlocksShort, InvalidField
from kvferry.geometry.model import Group, GroupKind

BlockIds: TypeAlias = npt.NDArray[np.int32]
AnyIds: TypeAlias = npt.NDArray[np.signedinteger[Any]]

MAX_BLOCKS = 1 << 24
"""Blocks of one list: 10**8 tokens in blocks of 16 need fewer. Limits the ids that a peer's runs can expand to."""

MAX_RUNS = 1 << 17
"""Runs of block ids in one step of a publication, over all groups: two million tokens in blocks of 16 of which no two
are neighbours. Limits the cost of checking a step and of sending it to every reader."""

MAX_UNFINISHED = 1 << 17
"""Blocks, over all groups, of which some layers are complete. Each newly named layer costs another look at them."""

MAX_LAYERS = 1 << 13
"""Layers that the steps of a publication name together for the same blocks."""

FEW_RUNS = 8
"""Up to this many runs are decoded without numpy's arithmetic, whose setup takes longer than the runs do."""

TOKEN_LIMIT = 1 << 40
"""Positions of tokens stay below this. A token has at most 2**20 states (`kvferry.planner.coverage.MAX_CELLS`), so the
positions of states fit numpy's int64."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Block ids of one group, in token order.

    Block tables are aligned: a request's token ``t`` lies in its block ``t // block_tokens``. The first id is the block
    that holds `first_token`, which may lie inside the block.

    Attributes:
        ids: block ids, ``int32[n]``, read-only. Any sequence of integers is accepted and copied, so the caller may
            change it afterwards.
        first_token: first token that the blocks hold (source) or want (destination).
        end_token: one past the last token; None: up to the end of the last block.
        state_token: tokens that the state has seen, for state groups.
    """

    ids: BlockIds
    first_token: int = 0
    end_token: int | None = None
    state_token: int = 0

    def __init__(
        self,
        ids: Sequence[int] | npt.NDArray[np.integer],
        first_token: int = 0,
        end_token: int | None = None,
        state_token: int = 0,
    ) -> None:
        first, state = integer("first_token", first_token), integer("state_token", state_token)
        end = None if end_token is None else integer("end_token", end_token)
        _check_tokens("blocks", first, end, state)
        object.__setattr__(self, "ids", _checked_ids(ids))
        object.__setattr__(self, "first_token", first)
        object.__setattr__(self, "end_token", end)
        object.__setattr__(self, "state_token", state)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Blocks):
            return NotImplemented
        mine = (self.first_token, self.end_token, self.state_token)
        theirs = (other.first_token, other.end_token, other.state_token)
        return mine == theirs and bool(np.array_equal(self.ids, other.ids))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return (Blocks, (self.ids, self.first_token, self.end_token, self.state_token))


def _check_tokens(where: str, first: int, end: int | None, state: int) -> None:
    end = first if end is None else end
    if not 0 <= first <= end < TOKEN_LIMIT:
        raise InvalidField(where, (first, end), "0 <= first_token <= end_token < 2**40")
    if not 0 <= state < TOKEN_LIMIT:
        raise InvalidField(f"{where}.state_token", state, "0 <= state_token < 2**40")


def _checked_ids(ids: Sequence[int] | npt.NDArray[np.integer]) -> BlockIds:
    """A copy of the ids as int32; refuses what numpy would silently truncate (floats, 2**32 + 1)."""
    expected = "a flat sequence of integers"
    try:
        # Copied before the checks: an engine may be writing its next request into the same row.
        array = np.array(ids)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InvalidField("ids", described(ids), expected) from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidField("ids", f"{array.dtype} of shape {array.shape}", expected)
    if array.size > MAX_BLOCKS:
        raise InvalidField("ids", f"{array.size} ids", f"at most {MAX_BLOCKS}")
    if array.size and array.dtype != np.int32 and (int(array.min()) < -(2**31) or int(array.max()) >= 2**31):
        bad = int(array.max()) if int(array.max()) >= 2**31 else int(array.min())
        raise InvalidField("ids", bad, "block ids below 2**31")
    # Made of bytes, so that the array cannot be made writeable again.
    return np.frombuffer(array.astype(np.int32).tobytes(), np.int32)


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """The blocks of one group as runs of consecutive ids, as processes exchange them: ``starts[i]`` is the first id of
    a run of ``counts[i]`` blocks. The other fields are those of `Blocks`."""

    group: str
    first_token: int = 0
    end_token: int | None = None
    state_token: int = 0
    starts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    @classmethod
    def of_blocks(cls, group: str, blocks: Blocks, block_tokens: int = 0) -> BlockRuns:
        """The runs of blocks, whose end follows from `block_tokens`, unless 0, where `end_token` is None."""
        starts, counts = (tuple(column.tolist()) for column in id_runs(blocks.ids))
        end = blocks.end_token
        if end is None and block_tokens:
            end = (blocks.first_token // block_tokens + len(blocks.ids)) * block_tokens
        return cls(group, blocks.first_token, end, blocks.state_token, starts, counts)

    @property
    def end(self) -> int:
        """One past the last token; 0: unknown."""
        return self.end_token or 0

    @property
    def num_blocks(self) -> int:
        return sum(self.counts)

    def check(self, where: str) -> None:
        """Check everything that needs no group, before any ids are made: a few bytes of runs can expand to any number.
        Raises `InvalidField`, in which `where` names these blocks."""
        if len(self.starts) != len(self.counts):
            given = f"{len(self.starts)} starts, {len(self.counts)} counts"
            raise InvalidField(where, given, "as many run_starts as run_counts")
        if min(self.counts, default=1) < 1 or self.num_blocks > MAX_BLOCKS:
            raise InvalidField(where, "run_counts", f"counts of at least 1, in total at most {MAX_BLOCKS}")
        largest = max(self.starts, default=0)
        # The sum of the largest start and the largest count bounds every run, so single runs are rarely looked at.
        if largest + max(self.counts, default=0) > 2**31:
            largest = max(start + count - 1 for start, count in zip(self.starts, self.counts, strict=True))
        if min(self.starts, default=0) < 0 or largest >= 2**31:
            raise InvalidField(where, largest, "block ids below 2**31")
        _check_tokens(where, self.first_token, self.end_token, self.state_token)

    def blocks(self) -> Blocks:
        """The runs as `Blocks`; raises `InvalidField`, see `check`."""
        self.check(f"blocks of group {self.group!r}")
        if len(self.starts) <= FEW_RUNS:
            runs = zip(self.starts, self.counts, strict=True)
            pieces = [np.arange(start, start + count, dtype=np.int32) for start, count in runs]
            ids = pieces[0] if len(pieces) == 1 else np.concatenate((np.empty(0, np.int32), *pieces))
        else:
            ids = ids_of_runs(np.array(self.starts, np.int64), np.array(self.counts, np.int64))
        return Blocks(ids, self.first_token, self.end_token, self.state_token)

    def followed_by(self, more: BlockRuns) -> BlockRuns:
        """These blocks and the blocks after them, of the same group, as one."""
        starts, counts = self.starts + more.starts, self.counts + more.counts
        return BlockRuns(self.group, self.first_token, more.end_token, more.state_token, starts, counts)


def check_published(group: Group, where: str, blocks: BlockRuns, *, last: bool) -> None:
    """Check the blocks that a step of a publication gives of a group, at the source and at its home; `last`: no step
    follows. Raises `InvalidField`, in which `where` names the blocks: tokens and number of blocks do not match, or the
    step has something that only the last step may have."""
    if group.kind is GroupKind.STATE:
        if blocks.first_token or blocks.end:
            raise InvalidField(where, (blocks.first_token, blocks.end), "no token range in a state group")
    elif blocks.state_token:
        raise InvalidField(f"{where}.state_token", blocks.state_token, "0, because this is no state group")
    else:
        end_block = -(-blocks.end // group.block_tokens)
        needed = 0
        if blocks.end > blocks.first_token:
            needed = end_block - blocks.first_token // group.block_tokens
        if blocks.num_blocks != needed:
            tokens = f"tokens [{blocks.first_token}, {blocks.end})"
            expected = f"{needed} for {tokens} in blocks of {group.block_tokens}"
            raise InvalidField(where, f"{blocks.num_blocks} block ids", expected)
    if last:
        return
    # Blocks that the source may still write to come last (PROTOCOL, What the source promises when it publishes).
    if group.kind is not GroupKind.TOKENS:
        raise InvalidField(where, group.kind.name, "a group of kind TOKENS, because this is not the last step")
    if blocks.end % group.block_tokens:
        expected = f"full blocks of {group.block_tokens} tokens, because this is not the last step"
        raise InvalidField(where, f"end_token {blocks.end}", expected)


def id_runs(ids: AnyIds) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ids, or block indices, as runs of consecutive ones: the first of each run, and counts, ``int64[r]`` each."""
    starts, counts = split_runs(ids)
    return ids[starts].astype(np.int64), counts


def ids_of_runs(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> BlockIds:
    """The ids of runs whose bounds were checked, ``int32[n]``. Computed at once, since a request may have a run per
    block: a loop would hold up the engine's step."""
    ids = np.arange(int(counts.sum()), dtype=np.int32)
    ids += np.repeat((starts - (np.cumsum(counts) - counts)).astype(np.int32), counts)
    return ids


def runs_of(blocks: Mapping[str, Blocks]) -> tuple[BlockRuns, ...]:
    """Blocks by group as runs."""
    return tuple(BlockRuns.of_blocks(name, listed) for name, listed in blocks.items())


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Published blocks of which only some layers are complete. Once all layers are, the source publishes the same
    blocks as complete ones.

    The blocks of each group begin where the group's complete blocks end; `layers` names the layers that are complete in
    all of these blocks. In a step that a source publishes, empty `groups` are the blocks of the step before, and
    `layers` are those that the steps before did not name for the same blocks.
    """

    groups: tuple[BlockRuns, ...]
    layers: tuple[str, ...]


def blocks_by_group(name: str, blocks: object) -> dict[str, Blocks]:
    """A copy of a mapping from groups to their blocks; raises `InvalidField`, which names the wrong entry."""
    expected = "a mapping from group names to Blocks"
    found = mapping(name, blocks, expected)
    return {
        text(f"a group of {name}", group): instance(f"{name}[{group!r}]", listed, Blocks, "Blocks(ids)")
        for group, listed in found.items()
    }


def without_nulls(group: Group, blocks: Blocks) -> Blocks:
    """A source's blocks without the null blocks, which hold nothing, at the beginning of a window's table."""
    if group.window_tokens == 0 or group.null_block is None or not len(blocks.ids):
        return blocks
    held = np.flatnonzero(blocks.ids != group.null_block)
    # A table of null blocks only is left as it is, and refused later.
    left_out = int(held[0]) if len(held) else 0
    if not left_out:
        return blocks
    first = (blocks.first_token // group.block_tokens + left_out) * group.block_tokens
    end = first + (len(blocks.ids) - left_out) * group.block_tokens if blocks.end_token is None else blocks.end_token
    return Blocks(blocks.ids[left_out:], first, end, blocks.state_token)


def joined(steps: Iterable[Mapping[str, Blocks]]) -> dict[str, Blocks]:
    """The blocks of consecutive steps as those of one step; raises `BlocksShort` if a group leaves out tokens."""
    parts: dict[str, list[Blocks]] = {}
    for step in steps:
        for name, blocks in step.items():
            before = parts.setdefault(name, [])
            if before and before[-1].end_token != blocks.first_token:
                asked = f"tokens from {before[-1].end_token}"
                raise BlocksShort(name, "source", asked, f"tokens from {blocks.first_token}")
            before.append(blocks)
    found = {}
    for name, of in parts.items():
        first, last = of[0], of[-1]
        if first is last:
            found[name] = first
            continue
        ids = np.concatenate([part.ids for part in of])
        found[name] = Blocks(ids, first.first_token, last.end_token, last.state_token)
    return found


def taken_end(offered: Mapping[str, Blocks], wanted: Mapping[str, Blocks], tokens: tuple[int, int] | None) -> int:
    """The end of the tokens that a read of the source's `offered` into the destination's `wanted` blocks takes, or that
    a state which the read takes has seen. `tokens`: those asked; None: the source's, up to the end that the
    destination's blocks give, if any."""
    ends = [0 if tokens is None else tokens[1]]
    for name, mine in wanted.items():
        ends.append(mine.state_token)
        if tokens is None and mine.end_token is not None:
            ends.append(mine.end_token)
        elif tokens is None and name in offered:
            ends.append(offered[name].end_token or 0)
    return max(ends)


def check_ids(group: str, side: str, ids: AnyIds, num_blocks: int, null_block: int | None) -> None:
    """Raise `BadBlock` for the first id that is out of range or the null block (R7)."""
    if len(ids) == 0:
        return
    if int(ids.min()) < 0 or int(ids.max()) >= num_blocks:
        bad = int(ids[(ids < 0) | (ids >= num_blocks)][0])
        padding = ": -1 is padding? cut the table to the request's blocks" if bad == -1 else ""
        raise BadBlock(group, side, bad, num_blocks, f"out of range{padding}")
    if null_block is not None and bool((ids == null_block).any()):
        raise BadBlock(group, side, null_block, num_blocks, "the null block holds nothing")


def repeated(lists: Sequence[AnyIds]) -> int | None:
    """The smallest id that occurs twice in these lists together; None: there is none."""
    ids = lists[0] if len(lists) == 1 else np.concatenate(lists)
    if bool((ids[1:] > ids[:-1]).all()):
        return None
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(twice[0]) if len(twice) else None


def split_runs(*columns: npt.NDArray[np.signedinteger[Any]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Split positions into runs in which every column rises by one.

    Returns first positions and lengths of the runs, ``int64[r]`` each; empty for empty columns.
    """
    count = len(columns[0])
    if count == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    ends = np.zeros(count - 1, np.bool_)
    for column in columns:
        ends |= column[1:] - column[:-1] != 1
    starts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(ends) + 1))
    return starts, np.concatenate((starts[1:], [count])) - starts
