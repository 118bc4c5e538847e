"""Counters of a rank for SGLang's Prometheus endpoint.

SGLang's processes share counters in files (prometheus-client's multiprocess mode), which does not support collectors.
"""

from __future__ import annotations

import functools

from kvferry import ReadResult
from kvferry.engine import ReadEnd
from kvferry.stats import METRICS

SHOWN = "reads.outcomes", "reads.failures", "reads.prompts", "ranks.bytes", "source.published", "source.released"
"""The metrics of `METRICS` that a rank counts."""


class Counts:
    """The counters of one rank: `SHOWN`, with the label ``tp_rank``."""

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

    def add(self, path: str, *labels: str, by: int = 1) -> None:
        """Add to the counter with this path in `METRICS`, for these values of its labels."""
        self._made[path].labels(self._rank, *labels).inc(by)

    def read_done(self, read: ReadEnd | ReadResult) -> None:
        self.add("reads.outcomes", "done")
        self.add("reads.prompts", read.prompt)
        self.add("ranks.bytes", by=read.bytes)

    def read_failed(self, reason: str) -> None:
        """Count a failed read by the name of its error's class. Each rank that knows the reason counts it."""
        self.add("reads.outcomes", "failed")
        self.add("reads.failures", reason)


counts_of = functools.cache(Counts)
"""Returns the counters of a rank, which are made once in a process."""
