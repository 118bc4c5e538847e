"""Encodes the blocks of a request as protobuf messages, with runs of consecutive ids."""

from __future__ import annotations

import numpy as np

from kvferry.errors import InvalidField
from kvferry.geometry.blocks import MAX_BLOCKS, Blocks
from kvferry.v1 import kv_transfer_pb2 as pb


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
    starts = np.array(message.run_starts, dtype=np.uint64)
    counts = np.array(message.run_counts, dtype=np.uint64)
    where = f"blocks of group {message.group!r}"
    if len(starts) != len(counts):
        raise InvalidField(where, f"{len(starts)} starts, {len(counts)} counts", "as many run_starts as run_counts")
    if len(starts) == 0:
        ids = np.empty(0, np.int32)
    else:
        # Check the bounds first: a count of 2**32 - 1 must not cause an allocation.
        if int(counts.min()) < 1 or int(counts.max()) > MAX_BLOCKS or int(counts.sum()) > MAX_BLOCKS:
            raise InvalidField(where, "run_counts", f"counts of at least 1, together at most {MAX_BLOCKS}")
        if int(starts.max()) >= 2**31 or int((starts + counts).max()) > 2**31:
            raise InvalidField(where, int(starts.max()), "block ids below 2**31")
        total = int(counts.sum())
        signed = counts.astype(np.int64)
        before = np.cumsum(signed) - signed
        ids = np.arange(total, dtype=np.int32)
        ids += np.repeat((starts.astype(np.int64) - before).astype(np.int32), signed)
    if message.end_token < message.first_token or message.end_token >= 2**62:
        raise InvalidField(where, (message.first_token, message.end_token), "0 <= first_token <= end_token < 2**62")
    return Blocks(ids, message.first_token, message.end_token, message.state_token)
