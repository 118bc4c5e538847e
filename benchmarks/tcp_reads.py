"""Reads of many bytes over TCP, as between hosts, against raw NIXL with the same options and with its own best."""

from __future__ import annotations

import threading
import time

from benchmarks.caches import Layout
from benchmarks.destinations import STEP_PAUSE, PortEngine, port_engine
from benchmarks.large_reads import LONG, ONE_AGENT, Case, compare, raw_actions, read
from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved, median
from benchmarks.nixl_time import NixlTime
from benchmarks.node_server import node_server
from benchmarks.sources import Source, source
from kvferry import NixlOptions

REPEATS = 7
OURS = NixlOptions(ucx_tls="tcp")
SEGMENTS = (8 << 10, 64 << 10, 1 << 20)
"""Bytes of a segment of UCX's TCP beside kvferry's own; the first is UCX's own."""

ALONE = "raw NIXL alone, {}"
BESIDE = "raw NIXL beside an engine's steps, {}"
READ = "whole read beside these two, {}"

CASES = (
    Case("runs of 8 MiB", LONG, 256, 256),
    Case("runs of 1 MiB", LONG, 256, 32),
    Case("pieces of 32 KiB", Layout(), 128, 1),
)


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    measures: list[Measure] = []
    raw = {"raw NIXL, kvferry's options": OURS}
    for segment in SEGMENTS[: effort.size(len(SEGMENTS), 1)]:
        raw[f"raw NIXL, segments of {segment >> 10} KiB"] = NixlOptions(ucx_tls="tcp", tcp_segment=segment)
    with node_server() as server:
        for case in CASES[1:2] if effort.smoke else CASES:
            chosen = case.smaller() if effort.smoke else case
            with (
                source(server.address, chosen.layout, options=OURS, raw=list(raw.values())) as made,
                port_engine(server.address, chosen.layout, options=OURS) as engine,
            ):
                measures += compare(chosen, made, {ONE_AGENT: engine}, raw, effort.repeats(REPEATS))
                measures += beside_steps(chosen, made, engine, effort.repeats(REPEATS))
    return Topic("tcp_reads", "Many bytes over TCP, huge pages on both sides", tuple(measures))


def beside_steps(case: Case, made: Source, engine: PortEngine, repeats: int) -> list[Measure]:
    """Raw NIXL alone, and beside an engine's loop, which every read of ours has; and such a read, in turns."""
    theirs, mine = case.ids()
    alone = raw_actions(OURS, made.raw[0], engine.memory, theirs, mine)
    beside = {f"{name}, beside": _beside(action, engine) for name, action in alone.items()}
    times = interleaved(
        {**alone, **beside, READ: read(engine, made, theirs, mine, NixlTime(), [])},
        repeats,
    )
    best, slower = (min((times[name] for name in names), key=median) for names in (alone, beside))
    label = case.label
    return [
        Measure(ALONE.format(label), "s", best),
        Measure(BESIDE.format(label), "s", slower, ALONE.format(label)),
        Measure(READ.format(label), "s", times[READ], BESIDE.format(label)),
    ]


def _beside(action: Action, engine: PortEngine) -> Action:
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
