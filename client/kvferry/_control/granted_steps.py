"""Collects the steps of a publication that a home grants, and joins them to one list of blocks per group."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry._wire.blocks_codec import blocks_from_proto
from kvferry.errors import BlocksShort, InvalidField
from kvferry.geometry.blocks import MAX_BLOCKS, Blocks
from kvferry.v1 import kv_transfer_pb2 as pb

GRANT_BYTES = 128 << 20
"""Most bytes of the encoded blocks of one publication: enough for `MAX_BLOCKS` ids without consecutive ones. Without a
limit, a home could fill the reader's memory."""

STEP_BYTES = 256
"""Bytes to count for each step beside its blocks."""


class GrantedSteps:
    """The steps that one reader was granted under one lease."""

    def __init__(self) -> None:
        self._steps: list[pb.Blocks] = []
        self._size = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, steps: Iterable[pb.Blocks]) -> None:
        """Add the next steps; raises `InvalidField` if one is out of order, or they are too large."""
        for step in steps:
            if step.step != len(self._steps):
                raise InvalidField("number of a publication's step", step.step, f"{len(self._steps)}, the next one")
            self._size += step.ByteSize() + STEP_BYTES
            if self._size > GRANT_BYTES:
                raise InvalidField("size of a publication's blocks", f"{self._size} bytes", f"at most {GRANT_BYTES}")
            self._steps.append(step)

    def blocks(self) -> dict[str, Blocks]:
        """Return all blocks by group; raises the errors of `joined`."""
        return joined(self._steps)


def joined(steps: Iterable[pb.Blocks]) -> dict[str, Blocks]:
    """Join the steps of a publication to one list of blocks per group.

    Raises:
        BlocksShort: a step does not continue where the one before ended.
        InvalidField: blocks are malformed, or there are too many.
    """
    pieces: dict[str, list[pb.GroupBlocks]] = {}
    for step in sorted(steps, key=lambda step: step.step):
        for group in step.groups:
            pieces.setdefault(group.group, []).append(group)
    # Checked before any ids are decoded: a few bytes of runs can stand for any number of ids.
    count = sum(sum(part.run_counts) for parts in pieces.values() for part in parts)
    if count > MAX_BLOCKS:
        raise InvalidField("number of blocks of all groups", count, f"at most {MAX_BLOCKS}")
    joined = {}
    for name, parts in pieces.items():
        whole = parts[0]
        if len(parts) > 1:
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
