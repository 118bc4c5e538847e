"""A process that is stopped still has its connections, and its host acknowledges what it is sent: its silence is
noticed within the time of a ping, and not gRPC's minute."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvferry import Blocks, Client, EngineSpec, Group, KvferryError, Release, ReleaseOutcome
from kvferry._wire.channel import connect
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.errors import EngineUnknown, TransferFailed
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.node_in_process import proto
from tests.support.node_servers import Kvferryd
from tests.support.parties import SECRETS, P
from tests.support.stubs import KVTransferStub
from tests.support.waiting import until

pytestmark = pytest.mark.slow

NOTICED = 40.0
"""Seconds: more than a ping takes, and less than gRPC's minute."""


SHAPE = 8, 4, 2, 16
"""Blocks, their tokens, heads, elements."""


def engine_of(name: str) -> EngineSpec:
    return EngineSpec(name, (Group("full", block_tokens=4, num_blocks=SHAPE[0]),))


def watch(channel: grpc.Channel) -> Any:
    """A Watch of P's scheduler that has begun."""
    request = pb.WatchRequest(engine=proto(P), session_secret=SECRETS[P], role=pb.WATCH_ROLE_SCHEDULER)
    stream = KVTransferStub(channel).Watch(request)
    assert next(stream).WhichOneof("event") == "opened"
    return stream


def watch_for_long(address: str, pipe: Connection) -> None:
    with connect(address) as channel:
        stream = watch(channel)
        pipe.send("watching")
        pipe.poll(None)
        stream.cancel()


def test_watch_of_a_stopped_engine_ends(tmp_path: Path) -> None:
    mine, theirs = multiprocessing.Pipe()
    with (
        Kvferryd("--listen", "", "--unix", str(tmp_path / "s")) as server,
        grpc.insecure_channel(server.address) as asking,
    ):
        spawned = multiprocessing.get_context("spawn")
        engine = spawned.Process(target=watch_for_long, args=(server.address, theirs), daemon=True)
        engine.start()
        assert mine.recv() == "watching"
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            engines = IntrospectionStub(asking)
            deadline = time.monotonic() + NOTICED
            while engines.ListEngines(ipb.ListEnginesRequest()).engines[0].state != ipb.ENGINE_STATE_LOST:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        finally:
            os.kill(engine.pid, signal.SIGKILL)
            engine.join()


def publish_twice(address: str, pipe: Connection) -> None:
    """An engine that publishes, and again when that is released."""
    spec = engine_of("source")
    with Client(address) as client, SchedulerPort(client, spec) as port:
        WorkerPort(client, spec, 0, token=port.token).register({"layer": np.ones(SHAPE, np.float32)}, serve=True)
        for request in ("before", "after"):
            publication = port.publish(request, {"full": Blocks([1])})
            pipe.send(publication.reference)
            released: list[Release] = []
            while not released:
                released = port.released()
                time.sleep(0.01)
            pipe.send([release.outcome for release in released])


def test_engine_that_was_stopped_until_it_counted_as_dead_goes_on_as_the_same(tmp_path: Path) -> None:
    """What it had published is over, told once; what it publishes then is read."""
    mine, theirs = multiprocessing.Pipe()
    spec = engine_of("reader")
    with (
        Kvferryd("--listen", "", "--unix", str(tmp_path / "s"), "--engine-ttl", "1") as server,
        grpc.insecure_channel(server.address) as asking,
        Client(server.address) as client,
        SchedulerPort(client, spec) as port,
    ):
        into = np.zeros(SHAPE, np.float32)
        cache = WorkerPort(client, spec, 0, token=port.token).register({"layer": into})
        spawned = multiprocessing.get_context("spawn")
        engine = spawned.Process(target=publish_twice, args=(server.address, theirs), daemon=True)
        engine.start()
        before = mine.recv()
        engines = IntrospectionStub(asking)
        # Else the home would hear of it, and hold it for its readers, when the engine goes on.
        until(lambda: bool(engines.ListRequests(ipb.ListRequestsRequest()).requests))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + NOTICED
            # A dead engine is not listed.
            while len(engines.ListEngines(ipb.ListEnginesRequest()).engines) > 1:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            with pytest.raises(KvferryError) as lost:
                cache.read(before, {"full": Blocks([1])}).result(NOTICED)
            assert isinstance(lost.value, EngineUnknown | TransferFailed), lost.value
            os.kill(engine.pid, signal.SIGCONT)
            assert mine.recv() == [ReleaseOutcome.ABORTED]
            assert cache.read(mine.recv(), {"full": Blocks([2])}).result(NOTICED).bytes == into[2].nbytes
            assert (into[2] == 1).all()
            assert mine.recv() == [ReleaseOutcome.READ]
        finally:
            os.kill(engine.pid, signal.SIGKILL)
            engine.join()


def test_watch_at_a_stopped_node_server_ends(tmp_path: Path) -> None:
    with Kvferryd("--listen", "", "--unix", str(tmp_path / "s")) as server, connect(server.address) as channel:
        stream = watch(channel)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(grpc.RpcError) as ended:
                for _ in stream:
                    pass
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
