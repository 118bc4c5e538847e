"""The systemd unit is valid, and gives kvferryd few rights."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from kvferry_server.node.loading import configure
from tests.support.repository import ROOT

UNIT = ROOT / "deploy" / "systemd" / "kvferryd.service"
EXPOSURE = 11
"""systemd's exposure measure in tenths, at most 100. The rest is the network and the root directory."""

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_unit_is_valid_for_systemd(tmp_path: Path) -> None:
    program = tmp_path / "kvferryd"
    program.touch(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvferry/bin/kvferryd", str(program)))
    done = analyze("verify", "--man=no", str(unit))
    assert (done.returncode, done.stderr) == (0, "")
    # A misspelt setting is reported.
    unit.write_text(unit.read_text().replace("NoNewPrivileges=", "NoNewPrivilege="))
    assert "'NoNewPrivilege'" in analyze("verify", "--man=no", str(unit)).stderr


def test_unit_gives_few_rights_to_an_attacker_in_kvferryd() -> None:
    done = analyze("security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE}", str(UNIT))
    assert done.returncode == 0, done.stdout
    assert f"{EXPOSURE / 10:.1f} of 10" in (ROOT / "docs" / "deployment.md").read_text()


def test_unit_waits_longer_than_the_drain_and_gives_files_for_all_connections() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read(UNIT)
    service, settings = parser["Service"], configure()
    assert float(service["TimeoutStopSec"]) > settings.drain
    assert int(service["LimitNOFILE"]) > 2 * settings.max_connections
    assert str(Path(settings.unix).parent) == f"/run/{service['RuntimeDirectory']}"


def test_kvferryd_is_started_again_however_often_it_fails() -> None:
    """By default systemd gives a unit up that fails five times in ten seconds. Wrong settings end with another code."""
    lines = UNIT.read_text().splitlines()
    assert {"Restart=on-failure", "RestartPreventExitStatus=2"} <= set(lines)
    assert lines.index("[Unit]") < lines.index("StartLimitIntervalSec=0") < lines.index("[Service]")
