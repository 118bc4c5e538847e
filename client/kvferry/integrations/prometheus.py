"""Shows Prometheus what clients count and measure. Needs the package prometheus-client (``kvferry[prometheus]``).

    from prometheus_client import REGISTRY
    from kvferry.integrations.prometheus import ClientCollector

    REGISTRY.register(ClientCollector(client))

Each scrape takes `Client.stats`; between scrapes nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvferry import _arguments as arguments
from kvferry._client import Client
from kvferry.errors import ForkedClient, PromptMismatch
from kvferry.integrations import metrics
from kvferry.stats import ClientStats, Distribution

RELEASES = ("read", "unread", "declined", "aborted", "final", "refused")
"""Outcomes of publications. All are there from the first scrape on, so that rates have a beginning."""

ALARMS = (PromptMismatch.__name__,)
"""Reasons of failures that are there from the first scrape on, because an alert is to see the first one."""

COUNTERS: tuple[tuple[metrics.Named, Callable[[ClientStats], float]], ...] = (
    (metrics.DISPUTED, lambda stats: stats.reads.disputed),
    (metrics.BYTES, lambda stats: stats.ranks.bytes),
    (metrics.STAGED_BYTES, lambda stats: stats.ranks.staged_bytes),
    (metrics.PIECES, lambda stats: stats.ranks.pieces),
    (metrics.DESCRIPTORS, lambda stats: stats.ranks.descriptors),
    (metrics.QUARANTINED_BYTES, lambda stats: stats.ranks.quarantined_bytes),
    (metrics.AGENTS_RETIRED, lambda stats: stats.ranks.agents_retired),
    (metrics.PUBLISHED, lambda stats: stats.source.published),
    (metrics.CALLS, lambda stats: stats.calls.calls),
    (metrics.CALLS_RETRIED, lambda stats: stats.calls.retried),
)
COUNTERS_BY: tuple[tuple[metrics.Named, str, Callable[[ClientStats], Mapping[str, float]]], ...] = (
    (metrics.READS, "outcome", lambda stats: stats.reads.outcomes),
    (metrics.FAILURES, "reason", lambda stats: {**dict.fromkeys(ALARMS, 0), **stats.reads.failures}),
    (metrics.PROMPTS, "prompt", lambda stats: stats.reads.prompts),
    (metrics.RELEASED, "outcome", lambda stats: {**dict.fromkeys(RELEASES, 0), **stats.source.released}),
    (metrics.CALLS_FAILED, "reason", lambda stats: stats.calls.failed),
)
GAUGES: tuple[tuple[metrics.Named, Callable[[ClientStats], float]], ...] = (
    (metrics.TRANSFERS, lambda stats: stats.ranks.transfers),
    (metrics.UNCERTAIN_BYTES, lambda stats: stats.ranks.uncertain_bytes),
    (metrics.AGENTS, lambda stats: stats.ranks.agents),
    (metrics.RETIRED_AGENTS, lambda stats: stats.ranks.retired_agents),
    (metrics.STAGING_SLOTS, lambda stats: stats.ranks.staging_slots),
    (metrics.HELD, lambda stats: stats.source.held),
    (metrics.HOMES, lambda stats: stats.calls.homes),
    (metrics.HOMES_UNREACHABLE, lambda stats: stats.calls.unreachable),
    (metrics.UNREACHABLE, lambda stats: stats.calls.unreachable_seconds),
)
HISTOGRAMS: tuple[tuple[metrics.Named, Callable[[ClientStats], Distribution]], ...] = (
    (metrics.WAIT, lambda stats: stats.reads.wait),
    (metrics.GRANT, lambda stats: stats.reads.grant),
    (metrics.ATTACH, lambda stats: stats.reads.attach),
    (metrics.JUDGE, lambda stats: stats.reads.judge),
    (metrics.READ_BYTES, lambda stats: stats.reads.size),
    (metrics.HANDSHAKE, lambda stats: stats.ranks.handshake),
    (metrics.PLAN, lambda stats: stats.ranks.plan),
    (metrics.MOVE, lambda stats: stats.ranks.move),
    (metrics.STEPS, lambda stats: stats.ranks.steps),
)


class ClientCollector(Collector):
    """Collects the metrics of clients, their ports and caches included.

    Threading: scraped on any thread. In a child of a fork, where a client cannot be used, it collects no values.

    Args:
        clients: the client; or several, by a name that their metrics get as the label ``client``.

    Raises:
        InvalidField: the argument is neither.
    """

    def __init__(self, clients: Client | Mapping[str, Client]) -> None:
        if isinstance(clients, Client):
            self._label: tuple[str, ...] = ()
            self._clients: list[tuple[tuple[str, ...], Client]] = [((), clients)]
            return
        expected = "a Client, or Clients by name"
        self._label = ("client",)
        self._clients = [
            ((arguments.text("clients", name),), arguments.instance("clients", client, Client, expected))
            for name, client in arguments.mapping("clients", clients, expected).items()
        ]

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the moment."""
        return self._families(list(self._stats()))

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values: by them, a registry refuses a second collector of the same names."""
        return self._families([])

    def _stats(self) -> Iterator[tuple[tuple[str, ...], ClientStats]]:
        for labels, client in self._clients:
            try:
                yield labels, client.stats()
            except ForkedClient:
                continue

    def _families(self, found: Sequence[tuple[tuple[str, ...], ClientStats]]) -> Iterator[Metric]:
        for (name, text), value in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=self._label)
            for labels, stats in found:
                counter.add_metric(labels, value(stats))
            yield counter
        for (name, text), by, values in COUNTERS_BY:
            counter = CounterMetricFamily(name, text, labels=(*self._label, by))
            for labels, stats in found:
                for label, count in values(stats).items():
                    counter.add_metric((*labels, label), count)
            yield counter
        for (name, text), value in GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=self._label)
            for labels, stats in found:
                gauge.add_metric(labels, value(stats))
            yield gauge
        gauge = GaugeMetricFamily(*metrics.READS_IN_PROGRESS, labels=(*self._label, "stage"))
        for labels, stats in found:
            for stage, count in stats.reads.stages.items():
                gauge.add_metric((*labels, stage), count)
        yield gauge
        for (name, text), measured in HISTOGRAMS:
            histogram = HistogramMetricFamily(name, text, labels=self._label)
            for labels, stats in found:
                distribution = measured(stats)
                bounds, counts = zip(*distribution.up_to(), strict=True)
                buckets = list(zip(map(floatToGoString, bounds), map(float, counts), strict=True))
                histogram.add_metric(labels, buckets, distribution.sum)
            yield histogram
