"""A home with up to a thousand engines and ten thousand leases: what calls take, what each costs in memory, and what it
uses when idle."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np

from benchmarks.caches import Layout
from benchmarks.echo_server import echo_server
from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved
from benchmarks.node_server import ServerProcess, node_server
from benchmarks.parties import TIMEOUT, Party, sent
from kvferry.v1 import kv_transfer_pb2 as pb

LAYOUT = Layout()
BLOCKS = 16
"""Blocks of a publication, scattered."""
ENGINES = (1, 10, 100, 1000)
LEASES = (1, 10, 100, 1000, 10_000)
REPEATS = 100
READERS = 100
"""Reader engines that share the leases; each renews all of its own in one call."""
IN_FLIGHT = 64
IDLE = 4.0
ROUND = 4.0
"""Seconds in which all leases are renewed once; readers take 10."""


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    engines = ENGINES if not effort.smoke else (1, 3)
    leases = LEASES if not effort.smoke else (1, 4)
    with (
        node_server() as server,
        echo_server() as (echo, _),
        grpc.insecure_channel(server.address) as channel,
    ):
        first = _open(channel, 0)
        _request(first)()
        parties = [first]
        empty = server.resident()
        measures: list[Measure] = []
        for count in engines:
            parties += [_open(channel, number) for number in range(len(parties), count)]
            actions = {"echo": Action(echo.unary()), "request": Action(_request(first))}
            times = interleaved(actions, effort.repeats(REPEATS))
            measures += [
                Measure(f"bare unary echo beside {count:,} engines", "s", times["echo"]),
                Measure(
                    f"publish, blocks and report with {count:,} engines",
                    "s",
                    times["request"],
                    f"bare unary echo beside {count:,} engines",
                ),
            ]
        grown = (server.resident() - empty) / max(1, len(parties) - 1)
        measures.append(Measure.of("memory per engine of one rank with 32 planes", "B", grown))
        measures.append(Measure.of(f"CPU with {engines[-1]:,} engines, idle", "%", 100 * _idle_share(server, effort)))
        for party in parties:
            party.close()
    # Another one, whose memory nothing else has filled.
    with node_server() as server, grpc.insecure_channel(server.address) as channel:
        source = _open(channel, 0)
        readers = [Party(channel, f"reader-{number}", LAYOUT) for number in range(READERS)]
        measures += _with_leases(server, source, readers, leases, effort)
        source.close()
    return Topic("fleet", "A home of many engines and leases", tuple(measures))


def _open(channel: grpc.Channel, number: int) -> Party:
    party = Party(channel, f"engine-{number}", LAYOUT)
    party.open()
    return party


def _request(party: Party) -> Any:
    """A request's three calls, reading from itself."""

    def request() -> None:
        sent(party.stub, party.publish_request(_scattered()))
        answer = party.stub.ReadBlocks(party.read_request(party.reference(), secrets.token_bytes(16)), timeout=TIMEOUT)
        [result] = sent(party.stub, party.done_request(answer.accepted.lease_id))
        if result.read_ended.verdict != pb.VERDICT_VALID:
            raise AssertionError(f"a good read ended {result}")

    return request


def _scattered() -> Any:
    return np.arange(0, 2 * BLOCKS, 2, dtype=np.int32)


def _with_leases(
    server: ServerProcess, source: Party, readers: Sequence[Party], counts: Sequence[int], effort: Effort
) -> list[Measure]:
    """Leases, each on a publication of its own, shared among reader engines."""
    # What the first few hundred cost is gRPC's, not the leases'. They run out unrenewed.
    few = effort.size(500, 1)
    _publish(source, few)
    _lease(source, readers, [[] for _ in readers], source.published - few, source.published)
    before, begin = server.resident(), source.published
    _publish(source, counts[-1])
    published = server.resident()
    held: list[list[bytes]] = [[] for _ in readers]
    measures = []
    for count in counts:
        _lease(source, readers, held, begin + sum(map(len, held)), begin + count)
        measures.append(Measure.of(f"renewing one lease of {count:,}", "s", _renewals(source, readers, held, effort)))
    leased = server.resident()
    measures += [
        Measure.of("memory per publication of 16 scattered blocks", "B", (published - before) / counts[-1]),
        Measure.of("memory per lease", "B", (leased - published) / counts[-1]),
    ]
    measures.append(Measure.of(f"CPU with {counts[-1]:,} leases, idle", "%", 100 * _idle_share(server, effort)))
    return measures


def _idle_share(server: ServerProcess, effort: Effort) -> float:
    """The share of a core that the server uses while nobody calls."""
    began, used = time.monotonic(), server.cpu_seconds()
    time.sleep(effort.size(int(IDLE * 10), 1) / 10)
    return (server.cpu_seconds() - used) / (time.monotonic() - began)


def _publish(source: Party, count: int) -> None:
    """Publish so many, in large batches."""
    left = count
    while left:
        batch = [source.publish_request(_scattered()).notifications[0] for _ in range(min(left, 512))]
        sent(source.stub, source.as_source(*batch))
        left -= len(batch)


def _lease(source: Party, readers: Sequence[Party], held: list[list[bytes]], begin: int, last: int) -> None:
    """Lease the publications after `begin` up to `last`, each for the next reader."""
    waiting: deque[tuple[int, Any]] = deque()

    def take() -> None:
        at, call = waiting.popleft()
        answer = call.result()
        if not answer.HasField("complete"):
            raise AssertionError("a publication is not complete")
        held[at].append(answer.accepted.lease_id)

    for number in range(begin + 1, last + 1):
        at = number % len(readers)
        request = readers[at].read_request(source.reference(number), secrets.token_bytes(16))
        waiting.append((at, source.stub.ReadBlocks.future(request, timeout=TIMEOUT)))
        if len(waiting) >= IN_FLIGHT:
            take()
    while waiting:
        take()


def _renewals(source: Party, readers: Sequence[Party], held: Sequence[Sequence[bytes]], effort: Effort) -> list[float]:
    """Seconds that the renewal of one lease takes while all others are renewed, each reader's in one call."""
    busy = [(reader, leases) for reader, leases in zip(readers, held, strict=True) if leases]
    probe = busy[0][0].as_reader(pb.Notification(renew=pb.Renew(lease_id=busy[0][1][0])))
    batches = [
        reader.as_reader(*(pb.Notification(renew=pb.Renew(lease_id=lease)) for lease in leases))
        for reader, leases in busy
    ]
    probes = effort.size(400, 4)
    found: list[float] = []
    calls: list[Any] = []
    pause = ROUND / 400
    for number in range(probes):
        due = len(batches) * (number + 1) // probes
        while len(calls) < due:
            calls.append(source.stub.Notify.future(batches[len(calls)], timeout=TIMEOUT))
        began = time.perf_counter()
        [result] = sent(source.stub, probe)
        found.append(time.perf_counter() - began)
        if not result.renewed.remaining.seconds:
            raise AssertionError("a live lease was not renewed")
        time.sleep(pause)
    for call in calls:
        if any(not result.renewed.remaining.seconds for result in call.result().results):
            raise AssertionError("a live lease was not renewed")
    return found
