"""Reads of many bytes over TCP, as between hosts, against raw NIXL with the same options and with its own best."""

from __future__ import annotations

from benchmarks.caches import Layout
from benchmarks.destinations import port_engine
from benchmarks.large_reads import LONG, ONE_AGENT, Case, compare
from benchmarks.measures import FULL, Effort, Measure, Topic
from benchmarks.node_server import node_server
from benchmarks.sources import source
from kvferry import NixlOptions

REPEATS = 7
OURS = NixlOptions(ucx_tls="tcp")
SEGMENTS = (8 << 10, 64 << 10, 1 << 20)
"""Bytes of a segment of UCX's TCP beside kvferry's own; the first is UCX's own."""

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
    return Topic("tcp_reads", "Many bytes over TCP, huge pages on both sides", tuple(measures))
