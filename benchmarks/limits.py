"""What bounds goals that are missed: bare calls after a pause, hand-overs between threads, what a read adds to its
movement, first contact with a source, and raw NIXL over TCP beside an engine's steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from benchmarks.caches import Ids, Layout
from benchmarks.destinations import STEP_PAUSE, TIMEOUT, PortEngine, port_engine
from benchmarks.echo_server import echo_server
from benchmarks.large_reads import LONG, Case, raw_actions, read
from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved, median
from benchmarks.nixl_time import NixlTime
from benchmarks.node_server import node_server
from benchmarks.sources import Source, source
from benchmarks.tcp_reads import OURS
from kvferry._loop import Loop
from kvferry.engine import ReadTimes

CALLS = 200
PAUSE = 0.005
"""Seconds after which cores and caches are as the calls of a request find them."""
ECHO = "bare unary echo"
PAUSED = "bare unary echo, after a pause of 5 ms"
HANDED = "to another thread and back, after a pause of 5 ms"

LONG_PAUSE = 0.05
"""Seconds in which the memory of a long read is written: what a benchmark of such reads does between two of them."""
LONG_PAUSED = "bare unary echo, after a pause of 50 ms"
ADDED = {mib: f"what a read of {mib} MiB adds to its movement, after a pause of 50 ms" for mib in (1, 16, 64, 256)}
ADDED_REPEATS = 15

LAYOUT = Layout(num_blocks=64)
BLOCKS = 4
"""4 MiB."""
SOURCES = 8
STEADY_READS = 6
STEADY = "steady read of 4 MiB"
MET = "first read from another source, nothing warmed"
HANDSHAKE = "of it the handshake"
CONNECTING = "of it connecting and moving"

TCP_REPEATS = 9
TCP = Case("runs of 8 MiB", LONG, 256, 256)
ALONE = "raw NIXL over TCP, runs of 8 MiB"
BESIDE = "the same beside an engine's steps"
READ = "whole read over TCP, runs of 8 MiB"


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    with node_server() as server:
        measures = [
            *_calls(effort),
            *_added(server.address, effort),
            *_first_contact(server.address, effort),
            *_over_tcp(server.address, effort),
        ]
    return Topic("limits", "What bounds goals that are missed", tuple(measures))


def _calls(effort: Effort) -> list[Measure]:
    """Bare calls in a loop and after a pause, and hand-overs between threads."""
    with echo_server() as (echo, _), _loop() as loop:
        actions = {
            ECHO: Action(echo.unary()),
            PAUSED: Action(echo.unary(), prepare=_pause),
            LONG_PAUSED: Action(echo.unary(), prepare=lambda: time.sleep(LONG_PAUSE)),
            HANDED: _to_the_loop_and_back(loop),
        }
        times = interleaved(actions, effort.repeats(CALLS))
    return [Measure(name, "s", found, ECHO if name != ECHO else "") for name, found in times.items()]


@contextmanager
def _loop() -> Iterator[Loop]:
    """The event loop of a client, until the end of the block."""
    loop = Loop("benchmark")
    try:
        yield loop
    finally:
        loop.close(TIMEOUT)


def _pause() -> None:
    time.sleep(PAUSE)


def _to_the_loop_and_back(loop: Loop) -> Action:
    """A hand-over to the sleeping event loop of a client, and back: two of them."""
    back: queue.Queue[None] = queue.Queue()

    def run() -> None:
        loop.call(lambda: back.put(None))
        back.get()

    return Action(run, prepare=_pause)


def _added(address: str, effort: Effort) -> list[Measure]:
    """What reads of several sizes take beside their movement, each after the same pause; verified. A block is 1 MiB."""
    added: dict[int, list[float]] = {mib: [] for mib in ADDED}
    layout = LAYOUT if effort.smoke else LONG
    with source(address, layout) as made, port_engine(address, layout) as engine:
        for repeat in range(1 + effort.repeats(ADDED_REPEATS)):
            for mib, found in added.items():
                ids = np.arange(1 if effort.smoke else mib, dtype=np.int32)
                time.sleep(LONG_PAUSE)
                whole, times = _read(engine, made, ids)
                if repeat:
                    found.append(whole - times.move)
    return [Measure.of(ADDED[mib], "s", found, LONG_PAUSED) for mib, found in added.items()]


def _first_contact(address: str, effort: Effort) -> list[Measure]:
    """First reads from several sources by one process, beside its last ones from each."""
    steady: list[float] = []
    first: list[tuple[float, ReadTimes]] = []
    ids = np.arange(BLOCKS, dtype=np.int32)
    with port_engine(address, LAYOUT) as engine, ExitStack() as sources:
        # The first makes the agents, and does not count where there are others.
        for _ in range(effort.size(1 + SOURCES, 1)):
            made = sources.enter_context(source(address, LAYOUT))
            first.append(_read(engine, made, ids))
            steady.append([_read(engine, made, ids)[0] for _ in range(effort.size(STEADY_READS, 1))][-1])
    steady, first = steady[-SOURCES:], first[-SOURCES:]
    return [
        Measure.of(STEADY, "s", steady),
        Measure.of(MET, "s", [whole for whole, _ in first], STEADY),
        Measure.of(HANDSHAKE, "s", [times.handshake for _, times in first], MET),
        Measure.of(CONNECTING, "s", [times.move for _, times in first], MET),
    ]


def _read(engine: PortEngine, made: Source, ids: Ids) -> tuple[float, ReadTimes]:
    """A read, verified; its seconds, and those of its stages."""
    engine.memory.poison(ids)
    reference = made.publish(ids.tolist()).reference
    began = time.perf_counter()
    end = engine.read(reference, ids)
    took = time.perf_counter() - began
    engine.memory.check(ids, ids)
    return took, end.times


def _over_tcp(address: str, effort: Effort) -> list[Measure]:
    """Raw NIXL alone, and beside an engine's loop, which every read of ours has; and such a read, in turns."""
    case = TCP.smaller() if effort.smoke else TCP
    theirs, mine = case.ids()
    with (
        source(address, case.layout, options=OURS, raw=[OURS]) as made,
        port_engine(address, case.layout, options=OURS) as engine,
    ):
        alone = raw_actions(OURS, made.raw[0], engine.memory, theirs, mine)
        beside = {f"{name}, beside": _beside_steps(action, engine) for name, action in alone.items()}
        ours = read(engine, made, theirs, mine, NixlTime(), [])
        times = interleaved({**alone, **beside, READ: ours}, effort.repeats(TCP_REPEATS))
    best, slower = (min((times[name] for name in names), key=median) for names in (alone, beside))
    return [
        Measure(ALONE, "s", best),
        Measure(BESIDE, "s", slower, ALONE),
        Measure(READ, "s", times[READ], BESIDE),
    ]


def _beside_steps(action: Action, engine: PortEngine) -> Action:
    """The action, while the engine takes its steps on a thread of this process."""
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def steps() -> None:
        while not ended.is_set():
            engine.step()
            time.sleep(STEP_PAUSE)

    def prepare() -> None:
        action.prepare()
        ended.clear()
        threads.append(threading.Thread(target=steps))
        threads[-1].start()

    def verify() -> None:
        ended.set()
        threads.pop().join()
        action.verify()

    return Action(action.run, prepare, verify)
