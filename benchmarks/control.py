"""What the control plane costs: every RPC of a request against a bare gRPC call to the same server, from the same
client."""

from __future__ import annotations

import secrets
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvferry
from benchmarks.tables import Table, seconds
from benchmarks.transfer import group, memory, planes
from kvferry import Blocks, Client, EngineSpec, Interval
from kvferry._wire.geometry_codec import group_to_proto, rank_to_proto
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.kv_transfer_pb2_grpc import KVTransferStub

REPEATS = 200


def run() -> Table:
    """Measure each call's median."""
    with kvferry.serve() as server, Client(server.address) as client, grpc.insecure_channel(server.address) as channel:
        cells, region = memory(8)
        cache = client.register_cache(
            EngineSpec("control", (group(),)), planes=planes(Interval(0, 8), region.base), regions=[region], keep=cells
        )
        session = cache.session
        # The health service's stubs have no types.
        health: Any = health_pb2_grpc.HealthStub(channel)
        stub = KVTransferStub(channel)
        echo = seconds(lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=5), REPEATS)
        reader = pb.EngineRef(engine_id="reader", incarnation=secrets.token_bytes(16))
        handshake = pb.HandshakeRequest(
            engine_id="control",
            reader=reader,
            groups=[group_to_proto(group())],
            rank=rank_to_proto(cache.rank),
        )
        scattered = np.random.default_rng(0).permutation(512)[:256]
        reference = session.publish("control", {"full": Blocks(scattered)}, expected_reads=REPEATS + 1).reference
        leases: list[bytes] = []

        def publish() -> None:
            session.publish("control", {"full": Blocks(scattered)})

        def read_blocks() -> None:
            request = pb.ReadBlocksRequest(
                reference=reference, reader=reader, read_id=secrets.token_bytes(16), parties=1
            )
            stream = stub.ReadBlocks(request, timeout=5)
            for message in stream:
                if message.WhichOneof("message") == "accepted":
                    leases.append(message.accepted.lease_id)
                if message.WhichOneof("message") == "complete":
                    break
            stream.cancel()

        def read_done() -> None:
            report = pb.RankReport(rank=0, outcome=pb.RANK_OUTCOME_DONE)
            done = pb.Notification(read_done=pb.ReadDone(lease_id=leases.pop(), reports=[report]))
            stub.Notify(pb.NotifyRequest(sender=reader, notifications=[done]), timeout=5)

        calls = {
            "bare gRPC call (health check)": echo,
            "Handshake, 1 rank, 32 planes": seconds(lambda: list(stub.Handshake(handshake, timeout=5)), REPEATS),
            "Notify(publish), 256 scattered blocks": seconds(publish, REPEATS),
            "ReadBlocks up to Complete, 256 scattered blocks": seconds(read_blocks, REPEATS),
            "Notify(read done)": seconds(read_done, REPEATS - 1),
        }
    rows = [[label, f"{taken / echo:.2f}"] for label, taken in calls.items()]
    return Table("The control plane of a request, against a bare gRPC call", ("call", "times a bare call"), rows)
