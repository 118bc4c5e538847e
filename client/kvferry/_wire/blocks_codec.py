"""Encodes the blocks of a request as protobuf messages, with runs of consecutive ids."""

from __future__ import annotations

import numpy as np

from kvferry.errors import InvalidField
from kvferry.geometry.blocks import FEW_RUNS, MAX_BLOCKS, BlockRuns, Blocks, ids_of_runs
from kvferry.v1 import kv_transfer_pb2 as pb


def blocks_to_proto(group: str, blocks: Blocks, block_tokens: int) -> pb.GroupBlocks:
    """Encode blocks of a group; `block_tokens` (0 for state groups) gives the end where `end_token` is None."""
    message = runs_to_proto(BlockRuns.of_blocks(group, blocks))
    if blocks.end_token is None and block_tokens:
        message.end_token = (blocks.first_token // block_tokens + len(blocks.ids)) * block_tokens
    return message


def blocks_from_proto(message: pb.GroupBlocks) -> Blocks:
    """Decode blocks; raises `InvalidField`."""
    runs = len(message.run_starts)
    if runs <= FEW_RUNS or runs != len(message.run_counts):
        return runs_from_proto(message).blocks()
    # As `BlockRuns.check`, without a Python number for each run.
    starts, counts = np.array(message.run_starts, np.uint64), np.array(message.run_counts, np.uint64)
    where = f"blocks of group {message.group!r}"
    if not counts.all() or int(counts.sum()) > MAX_BLOCKS:
        raise InvalidField(where, "run_counts", f"counts of at least 1, in total at most {MAX_BLOCKS}")
    if int(starts.max()) >= 2**31 or int((starts + counts).max()) > 2**31:
        raise InvalidField(where, int(starts.max()), "block ids below 2**31")
    ids = ids_of_runs(starts.astype(np.int64), counts.astype(np.int64))
    return Blocks(ids, message.first_token, message.end_token, message.state_token)


def runs_to_proto(runs: BlockRuns) -> pb.GroupBlocks:
    """Encode runs of blocks."""
    return pb.GroupBlocks(
        group=runs.group,
        first_token=runs.first_token,
        end_token=runs.end,
        state_token=runs.state_token,
        run_starts=runs.starts,
        run_counts=runs.counts,
    )


def runs_from_proto(message: pb.GroupBlocks) -> BlockRuns:
    """Decode runs of blocks without a check: see `BlockRuns.check`."""
    return BlockRuns(
        group=message.group,
        first_token=message.first_token,
        end_token=message.end_token,
        state_token=message.state_token,
        # Slices, because protobuf iterates over single numbers slowly.
        starts=tuple(message.run_starts[:]),
        counts=tuple(message.run_counts[:]),
    )
