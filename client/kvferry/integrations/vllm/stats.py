"""Counts and measurements for vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry.engine import ReadEnd
from kvferry.errors import PromptMismatch, TransferCancelled
from kvferry.integrations import metrics
from kvferry.stats import SECONDS, SIZES

COUNTERS = {
    "published": "Requests published to decode instances.",
    "unread": "Published requests that no decode instance has read in time.",
    "read": "Requests read from prefill instances.",
    "bytes": "Bytes read from prefill instances, by all ranks.",
    "failed": "Reads that failed.",
    "disputed": "Good reads whose lease had ended, as their home has said since (confirm: after).",
    "not_granted": "Reads that were refused, or whose publication never came.",
    "cancelled": "Reads of requests that were aborted.",
    "verified_blocks": "Heads of blocks that were compared with the source's sums, and equal.",
    "unverified_blocks": "Heads of blocks that integrity mode has not compared.",
    "unmarked": "Requests read that no mark has shown to be of their prompt.",
}
REASONS = "reasons"
"""Failed and refused reads by the class of their error, ``vllm:kvferry_failures_total``."""


class Histogram(NamedTuple):
    """A histogram of one value per read.

    Attributes:
        name: of the metric, without ``vllm:kvferry_``.
        documentation: what is measured.
        buckets: upper bounds.
    """

    name: str
    documentation: str
    buckets: tuple[float, ...]


HISTOGRAMS = {
    "wait": Histogram(
        "read_wait_seconds", "From a request's arrival until the source's home promised its blocks.", SECONDS
    ),
    "grant": Histogram("read_grant_seconds", metrics.GRANT.documentation, SECONDS),
    "attach": Histogram("read_attach_seconds", "From there until vLLM had allocated blocks to read into.", SECONDS),
    "handshake": Histogram(
        "read_handshake_seconds", "Longest wait of a rank for the handshake with a new source.", SECONDS
    ),
    "move": Histogram("read_move_seconds", "Longest transfer of a rank, to its last byte.", SECONDS),
    "judge": Histogram("read_judge_seconds", metrics.JUDGE.documentation, SECONDS),
    "size": Histogram("read_bytes", metrics.READ_BYTES.documentation, SIZES),
    "descriptors": Histogram(
        "read_descriptors", "NIXL descriptors of a read, by all ranks.", tuple(4.0**power for power in range(11))
    ),
    "staged": Histogram(
        "read_staged_share",
        "Share of a read's bytes that went through staging memory.",
        (0.0, 0.25, 0.5, 0.75, 0.99, 1.0),
    ),
}
"""Measurements of reads that succeeded, by their key in the data. A handshake is counted only where there was one."""


class KvferryStats(KVConnectorStats):  # type: ignore[misc]
    """Counts and measurements of one interval, for all ranks together: only the scheduler counts.

    The data has numbers, lists of numbers and, under `REASONS`, numbers by name; nothing that was not seen. So it
    passes through msgpack between vLLM's processes.
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        # A copy, because vLLM's log adds to these while Prometheus still gets the dict that they were made of.
        super().__init__(dict(data or {}))

    def count(self, what: str, by: int = 1) -> None:
        """Add to a count."""
        self.data[what] = self.data.get(what, 0) + by

    def read_ended(self, end: ReadEnd, *, granted: bool) -> None:
        """Add a read.

        Args:
            end: how it ended.
            granted: a home has granted it.
        """
        if isinstance(end.error, TransferCancelled):
            self.count("cancelled")
        elif end.error is not None:
            self.count("failed" if granted else "not_granted")
            reasons = self.data.setdefault(REASONS, {})
            name = type(end.error).__name__
            reasons[name] = reasons.get(name, 0) + 1
        else:
            self.count("read")
            self.count("bytes", end.bytes)
            for name, by in (
                ("verified_blocks", end.verified),
                ("unverified_blocks", end.unverified),
                ("unmarked", int(end.prompt != "matched")),
            ):
                if by:
                    self.count(name, by)
            self._measured(end)

    def _measured(self, end: ReadEnd) -> None:
        times = end.times
        values = {
            "wait": times.wait,
            "grant": times.grant,
            "attach": times.attach,
            "move": times.move,
            "judge": times.judge,
            "size": end.bytes,
            "descriptors": end.descriptors,
            "staged": end.staged_bytes / end.bytes if end.bytes else 0.0,
        }
        if times.handshake:
            values["handshake"] = times.handshake
        for name, value in values.items():
            self.data.setdefault(name, []).append(value)

    def reset(self) -> None:
        """Start a new interval."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KvferryStats:
        """Add those of another interval or engine, which stays as it is."""
        for what, value in other.data.items():
            if isinstance(value, dict):
                mine = self.data.get(what, {})
                self.data[what] = {name: mine.get(name, 0) + value.get(name, 0) for name in {**mine, **value}}
            elif isinstance(value, list):
                self.data[what] = [*self.data.get(what, ()), *value]
            else:
                self.data[what] = self.data.get(what, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts, and what is most telling of the measurements, for vLLM's log."""
        found: dict[str, int | float] = {name: self.data[name] for name in COUNTERS if name in self.data}
        for name, count in sorted(self.data.get(REASONS, {}).items()):
            found[f"failed with {name}"] = count
        for name in ("wait", "move"):
            values = self.data.get(name)
            if values:
                found[f"{name} (ms, median)"] = round(statistics.median(values) * 1e3, 3)
                found[f"{name} (ms, most)"] = round(max(values) * 1e3, 3)
        return found

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class KvferryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same for Prometheus: ``vllm:kvferry_…_total``, and the histograms ``vllm:kvferry_read_…``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(f"vllm:kvferry_{name}_total", documentation, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, documentation in COUNTERS.items()
        }
        self._failures = self._counter_cls(
            "vllm:kvferry_failures_total",
            "Reads that failed or were refused, by the class of their error.",
            labelnames=[*labelnames, "reason"],
        )
        for values in per_engine_labelvalues.values():
            # There from the first scrape on, because an alert is to see the first one.
            self._failures.labels(*values, PromptMismatch.__name__)
        self._histograms = {
            key: create_metric_per_engine(
                self._histogram_cls(
                    f"vllm:kvferry_{made.name}", made.documentation, buckets=made.buckets, labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for key, made in HISTOGRAMS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts and measurements of an interval."""
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name in self._histograms:
                for one in value:
                    self._histograms[name][engine_idx].observe(one)
            elif name == REASONS:
                for reason, count in value.items():
                    self._failures.labels(*self.per_engine_labelvalues[engine_idx], reason).inc(count)
