"""The soak's tables in Markdown; tests/faults/RESULTS.md has the first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.soak.gauges import Line
from tests.support.faults.interruptions import Storm
from tests.support.faults.traffic import Ended

WRONG = ("wrong bytes", "bytes changed")
HUNG = ("a request hangs", "requests hang")
"""What failures say that are worse than others."""


@dataclass
class Under:
    """What requests saw under one fault, whenever it was played.

    Attributes:
        times: that it was played.
        requests, failed: that were under way meanwhile, and those of them that ended with an error.
        slowest: of these requests; None: there was none.
        lasted: seconds of the fault under which that was.
        recovered: most seconds after it until a new request had been served.
    """

    times: int = 0
    requests: int = 0
    failed: int = 0
    slowest: Ended | None = None
    lasted: float = 0.0
    recovered: float = 0.0

    def add(self, request: Ended, lasts: float) -> None:
        """Add a request that was under way during the fault."""
        self.requests += 1
        self.failed += request.error is not None
        if self.slowest is None or request.seconds > self.slowest.seconds:
            self.slowest, self.lasted = request, lasts

    def __str__(self) -> str:
        if self.slowest is None:
            return f"{self.times} | 0 | | | {self.recovered:.1f}"
        how = "right bytes" if self.slowest.error is None else f"`{type(self.slowest.error).__name__}`"
        slowest = f"{self.slowest.seconds:.1f} of {self.lasted:g}, {how}"
        return f"{self.times} | {self.requests} | {self.failed} | {slowest} | {self.recovered:.1f}"


class Summary:
    """What all rounds of load under faults have shown together."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self._faults: defaultdict[str, Under] = defaultdict(Under)
        self._slowest = 0.0

    def add(self, storm: Storm) -> None:
        """Add a round, as far as it came."""
        self.outcomes.update(storm.traffic.outcomes)
        for index, fault in enumerate(storm.played):
            under = self._faults[fault.name]
            under.times += 1
            under.recovered = max(under.recovered, *storm.recovered[index : index + 1], 0.0)
        for request in storm.traffic.ended:
            self._slowest = max(self._slowest, request.seconds)
            for fault in storm.under(request):
                self._faults[fault.name].add(request, fault.lasts)

    def lines(
        self, seed: int, minutes: float, counts: Mapping[str, int], failures: Sequence[str], gauges: Sequence[Line]
    ) -> Iterator[str]:
        """The tables."""
        grown = max((line.growth(line.resident) for line in gauges if line.bounded), default=0)
        rounds = [f"{count} of {kind[:-7]}" for kind, count in sorted(counts.items()) if kind.endswith(" rounds")]
        cells = {
            "Seed": seed,
            "Minutes": f"{minutes:g}",
            "Rounds": ", ".join(rounds),
            "Requests under load": counts.get("requests under load", 0),
            "under faults": self.outcomes.total(),
            "Slowest": f"{self._slowest:.1f} s",
            "Wrong": _saying(failures, WRONG),
            "Hung": counts.get("hung threads", 0) + _saying(failures, HUNG),
            "Failures": len(failures),
            "Growth": f"{grown / (1 << 20):.1f} MiB",
        }
        yield _row(cells)
        yield _row(["---"] * len(cells))
        yield _row(map(str, cells.values()))
        yield ""
        ended = ", ".join(f"{count} {how}" for how, count in self.outcomes.most_common() if count)
        yield f"Requests under faults ended with: {ended}."
        yield ""
        yield "| Fault under load | Times | Requests | Failed | Slowest, s | Served again after, s |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for name, under in sorted(self._faults.items()):
            yield f"| {name} | {under} |"


def _saying(failures: Sequence[str], words: Sequence[str]) -> int:
    return sum(any(word in failure for word in words) for failure in failures)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
