"""docs/doctor.md lists what `kvferry doctor` can find, and each finding has a test that provokes it."""

from __future__ import annotations

import re

import pytest

from kvferry._doctor.catalogue import CHECKS, KINDS
from kvferry._doctor.isolation import KINDS as ISOLATION
from kvferry._doctor.packages import RANGES
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "doctor.md").read_text()


def section(heading: str) -> str:
    """What stands below a heading of the page."""
    return PAGE.partition(f"\n### {heading}\n")[2].partition("\n### ")[0].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The rows of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_page_has_the_table_of_each_check(check: object) -> None:
    from kvferry._doctor.catalogue import Check

    assert isinstance(check, Check)
    text = section(f"`{check.name}`")
    assert f"Looks at {check.looks_at}." in text
    expected = [[f"`{kind.name}`", kind.level.value, kind.means, kind.remedy] for kind in check.kinds]
    assert rows(text) == expected


def test_the_page_has_what_any_check_can_find() -> None:
    expected = [[f"`{kind.name}`", kind.level.value, kind.means, kind.remedy] for kind in ISOLATION]
    assert rows(section("Any check")) == expected
    assert re.findall(r"^### (.+)$", PAGE, re.MULTILINE) == [*(f"`{check.name}`" for check in CHECKS), "Any check"]


def test_each_finding_is_provoked_by_a_test() -> None:
    folders = (ROOT / "tests" / "doctor", ROOT / "tests" / "rdma" / "verbs")
    tests = "".join(path.read_text() for folder in folders for path in folder.glob("test_*.py"))
    assert [name for name in KINDS if f'"{name}"' not in tests] == []


def test_names_of_findings_are_unique() -> None:
    kinds = [kind for check in CHECKS for kind in check.kinds]
    assert len({kind.name for kind in (*kinds, *ISOLATION)}) == len(kinds) + len(ISOLATION)


@pytest.mark.parametrize("package", sorted(RANGES))
def test_the_versions_are_those_that_the_project_declares(package: str) -> None:
    first, beyond = RANGES[package]
    declared = f'"{package}>={first}{f",<{beyond}" if beyond else ""}"'
    assert declared in (ROOT / "pyproject.toml").read_text()
