"""Where the time of a request goes: its stages beside their bare parts, and the movement of bytes beside raw NIXL and
NixlConnector's worker."""

from __future__ import annotations

from benchmarks import mooncake
from benchmarks.large_reads import CASES, ONE_AGENT
from benchmarks.results import Results, shown
from benchmarks.small_reads import BARE_PARTS, STAGES
from benchmarks.tables import Table
from benchmarks.tcp_reads import CASES as TCP_CASES
from benchmarks.vllm_worker import CASES as WORKER_CASES
from benchmarks.vllm_worker import KVFERRY, MOVING, RATIO, RAW, WORKER


def stages(results: Results) -> Table:
    """A request of 1 MiB through the ports."""
    rows = []
    for name in STAGES:
        measure = results.measure("small_reads", f"ports: {name}")
        bare = results.measure("small_reads", measure.against).median if measure.against else 0.0
        rows.append((name, shown(bare, "s") if bare else "–", shown(measure.median, "s")))
    whole = results.measure("small_reads", "through the ports, publish to finished")
    bare = results.measure("small_reads", BARE_PARTS).median
    rows.append(("**all**", shown(bare, "s"), shown(whole.median, "s")))
    return Table("", ("stage", "its bare part", "measured"), rows)


def movement(results: Results) -> Table:
    """Reads of many bytes, with one reading agent."""
    rows = []
    for topic, way, cases in (("large_reads", "one host", CASES), ("tcp_reads", "TCP", TCP_CASES)):
        for label in (case.label for case in cases):
            moving = results.measure(topic, f"moving, {ONE_AGENT}, {label}")
            times = (
                results.measure(topic, moving.against).median,
                results.measure(topic, f"of it within NIXL, {ONE_AGENT}, {label}").median,
                moving.median,
                results.measure(topic, f"whole read, {ONE_AGENT}, {label}").median,
            )
            rows.append((f"{label}, {way}", *(shown(time, "s") for time in times)))
    columns = ("a read of", "raw NIXL's best program", "within NIXL", "moving", "whole")
    return Table("", columns, rows)


def workers(results: Results) -> Table:
    """Reads beside NixlConnector's worker."""
    rows = []
    for label in (case.label for case in WORKER_CASES):
        found = [results.measure("vllm_worker", name.format(label)) for name in (RAW, WORKER, KVFERRY, MOVING)]
        ratio = results.measure("vllm_worker", RATIO.format(label))
        spread = f"{ratio.median:.2f} ({ratio.p10:.2f} to {ratio.p90:.2f})"
        rows.append((label, *(shown(one.median, "s") for one in found), spread))
    columns = ("raw NIXL's best program", "NixlConnector's worker", "kvferry", "of it moving", "kvferry / worker")
    return Table("", ("a read of", *columns), rows)


def beside_mooncake(results: Results) -> Table:
    """Whole reads, by the bytes of each."""
    measures = results.topics["mooncake"].measures
    rows = []
    for size in mooncake.SIZES:
        for kind in mooncake.KINDS:
            names = [f"{system}, {size} MiB, {kind}" for system in (mooncake.MOONCAKE, mooncake.TCP, mooncake.CMA)]
            times = [shown(measures[name].median, "s") if name in measures else "it failed" for name in names]
            rows.append((f"{size} MiB, {kind}", *times))
    return Table("", ("a read of", mooncake.MOONCAKE, mooncake.TCP, mooncake.CMA), rows)
