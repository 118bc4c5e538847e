"""The first read of a process, cold and warmed up, against later reads of the same process."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.caches import Layout
from benchmarks.destinations import TIMEOUT, port_engine
from benchmarks.measures import FULL, Effort, Measure, Topic, median
from benchmarks.node_server import node_server
from benchmarks.sources import Source, source

LAYOUT = Layout(num_blocks=64)
BLOCKS = 4
"""4 MiB."""
PROCESSES = 4
STEADY = 8
SETTLE = 1.0
"""Seconds after `warm`, in which connections are opened."""


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    names = ("cold", "warmed by warm")[effort.size(0, 1) :]
    first: dict[str, list[float]] = {name: [] for name in names}
    steady: dict[str, list[float]] = {name: [] for name in first}
    with node_server() as server, source(server.address, LAYOUT) as made:
        for _ in range(effort.repeats(PROCESSES)):
            for name in first:
                warm = made.engine_reference if name != "cold" else ""
                times = _in_new_process(server.address, made, warm, effort.size(STEADY, 1))
                first[name].append(times[0])
                # The second still finds caches cold.
                steady[name].append(median(times[min(2, len(times) - 1) :]))
    measures = []
    for name in first:
        measures.append(Measure.of(f"steady read of 4 MiB, process {name}", "s", steady[name]))
        measures.append(Measure.of(f"first read, {name}", "s", first[name], f"steady read of 4 MiB, process {name}"))
    return Topic("first_reads", "The first read of a process", tuple(measures))


def _in_new_process(address: str, made: Source, warm: str, later: int) -> list[float]:
    """Seconds of a new process's reads: the first, and so many later ones.

    Args:
        address: of its node server.
        made: the source.
        warm: the engine reference to warm up with; empty: none.
        later: how many reads after the first.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_reader, args=(address, warm, theirs))
    process.start()
    theirs.close()
    try:
        ours.recv()
        references = []
        for _ in range(1 + later):
            references.append(made.publish(range(BLOCKS)).reference)
        ours.send(references)
        times: Sequence[float] = ours.recv()
        return list(times)
    finally:
        ours.close()
        process.join(20)


def _reader(address: str, warm: str, pipe: Connection) -> None:
    theirs = np.arange(BLOCKS, dtype=np.int32)
    with port_engine(address, LAYOUT) as engine:
        if warm:
            engine.worker.warm(warm).result(TIMEOUT)
            time.sleep(SETTLE)
        pipe.send("ready")
        times = []
        for reference in pipe.recv():
            engine.memory.poison(theirs)
            began = time.perf_counter()
            engine.read(reference, theirs)
            times.append(time.perf_counter() - began)
            engine.memory.check(theirs, theirs)
        pipe.send(times)
