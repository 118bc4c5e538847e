"""docs/reliability.md says what the suite tests."""

from __future__ import annotations

from tests.faults.table import DOCUMENT, written
from tests.support.faults.scenarios import ROWS


def test_the_document_has_the_table_of_the_scenarios() -> None:
    document = DOCUMENT.read_text()
    assert written(document) == document, "run make reliability"


def test_every_row_is_named_once() -> None:
    named = [(row.fault, row.moment) for row in ROWS]
    assert len(set(named)) == len(named)
