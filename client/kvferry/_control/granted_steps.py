"""The steps of a publication as its reader is told them, and as one list of blocks for each group."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry._wire.blocks_codec import blocks_from_proto
from kvferry.errors import BlocksShort, InvalidField
from kvferry.geometry.blocks import MAX_BLOCKS, Blocks
from kvferry.v1 import kv_transfer_pb2 as pb

GRANT_BYTES = 128 << 20
"""The most that the blocks of one publication take on the wire: `MAX_BLOCKS` ids that follow no other, with room. A
home that went on sending would fill our memory."""

STEP_BYTES = 256
"""What one step takes beside its blocks."""


class GrantedSteps:
    """The steps that one reader was told under one lease."""

    def __init__(self) -> None:
        self._steps: list[pb.Blocks] = []
        self._size = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, steps: Iterable[pb.Blocks]) -> None:
        """The next steps were told; raises `InvalidField` for others, or too much of them."""
        for step in steps:
            if step.step != len(self._steps):
                raise InvalidField("number of a publication's step", step.step, f"{len(self._steps)}, the next one")
            self._size += step.ByteSize() + STEP_BYTES
            if self._size > GRANT_BYTES:
                raise InvalidField("size of a publication's blocks", f"{self._size} bytes", f"at most {GRANT_BYTES}")
            self._steps.append(step)

    def blocks(self) -> dict[str, Blocks]:
        """All blocks, by group. Errors as `joined`."""
        return joined(self._steps)


def joined(steps: Iterable[pb.Blocks]) -> dict[str, Blocks]:
    """The steps of a publication as one list per group; each step goes on where the one before ended.

    Raises:
        BlocksShort: one does not.
        InvalidField: they are no blocks, or too many.
    """
    pieces: dict[str, list[pb.GroupBlocks]] = {}
    for step in sorted(steps, key=lambda step: step.step):
        for group in step.groups:
            pieces.setdefault(group.group, []).append(group)
    # Before any is written out: a few bytes of runs are as many ids as their sender likes, in each group.
    count = sum(sum(part.run_counts) for parts in pieces.values() for part in parts)
    if count > MAX_BLOCKS:
        raise InvalidField("number of blocks of all groups", count, f"at most {MAX_BLOCKS}")
    joined = {}
    for name, parts in pieces.items():
        whole = pb.GroupBlocks()
        whole.CopyFrom(parts[0])
        for part in parts[1:]:
            if part.first_token != whole.end_token:
                asked, available = f"tokens from {whole.end_token}", f"tokens from {part.first_token}"
                raise BlocksShort(name, "source", asked, available)
            whole.end_token = part.end_token
            whole.run_starts.extend(part.run_starts)
            whole.run_counts.extend(part.run_counts)
        joined[name] = blocks_from_proto(whole)
    return joined
