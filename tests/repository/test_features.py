"""Every geometry of docs/guarantees.md names a file that exists, and a test that is in it."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.repository import ROOT

DOCS = ROOT / "docs"
TEXT = (DOCS / "guarantees.md").read_text().partition("\n## Geometries\n")[2].partition("\n## ")[0]
LINKS = re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", TEXT)
TESTS = sorted({(name.strip("`"), path) for name, path in LINKS if name.startswith("`test_")})


def test_rows_all_have_a_proof() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    assert [row for row in rows if "`test_" not in row] == []


@pytest.mark.parametrize("path", sorted({path for _, path in LINKS}))
def test_linked_file_exists(path: str) -> None:
    assert (DOCS / path).is_file()


@pytest.mark.parametrize(("name", "path"), TESTS)
def test_named_test_is_in_its_file(name: str, path: str) -> None:
    module = ast.parse((DOCS / path).read_text())
    assert name in {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
