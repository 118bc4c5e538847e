"""What a rank has published and read, at SGLang's ``/metrics``, which ``--enable-metrics`` opens."""

from __future__ import annotations

import functools

from kvferry._control.publications import Release
from kvferry._reads.read import ReadResult
from kvferry.stats import METRICS

SHOWN = "reads.outcomes", "reads.failures", "reads.prompts", "ranks.bytes", "source.published", "source.released"
"""Which of `METRICS` a rank counts."""


class Counts:
    """The counters of one rank: `SHOWN`, with the label ``tp_rank``. A failed read is counted by each rank that knows
    why.

    SGLang's schedulers and its HTTP server are several processes. They share counters in files, which is what
    prometheus-client calls its multiprocess mode, and which knows no collectors.

    Args:
        rank: the rank.
    """

    def __init__(self, rank: int) -> None:
        # Not before SGLang has set the folder of the files: prometheus-client asks for it when it is imported.
        from prometheus_client import Counter

        self._rank = str(rank)
        self._made: dict[str, Counter] = {}
        for path in SHOWN:
            metric = METRICS[path]
            self._made[path] = Counter(metric.name, metric.documentation, ["tp_rank", *metric.labels])
            for value in metric.values:
                self._made[path].labels(self._rank, value)

    @classmethod
    @functools.cache
    def of(cls, rank: int) -> Counts:
        """Return the counters of a rank, which are made once in its process."""
        return cls(rank)

    def read(self, result: ReadResult) -> None:
        """Count this rank's share of a good read."""
        self._count("reads.outcomes", "done")
        self._count("reads.prompts", result.prompt)
        self._count("ranks.bytes", by=result.bytes)

    def read_failed(self, reason: str) -> None:
        """Count a read that has failed, and the class of its error."""
        self._count("reads.outcomes", "failed")
        self._count("reads.failures", reason)

    def read_cancelled(self) -> None:
        """Count a read that was cancelled."""
        self._count("reads.outcomes", "cancelled")

    def published(self) -> None:
        """Count a publication."""
        self._count("source.published")

    def released(self, release: Release) -> None:
        """Count the end of a publication, by its outcome."""
        self._count("source.released", release.outcome.name.lower())

    def _count(self, path: str, *labels: str, by: int = 1) -> None:
        self._made[path].labels(self._rank, *labels).inc(by)
