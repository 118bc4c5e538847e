"""Encodes the blocks of a request as protobuf messages, with runs of consecutive ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.errors import InvalidField
from kvferry.geometry.blocks import MAX_BLOCKS, BlockIds, Blocks
from kvferry.v1 import kv_transfer_pb2 as pb

FEW_RUNS = 8
"""Up to so many runs are decoded without numpy's arithmetic, which takes longer to set up than they do."""


def blocks_to_proto(group: str, blocks: Blocks, block_tokens: int) -> pb.GroupBlocks:
    """Encode blocks of a group; `block_tokens` (0 for state groups) gives the end where `end_token` is None."""
    starts, counts = blocks.runs()
    end = blocks.end_token
    if end is None:
        first_block = blocks.first_token // block_tokens if block_tokens else 0
        end = (first_block + len(blocks.ids)) * block_tokens
    return pb.GroupBlocks(
        group=group,
        first_token=blocks.first_token,
        end_token=end,
        state_token=blocks.state_token,
        run_starts=starts.tolist(),
        run_counts=counts.tolist(),
    )


def blocks_from_proto(message: pb.GroupBlocks) -> Blocks:
    """Decode blocks; raises `InvalidField`."""
    runs = len(message.run_starts)
    where = f"blocks of group {message.group!r}"
    if runs != len(message.run_counts):
        given = f"{runs} starts, {len(message.run_counts)} counts"
        raise InvalidField(where, given, "as many run_starts as run_counts")
    if runs <= FEW_RUNS:
        ids = _few_ids(where, list(message.run_starts), list(message.run_counts))
    else:
        ids = _ids(where, np.array(message.run_starts, np.uint64), np.array(message.run_counts, np.uint64))
    if message.end_token < message.first_token or message.end_token >= 2**62:
        raise InvalidField(where, (message.first_token, message.end_token), "0 <= first_token <= end_token < 2**62")
    return Blocks(ids, message.first_token, message.end_token, message.state_token)


def _few_ids(where: str, starts: list[int], counts: list[int]) -> BlockIds:
    if not starts:
        return np.empty(0, np.int32)
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    _check_runs(where, min(counts), sum(counts), max(starts), max(ends))
    pieces = [np.arange(start, end, dtype=np.int32) for start, end in zip(starts, ends, strict=True)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _ids(where: str, starts: npt.NDArray[np.uint64], counts: npt.NDArray[np.uint64]) -> BlockIds:
    _check_runs(where, int(counts.min()), int(counts.sum()), int(starts.max()), int((starts + counts).max()))
    signed = counts.astype(np.int64)
    before = np.cumsum(signed) - signed
    ids = np.arange(int(counts.sum()), dtype=np.int32)
    ids += np.repeat((starts.astype(np.int64) - before).astype(np.int32), signed)
    return ids


def _check_runs(where: str, fewest: int, total: int, last_start: int, last_end: int) -> None:
    """Check the bounds of runs before their ids are made: a count of 2**32 - 1 must not cause an allocation."""
    if fewest < 1 or total > MAX_BLOCKS:
        raise InvalidField(where, "run_counts", f"counts of at least 1, together at most {MAX_BLOCKS}")
    if last_start >= 2**31 or last_end > 2**31:
        raise InvalidField(where, last_start, "block ids below 2**31")
