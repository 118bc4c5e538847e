"""Short requests of a node with eight cards, one engine each, at one to eight node servers: a home is one event loop on
one core, and several may share the engines of a node."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import grpc
import numpy as np

from benchmarks.caches import Layout
from benchmarks.measures import FULL, Effort, Measure, Topic
from benchmarks.node_server import ServerProcess, node_server
from benchmarks.parties import TIMEOUT, Party
from kvferry.v1 import kv_transfer_pb2 as pb

ENGINES = 8
HOMES = (1, 2, 4, 8)
BLOCKS = 256
IN_FLIGHT = 8
"""Requests at once of each engine."""
ROUNDS = 7
WAVES = 10
"""Waves of requests in a round."""


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    measures: list[Measure] = []
    homes = HOMES[: effort.size(len(HOMES), 2)]
    for count in homes:
        label, only = cpu_label(count), cpu_label(1)
        cpu, rates = _served(count, effort)
        measures.append(Measure.of(label, "s", cpu, only if count > 1 else ""))
        measures.append(Measure.of(rate_label(count), "1/s", rates, rate_label(1) if count > 1 else ""))
    title = f"Short requests of {ENGINES} engines, {IN_FLIGHT * ENGINES} at once, publish and validate"
    return Topic("homes", title, tuple(measures))


def cpu_label(homes: int) -> str:
    """The name of a measure."""
    return f"CPU of all homes per request, {homes} home{'s' * (homes > 1)}"


def rate_label(homes: int) -> str:
    """The name of a measure."""
    return f"requests per second, {homes} home{'s' * (homes > 1)}"


def _served(homes: int, effort: Effort) -> tuple[list[float], list[float]]:
    """The CPU seconds of all homes per request, and the requests per second, of each round."""
    cpu: list[float] = []
    rates: list[float] = []
    waves = effort.size(WAVES, 1)
    with ExitStack() as stack:
        servers = [stack.enter_context(node_server()) for _ in range(homes)]
        channels = [stack.enter_context(grpc.insecure_channel(server.address)) for server in servers]
        pairs = []
        for number in range(ENGINES):
            channel = channels[number % homes]
            source = Party(channel, f"engine-{number}", Layout())
            source.open()
            stack.callback(source.close)
            pairs.append((source, Party(channel, f"reader-{number}", Layout())))
        for _ in range(1 + effort.repeats(ROUNDS)):
            began, used = time.perf_counter(), _cpu(servers)
            for _ in range(waves):
                _wave(pairs)
            requests = waves * ENGINES * IN_FLIGHT
            cpu.append((_cpu(servers) - used) / requests)
            rates.append(requests / (time.perf_counter() - began))
    return cpu[1:], rates[1:]


def _wave(pairs: Sequence[tuple[Party, Party]]) -> None:
    """One request of each place in flight: all publish, then all that have read validate."""
    ids = np.arange(0, 2 * BLOCKS, 2, dtype=np.int32)
    asks: list[tuple[Party, pb.NotifyRequest]] = []

    def publish(source: Party, reader: Party) -> pb.NotifyRequest:
        request = source.publish_request(ids)
        asks.append((reader, reader.validate_request(source)))
        return request

    _all([(source, publish(source, reader)) for source, reader in pairs for _ in range(IN_FLIGHT)], _accepted)
    _all(asks, _valid)


def _all(calls: Sequence[tuple[Party, pb.NotifyRequest]], right: Callable[[pb.NotificationResult], bool]) -> None:
    waiting = [party.stub.Notify.future(request, timeout=TIMEOUT) for party, request in calls]
    for call in waiting:
        [result] = call.result().results
        if not right(result):
            raise AssertionError(f"a good request ended {result}")


def _accepted(result: pb.NotificationResult) -> bool:
    return result.WhichOneof("kind") != "error"


def _valid(result: pb.NotificationResult) -> bool:
    return bool(result.read_ended.verdict == pb.VERDICT_VALID)


def _cpu(servers: Sequence[ServerProcess]) -> float:
    return sum(server.cpu_seconds() for server in servers)
