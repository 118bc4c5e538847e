"""Counts and measurements of a client: `Client.stats` returns them as plain values.

The classes are also the table of a client's metrics: a field has the name, the labels and the explanation that metrics
systems show. `kvferry.integrations` and the documents take these from `METRICS`, so a new metric is one field here and
one line at the event. No metrics library is needed.

Totals only rise; the other values are of the moment.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_type_hints

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

SECONDS = (0.0001, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Bounds for durations, from a plan of a short request to the longest timeout of a read."""

SIZES = tuple(4.0**power for power in range(5, 18))
"""Bounds for bytes: 1 KiB to 16 GiB."""

Stats = TypeVar("Stats")


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of a table of metrics.

    Attributes:
        kind: as Prometheus names it.
        name: of counters, without ``_total``.
        documentation: one or two sentences for people.
        labels: names of labels, each with the known values: strings, or members of an enum, which are shown by their
            names in lower case. The values of an only label are exposed from the start, because a rate needs a first
            value.
        bounds: of a histogram, the upper bounds of its buckets.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    documentation: str
    labels: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    bounds: tuple[float, ...] = SECONDS

    @property
    def values(self) -> Sequence[Any]:
        """The known values of the only label; empty if there are several labels, or none."""
        return next(iter(self.labels.values())) if len(self.labels) == 1 else ()

    @property
    def full_name(self) -> str:
        """The name as Prometheus shows it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def family(self, found: Iterable[tuple[tuple[str, ...], Any]], common: tuple[str, ...] = ()) -> Family:
        """Return the metric as Prometheus collects it; needs the package prometheus-client.

        `found` has numbers and distributions, or mappings to these by the values of the metric's labels, each with the
        values of the `common` labels, which stand before the metric's own.
        """
        from prometheus_client import core
        from prometheus_client.utils import floatToGoString

        made: Any = getattr(core, f"{self.kind.title()}MetricFamily")(
            self.name, self.documentation, labels=(*common, *self.labels)
        )
        for labels, value in found:
            samples: Mapping[Any, Any] = {**dict.fromkeys(self.values, 0), **value} if self.labels else {(): value}
            for key, sample in samples.items():
                own = (*labels, *map(shown, key if isinstance(key, tuple) else (key,)))
                if isinstance(sample, Distribution):
                    buckets = [(floatToGoString(bound), float(count)) for bound, count in sample.up_to()]  # type: ignore[no-untyped-call]
                    made.add_metric(own, buckets, sample.sum)
                else:
                    made.add_metric(own, sample)
        return made  # type: ignore[no-any-return]


def shown(value: object) -> str:
    """Return the value of a label as it is shown."""
    return value.name.lower() if isinstance(value, Enum) else str(value)


@dataclass(slots=True)
class Distribution:
    """Measured values, counted by size. Not thread-safe.

    Attributes:
        bounds: upper bounds of the buckets, inclusive and rising.
        counts: number of values in each bucket alone; one more than bounds, the last for values above all bounds.
        sum: sum of the values.
    """

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = dataclasses.field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def up_to(self) -> Iterator[tuple[float, int]]:
        """Return each bound with the number of values up to it; the last bound is infinite."""
        return zip((*self.bounds, math.inf), accumulate(self.counts), strict=True)


def counter(name: str, documentation: str, **labels: Sequence[Any]) -> Any:
    """Return the field of a dataclass for a counter: a number, or a `Counter` by the values of its labels."""
    return _field(Metric("counter", name, documentation, labels))


def gauge(name: str, documentation: str, **labels: Sequence[Any]) -> Any:
    """Return the field of a dataclass for a value of the moment, otherwise like that of a `counter`."""
    return _field(Metric("gauge", name, documentation, labels))


def histogram(name: str, documentation: str, bounds: tuple[float, ...] = SECONDS, **labels: Sequence[Any]) -> Any:
    """Return the field of a dataclass for a `Distribution`, or a dict of them by the values of its labels."""
    return _field(Metric("histogram", name, documentation, labels, bounds))


def _field(metric: Metric) -> Any:
    def empty() -> object:
        if metric.kind == "histogram":
            return {} if metric.labels else Distribution(metric.bounds)
        return Counter(dict.fromkeys(metric.values, 0)) if metric.labels else 0

    return dataclasses.field(default_factory=empty, metadata={"metric": metric})


def metrics_of(kind: Any) -> dict[str, Metric]:
    """Return the metrics that a dataclass declares, by the names of its fields."""
    return {each.name: each.metadata["metric"] for each in dataclasses.fields(kind) if "metric" in each.metadata}


def total(kind: type[Stats], parts: Iterable[Stats]) -> Stats:
    """Add up objects of a dataclass whose fields are numbers, and numbers by name."""
    found = kind()
    for part in parts:
        for each in dataclasses.fields(kind):  # type: ignore[arg-type]
            value = getattr(part, each.name)
            if isinstance(value, Mapping):
                getattr(found, each.name).update(value)
            else:
                setattr(found, each.name, getattr(found, each.name) + value)
    return found


@dataclass(slots=True)
class ReadStats:
    """The reads whose leases this process holds: those of a `SchedulerPort`, or of `Cache.read`."""

    outcomes: Counter[str] = counter(
        "kvferry_reader_reads",
        "Reads that have ended; not_granted: no home gave a lease; missed: an engine that was asked for a prefix had "
        "nothing to read.",
        outcome=("done", "failed", "cancelled", "expired", "not_granted", "missed"),
    )
    failures: Counter[str] = counter(
        "kvferry_reader_failures",
        "Reads that failed, expired or were not granted, by the class of their error. Other classes than "
        "PromptMismatch begin with the first such read.",
        reason=("PromptMismatch",),
    )
    prompts: Counter[str] = counter(
        "kvferry_reader_prompts",
        "Reads that are done. matched: their source marked the same prompt; unmarked: it did not mark what was read; "
        "unknown: nothing was compared.",
        prompt=("matched", "unmarked", "unknown"),
    )
    stages: Counter[str] = gauge(
        "kvferry_reader_reads_in_progress",
        "Reads in progress.",
        stage=("waiting", "granted", "reading", "judging"),
    )
    wait: Distribution = histogram(
        "kvferry_reader_wait_seconds",
        "From the request until the source's home promised its blocks: mostly the source's computing.",
    )
    grant: Distribution = histogram(
        "kvferry_reader_grant_seconds",
        "From the promise until all blocks were known, or the first of a progressive read.",
    )
    attach: Distribution = histogram(
        "kvferry_reader_attach_seconds",
        "From there until the engine had blocks to read into.",
    )
    judge: Distribution = histogram(
        "kvferry_reader_judge_seconds",
        "From the end of the last rank until the home's verdict.",
    )
    size: Distribution = histogram("kvferry_reader_read_bytes", "Bytes of a read, by all ranks.", bounds=SIZES)


@dataclass(slots=True)
class TransportGauges:
    """The present and past work of a cache's transport: `Cache.gauges`.

    Attributes:
        uncertain: transfers that ended and are not quiet; their destination blocks are in quarantine.
        quiesced: transfers that were uncertain and became quiet, since the start.
        bytes_moved: since the start, failed transfers included.
        chunks_in_flight: posted and not seen DONE.
        peers: peers added to agents.
    """

    transfers: int = gauge("kvferry_reader_transfers", "Transfers of ranks that have not ended.")
    uncertain_bytes: int = gauge(
        "kvferry_reader_uncertain_bytes",
        "Bytes of ended transfers that may still write to their blocks, which are in quarantine.",
    )
    quarantined_bytes: int = counter(
        "kvferry_reader_quarantined_bytes", "Bytes of transfers that ever were in quarantine."
    )
    agents: int = gauge("kvferry_reader_agents", "NIXL agents that read, retired ones included.")
    retired_agents: int = gauge(
        "kvferry_reader_retired_agents",
        "NIXL agents that get no new work, and are destroyed once that is safe.",
    )
    agents_retired: int = counter("kvferry_reader_agents_retired", "NIXL agents that were ever retired.")
    staging_slots: int = gauge("kvferry_reader_staging_slots", "Slots of staging memory in use.")
    uncertain: int = 0
    quiesced: int = 0
    bytes_moved: int = 0
    chunks_in_flight: int = 0
    peers: int = 0


@dataclass(slots=True)
class RankStats(TransportGauges):
    """The reads of this process's ranks into their memory, of all caches together; with the sums of the gauges."""

    handshake: Distribution = histogram(
        "kvferry_reader_handshake_seconds",
        "Wait of a rank for the handshake with a new source; not counted where the source was known.",
    )
    plan: Distribution = histogram(
        "kvferry_reader_plan_seconds", "Time in which a rank made descriptors of a request's blocks."
    )
    move: Distribution = histogram(
        "kvferry_reader_move_seconds",
        "A rank's transfer, until its last byte or its failure; of a progressive read, its transfers together.",
    )
    steps: Distribution = histogram(
        "kvferry_reader_steps_seconds",
        "Of a progressive read: a rank waits for more to be published.",
    )
    bytes: int = counter("kvferry_reader_bytes", "Bytes that have arrived at the ranks of this process.")
    staged_bytes: int = counter("kvferry_reader_staged_bytes", "Those of them that went through staging memory.")
    pieces: int = counter("kvferry_reader_pieces", "Contiguous ranges to read, before fusing and merging.")
    descriptors: int = counter("kvferry_reader_descriptors", "NIXL descriptors, after fusing and merging.")


@dataclass(slots=True)
class SourceStats:
    """The publications of the engines that this client has opened."""

    published: int = counter("kvferry_source_published", "Publications.")
    held: int = gauge(
        "kvferry_source_publications_held", "Publications that are not released: their blocks are pinned."
    )
    released: Mapping[str, int] = counter(
        "kvferry_source_released",
        "Released publications, as `ReleaseOutcome` names their ends.",
        outcome=("read", "unread", "declined", "aborted", "final"),
    )


@dataclass(slots=True)
class CallStats:
    """The calls to node servers."""

    calls: int = counter("kvferry_client_calls", "Calls to node servers that were started, streams included.")
    failed: Mapping[str, int] = counter(
        "kvferry_client_calls_failed", "Calls that failed, by the class of their error.", reason=()
    )
    retried: int = counter(
        "kvferry_client_calls_retried", "Calls that failed in a way after which the same is asked again."
    )
    homes: int = gauge("kvferry_client_homes", "Node servers that were called.")
    unreachable: int = gauge("kvferry_client_homes_unreachable", "Node servers that cannot be reached now.")
    unreachable_seconds: float = gauge(
        "kvferry_client_home_unreachable_seconds", "How long the longest outage of a node server has lasted."
    )


@dataclass(slots=True)
class ClientStats:
    """Counts and measurements of a client: its reads, the transfers of its ranks, its publications and calls."""

    reads: ReadStats
    ranks: RankStats
    source: SourceStats
    calls: CallStats


METRICS = {
    f"{part}.{name}": metric
    for part, kind in get_type_hints(ClientStats).items()
    for name, metric in metrics_of(kind).items()
}
"""All metrics of a client, by their paths in `ClientStats`, such as ``ranks.bytes``."""
