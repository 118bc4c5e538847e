"""The changelog has release notes for the version that would be released."""

from __future__ import annotations

import re

import kvferry
from tests.support.repository import ROOT

SECTION = re.compile(r"^## \[(?P<version>\d+\.\d+\.\d+)\] - (?P<date>Unreleased|\d{4}-\d{2}-\d{2})$")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}

LINES = (ROOT / "CHANGELOG.md").read_text().splitlines()


def test_topmost_section_is_of_this_version_and_not_empty() -> None:
    sections = [line for line in LINES if line.startswith("## ")]
    parsed = [SECTION.match(line) for line in sections]
    assert None not in parsed, sections
    assert parsed[0] is not None
    assert parsed[0]["version"] == kvferry.__version__
    assert any(line.startswith("- ") for line in LINES[LINES.index(sections[0]) :])
    # Only what comes next is not released.
    assert [found["date"] for found in parsed[1:] if found is not None and found["date"] == "Unreleased"] == []


def test_changes_are_of_the_kinds_of_keep_a_changelog() -> None:
    assert {line.removeprefix("### ") for line in LINES if line.startswith("### ")} <= KINDS


def test_version_is_the_same_in_both_places() -> None:
    assert f'\nversion = "{kvferry.__version__}"\n' in (ROOT / "pyproject.toml").read_text()
