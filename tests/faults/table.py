"""The tables of tests/faults/RESULTS.md, made of the scenarios.

python -m tests.faults.table
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from kvferry import KvferryError
from tests.support.faults.scenario import Bound, Expected, Good, Moment, Row
from tests.support.faults.scenarios import ROWS, WITHOUT_A_LEASE
from tests.support.faults.verbs_scenarios import VERBS_ROWS
from tests.support.repository import ROOT

DOCUMENT = ROOT / "tests" / "faults" / "RESULTS.md"
BEGIN = "<!-- The table below is written by `make reliability` from {}. -->\n"
TABLES = {
    "tests/support/faults/scenarios.py": ROWS,
    "WITHOUT_A_LEASE in tests/support/faults/scenarios.py": tuple(scenario.row for scenario in WITHOUT_A_LEASE),
    "tests/support/faults/verbs_scenarios.py": VERBS_ROWS,
}
"""The rows of each table, by their place."""
END = "<!-- End of the table. -->\n"
HEADER = ("Fault", "When", "The destination sees", "`released` at the source", "The request is")
SIGNAL = re.compile(r"(SIG\w+) to (.+)")


def written(document: str) -> str:
    """The document with the tables as they should be."""
    for place, rows in TABLES.items():
        begin = BEGIN.format(place)
        before, rest = document.split(begin)
        _, after = rest.split(END, 1)
        # A read without a lease ends in most ways as one with a lease.
        shown = rows if rows is ROWS else [row for row in rows if not any(_alike(row, other) for other in ROWS)]
        document = f"{before}{begin}\n{table(shown)}\n{END}{after}"
    return document


def table(rows: Sequence[Row]) -> str:
    """In Markdown. Faults that end alike share a line."""
    notes: list[str] = []
    lines = [_line(HEADER), _line(["---"] * len(HEADER))]
    for row in _merged(rows):
        mark = ""
        if row.note:
            if row.note not in notes:
                notes.append(row.note)
            mark = f" [{notes.index(row.note) + 1}]"
        cells = (
            row.fault + mark,
            row.moment,
            _destination(row.expected),
            _source(row.expected),
            row.expected.fate.value,
        )
        lines.append(_line(cells))
    lines += ["", *(f"[{number}] {note}  " for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


def _alike(row: Row, other: Row) -> bool:
    return (row.fault, row.moment, row.expected) == (other.fault, other.moment, other.expected)


def _merged(rows: Sequence[Row]) -> Iterator[Row]:
    faults: defaultdict[tuple[str, Expected, str], list[str]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.moment == Moment.AFTER.value):
        faults[row.moment, row.expected, row.note].append(row.fault)
    moments: defaultdict[tuple[str, Expected, str], list[str]] = defaultdict(list)
    for (moment, expected, note), alike in faults.items():
        moments[_together(alike), expected, note].append(moment)
    for (fault, expected, note), alike in moments.items():
        yield Row(fault, " or ".join(alike).replace(" the read or", " or"), expected, note)


def _together(faults: Sequence[str]) -> str:
    """Signals to one target are named with it once."""
    signals: defaultdict[str, list[str]] = defaultdict(list)
    for fault in faults:
        found = SIGNAL.fullmatch(fault)
        signals[found[2] if found else fault] += [found[1]] if found else []
    return "; ".join(f"{_listed(names)} to {target}" if names else target for target, names in signals.items())


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _destination(expected: Expected) -> str:
    seen = " or ".join(_outcome(outcome) for outcome in expected.destination)
    return seen + _bound(expected.destination_bound) if seen else "(nothing)"


def _source(expected: Expected) -> str:
    seen = " or ".join(outcome.name for outcome in expected.source)
    return seen + _bound(expected.source_bound) if seen else "(it is gone)"


def _outcome(outcome: Good | type[KvferryError]) -> str:
    if not isinstance(outcome, Good):
        return f"`{outcome.__name__}`"
    return {True: "good bytes", False: "good bytes, unconfirmed", None: "good bytes, perhaps unconfirmed"}[
        outcome.confirmed
    ]


def _bound(bound: Bound) -> str:
    if not bound:
        return ""
    terms = " + ".join(term.title for term in bound)
    known = sum(term.default for term in bound)
    return f"; {terms} ({known:g} s)" if all(term.default for term in bound) else f"; {terms}"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
