"""kvferry and the worker of vLLM's NixlConnector move the same blocks of caches of the same layout, in turns with raw
NIXL. In vLLM's environment."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.caches import Layout
from benchmarks.destinations import PortEngine, port_engine
from benchmarks.large_reads import Case, Move, raw_actions, read
from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved, median
from benchmarks.nixl_time import nixl_time
from benchmarks.node_server import node_server
from benchmarks.sources import Source, source
from benchmarks.worker_pairs import WorkerPair, worker_pair
from kvferry import NixlOptions

REPEATS = 15
LAYOUT = Layout()
BLOCKS = (16, 64, 256)
"""Of 1 MiB, in pieces of 32 KiB."""

CASES = tuple(
    Case(f"{blocks} MiB, {kind}", LAYOUT, blocks, blocks if kind == "one run" else 1)
    for kind in ("one run", "scattered")
    for blocks in BLOCKS
)
RAW, WORKER, KVFERRY, MOVING, RATIO = (
    "raw NIXL, {}",
    "NixlConnector's worker, {}",
    "kvferry, {}",
    "of it moving, {}",
    "kvferry in the worker's time, {}",
)
"""Names of the measures of a case."""


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    cases = [Case("smoke", Layout(layers=1, num_blocks=16), 4, 1)] if effort.smoke else CASES
    layout = cases[0].layout
    measures: list[Measure] = []
    with (
        node_server() as server,
        source(server.address, layout, raw=[NixlOptions()]) as made,
        port_engine(server.address, layout, options=NixlOptions(reading_agents=1)) as engine,
        worker_pair(layout) as pair,
    ):
        pair.stop()
        for case in cases:
            measures += compare(case, made, engine, pair, effort.repeats(REPEATS))
    return Topic("vllm_worker", "NixlConnector's worker on the same layout", tuple(measures))


def compare(case: Case, made: Source, engine: PortEngine, pair: WorkerPair, repeats: int) -> Sequence[Measure]:
    """Time one request by all; verified."""
    theirs, mine = case.ids()
    worker: list[float] = []
    moves: list[Move] = []

    def prepare() -> None:
        pair.go()
        pair.prepare(mine)

    def verify() -> None:
        pair.check(theirs, mine)
        pair.stop()

    actions = raw_actions(NixlOptions(), made.raw[0], engine.memory, theirs, mine)
    raw = list(actions)
    # What its process says counts: the messages to it and back are the benchmark's.
    actions[WORKER] = Action(lambda: worker.append(pair.read(theirs, mine)), prepare, verify)
    with nixl_time() as nixl:
        actions[KVFERRY] = read(engine, made, theirs, mine, nixl, moves)
        times = interleaved(actions, repeats)
    ours, theirs_took = times[KVFERRY], worker[-repeats:]
    against = WORKER.format(case.label)
    fastest = min(raw, key=lambda name: median(times[name]))
    ratios = [mine_took / other for mine_took, other in zip(ours, theirs_took, strict=True)]
    return [
        Measure.of(RAW.format(case.label), "s", times[fastest], against),
        Measure.of(against, "s", theirs_took),
        Measure.of(KVFERRY.format(case.label), "s", ours, against),
        Measure.of(MOVING.format(case.label), "s", [move.whole for move in moves[-repeats:]], against),
        Measure.of(RATIO.format(case.label), "", ratios),
    ]
