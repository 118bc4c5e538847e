"""The soak's tables in Markdown, as docs/reliability.md has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tests.soak.gauges import Line
from tests.support.faults.interruptions import Storm

SLOWEST = 8
"""Requests that are listed, each of another set of faults."""


class Summary:
    """What all rounds of load under faults have shown together."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.recovered: list[float] = []
        self._slowest: dict[str, tuple[float, str]] = {}
        """By the faults under way, the longest that a request took, and how it ended."""

    def add(self, storm: Storm) -> None:
        """Add a round, as far as it came."""
        self.faults.update(fault.name for fault in storm.played)
        self.outcomes.update(storm.traffic.outcomes)
        self.recovered += storm.recovered
        for request in storm.traffic.ended:
            under = "; ".join(storm.under(request)) or "none"
            how = "right bytes" if request.error is None else f"`{type(request.error).__name__}`"
            self._slowest[under] = max(self._slowest.get(under, (0.0, "")), (request.seconds, how))

    def lines(
        self, seed: int, minutes: float, counts: Mapping[str, int], failures: Sequence[str], gauges: Sequence[Line]
    ) -> list[str]:
        """All tables."""
        rounds = ", ".join(
            f"{count} of {kind[:-7]}" for kind, count in sorted(counts.items()) if kind[-7:] == " rounds"
        )
        slowest = sorted(self._slowest.items(), key=lambda item: -item[1][0])
        grown = max((line.growth(line.resident) for line in gauges if line.bounded), default=0)
        values = {
            "seed": seed,
            "minutes": f"{minutes:g}",
            "rounds": rounds,
            "faults under load": self.faults.total(),
            "requests under faults": self.outcomes.total(),
            "requests under load": counts.get("requests under load", 0),
            "slowest request": f"{slowest[0][1][0]:.1f} s" if slowest else "",
            "slowest recovery": f"{max(self.recovered, default=0.0):.1f} s",
            "wrong bytes": sum("wrong bytes" in failure for failure in failures),
            "hung": counts.get("hung threads", 0) + sum("hang" in failure for failure in failures),
            "failures": len(failures),
            "most growth of a process": f"{grown / (1 << 20):.1f} MiB",
        }
        return [
            *_table("Soak", "", values.items()),
            *_table("Requests under faults ended with", "number", self.outcomes.most_common()),
            *_table("Fault under load", "times", sorted(self.faults.items())),
            *_table(
                "Slowest requests under ...",
                "",
                [(under, f"{seconds:.1f} s, {how}") for under, (seconds, how) in slowest[:SLOWEST]],
            ),
        ]


def _table(title: str, value: str, rows: Iterable[tuple[str, object]]) -> list[str]:
    return [f"| {title} | {value} |", "| --- | --- |", *(f"| {name} | {what} |" for name, what in rows), ""]
