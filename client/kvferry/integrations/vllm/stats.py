"""Counts for vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTERS = {
    "published": "Requests published to decode instances.",
    "read": "Requests read from prefill instances.",
    "bytes": "Bytes read from prefill instances, by all ranks.",
    "failed": "Reads that failed.",
    "not_granted": "Reads that were refused, or whose publication never came.",
}


class KvferryStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of one interval, for all ranks together: only the scheduler counts."""

    data: dict[str, int]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})

    def count(self, what: str, size: int = 0) -> None:
        """Add one to a count, and `size` to the bytes."""
        self.data[what] = self.data.get(what, 0) + 1
        if size:
            self.data["bytes"] = self.data.get("bytes", 0) + size

    def reset(self) -> None:
        """Start a new interval."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KvferryStats:
        """Add the counts of another interval."""
        for what, value in other.data.items():
            self.data[what] = self.data.get(what, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for vLLM's log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class KvferryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus counters of the same, named ``vllm:kvferry_…_total``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(f"vllm:kvferry_{name}_total", documentation, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, documentation in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of an interval."""
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
