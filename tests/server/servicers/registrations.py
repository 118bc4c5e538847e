"""Registrations of an exact size in bytes."""

from __future__ import annotations

from kvferry._wire.geometry_codec import agent_to_proto, rank_to_proto
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry_server.servicers import decode
from tests.support.node_in_process import register_request
from tests.support.parties import rank_geometry


def size_of(request: pb.RegisterCacheRequest) -> int:
    """Bytes of a rank and its agent as sent to readers."""
    made = decode.registration(request)
    agent = 0 if made.agent is None else agent_to_proto(made.agent).ByteSize()
    return rank_to_proto(made.geometry).ByteSize() + agent


def of_size(size: int, rank: int = 0, ranks: int = 1) -> pb.RegisterCacheRequest:
    """A registration whose rank and agent take exactly `size` bytes, by the length of a label's name."""
    request = register_request(rank, ranks, geometry=rank_geometry(rank, ranks, heads=max(8, ranks)))
    request.rank.labels["x" * max(1, size - size_of(request) - 20)] = 1
    for _ in range(4):
        label = next(name for name in request.rank.labels if name.startswith("x"))
        length = len(label) + size - request.rank.ByteSize() - request.agent.ByteSize()
        del request.rank.labels[label]
        request.rank.labels["x" * length] = 1
    return request
