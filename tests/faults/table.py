"""The tables of docs/reliability.md, made of the scenarios.

python -m tests.faults.table
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry import KvferryError
from tests.support.faults.scenario import Bound, Expected, Good, Row
from tests.support.faults.scenarios import ROWS, WITHOUT_A_LEASE
from tests.support.faults.verbs_scenarios import VERBS_ROWS
from tests.support.repository import ROOT

DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- The table below is written by `make reliability` from {}. -->\n"
TABLES = {
    "tests/support/faults/scenarios.py": ROWS,
    "WITHOUT_A_LEASE in tests/support/faults/scenarios.py": tuple(scenario.row for scenario in WITHOUT_A_LEASE),
    "tests/support/faults/verbs_scenarios.py": VERBS_ROWS,
}
"""The rows of each table, by their place."""
END = "<!-- End of the table. -->\n"
HEADER = ("Fault", "When", "The destination sees", "within", "The source sees", "within", "The request is")


def written(document: str) -> str:
    """The document with the tables as they should be."""
    for place, rows in TABLES.items():
        begin = BEGIN.format(place)
        before, rest = document.split(begin)
        _, after = rest.split(END, 1)
        document = f"{before}{begin}\n{table(rows)}\n{END}{after}"
    return document


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    notes: list[str] = []
    lines = [_line(HEADER), _line(["---"] * len(HEADER))]
    for row in rows:
        mark = ""
        if row.note:
            if row.note not in notes:
                notes.append(row.note)
            mark = f" [{notes.index(row.note) + 1}]"
        expected = row.expected
        cells = (
            row.fault + mark,
            row.moment,
            _destination(expected),
            _bound(expected.destination_bound) if expected.destination else "",
            _source(expected),
            _bound(expected.source_bound) if expected.source else "",
            expected.fate.value,
        )
        lines.append(_line(cells))
    lines += ["", *(f"[{number}] {note}  " for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _destination(expected: Expected) -> str:
    return " or ".join(_outcome(outcome) for outcome in expected.destination) or "(nothing)"


def _source(expected: Expected) -> str:
    if not expected.source:
        return "(it is gone)"
    return f"`released`: {' or '.join(outcome.name for outcome in expected.source)}"


def _outcome(outcome: Good | type[KvferryError]) -> str:
    if not isinstance(outcome, Good):
        return f"`{outcome.__name__}`"
    return {True: "good bytes", False: "good bytes, unconfirmed", None: "good bytes, perhaps unconfirmed"}[
        outcome.confirmed
    ]


def _bound(bound: Bound) -> str:
    if not bound:
        return "at once"
    terms = " + ".join(term.title for term in bound)
    known = sum(term.default for term in bound)
    return f"{terms} ({known:g} s)" if all(term.default for term in bound) else terms


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
