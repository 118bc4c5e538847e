"""What an engine sees of kvferry: its first read cold and warmed up, what a step costs it, what huge pages give."""

from __future__ import annotations

import mmap
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvferry
from benchmarks.tables import Table, seconds
from benchmarks.transfer import BLOCK, HEAD_DIM, HEADS, LAYERS, NUM_BLOCKS, group, planes
from kvferry import Blocks, Client, EngineSpec, Interval, MemoryKind, MemoryRegion
from kvferry.engine import SchedulerPort, WorkerPort
from kvferry.host_memory import HostMemory

BLOCKS = 256
SIZE = 2 * LAYERS * NUM_BLOCKS * BLOCK * HEADS * HEAD_DIM * 2
READ_SIZE = SIZE * BLOCKS // NUM_BLOCKS
REPEATS = 5
STEPS = 2000


class _Engine:
    """Scheduler and worker of one rank, in this process."""

    def __init__(self, address: str, name: str, *, huge: bool = True) -> None:
        self.client = Client(address)
        spec = EngineSpec(name, (group(),))
        self.scheduler = SchedulerPort(self.client, spec)
        self.worker = WorkerPort(self.client, spec)
        # Not numpy's own, which asks for huge pages itself.
        memory: Any = HostMemory(SIZE).array if huge else np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
        memory[:] = 1
        region = MemoryRegion(MemoryKind.DRAM, 0, memory.ctypes.data, SIZE)
        self.worker.register(planes=planes(Interval(0, HEADS), region.base), regions=[region], keep=memory)

    def step(self) -> bool:
        """What an engine asks after each step; whether a read has ended."""
        for read_id in self.scheduler.cancels():
            self.worker.cancel(read_id)
        self.scheduler.collect(self.worker.finished())
        self.scheduler.released()
        return bool(self.scheduler.finished().reads)

    def read(self, reference: str, ids: range) -> list[float]:
        """Read a publication; how long each step meanwhile took."""
        self.scheduler.acquire("request", reference)
        steps = []
        attached = done = False
        while not done:
            began = time.perf_counter()
            if not attached and self.scheduler.granted("request") is not None:
                self.worker.start(self.scheduler.attach("request", {"full": Blocks(ids)}))
                attached = True
            done = self.step()
            steps.append(time.perf_counter() - began)
            # The rest of an engine's step.
            time.sleep(0.0005)
        return steps

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()
        self.client.close()


def run_source(address: str, name: str, huge: bool, pipe: Connection) -> None:
    """The source: publishes so many blocks per message; for 0 it answers the engine's own reference."""
    engine = _Engine(address, name, huge=huge)
    pipe.send("ready")
    while True:
        try:
            count = pipe.recv()
        except EOFError:
            engine.close()
            return
        if count:
            pipe.send(engine.scheduler.publish("request", {"full": Blocks(range(count))}).reference)
        else:
            pipe.send(engine.scheduler.engine_reference)


def run_reader(address: str, warm: str, pipe: Connection) -> None:
    """A process that has never read: answers the seconds of its first reads. `warm` is the reference of an engine to
    warm up with, or empty."""
    engine = _Engine(address, "reader")
    if warm:
        engine.worker.warm(warm).result(60)
        time.sleep(2)
    pipe.send("ready")
    times = []
    for _ in range(4):
        reference = pipe.recv()
        began = time.perf_counter()
        engine.read(reference, range(4))
        times.append(time.perf_counter() - began)
        pipe.send(None)
    pipe.send(times)
    engine.close()


@contextmanager
def _process(target: Any, *arguments: Any) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    ours.recv()
    yield ours
    ours.close()
    process.join(30)


def run() -> list[Table]:
    """Measure."""
    return [_first_read(), _steps(), _huge_pages()]


def _first_read() -> Table:
    """The first read of a process, cold and warmed up, in later reads of the same process."""
    rows = []
    for warm in (False, True):
        ratios = []
        for _ in range(3):
            with (
                kvferry.serve("127.0.0.1:0", unix="") as server,
                _process(run_source, server.address, "source", True) as source,
            ):
                source.send(0)
                reference = source.recv()
                with _process(run_reader, server.address, reference if warm else "") as reader:
                    for _ in range(4):
                        source.send(4)
                        reader.send(source.recv())
                        reader.recv()
                    times = reader.recv()
                ratios.append(times[0] / statistics.median(times[2:]))
        rows.append(("warmed up" if warm else "cold", f"{statistics.median(ratios):.1f}"))
    return Table("The first read of a process, in later reads of 2 MiB", ("", "first read"), rows)


def _steps() -> Table:
    """What the ports take of an engine's step, in echoes of a bare gRPC server."""
    rows = []
    with (
        kvferry.serve("127.0.0.1:0", unix="") as server,
        _process(run_source, server.address, "source", True) as source,
        grpc.insecure_channel(server.address) as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        echo = seconds(lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=5), 200)
        engine = _Engine(server.address, "reader")
        idle = seconds(engine.step, STEPS)
        rows.append(("nothing to do", f"{idle / echo:.3f}", "-", f"{STEPS:,}"))
        found: list[float] = []
        for _ in range(REPEATS + 1):
            source.send(BLOCKS)
            found += engine.read(source.recv(), range(BLOCKS))
        ordered = sorted(found)
        median, worst = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
        label = f"while {READ_SIZE >> 20} MiB are read"
        rows.append((label, f"{median / echo:.3f}", f"{worst / echo:.2f}", f"{len(found):,}"))
        engine.close()
    title = "The ports' part of an engine's step, in round trips of a bare gRPC echo"
    return Table(title, ("", "median", "99th percentile", "steps"), rows)


def _huge_pages() -> Table:
    """Whole reads from a source in small and in huge pages, against memcpy."""
    rows = []
    cells, into = np.ones(READ_SIZE, np.uint8), np.ones(READ_SIZE, np.uint8)
    copy = seconds(lambda: np.copyto(into, cells), REPEATS)
    for label, huge in (("pages of 4 KiB", False), ("HostMemory", True)):
        with (
            kvferry.serve("127.0.0.1:0", unix="") as server,
            _process(run_source, server.address, "source", huge) as source,
        ):
            engine = _Engine(server.address, "reader")
            times = []
            for _ in range(2 * REPEATS + 1):
                source.send(BLOCKS)
                reference = source.recv()
                began = time.perf_counter()
                engine.read(reference, range(BLOCKS))
                times.append(time.perf_counter() - began)
            engine.close()
        rows.append((label, f"{copy / statistics.median(times[1:]):.2f}"))
    title = f"A read of {READ_SIZE >> 20} MiB through the ports, by the source's memory: speed in memcpy's"
    return Table(title, ("source memory", "speed"), rows)
