"""Converts the metrics of a table (`kvferry.stats`) to families of the package prometheus-client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.utils import floatToGoString

from kvferry.stats import Distribution, Metric, shown

FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


def family(metric: Metric, found: Iterable[tuple[tuple[str, ...], Any]], common: tuple[str, ...] = ()) -> Family:
    """Return a metric as Prometheus collects it.

    `found` has numbers and distributions, or mappings to these by the values of the metric's labels, each with the
    values of the `common` labels, which stand before the metric's own.
    """
    made: Any = FAMILIES[metric.kind](metric.name, metric.documentation, labels=(*common, *metric.labels))
    for labels, value in found:
        samples: Mapping[Any, Any] = {**dict.fromkeys(metric.values, 0), **value} if metric.labels else {(): value}
        for key, sample in samples.items():
            own = (*labels, *map(shown, key if isinstance(key, tuple) else (key,)))
            if isinstance(sample, Distribution):
                buckets = [(floatToGoString(bound), float(count)) for bound, count in sample.up_to()]  # type: ignore[no-untyped-call]
                made.add_metric(own, buckets, sample.sum)
            else:
                made.add_metric(own, sample)
    return made  # type: ignore[no-any-return]
