"""Counters of a rank at SGLang's ``/metrics``, which ``--enable-metrics`` opens."""

from __future__ import annotations

import functools

from kvferry.stats import METRICS

SHOWN = "reads.outcomes", "reads.failures", "reads.prompts", "ranks.bytes", "source.published", "source.released"
"""The metrics of `METRICS` that a rank counts."""


class Counts:
    """The counters of one rank: `SHOWN`, with the label ``tp_rank``. A failed read is counted by each rank that knows
    the reason.

    SGLang's schedulers and its HTTP server are several processes. They share counters in files (prometheus-client's
    multiprocess mode), which does not support collectors.
    """

    def __init__(self, rank: int) -> None:
        # Imported late: prometheus-client reads the folder of the files at import, and SGLang sets the folder first.
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
        """Return the counters of a rank, which are made once in a process."""
        return cls(rank)

    def add(self, path: str, *labels: str, by: int = 1) -> None:
        """Add to the counter with this path in `METRICS`, for these values of its labels."""
        self._made[path].labels(self._rank, *labels).inc(by)
