"""A process that is stopped still has its connections, and its host acknowledges what it is sent: its silence is
noticed within the time of a ping, and not gRPC's minute."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
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


@contextmanager
def engine_process(target: Callable[[str, Connection], None], address: str) -> Iterator[tuple[int, Connection]]:
    """A process of an engine at a home: its id, and a pipe to it. Killed at the end."""
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(address, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield process.pid, mine
    finally:
        process.kill()
        process.join()


@dataclass(frozen=True)
class Stopped:
    """Processes that were stopped.

    Attributes:
        watched: the home of an engine that watched.
        home: the home of a source that had published.
        source, pipe: the source's process id, and a pipe to it.
        reference: of what it had published.
        stream: a Watch at a node server.
    """

    watched: Kvferryd
    home: Kvferryd
    source: int
    pipe: Connection
    reference: str
    stream: Any


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stopped]:
    """They are stopped together: each is noticed by a ping, which takes as long for all as for one."""
    folder = tmp_path_factory.mktemp("stopped")
    with ExitStack() as stack:

        def server(name: str, *flags: str) -> Kvferryd:
            return stack.enter_context(Kvferryd("--listen", "", "--unix", str(folder / name), *flags))

        watched, home, watching = server("watched"), server("home", "--engine-ttl", "1"), server("watching")
        watcher, pipe = stack.enter_context(engine_process(watch_for_long, watched.address))
        assert pipe.recv() == "watching"
        source, pipe = stack.enter_context(engine_process(publish_twice, home.address))
        reference = pipe.recv()
        with grpc.insecure_channel(home.address) as asking:
            requests = IntrospectionStub(asking).ListRequests
            # Else the home would hear of it, and hold it for its readers, when the engine goes on.
            until(lambda: bool(requests(ipb.ListRequestsRequest()).requests))
        stream = watch(stack.enter_context(connect(watching.address)))
        stack.callback(os.kill, watching.pid, signal.SIGCONT)
        for pid in (watcher, source, watching.pid):
            os.kill(pid, signal.SIGSTOP)
        yield Stopped(watched, home, source, pipe, reference, stream)


def wait_listed(server: Kvferryd, *states: ipb.EngineState.ValueType) -> None:
    """Wait until a home lists engines in these states; a dead engine is not listed."""
    with grpc.insecure_channel(server.address) as channel:
        engines = IntrospectionStub(channel).ListEngines
        until(lambda: [one.state for one in engines(ipb.ListEnginesRequest()).engines] == [*states], NOTICED)


def test_watch_of_a_stopped_engine_ends(stopped: Stopped) -> None:
    wait_listed(stopped.watched, ipb.ENGINE_STATE_LOST)


def test_engine_that_was_stopped_until_it_counted_as_dead_goes_on_as_the_same(stopped: Stopped) -> None:
    """What it had published is over, told once; what it publishes then is read."""
    pipe, spec, into = stopped.pipe, engine_of("reader"), np.zeros(SHAPE, np.float32)
    wait_listed(stopped.home)
    with Client(stopped.home.address) as client, SchedulerPort(client, spec) as port:
        cache = WorkerPort(client, spec, 0, token=port.token).register({"layer": into})
        with pytest.raises(KvferryError) as lost:
            cache.read(stopped.reference, {"full": Blocks([1])}).result(NOTICED)
        assert isinstance(lost.value, EngineUnknown | TransferFailed), lost.value
        os.kill(stopped.source, signal.SIGCONT)
        assert pipe.recv() == [ReleaseOutcome.ABORTED]
        assert cache.read(pipe.recv(), {"full": Blocks([2])}).result(NOTICED).bytes == into[2].nbytes
        assert (into[2] == 1).all()
        assert pipe.recv() == [ReleaseOutcome.READ]


def test_watch_at_a_stopped_node_server_ends(stopped: Stopped) -> None:
    with pytest.raises(grpc.RpcError) as ended:
        for _ in stopped.stream:
            pass
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
