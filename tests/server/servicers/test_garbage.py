"""R9: any bytes end in a typed status, and the server goes on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from kvferry._wire.geometry_codec import engine_to_proto
from kvferry._wire.status import from_rpc_error
from kvferry._wire.version import introduce
from kvferry.geometry import EngineGeometry
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from tests.support.node_in_process import (
    TIMEOUT,
    handshake_request,
    proto,
    publish_notification,
    read_done,
    read_request,
    reference,
    register_request,
    running,
    snapshot,
)
from tests.support.parties import FULL, SECRETS, P, rank_geometry

GEOMETRY = engine_to_proto(EngineGeometry("x", (FULL,), (rank_geometry(),), {"model": "m"}))
UNARY = {
    "KVTransfer/RegisterCache": register_request(),
    "KVTransfer/Notify": pb.NotifyRequest(
        sender=proto(P),
        session_secret=SECRETS[P],
        notifications=[
            publish_notification(marks=[pb.PromptMark(end=64, digest=b"d" * 16)]),
            read_done(b"l" * 16, 0),
            pb.Notification(renew=pb.Renew(lease_id=b"l" * 16)),
            pb.Notification(resync=pb.Resync(phase=pb.RESYNC_PHASE_BEGIN, high_water=3)),
            pb.Notification(released_ack=pb.ReleasedAck(publications=[1, 2])),
            pb.Notification(decline=pb.Decline(reference=reference())),
        ],
    ),
    "KVTransfer/ReadBlocks": read_request(next_step=1),
    "Introspection/GetEngine": ipb.GetEngineRequest(engine_id="prefill"),
    "Introspection/ListRequests": ipb.ListRequestsRequest(page_size=5, page_token="YQ.YQ"),
    "Introspection/PlanRead": ipb.PlanReadRequest(source_geometry=GEOMETRY, destination_geometry=GEOMETRY),
}
STREAMS = {
    "KVTransfer/Handshake": handshake_request(),
    "KVTransfer/Watch": pb.WatchRequest(engine=proto(P), session_secret=SECRETS[P], role=pb.WATCH_ROLE_SCHEDULER),
}
for asked in (*UNARY.values(), *STREAMS.values()):
    if "version" in asked.DESCRIPTOR.fields_by_name:
        # Without it every request would be refused.
        introduce(cast("Any", asked))


def damaged(message: Message, turns: random.Random) -> bytes:
    """A message with a few bytes changed, added, doubled or missing."""
    raw = bytearray(message.SerializeToString())
    for _ in range(turns.randint(1, 4)):
        at = turns.randrange(len(raw)) if raw else 0
        match turns.randrange(4):
            case 0 if raw:
                raw[at] = turns.randrange(256)
            case 1:
                raw[at:at] = turns.randbytes(turns.randint(1, 10))
            case 2:
                del raw[at : at + turns.randint(1, 10)]
            case _:
                raw[at:at] = raw[at : at + turns.randint(1, 40)]
    return bytes(raw)


@pytest.mark.parametrize("method", [*UNARY, *STREAMS])
async def test_damaged_requests_end_in_a_typed_status(tmp_path: Path, method: str) -> None:
    turns = random.Random(method)
    async with running(tmp_path) as node:
        with node.home.turn():
            node.home.engines.open_engine(P, SECRETS[P])
        await node.source(*snapshot())
        await node.register()
        await node.publish()
        async with grpc.aio.insecure_channel(f"unix:{tmp_path / 's'}") as channel:
            for _ in range(150):
                raw = damaged({**UNARY, **STREAMS}[method], turns)
                try:
                    if method in UNARY:
                        call: Any = channel.unary_unary(f"/kvferry.v1.{method}")
                        await call(raw, timeout=TIMEOUT)
                    else:
                        call = channel.unary_stream(f"/kvferry.v1.{method}")
                        stream = call(raw, timeout=TIMEOUT)
                        await stream.read()
                        stream.cancel()
                except grpc.aio.AioRpcError as error:
                    typed = from_rpc_error(error, "test")
                    assert typed.reason not in ("", "INTERNAL"), (raw.hex(), typed)
        # The server goes on.
        await node.introspection.ListEngines(ipb.ListEnginesRequest(), timeout=TIMEOUT)
