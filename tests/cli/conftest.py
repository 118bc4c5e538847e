"""A node server with a source of two ranks, one publication and one read of it; all over raw stubs, no NIXL."""

from __future__ import annotations

import hashlib
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from kvferry._wire.authority import incarnation_of, new_session_secret
from kvferry._wire.channel import connect
from kvferry.v1 import geometry_pb2, kv_transfer_pb2
from tests.support.command_line import run_kvferry
from tests.support.node_servers import Kvferryd
from tests.support.stubs import KVTransferStub

SOURCE, READER = "prefill", "decode"
BLOCKS, BLOCK_TOKENS, UNITS, STATE_BYTES = 32, 16, 4, 256
PLANE_BYTES = BLOCKS * BLOCK_TOKENS * UNITS * STATE_BYTES
CACHE_BYTES = 2 * 2 * PLANE_BYTES
RANKS = 2
LEASES = ("--ttl", "500", "--max-ttl", "500")
"""The lease is not renewed, and outlives a test run."""
SETTLED = ("--engine-ttl", "0.01")
"""The node server waits for no engines of a former start."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Stage:
    """The node server that the commands ask, and its contents."""

    server: Kvferryd
    incarnation: bytes
    publication: int


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    path = tmp_path_factory.mktemp("cli") / "node.sock"
    with ExitStack() as stack:
        server = stack.enter_context(
            Kvferryd(*("--unix", str(path), "--listen", "127.0.0.1:0", "--drain", "0"), *LEASES, *SETTLED)
        )
        stub = KVTransferStub(stack.enter_context(connect(server.address)))
        secret = new_session_secret()
        source = open_engine(stub, SOURCE, secret)
        for rank in range(RANKS):
            stub.RegisterCache(registration(source, secret, rank), timeout=10)
        publish = kv_transfer_pb2.Publish(
            publication=7,
            request_id="cmpl-7",
            groups=[kv_transfer_pb2.GroupBlocks(group="full", end_token=48, run_starts=[3], run_counts=[3])],
            last=True,
            marks=[kv_transfer_pb2.PromptMark(end=45, digest=secrets.token_bytes(16))],
        )
        notified = stub.Notify(
            kv_transfer_pb2.NotifyRequest(
                sender=source,
                session_secret=secret,
                notifications=[kv_transfer_pb2.Notification(publish=publish)],
            ),
            timeout=10,
        )
        reader = open_engine(stub, READER, new_session_secret())
        reading = stub.ReadBlocks(
            kv_transfer_pb2.ReadBlocksRequest(
                reference=notified.results[0].published.reference,
                reader=reader,
                read_id=secrets.token_bytes(16),
                parties=4,
            ),
            timeout=60,
        )
        lease_id = reading.accepted.lease_id
        report = kv_transfer_pb2.RankReport(rank=2, outcome=kv_transfer_pb2.RANK_OUTCOME_DONE, bytes=150_000)
        done = kv_transfer_pb2.Notification(read_done=kv_transfer_pb2.ReadDone(lease_id=lease_id, reports=[report]))
        stub.Notify(kv_transfer_pb2.NotifyRequest(sender=reader, notifications=[done]), timeout=10)
        yield Stage(server, source.incarnation, publish.publication)


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvferryd]:
    """A node server without engines, which waits for those of a former start for as long as a test run takes."""
    path = tmp_path_factory.mktemp("cli") / "empty.sock"
    with Kvferryd("--unix", str(path), "--listen", "", "--engine-ttl", "3600", "--retire", "7200") as server:
        yield server


@pytest.fixture
def kvferry(stage: Stage) -> Run:
    """Run the command against the stage, unless told otherwise."""

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return run_kvferry(*arguments, KVFERRY_SERVER=env.pop("KVFERRY_SERVER", stage.server.address), **env)

    return run


def open_engine(stub: KVTransferStub, engine_id: str, secret: bytes) -> kv_transfer_pb2.EngineRef:
    """Open an incarnation, whose Watch stays open as long as the channel."""
    engine = kv_transfer_pb2.EngineRef(engine_id=engine_id, incarnation=incarnation_of(secret))
    request = kv_transfer_pb2.WatchRequest(
        engine=engine, session_secret=secret, role=kv_transfer_pb2.WATCH_ROLE_SCHEDULER
    )
    watch: Any = stub.Watch(request)
    for event in watch:
        if event.WhichOneof("event") == "synced":
            break
    _open.append(watch)
    phases = (kv_transfer_pb2.RESYNC_PHASE_BEGIN, kv_transfer_pb2.RESYNC_PHASE_END)
    resync = [kv_transfer_pb2.Notification(resync=kv_transfer_pb2.Resync(phase=phase)) for phase in phases]
    stub.Notify(kv_transfer_pb2.NotifyRequest(sender=engine, session_secret=secret, notifications=resync), timeout=10)
    return engine


_open: list[grpc.Call] = []
"""Open Watches: an unreferenced stream is cancelled."""


def registration(engine: kv_transfer_pb2.EngineRef, secret: bytes, rank: int) -> kv_transfer_pb2.RegisterCacheRequest:
    base = 0x7F00_0000_0000 + rank * 4 * PLANE_BYTES
    planes = [
        geometry_pb2.Plane(
            layer="layers.0",
            component=component,
            group="full",
            format="hnd",
            dtype="bfloat16",
            memory_kind=geometry_pb2.MEMORY_KIND_DRAM,
            base=base + index * PLANE_BYTES,
            num_blocks=BLOCKS,
            block_stride=PLANE_BYTES // BLOCKS,
            page_tokens=BLOCK_TOKENS,
            block_states=BLOCK_TOKENS,
            unit_stride=BLOCK_TOKENS * STATE_BYTES,
            token_stride=STATE_BYTES,
            state_bytes=STATE_BYTES,
            axis_size=RANKS * UNITS,
            unit_begin=rank * UNITS,
            unit_end=(rank + 1) * UNITS,
            token_granule=1,
            units_divide=True,
        )
        for index, component in enumerate(("key", "value"))
    ]
    metadata = os.urandom(64)
    return kv_transfer_pb2.RegisterCacheRequest(
        engine=engine,
        session_secret=secret,
        num_ranks=RANKS,
        identity={"model": "tiny"},
        groups=[
            geometry_pb2.Group(
                name="full",
                kind=geometry_pb2.GROUP_KIND_TOKENS,
                block_tokens=BLOCK_TOKENS,
                num_blocks=BLOCKS,
                has_null_block=True,
            )
        ],
        rank=geometry_pb2.RankGeometry(rank=rank, labels={"tp_rank": rank}, planes=planes),
        agent=geometry_pb2.Agent(
            name=f"agent-{rank}",
            metadata=metadata,
            metadata_sha256=hashlib.sha256(metadata).digest(),
            regions=[
                geometry_pb2.MemoryRegion(memory_kind=geometry_pb2.MEMORY_KIND_DRAM, base=base, length=2 * PLANE_BYTES)
            ],
        ),
    )
