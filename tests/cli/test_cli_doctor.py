"""The command `kvferry doctor`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry._doctor import catalogue
from kvferry._doctor.catalogue import Check
from kvferry._doctor.peer import check as check_peer
from kvferry._doctor.system import environment
from tests.support.command_line import run_kvferry

QUICK = (Check("environment", environment), Check("peer", check_peer))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only two checks, because all take seconds."""
    monkeypatch.setattr(catalogue, "CHECKS", QUICK)


@pytest.mark.usefixtures("quick")
def test_problem_is_shown_with_its_remedy_and_ends_with_1(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'none.sock'}"
    done = run_kvferry("doctor", "--peer", address, UCX_TLS="tcp")
    assert done.returncode == 1
    assert "warning  environment: UCX_TLS=tcp" in done.stdout
    assert "To do: Add cma to UCX_TLS, or unset it." in done.stdout
    assert "problem  peer: " in done.stdout
    assert done.stdout.rstrip().endswith("1 problem, 1 warning. docs/doctor.md lists the checks.")
    assert "\x1b" not in done.stdout


@pytest.mark.usefixtures("quick")
def test_warnings_alone_end_with_0_and_no_peer_is_asked_unless_named() -> None:
    done = run_kvferry("doctor", UCX_TLS="tcp")
    assert done.returncode == 0
    assert "peer" not in done.stdout


@pytest.mark.usefixtures("quick")
def test_json_has_each_finding_and_counts(tmp_path: Path) -> None:
    done = run_kvferry("doctor", "--json", "--peer", f"unix:{tmp_path / 'none.sock'}")
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert [finding["check"] for finding in told["findings"]] == ["environment", "peer"]
    assert set(told["findings"][0]) == {"check", "finding", "level", "found", "means", "do"}
    assert told["counts"]["problem"] == 1


@pytest.mark.usefixtures("quick")
def test_doctor_escapes_what_a_peer_or_a_variable_says() -> None:
    assert "\x1b[31m" not in run_kvferry("doctor", UCX_NET_DEVICES="\x1b[31mmlx").stdout


def test_checks_all_run_on_this_host_and_change_nothing() -> None:
    """The whole command, as a person calls it. What it finds depends on the machine; that it finds something of each
    check does not."""
    command = [sys.executable, "-m", "kvferry._cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    told = json.loads(done.stdout)
    assert done.returncode == (1 if told["counts"]["problem"] else 0)
    checks = [check.name for check in catalogue.CHECKS if check.name != "peer"]
    assert list(dict.fromkeys(finding["check"] for finding in told["findings"])) == checks
    assert not {"check-died", "check-hung"} & {finding["finding"] for finding in told["findings"]}
    assert done.stderr == ""
