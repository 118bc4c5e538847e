"""Encodes the blocks of a request as protobuf messages, with runs of consecutive ids."""

from __future__ import annotations

from kvferry.geometry.blocks import BlockRuns, Blocks
from kvferry.v1 import kv_transfer_pb2 as pb


def blocks_to_proto(group: str, blocks: Blocks, block_tokens: int) -> pb.GroupBlocks:
    """Encode blocks of a group; `block_tokens` (0 for state groups) gives the end where `end_token` is None."""
    message = runs_to_proto(BlockRuns.of_blocks(group, blocks))
    if blocks.end_token is None and block_tokens:
        message.end_token = (blocks.first_token // block_tokens + len(blocks.ids)) * block_tokens
    return message


def blocks_from_proto(message: pb.GroupBlocks) -> Blocks:
    """Decode blocks; raises `InvalidField`."""
    return runs_from_proto(message).blocks()


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
    """Decode runs of blocks, which are as the sender gave them: see `BlockRuns.check`."""
    return BlockRuns(
        group=message.group,
        first_token=message.first_token,
        end_token=message.end_token,
        state_token=message.state_token,
        # Slices, because protobuf iterates over single numbers slowly.
        starts=tuple(message.run_starts[:]),
        counts=tuple(message.run_counts[:]),
    )
