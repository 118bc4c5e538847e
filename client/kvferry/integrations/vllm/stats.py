"""Counts and measurements for vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

import statistics
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.engine import ReadEnd
from kvferry.errors import TransferCancelled
from kvferry.integrations.vllm.metrics import METRICS, REASONS


class KvferryStats(KVConnectorStats):  # type: ignore[misc]
    """Counts and measurements of one interval, for all ranks together: only the scheduler counts. The data has, by the
    keys of `METRICS`, numbers, lists of measurements and, under `REASONS`, numbers by name; keys without events are
    missing. It passes through msgpack between vLLM's processes."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        # A copy, because vLLM's log adds to these counts while Prometheus still reads the given dict.
        super().__init__(dict(data or {}))

    def count(self, what: str, by: float = 1) -> None:
        self.data[what] = self.data.get(what, 0) + by

    def read_ended(self, end: ReadEnd, *, granted: bool) -> None:
        """Add a read. `granted`: a home has granted it."""
        if isinstance(end.error, TransferCancelled):
            self.count("cancelled")
            return
        if end.error is not None:
            self.count("failed" if granted else "not_granted")
            reasons = self.data.setdefault(REASONS, {})
            name = type(end.error).__name__
            reasons[name] = reasons.get(name, 0) + 1
            return
        for key, (metric, of) in METRICS.items():
            value = None if of is None else of(end)
            if value is not None and metric.kind == "histogram":
                self.data.setdefault(key, []).append(value)
            elif value:
                self.count(key, int(value))

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KvferryStats:
        """Add the counts of another interval or engine, which stay unchanged."""
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
        """Return the counts, and a summary of the measurements, for vLLM's log."""
        found: dict[str, int | float] = {
            key: self.data[key] for key in METRICS if isinstance(self.data.get(key), int | float)
        }
        for name, count in sorted(self.data.get(REASONS, {}).items()):
            found[f"failed with {name}"] = count
        for name in ("wait", "move"):
            values = self.data.get(name)
            if values:
                found[f"{name} (ms, median)"] = round(statistics.median(values) * 1e3, 3)
                found[f"{name} (ms, most)"] = round(max(values) * 1e3, 3)
        return found

    def is_empty(self) -> bool:
        return not self.data


class KvferryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Exposes the counts and measurements to Prometheus."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._made: dict[str, Any] = {}
        for key, (metric, _) in METRICS.items():
            labels = [*labelnames, *metric.labels]
            make, more = self._counter_cls, {}
            if metric.kind == "histogram":
                make, more = self._histogram_cls, {"buckets": metric.bounds}
            self._made[key] = made = make(metric.full_name, metric.documentation, labelnames=labels, **more)
            # All series exist from the first scrape on, because an alert must see the first event.
            for values in per_engine_labelvalues.values():
                for own in [[value] for value in metric.values] if metric.labels else [[]]:
                    made.labels(*values, *own)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            if key not in self._made:
                continue
            made = self._made[key]
            if isinstance(value, dict):
                for own, count in value.items():
                    made.labels(*labels, own).inc(count)
            elif isinstance(value, list):
                for measured in value:
                    made.labels(*labels).observe(measured)
            else:
                made.labels(*labels).inc(value)
