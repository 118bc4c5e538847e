"""tests/faults/RESULTS.md says what the suites test."""

from __future__ import annotations

from tests.faults.table import DOCUMENT, TABLES, written


def test_the_document_contains_the_tables_of_the_scenarios() -> None:
    document = DOCUMENT.read_text()
    assert written(document) == document, "run make reliability"


def test_every_row_is_tested_once() -> None:
    for rows in TABLES.values():
        named = [(row.fault, row.moment) for row in rows]
        assert len(set(named)) == len(named)
