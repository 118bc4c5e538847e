"""The same read from a source in pages of 4 KiB and from one in huge pages, in turns: compared at different times, what
else the machine does would be larger than the difference."""

from __future__ import annotations

from benchmarks.destinations import port_engine
from benchmarks.large_reads import LONG, Case, memcpy, read
from benchmarks.measures import FULL, Effort, Measure, Topic, interleaved
from benchmarks.nixl_time import NixlTime
from benchmarks.node_server import node_server
from benchmarks.sources import source

CASE = Case("runs of 1 MiB", LONG, 256, 32)
REPEATS = 11
SMALL, HUGE = "whole read, source in pages of 4 KiB", "whole read, source in huge pages"


def run(effort: Effort = FULL) -> Topic:
    """Measure."""
    case = CASE.smaller() if effort.smoke else CASE
    theirs, mine = case.ids()
    with (
        node_server() as server,
        source(server.address, case.layout, huge=False) as small,
        source(server.address, case.layout) as huge,
        port_engine(server.address, case.layout) as engine,
    ):
        actions = {
            "memcpy": memcpy(case.size),
            SMALL: read(engine, small, theirs, mine, NixlTime(), []),
            HUGE: read(engine, huge, theirs, mine, NixlTime(), []),
        }
        times = interleaved(actions, effort.repeats(REPEATS), warm=effort.size(2, 1))
    measures = (
        Measure("memcpy", "s", times["memcpy"]),
        Measure(SMALL, "s", times[SMALL], "memcpy"),
        Measure(HUGE, "s", times[HUGE], SMALL),
    )
    return Topic("pages", "256 MiB in runs of 1 MiB, by the pages of the source", measures)
