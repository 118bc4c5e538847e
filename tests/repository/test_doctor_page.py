"""docs/doctor.md lists what `kvferry doctor` can find, and each finding has a test that provokes it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry._doctor.catalogue import CHECKS
from kvferry._doctor.check import FINDINGS, table
from kvferry._doctor.system import RANGES
from tests.support.repository import ROOT

TABLE = FINDINGS.read_text()


def test_doctor_page_lists_what_needs_attention() -> None:
    command = [sys.executable, "-m", "scripts.doctor_page", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "doctor.md").read_text()
    attention = [name for name, (level, _, _) in table().items() if level != "ok"]
    assert [name for name in attention if f"`{name}`" not in page] == []


def test_table_of_findings_has_each_check_and_each_name_once() -> None:
    headings = [line.removeprefix("### ").strip("`") for line in TABLE.splitlines() if line.startswith("### ")]
    assert headings == [*(check.name for check in CHECKS), "Any check"]
    names = [line.split("`")[1] for line in TABLE.splitlines() if line.startswith("| `")]
    assert names == list(table())
    levels = {level for level, _, _ in table().values()}
    assert levels == {"ok", "warning", "problem", "unknown"}


def test_findings_are_all_provoked_by_a_test() -> None:
    folders = (ROOT / "tests" / "doctor", ROOT / "tests" / "rdma" / "verbs")
    tests = "".join(path.read_text() for folder in folders for path in folder.glob("test_*.py"))
    assert [name for name in table() if f'"{name}"' not in tests] == []


@pytest.mark.parametrize("package", sorted(RANGES))
def test_the_versions_are_those_that_the_project_declares(package: str) -> None:
    first, beyond = RANGES[package]
    declared = f'"{package}>={first}{f",<{beyond}" if beyond else ""}"'
    assert declared in (ROOT / "pyproject.toml").read_text()
