"""What a rank has published and read, at SGLang's ``/metrics``, which ``--enable-metrics`` opens."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry._control.publications import Release
from kvferry._reads.read import ReadResult
from kvferry.stats import METRICS

if TYPE_CHECKING:
    from prometheus_client import Counter


@dataclass(frozen=True, slots=True)
class Counts:
    """The counters of one rank. Their names are those of `kvferry.integrations.prometheus`, and have the label
    ``tp_rank``. A failed read is counted by each rank that knows why.

    SGLang's schedulers and its HTTP server are several processes. They share counters in files, which is what
    prometheus-client calls its multiprocess mode, and which knows no collectors.
    """

    rank: str
    reads: Counter
    failures: Counter
    prompts: Counter
    bytes: Counter
    publications: Counter
    releases: Counter

    @classmethod
    @functools.cache
    def of(cls, rank: int) -> Counts:
        """Make the counters of a rank, once in its process."""
        # Not before SGLang has set the folder of the files: prometheus-client asks for it when it is imported.
        from prometheus_client import Counter

        def counter(path: str) -> Counter:
            metric = METRICS[path]
            made = Counter(metric.name, metric.documentation, ["tp_rank", *metric.labels])
            for value in metric.values:
                made.labels(str(rank), value)
            return made

        return cls(
            str(rank),
            counter("reads.outcomes"),
            counter("reads.failures"),
            counter("reads.prompts"),
            counter("ranks.bytes"),
            counter("source.published"),
            counter("source.released"),
        )

    def read(self, result: ReadResult) -> None:
        """Count this rank's share of a good read."""
        self.reads.labels(self.rank, "done").inc()
        self.prompts.labels(self.rank, result.prompt).inc()
        self.bytes.labels(self.rank).inc(result.bytes)

    def read_failed(self, reason: str) -> None:
        """Count a read that has failed, and the class of its error."""
        self.reads.labels(self.rank, "failed").inc()
        self.failures.labels(self.rank, reason).inc()

    def read_cancelled(self) -> None:
        """Count a read that was cancelled."""
        self.reads.labels(self.rank, "cancelled").inc()

    def published(self) -> None:
        """Count a publication."""
        self.publications.labels(self.rank).inc()

    def released(self, release: Release) -> None:
        """Count the end of a publication, by its outcome."""
        self.releases.labels(self.rank, release.outcome.name.lower()).inc()
