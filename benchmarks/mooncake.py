"""Whole reads by kvferry, with the home's verdict, and by Mooncake's transfer engine over TCP, which has none: from 1
to 256 MiB, in long runs and in scattered pieces.

One system at a time, each in processes of its own, in turns: an idle agent of another system burns a core. Every read
is verified.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import raw_nixl
from benchmarks.caches import CacheMemory, Ids, Layout, blocks_in_runs
from benchmarks.destinations import reader
from benchmarks.measures import FULL, Action, Effort, Measure, Topic
from benchmarks.node_server import node_server
from benchmarks.sources import source
from kvferry import NixlOptions

LAYOUT = Layout()
TURNS = 2
REPEATS = 5
SIZES = (1, 16, 64, 256)
"""MiB of a read, which are blocks of `LAYOUT`."""

KINDS = ("runs", "pieces of 32 KiB")
TCP, CMA, MOONCAKE = "kvferry over TCP", "kvferry over CMA", "Mooncake over TCP"

Case = tuple[str, int]
"""A kind, and a size."""

Found = dict[Case, list[float]]
"""Seconds of each read; none where the system could not read so much at once."""


class Failed(Exception):
    """Mooncake reported an error for a read."""


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    systems: dict[str, Callable[[Effort], Found]] = {
        TCP: partial(_kvferry, NixlOptions(ucx_tls="tcp")),
        CMA: partial(_kvferry, NixlOptions()),
        MOONCAKE: _mooncake,
    }
    samples: dict[str, Found] = {name: {} for name in systems}
    for turn in range(effort.repeats(TURNS)):
        for name in list(systems)[:: 1 if turn % 2 == 0 else -1]:
            for case, seconds in _in_a_process(systems[name], effort).items():
                samples[name].setdefault(case, []).extend(seconds)
    measures = []
    for kind, size in _cases(effort):
        theirs = f"{MOONCAKE}, {size} MiB, {kind}"
        known = samples[MOONCAKE][kind, size]
        if known:
            measures.append(Measure.of(theirs, "s", known))
        for name in (TCP, CMA):
            against = theirs if known else ""
            measures.append(Measure.of(f"{name}, {size} MiB, {kind}", "s", samples[name][kind, size], against))
    return Topic("mooncake", "Whole reads, beside Mooncake's transfer engine", tuple(measures))


def _cases(effort: Effort) -> Iterator[Case]:
    for size in SIZES[: effort.size(len(SIZES), 1)]:
        for kind in KINDS:
            yield kind, size


def _ids(kind: str, size: int) -> tuple[Ids, Ids]:
    """Blocks at the source and at the destination."""
    theirs, mine = (blocks_in_runs(LAYOUT, size, size if kind == "runs" else 1, seed) for seed in (1, 2))
    return theirs, mine


def _seconds(action: Action, effort: Effort) -> list[float]:
    return [action.seconds() for _ in range(1 + effort.repeats(REPEATS))][1:]


def _kvferry(options: NixlOptions, effort: Effort) -> Found:
    found: Found = {}
    with (
        node_server() as server,
        source(server.address, LAYOUT, options=options) as made,
        reader(server.address, LAYOUT, options=options) as engine,
    ):
        for case in _cases(effort):
            theirs, mine = _ids(*case)
            reference = made.publish(theirs.tolist(), 1 + REPEATS).reference
            found[case] = _seconds(engine.action(reference, theirs, mine), effort)
    return found


def _mooncake(effort: Effort) -> Found:
    found: Found = {}
    memory = CacheMemory(LAYOUT)
    engine = _engine(memory)
    with _mooncake_source() as (name, base):
        for case in _cases(effort):
            theirs, mine = _ids(*case)
            there, here = raw_nixl.descriptors(LAYOUT, base, memory, theirs, mine)
            columns = here[:, 0].tolist(), there[:, 0].tolist(), here[:, 1].tolist()

            def read(columns: Sequence[list[int]] = columns) -> None:
                status = engine.batch_transfer_sync_read(name, *columns)
                if status != 0:
                    raise Failed(status)

            action = Action(read, partial(memory.poison, mine), partial(memory.check, mine, theirs))
            try:
                found[case] = _seconds(action, effort)
            except Failed:
                found[case] = []
    return found


@contextmanager
def _mooncake_source() -> Iterator[tuple[str, int]]:
    """A process that serves a cache by Mooncake: its name, and the address of its memory."""
    context: Any = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        # Mooncake's own end takes its time.
        process.kill()
        process.join()


def _serve(pipe: Connection) -> None:
    memory = CacheMemory(LAYOUT)
    memory.fill()
    engine = _engine(memory)
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", memory.region.base))
    pipe.recv()


def _engine(memory: CacheMemory) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise Failed("it did not start")
    if engine.register_memory(memory.region.base, memory.region.length) != 0:
        raise Failed("it did not register the memory")
    return engine


def _in_a_process(work: Callable[[Effort], Found], effort: Effort) -> Found:
    """What the work finds in a process of its own."""
    # Not a daemon: it starts processes itself.
    context: Any = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(work, effort, theirs))
    process.start()
    theirs.close()
    try:
        found: Found = ours.recv()
    finally:
        # All that it had started has ended.
        process.kill()
        process.join()
    return found


def _send(work: Callable[[Effort], Found], effort: Effort, pipe: Connection) -> None:
    pipe.send(work(effort))
