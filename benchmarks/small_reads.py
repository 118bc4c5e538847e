"""Reads of 1 MiB: one after the other against an echo, through the engine ports against the sum of their bare parts,
and sixteen at once against raw NIXL."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from benchmarks import raw_nixl
from benchmarks.caches import CacheMemory, Ids, Layout
from benchmarks.call_counter import counted
from benchmarks.call_sizes import CallSizes, sizes_of
from benchmarks.destinations import TIMEOUT, PortRequest, Reader, port_engine, reader
from benchmarks.echo_server import Echo, echo_server
from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved
from benchmarks.node_server import ServerProcess, node_server
from benchmarks.sources import Source, source
from kvferry import Blocks, NixlOptions

LAYOUT = Layout(num_blocks=128)
"""One block of all planes is 1 MiB, in 32 pieces of 32 KiB."""

READS = 300
PORT_READS = 100
CONCURRENT = 16
ROUNDS = 7
READS_PER_ROUND = 64
BARE_CPU = "bare server's CPU per call"
PUBLISHING = "publishing, and the reference's way"
ATTACHING = "until the engine's step gives it blocks"
MOVING = "moving"
VALIDATING = "validating"
REST = "the rest: from thread to thread, and the engine's last step"
STAGES = (PUBLISHING, ATTACHING, MOVING, VALIDATING, REST)
BARE_PARTS = "bare parts: publish, validate, raw NIXL, the reference's way"


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    options = NixlOptions()
    with (
        node_server() as server,
        echo_server() as (echo, bare),
        source(server.address, LAYOUT, raw=[options]) as made,
        grpc.insecure_channel(server.address) as channel,
    ):
        sizes = sizes_of(channel, LAYOUT, 1)
        before = bare.cpu_seconds()
        echo_calls = effort.repeats(READS)
        for _ in range(echo_calls):
            echo.unary()()
        measures = [
            Measure.of(BARE_CPU, "s", (bare.cpu_seconds() - before) / echo_calls),
            *_single(server, echo, made, options, effort),
            _calls_per_read(server, made, options, effort),
            *_through_ports(server, echo, made, sizes, options, effort),
            *_concurrent(server, made, options, effort),
        ]
    return Topic("small_reads", "Reads of 1 MiB", tuple(measures))


def raw_action(raw: raw_nixl.RawReader, peer: raw_nixl.RawPeer, memory: CacheMemory, theirs: Ids, mine: Ids) -> Action:
    """A read of whole blocks by raw NIXL, whose descriptors are made before; verified."""
    there, here = raw_nixl.descriptors(memory.layout, peer.base, memory, theirs, mine)
    return Action(
        run=lambda: raw.read(peer.name, there, here),
        prepare=lambda: memory.poison(mine),
        verify=lambda: memory.check(mine, theirs),
    )


def _single(server: ServerProcess, echo: Echo, made: Source, options: NixlOptions, effort: Effort) -> list[Measure]:
    """One read after the other, and what of the node server's CPU each takes."""
    repeats = effort.repeats(READS)
    theirs, mine = np.array([7], np.int32), np.array([5], np.int32)
    with (
        reader(server.address, LAYOUT, options=options) as destination,
        reader(server.address, LAYOUT, options=options, optimistic=False) as leasing,
    ):
        warm = effort.size(20, 1)
        published = made.publish(theirs.tolist(), reads=2 * (repeats + warm))
        read = destination.action(published.reference, theirs, mine)
        raw = raw_nixl.RawReader(destination.memory.region, options)
        raw.add(made.raw[0], destination.memory.region.base)
        actions = {
            "echo": Action(echo.unary()),
            "raw NIXL": raw_action(raw, made.raw[0], destination.memory, theirs, mine),
            "read": read,
            "leased": leasing.action(published.reference, theirs, mine),
        }
        times = interleaved(actions, repeats, warm=warm)
        # Alone, so that the server does nothing else meanwhile.
        published = made.publish(theirs.tolist(), reads=repeats)
        read = destination.action(published.reference, theirs, mine)
        before = server.cpu_seconds()
        for _ in range(repeats):
            read.seconds()
        used = (server.cpu_seconds() - before) / repeats
    return [
        Measure("bare unary echo", "s", times["echo"]),
        Measure("raw NIXL, the same 32 descriptors", "s", times["raw NIXL"], "bare unary echo"),
        Measure("read, warm", "s", times["read"], "bare unary echo"),
        Measure("read, warm, with a lease", "s", times["leased"], "bare unary echo"),
        Measure.of("node server's CPU per read", "s", used, BARE_CPU),
    ]


def _calls_per_read(server: ServerProcess, made: Source, options: NixlOptions, effort: Effort) -> Measure:
    """The calls of a steady read, each of which is a round trip: what it waits for, and what is sent beside it."""
    repeats = effort.repeats(READS)
    theirs, mine = np.array([7], np.int32), np.array([5], np.int32)
    with counted(server.address) as counter, reader(counter.address, LAYOUT, options=options) as destination:
        published = made.publish(theirs.tolist(), reads=repeats + 1)
        read = destination.action(published.reference, theirs, mine)
        read.seconds()
        before = counter.calls
        for _ in range(repeats):
            read.seconds()
        return Measure.of("calls per read", "", (counter.calls - before) / repeats)


def _through_ports(
    server: ServerProcess, echo: Echo, made: Source, sizes: CallSizes, options: NixlOptions, effort: Effort
) -> list[Measure]:
    """Requests from `publish` at the source to `finished` at the destination, beside what their parts cost at least."""
    repeats = effort.repeats(PORT_READS)
    theirs, mine = np.array([7], np.int32), np.array([5], np.int32)
    with port_engine(server.address, LAYOUT, options=options) as engine:
        raw = raw_nixl.RawReader(engine.memory.region, options)
        raw.add(made.raw[0], engine.memory.region.base)
        parts = {
            "publish": Action(echo.unary(*sizes.publish)),
            "validate": Action(echo.unary(*sizes.validate)),
            "raw": raw_action(raw, made.raw[0], engine.memory, theirs, mine),
            "hop": Action(made.hop),
        }
        bare: dict[str, list[float]] = {name: [] for name in parts}
        found: list[PortRequest] = []
        cpu = 0.0
        for number in range(-effort.size(10, 1), repeats):
            times = {name: action.seconds() for name, action in parts.items()}
            before = server.cpu_seconds()
            request = engine.from_publish_to_finished(made, theirs, mine)
            if number >= 0:
                cpu += server.cpu_seconds() - before
                found.append(request)
                for name, took in times.items():
                    bare[name].append(took)
    sums = [sum(times) for times in zip(*bare.values(), strict=True)]
    return [
        Measure.of(BARE_PARTS, "s", sums),
        Measure.of("through the ports, publish to finished", "s", [request.whole for request in found], BARE_PARTS),
        *_stages(found, bare),
        Measure.of("node server's CPU per request through the ports", "s", cpu / repeats, BARE_CPU),
    ]


def _stages(found: Sequence[PortRequest], bare: Mapping[str, Sequence[float]]) -> list[Measure]:
    """Where the time of the requests through the ports goes, beside the bare parts."""
    ways = [publish + hop for publish, hop in zip(bare["publish"], bare["hop"], strict=True)]
    lines: dict[str, tuple[Sequence[float], Callable[[PortRequest], float]]] = {
        PUBLISHING: (ways, lambda request: request.reference),
        ATTACHING: ((), lambda request: request.stages.wait + request.stages.grant + request.stages.attach),
        MOVING: (bare["raw"], lambda request: request.stages.move),
        VALIDATING: (bare["validate"], lambda request: request.stages.judge),
    }
    measures, told = [], [0.0] * len(found)
    for name, (least, of_request) in lines.items():
        times = [of_request(request) for request in found]
        told = [sum(pair) for pair in zip(told, times, strict=True)]
        if least:
            measures.append(Measure.of(f"bare: {name}", "s", least))
        measures.append(Measure.of(f"ports: {name}", "s", times, f"bare: {name}" if least else ""))
    rest = [request.whole - some for request, some in zip(found, told, strict=True)]
    return [*measures, Measure.of(f"ports: {REST}", "s", rest)]


def _concurrent(server: ServerProcess, made: Source, options: NixlOptions, effort: Effort) -> list[Measure]:
    """Requests per second with sixteen reads in flight, and those of raw NIXL, which has one thread and no control."""
    count = effort.size(READS_PER_ROUND, CONCURRENT)
    theirs = np.arange(CONCURRENT, dtype=np.int32) + 20
    mine = np.arange(CONCURRENT, dtype=np.int32) + 60
    rates: dict[str, list[float]] = {"raw": [], "threads": []}
    with reader(server.address, LAYOUT, options=options) as destination:
        raw = raw_nixl.RawReader(destination.memory.region, options)
        raw.add(made.raw[0], destination.memory.region.base)
        alone = [
            raw_action(raw, made.raw[0], destination.memory, theirs[at : at + 1], mine[at : at + 1])
            for at in range(CONCURRENT)
        ]
        cpu = 0.0
        with ThreadPoolExecutor(CONCURRENT) as readers:
            for round_ in range(1 + effort.repeats(ROUNDS)):
                references = [made.publish([int(block)], reads=count).reference for block in theirs]
                destination.memory.poison(mine)
                rates["raw"].append(count / _spent(lambda: [alone[at % CONCURRENT].run() for at in range(count)]))
                destination.memory.check(mine, theirs)
                destination.memory.poison(mine)
                before = server.cpu_seconds()
                work = _in_flight(destination, references, mine, count)
                rates["threads"].append(count / _spent(lambda work=work: list(readers.map(work, range(CONCURRENT)))))  # type: ignore[misc]
                cpu += (server.cpu_seconds() - before) / count if round_ else 0.0
                destination.memory.check(mine, theirs)
    label = "raw NIXL, one thread, no control plane"
    return [
        Measure.of(label, "1/s", rates["raw"][1:]),
        Measure.of("16 concurrent readers", "1/s", rates["threads"][1:], label),
        Measure.of("node server's CPU per read, 16 at once", "s", cpu / effort.repeats(ROUNDS), BARE_CPU),
    ]


def _in_flight(destination: Reader, references: list[str], mine: Ids, count: int) -> Callable[[int], None]:
    """The work of one of the concurrent readers: its share of the reads, one after the other."""

    def work(at: int) -> None:
        blocks = {"full": Blocks(mine[at : at + 1])}
        for _ in range(count // CONCURRENT):
            destination.cache.read(references[at], blocks).result(TIMEOUT)

    return work


def _spent(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
