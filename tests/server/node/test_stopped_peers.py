"""A process that is stopped still has its connections, and its host acknowledges what it is sent: its silence is
noticed within the time of a ping, and not gRPC's minute."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import pytest

from kvferry._wire.channel import connect
from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1 import kv_transfer_pb2 as pb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.node_in_process import proto
from tests.support.node_servers import Kvferryd
from tests.support.parties import SECRETS, P
from tests.support.stubs import KVTransferStub

pytestmark = pytest.mark.slow

NOTICED = 40.0
"""Seconds: more than a ping takes, and less than gRPC's minute."""


def watch(channel: grpc.Channel) -> grpc.Call:
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
