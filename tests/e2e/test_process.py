"""What an engine's process must be able to rely on: forks are safe or say so, idling costs nothing, an event loop is
never blocked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from kvferry import AsyncClient, Blocks, Client, EngineSpec, Interval, MemoryKind, MemoryRegion
from kvferry.errors import Closed
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.caches import Model, expect, kv, shards, write
from tests.support.engines import Engine
from tests.support.identifiers import unique_id
from tests.support.node_servers import NodeServerProcess
from tests.support.repository import ROOT

MakeEngine = Callable[..., Engine]
MODEL = Model()
IDLE_SECONDS = 10.0
IDLE_SHARE = 0.01


REGISTER = """
import os, sys, threading, time
import numpy as np
from kvferry import Blocks, Client, EngineSpec, Interval, MemoryKind, MemoryRegion
from kvferry.errors import ForkedClient
from tests.support.caches import Model
from tests.support.identifiers import unique_id

model = Model()
memory = np.zeros(model.rank_bytes(Interval(0, 4)), np.uint8)
base = memory.ctypes.data


def register(client, name):
    regions = [MemoryRegion(MemoryKind.DRAM, 0, base, memory.nbytes)]
    spec = EngineSpec(unique_id(name), (model.group(),))
    return client.register_cache(spec, planes=model.planes(Interval(0, 4), base), regions=regions).session
"""

FORK = """
parent = Client(sys.argv[1])
session = register(parent, "parent")
session.publish("before", {"full": Blocks([1])})

child = os.fork()
if child == 0:
    code = 1
    try:
        parent.open_engine(EngineSpec("fork-child", (model.group(),)))
    except ForkedClient as error:
        # The parent's client says so; one of the child's own works, but for NIXL, which needs a process of its own.
        with Client(sys.argv[1]) as own:
            own.open_engine(EngineSpec(unique_id("child"), (model.group(),)))
        code = 0 if str(os.getppid()) in str(error) else 3
    os._exit(code)
_, status = os.waitpid(child, 0)
session.publish("after", {"full": Blocks([3])})
parent.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def run(script: str, *arguments: str) -> str:
    """The output of a process that starts with REGISTER."""
    command = [sys.executable, "-c", REGISTER + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_child_of_a_fork_gets_an_error_and_the_parent_goes_on(homes: tuple[str, str]) -> None:
    run(FORK, homes[0])


IDLE = """
with Client(sys.argv[1]) as client:
    register(client, "idle").publish("x", {"full": Blocks([1])})
    before = time.process_time()
    threading.Event().wait(float(sys.argv[2]))
    print(time.process_time() - before)
"""


@pytest.mark.slow
def test_idle_rank_client_and_server_use_no_cpu(tmp_path: Path, engine: MakeEngine) -> None:
    with NodeServerProcess(tmp_path / "idle") as server:
        source = engine(server.address, MODEL, shards(4, 1))
        destination = engine(server.address, MODEL, shards(4, 1))
        source.ready()
        destination.ready()
        # Both have done something: agents, peers and connections are there, and then nothing happens.
        reference = source.session.publish("x", {"full": Blocks([1])}).reference
        destination.ranks[0].read(reference, [1], None)
        watched = psutil.Process(server.pid)
        before = watched.cpu_times()
        for rank in (source.ranks[0], destination.ranks[0]):
            rank.send("cpu_seconds_idle", IDLE_SECONDS)
        used = {"source rank": source.ranks[0].answer(), "destination rank": destination.ranks[0].answer()}
        after = watched.cpu_times()
        used["server"] = after.user + after.system - before.user - before.system
        # In a process of its own: this one holds what all tests before have left for the next full collection.
        used["session"] = float(run(IDLE, server.address, str(IDLE_SECONDS)))
    assert {who: seconds for who, seconds in used.items() if seconds > IDLE_SECONDS * IDLE_SHARE} == {}


async def test_asyncio_client_moves_blocks_and_never_blocks_the_loop(
    engine: MakeEngine, homes: tuple[str, str]
) -> None:
    source = engine(homes[0], MODEL, shards(4, 1)).ready()
    request = kv(MODEL, 5, 32)
    write(source.memories[0], request, [3, 4])
    publication = await asyncio.to_thread(source.session.publish, "async", {"full": Blocks([3, 4])})
    cells = np.full(MODEL.rank_bytes(Interval(0, 4)), 0xA5, np.uint8)
    spec = EngineSpec(unique_id("async"), (MODEL.group(),), identity={"model": "tiny"})
    async with AsyncClient(homes[1]) as client:
        cache = await client.register_cache(
            spec,
            planes=MODEL.planes(Interval(0, 4), cells.ctypes.data),
            regions=[MemoryRegion(MemoryKind.DRAM, 0, cells.ctypes.data, cells.nbytes)],
            keep=cells,
        )
        read = cache.read(publication.reference, {"full": Blocks([6, 7])})
        result = await read
        assert result.confirmed
        assert read.progress().done == result.bytes
    memory = source.memories[0]
    assert np.array_equal(cells, expect(memory, request, [6, 7], (0, 32)))


async def test_cancelled_await_cancels_the_read(engine: MakeEngine, homes: tuple[str, str]) -> None:
    source = engine(homes[0], MODEL, shards(4, 1)).ready()
    publication = await asyncio.to_thread(source.session.publish, "late", {}, last=False)
    cells = np.zeros(MODEL.rank_bytes(Interval(0, 4)), np.uint8)
    spec = EngineSpec(unique_id("async"), (MODEL.group(),), identity={"model": "tiny"})
    async with AsyncClient(homes[1]) as client:
        cache = await client.register_cache(
            spec,
            planes=MODEL.planes(Interval(0, 4), cells.ctypes.data),
            regions=[MemoryRegion(MemoryKind.DRAM, 0, cells.ctypes.data, cells.nbytes)],
            keep=cells,
        )
        read = cache.read(publication.reference, {"full": Blocks([6])})
        waiting = asyncio.ensure_future(asyncio.wait_for(read, 0.2))
        with pytest.raises(TimeoutError):
            await waiting
        assert await asyncio.to_thread(read.wait_quiet, 10)
        assert read.state.value == "cancelled"
    # The home was told, so the lease does not run out its time.
    with grpc.insecure_channel(homes[0]) as channel:
        request = ipb.ListTransfersRequest(engine_id=source.spec.engine_id)
        (transfer,) = IntrospectionStub(channel).ListTransfers(request, timeout=5).transfers
    assert [report.outcome for report in transfer.reports] == [pb.RANK_OUTCOME_CANCELLED]
    assert transfer.lease_remaining.ToNanoseconds() == 0


def test_closed_client_raises_closed(homes: tuple[str, str]) -> None:
    client = Client(homes[0])
    client.close()
    with pytest.raises(Closed):
        client.open_engine(EngineSpec("closed", (MODEL.group(),)))
