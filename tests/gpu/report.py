"""The report of a run: the machine, the outcome of each test, and the measures, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Table:
    """Rows of text, the first column a label."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [f"### {self.title}", "", _row(self.columns), "|---|" + "---:|" * (len(self.columns) - 1)]
        return "\n".join([*lines, *map(_row, self.rows)]) + "\n"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test.

    Attributes:
        result: passed, failed or skipped.
        seconds: that it took.
        why: the reason for which it was skipped, or how it failed.
        found: what it found out beside that.
    """

    result: str
    seconds: float
    why: str = ""
    found: str = ""


class Collected:
    """The outcomes of the tests: a plug-in of pytest."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test was set up, has run, or was cleaned up."""
        if report.when != "call" and report.passed:
            return
        before = self.outcomes.get(report.nodeid)
        if before is not None and before.result == "failed":
            return
        why = ""
        if isinstance(report.longrepr, tuple):
            why = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.failed:
            why = report.longreprtext
        found = "; ".join(str(value) for name, value in report.user_properties if name == "found")
        self.outcomes[report.nodeid] = Outcome(report.outcome, report.duration, why, found)


def markdown(
    machine: Mapping[str, str], outcomes: Mapping[str, Outcome], measures: Sequence[Table], problem: str = ""
) -> str:
    """The report.

    Args:
        machine: what it ran on, by name.
        outcomes: of the tests, by pytest's name.
        measures: tables.
        problem: why something could not be measured.
    """
    counts = Counter(outcome.result for outcome in outcomes.values())
    summary = ", ".join(f"{counts[result]} {result}" for result in ("passed", "failed", "skipped") if counts[result])
    parts = [
        "# Report of the tests on a GPU",
        "Written by `make test-gpu`; [Contributing](../CONTRIBUTING.md#gpus) says what the tests show.",
    ]
    parts.append(Table("Machine", ("", ""), [*machine.items()]).markdown().replace("---:", "---"))
    rows = [
        (_short(name), outcome.result, f"{outcome.seconds:.1f}", outcome.found) for name, outcome in outcomes.items()
    ]
    parts.append(Table(f"Tests: {summary}", ("test", "result", "seconds", "found"), rows).markdown())
    reasons = Counter(outcome.why for outcome in outcomes.values() if outcome.result == "skipped")
    if reasons:
        parts.append(
            "### Why tests were skipped\n\n" + "".join(f"- {count}: {why}\n" for why, count in reasons.items())
        )
    for name, outcome in outcomes.items():
        if outcome.result == "failed":
            parts.append(f"### {_short(name)} failed\n\n```\n{outcome.why.replace('```', '')}\n```\n")
    parts += [table.markdown() for table in measures]
    if problem:
        parts.append(f"### Not measured\n\n```\n{problem}\n```\n")
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _short(name: str) -> str:
    """A test's name without the folder."""
    return name.rpartition("/")[2].replace(".py::", ": ")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
