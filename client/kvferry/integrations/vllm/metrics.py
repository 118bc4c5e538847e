"""The table of the metrics ``vllm:kvferry_…``. Does not import vLLM, because docs/vllm.md is also made from this
table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from kvferry.engine import ReadEnd
from kvferry.stats import METRICS as OF_CLIENTS
from kvferry.stats import SECONDS, SIZES, Metric

REASONS = "reasons"
"""The key of failed and refused reads by error class, the only metric with a label of its own."""


class VllmMetric(NamedTuple):
    """One row of the table. `of` returns what a good read adds, or None. Rows without `of` are counted at their events,
    by `KvferryStats.count`."""

    metric: Metric
    of: Callable[[ReadEnd], float | None] | None = None


def _counter(name: str, documentation: str, of: Callable[[ReadEnd], float] | None = None) -> VllmMetric:
    return VllmMetric(Metric("counter", f"vllm:kvferry_{name}", documentation), of)


def _histogram(
    name: str, documentation: str, of: Callable[[ReadEnd], float | None], bounds: tuple[float, ...] = SECONDS
) -> VllmMetric:
    return VllmMetric(Metric("histogram", f"vllm:kvferry_read_{name}", documentation, bounds=bounds), of)


METRICS: dict[str, VllmMetric] = {
    "published": _counter("published", "Requests published to decode instances."),
    "unread": _counter("unread", "Published requests that no decode instance has read in time."),
    "prefixes_published": _counter("prefixes_published", "Prefixes published because other engines asked for them."),
    "prefixes_asked": _counter("prefixes_asked", "Requests for whose prefix the engine of a hint was asked."),
    "prefixes_missed": _counter("prefixes_missed", "Those whose prefix was not there, or not in time."),
    "hints_ignored": _counter(
        "hints_ignored", "Hints of other projects' routers that are malformed, of another version, or of nobody listed."
    ),
    "read": _counter("read", "Requests read from prefill instances.", lambda end: 1),
    "bytes": _counter("bytes", "Bytes read from prefill instances, by all ranks.", lambda end: end.bytes),
    "failed": _counter("failed", "Reads that failed."),
    "not_granted": _counter("not_granted", "Reads that were refused, or whose publication never came."),
    "cancelled": _counter("cancelled", "Reads of requests that were aborted."),
    "verified_blocks": _counter(
        "verified_blocks",
        "Heads of blocks that were compared with the source's sums, and equal.",
        lambda end: end.verified,
    ),
    "unverified_blocks": _counter(
        "unverified_blocks", "Heads of blocks that integrity mode has not compared.", lambda end: end.unverified
    ),
    "unmarked": _counter(
        "unmarked", "Requests read that no mark has shown to be of their prompt.", lambda end: end.prompt != "matched"
    ),
    REASONS: VllmMetric(replace(OF_CLIENTS["reads.failures"], name="vllm:kvferry_failures")),
    "wait": _histogram(
        "wait_seconds",
        "From a request's arrival until the source's home promised its blocks: mostly the rest of prefill.",
        lambda end: end.times.wait,
    ),
    "grant": _histogram("grant_seconds", OF_CLIENTS["reads.grant"].documentation, lambda end: end.times.grant),
    "attach": _histogram(
        "attach_seconds", "From there until vLLM had allocated blocks to read into.", lambda end: end.times.attach
    ),
    "handshake": _histogram(
        "handshake_seconds",
        "Longest wait of a rank for the handshake with a new source; counted only where there was one.",
        lambda end: end.times.handshake or None,
    ),
    "move": _histogram("move_seconds", "Longest transfer of a rank, to its last byte.", lambda end: end.times.move),
    "judge": _histogram("judge_seconds", OF_CLIENTS["reads.judge"].documentation, lambda end: end.times.judge),
    "size": _histogram("bytes", OF_CLIENTS["reads.size"].documentation, lambda end: end.bytes, SIZES),
    "descriptors": _histogram(
        "descriptors",
        "NIXL descriptors of a read, by all ranks.",
        lambda end: end.descriptors,
        tuple(4.0**power for power in range(11)),
    ),
    "staged": _histogram(
        "staged_share",
        "Share of a read's bytes that went through staging memory.",
        lambda end: end.staged_bytes / end.bytes if end.bytes else 0.0,
        (0.0, 0.25, 0.5, 0.75, 0.99, 1.0),
    ),
}
"""All rows, by their keys in the data that passes between vLLM's processes."""
