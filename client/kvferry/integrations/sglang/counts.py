"""What a rank has published and read, at SGLang's ``/metrics``, which ``--enable-metrics`` opens."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry._control.publications import Release
from kvferry.integrations import metrics

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
    bytes: Counter
    publications: Counter
    releases: Counter

    @classmethod
    @functools.cache
    def of(cls, rank: int) -> Counts:
        """Make the counters of a rank, once in its process."""
        # Not before SGLang has set the folder of the files: prometheus-client asks for it when it is imported.
        from prometheus_client import Counter

        labels = ["tp_rank"]
        return cls(
            str(rank),
            Counter(*metrics.READS, [*labels, "outcome"]),
            Counter(*metrics.BYTES, labels),
            Counter(*metrics.PUBLISHED, labels),
            Counter(*metrics.RELEASED, [*labels, "outcome"]),
        )

    def read(self, size: int) -> None:
        """Count a good read, in which this rank has read so many bytes."""
        self.reads.labels(self.rank, "done").inc()
        self.bytes.labels(self.rank).inc(size)

    def read_failed(self, outcome: str) -> None:
        """Count a read that is "failed" or "cancelled"."""
        self.reads.labels(self.rank, outcome).inc()

    def published(self) -> None:
        """Count a publication."""
        self.publications.labels(self.rank).inc()

    def released(self, release: Release) -> None:
        """Count the end of a publication, by its outcome."""
        self.releases.labels(self.rank, release.outcome.name.lower()).inc()
