"""Block ids as plain values: runs of consecutive ids, for what passes between an engine's scheduler and its workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.errors import InvalidField
from kvferry.geometry.blocks import MAX_BLOCKS, Blocks, Unfinished


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """The blocks of one group, as runs of consecutive ids: ``starts[i]`` is the first id of a run of ``counts[i]``
    blocks. The other fields are those of `Blocks`."""

    group: str
    first_token: int
    end_token: int | None
    state_token: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of_blocks(cls, group: str, blocks: Blocks) -> BlockRuns:
        """Encode blocks as runs."""
        starts, counts = blocks.runs()
        return cls(
            group,
            blocks.first_token,
            blocks.end_token,
            blocks.state_token,
            tuple(starts.tolist()),
            tuple(counts.tolist()),
        )

    def blocks(self) -> Blocks:
        """Decode the blocks; raises `InvalidField` for runs that `of_blocks` cannot have made."""
        total = sum(self.counts)
        if len(self.starts) != len(self.counts) or min(self.counts, default=1) < 1 or total > MAX_BLOCKS:
            raise InvalidField("blocks", self.group, f"as many starts as counts, together at most {MAX_BLOCKS} blocks")
        if min(self.starts, default=0) < 0 or max(self.starts, default=0) >= 2**31:
            raise InvalidField("blocks", self.group, "starts that are block ids")
        starts, counts = np.array(self.starts, np.int64), np.array(self.counts, np.int64)
        # All at once, since a request may have a run per block: a loop would hold up the engine's step.
        ids = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(total)
        return Blocks(ids, self.first_token, self.end_token, self.state_token)

    def followed_by(self, more: BlockRuns) -> BlockRuns:
        """Return these blocks and those after them, of the same group, as one."""
        return BlockRuns(
            self.group,
            self.first_token,
            more.end_token,
            more.state_token,
            self.starts + more.starts,
            self.counts + more.counts,
        )


@dataclass(frozen=True, slots=True)
class UnfinishedRuns:
    """Blocks of which only some layers are complete; see `Unfinished`.

    Attributes:
        granted: the source's blocks by group.
        layers: names of the layers that are complete.
    """

    granted: tuple[BlockRuns, ...]
    layers: tuple[str, ...]

    @classmethod
    def of(cls, unfinished: Unfinished | None) -> UnfinishedRuns | None:
        """Encode blocks as runs; None: there are none."""
        if unfinished is None:
            return None
        runs = tuple(BlockRuns.of_blocks(name, blocks) for name, blocks in unfinished.blocks.items())
        return cls(runs, tuple(sorted(unfinished.layers)))


def unfinished_of(runs: UnfinishedRuns | None) -> Unfinished | None:
    """Decode what `UnfinishedRuns.of` has made."""
    if runs is None:
        return None
    return Unfinished({group.group: group.blocks() for group in runs.granted}, frozenset(runs.layers))
