"""What kvferry takes of an engine's step, with nothing to do and while 256 MiB move, in round trips of a bare echo."""

from __future__ import annotations

from benchmarks.caches import Layout, blocks_in_runs
from benchmarks.destinations import port_engine
from benchmarks.echo_server import echo_server
from benchmarks.measures import FULL, Action, Effort, Measure, Topic, interleaved, quantile
from benchmarks.node_server import node_server
from benchmarks.sources import source

LAYOUT = Layout()
BLOCKS = 256
READS = 12
STEPS = 2000
ECHO = "bare unary echo"


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    layout = LAYOUT if not effort.smoke else Layout(layers=1, num_blocks=32)
    count = effort.size(BLOCKS, 8)
    theirs, mine = (blocks_in_runs(layout, count, 1, seed) for seed in (1, 2))
    with (
        node_server() as server,
        echo_server() as (echo, _),
        source(server.address, layout) as made,
        port_engine(server.address, layout) as engine,
    ):
        actions = {"echo": Action(echo.unary()), "idle": Action(engine.step)}
        times = interleaved(actions, effort.repeats(STEPS))
        worst = []
        found: list[float] = []
        for _ in range(1 + effort.repeats(READS)):
            engine.steps.clear()
            engine.from_publish_to_finished(made, theirs, mine)
            worst.append(max(engine.steps))
            found += engine.steps
    measures = [
        Measure(ECHO, "s", times["echo"]),
        Measure("a step with nothing to do", "s", times["idle"], ECHO),
        Measure.of("steps while 256 MiB move, scattered", "s", found, ECHO),
        Measure.of("99th percentile of these steps", "s", quantile(found, 0.99), ECHO),
        Measure.of("the longest step of a read", "s", worst[1:], ECHO),
    ]
    return Topic("engine_steps", "kvferry's part of an engine's step", tuple(measures))
