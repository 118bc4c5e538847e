"""The results of a run, as results.json has them: median and spread of each measure, and the load of each topic."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
import numpy as np

from benchmarks.measures import Measure, Topic, median, quantile
from benchmarks.tables import Table

RESULTS = Path(__file__).parent / "results.json"
DIGITS = 5


@dataclass(frozen=True, slots=True)
class Summary:
    """One measure: how many samples it has, their quantiles, and what it is compared with."""

    name: str
    unit: str
    count: int
    minimum: float
    p10: float
    median: float
    p90: float
    p99: float
    maximum: float
    against: str

    @classmethod
    def of(cls, measure: Measure) -> Summary:
        """Summarise a measure."""
        found = measure.samples
        return cls(
            measure.name,
            measure.unit,
            len(found),
            minimum=_short(min(found)),
            p10=_short(quantile(found, 0.1)),
            median=_short(median(found)),
            p90=_short(quantile(found, 0.9)),
            p99=_short(quantile(found, 0.99)),
            maximum=_short(max(found)),
            against=measure.against,
        )


@dataclass(frozen=True, slots=True)
class TopicResult:
    """The measures of one topic.

    Attributes:
        title: heading.
        load: the machine's load average over a minute before and after, which includes the run itself.
        took: seconds that the topic took.
        when: the time in UTC at its end.
        revision: the commit that it measured; with a "+" if files differed from it.
        measures: by name, in the table's order.
    """

    title: str
    load: tuple[float, float]
    took: float
    when: str
    revision: str
    measures: Mapping[str, Summary]

    @classmethod
    def of(cls, topic: Topic, load: tuple[float, float], took: float) -> TopicResult:
        """Summarise a topic; raises `ValueError` if two measures have one name."""
        summaries = {measure.name: Summary.of(measure) for measure in topic.measures}
        if len(summaries) != len(topic.measures):
            raise ValueError(f"two measures of {topic.name} have the same name")
        return cls(
            topic.title, load, round(took, 1), time.strftime("%Y-%m-%d %H:%M", time.gmtime()), revision(), summaries
        )

    def table(self) -> Table:
        """All measures as a table."""
        rows = []
        for found in self.measures.values():
            ratio = f"{self.ratio(found.name):.2f}" if found.against else ""
            spread = f"{shown(found.p10, found.unit)} – {shown(found.p90, found.unit)}" if found.count > 1 else ""
            middle = shown(found.median, found.unit)
            rows.append((found.name, middle, spread, f"{found.count:,}", ratio, found.against))
        return Table(self.title, ("", "median", "10 % – 90 %", "samples", "ratio", "to"), rows)

    def ratio(self, name: str) -> float:
        """The median of a measure in that of the measure it is compared with."""
        found = self.measures[name]
        return found.median / self.measures[found.against].median


@dataclass(frozen=True, slots=True)
class Results:
    """What results.json holds.

    Attributes:
        machine: what was measured on.
        topics: by name.
    """

    machine: Mapping[str, str]
    topics: Mapping[str, TopicResult]

    def measure(self, topic: str, name: str) -> Summary:
        """A measure; raises `KeyError`."""
        return self.topics[topic].measures[name]

    def ratio(self, topic: str, name: str) -> float:
        """See `TopicResult.ratio`."""
        return self.topics[topic].ratio(name)

    def quotient(self, topic: str, name: str, other: str) -> float:
        """The median of a measure in that of another one of the same topic."""
        return self.measure(topic, name).median / self.measure(topic, other).median

    def with_topics(self, topics: Mapping[str, TopicResult]) -> Results:
        """These results with some topics replaced, in the order of their names."""
        together = {**self.topics, **topics}
        return replace(self, machine=machine(), topics={name: together[name] for name in sorted(together)})

    def dump(self) -> str:
        """As JSON, with a line for each measure, so that a change of it is a line."""
        topics = []
        for name, topic in self.topics.items():
            lines = ",\n".join(f"   {_json(key)}: {_json(asdict(found))}" for key, found in topic.measures.items())
            told = {"title": topic.title, "load": topic.load, "took": topic.took}
            head = _json(told | {"when": topic.when, "revision": topic.revision})[1:-1]
            topics.append(f'  {_json(name)}: {{{head}, "measures": {{\n{lines}\n  }}}}')
        return f'{{"machine": {_json(self.machine)},\n "topics": {{\n' + ",\n".join(topics) + "\n}}\n"

    @classmethod
    def parse(cls, text: str) -> Results:
        """From JSON."""
        given = json.loads(text)
        topics = {
            name: TopicResult(
                topic["title"],
                (topic["load"][0], topic["load"][1]),
                topic["took"],
                topic["when"],
                topic["revision"],
                {key: Summary(**value) for key, value in topic["measures"].items()},
            )
            for name, topic in given["topics"].items()
        }
        return cls(given["machine"], topics)


def machine() -> dict[str, str]:
    """What the results were measured on and with."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "grpcio": str(grpc.__version__),
        "numpy": np.__version__,
    }


def revision() -> str:
    """The commit of this checkout, with a "+" if tracked files differ from it; empty outside of git."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    # The results themselves, and what is written from them, are not what is measured.
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
    return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)


def shown(value: float, unit: str) -> str:
    """A value in its unit, for people."""
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
            if value * factor >= 1:
                return f"{value * factor:.3g} {name}"
        return f"{value * 1e9:.3g} ns"
    if unit == "B":
        return f"{value / (1 << 20):.1f} MiB" if value >= 10 << 20 else f"{value:,.0f} B"
    if unit == "%":
        return f"{value:.2g} %"
    return f"{value:,.0f} {unit}".rstrip() if value >= 100 else f"{value:.3g} {unit}".rstrip()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
