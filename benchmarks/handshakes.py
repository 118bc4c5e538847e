"""Handshakes: one rank's against a bare call, and those of 128 ranks with an engine of 128 ranks at once, with renewals
of another engine meanwhile."""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np

from benchmarks.caches import Layout
from benchmarks.echo_server import echo_server
from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved
from benchmarks.node_server import ServerProcess, node_server
from benchmarks.parties import TIMEOUT, Party, sent
from kvferry._wire.geometry_codec import put_together
from kvferry.geometry import EngineGeometry
from kvferry.planner import plan_read
from kvferry.v1 import kv_transfer_pb2 as pb

LAYOUT = Layout()
"""32 planes."""
REPEATS = 200
RANKS = 128
RENEW_EVERY = 0.005
METHOD = "/kvferry.v1.KVTransfer/Handshake"


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    with (
        node_server() as server,
        echo_server() as (echo, _),
        grpc.insecure_channel(server.address) as channel,
    ):
        source, reader = Party(channel, "one", LAYOUT), Party(channel, "reader", LAYOUT)
        source.open()
        request = reader.handshake(source)
        answers = [message.ByteSize() for message in source.stub.Handshake(request, timeout=TIMEOUT)]

        def handshake() -> None:
            found = list(source.stub.Handshake(request, timeout=TIMEOUT))
            if sum(len(message.ranks) for message in found) != 1 or len(found[-1].agents) != 1:
                raise AssertionError("a handshake answered something else")

        actions = {
            "bare unary echo": Action(echo.unary()),
            "bare stream of the same sizes": Action(echo.stream(request.ByteSize(), answers)),
            "Handshake, 1 rank, 32 planes": Action(handshake),
        }
        times = interleaved(actions, effort.repeats(REPEATS))
        measures = [
            Measure(name, "s", found, "bare unary echo" if name.startswith("H") else "")
            for name, found in times.items()
        ]
        measures += _all_at_once(channel, server, effort.size(RANKS, 4))
        source.close()
    return Topic("handshakes", "Handshakes", tuple(measures))


def _all_at_once(channel: grpc.Channel, server: ServerProcess, ranks: int) -> list[Measure]:
    """Every rank of one engine handshakes with all ranks of another, all at once, each over a connection of its own."""
    layout = Layout(heads=ranks)
    source, reader = Party(channel, "wide", layout, ranks), Party(channel, "wide-reader", layout, ranks)
    source.open()
    requests = [reader.handshake(source, rank).SerializeToString() for rank in range(ranks)]
    # Each its own: a rank is a process.
    channels = [grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(ranks)]
    for opened in channels:
        grpc.channel_ready_future(opened).result(TIMEOUT)

    def handshake(rank: int) -> list[bytes]:
        # Undecoded, since all of these ranks share one interpreter.
        call: Any = channels[rank].unary_stream(METHOD)
        return list(call(requests[rank], timeout=TIMEOUT))

    with renewing(server.address) as times, ThreadPoolExecutor(ranks) as calls:
        used, began = server.cpu_seconds(), time.perf_counter()
        answers = list(calls.map(handshake, range(ranks)))
        took, used = time.perf_counter() - began, server.cpu_seconds() - used
        renewals = times()
    for opened in channels:
        opened.close()
    for answer in answers:
        messages = [pb.HandshakeResponse.FromString(message) for message in answer]
        if sum(len(message.ranks) for message in messages) != ranks:
            raise AssertionError("a handshake answered something else")
    source.close()
    size = sum(len(message) for message in answers[0])
    began = time.perf_counter()
    told = put_together(pb.HandshakeResponse.FromString(message) for message in answers[0])
    destination = EngineGeometry("wide-reader", (layout.group(),), tuple(map(reader.geometry, range(ranks))))
    plan_read(told.geometry, destination, 0)
    decoded = time.perf_counter() - began
    return [
        Measure.of(f"all handshakes of {RANKS} ranks with {RANKS} ranks", "s", took),
        Measure.of("node server's CPU per handshake of these", "s", used / ranks),
        Measure.of("bytes of one of their answers", "B", size),
        Measure.of("decoding one of their answers and planning with it", "s", decoded),
        Measure.of("renewals meanwhile", "s", renewals),
    ]


@contextmanager
def renewing(address: str, every: float = RENEW_EVERY) -> Iterator[Any]:
    """An engine in a process of its own that renews one lease all the time.

    Yields:
        A function that ends the renewals, and returns the seconds that each took.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_renew, args=(address, every, theirs))
    process.start()
    theirs.close()
    ours.recv()

    def end() -> list[float]:
        ours.send("end")
        found: list[float] = ours.recv()
        return found

    try:
        yield end
    finally:
        ours.close()
        process.join(20)


def _renew(address: str, every: float, pipe: Connection) -> None:
    layout = Layout(layers=1, num_blocks=16)
    with grpc.insecure_channel(address) as channel:
        party = Party(channel, f"renewing-{secrets.token_hex(4)}", layout)
        party.open()
        sent(party.stub, party.publish_request(np.arange(4, dtype=np.int32)))
        asked = party.read_request(party.reference(), secrets.token_bytes(16))
        lease = party.stub.ReadBlocks(asked, timeout=TIMEOUT).accepted.lease_id
        renewal = party.as_reader(pb.Notification(renew=pb.Renew(lease_id=lease)))
        sent(party.stub, renewal)
        pipe.send("renewing")
        found = []
        while True:
            began = time.perf_counter()
            [result] = sent(party.stub, renewal)
            found.append(time.perf_counter() - began)
            if not result.renewed.remaining.seconds:
                raise AssertionError("a live lease was not renewed")
            try:
                if pipe.poll(every):
                    pipe.recv()
                    pipe.send(found)
                    break
            except (EOFError, OSError):
                break
        party.close()
