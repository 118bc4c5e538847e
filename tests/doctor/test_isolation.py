"""A check that dies or hangs is a finding, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from kvferry._doctor.catalogue import CHECKS, Check, run_alone
from kvferry._doctor.check import Finding, Host
from tests.doctor.looking import names, run
from tests.support.waiting import until


def host_with(tmp_path: Path, lines: str) -> Host:
    """A host in which Python first runs these lines in each process, as a library that misbehaves would."""
    (tmp_path / "sitecustomize.py").write_text(lines)
    return Host(environ={**os.environ, "PYTHONPATH": str(tmp_path)})


@pytest.mark.parametrize(("lines", "how"), [("import os; os.abort()", "SIGABRT"), ("raise SystemExit(3)", "exit code")])
def test_check_whose_process_dies_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, how: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    found = run_alone("cma", host_with(tmp_path, f"import sys; print('last words', file=sys.stderr); {lines}"), 30)
    assert names(found) == {"check-died"}
    assert how in found[0].found
    assert "last words" in found[0].found


def test_check_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    started = tmp_path / "started"
    lines = f"""
import subprocess
child = subprocess.Popen(["sleep", "1000"])
open({str(started)!r}, "w").write(str(child.pid))
child.wait()
"""
    # On a busy machine Python's start alone may take longer than the first of them.
    for limit in (2.0, 10.0, 50.0):
        found = run_alone("cma", host_with(tmp_path, lines), limit)
        assert names(found) == {"check-hung"}
        assert f"longer than {limit:g} s" in found[0].found
        if started.exists() and started.read_text():
            break
    child = int(started.read_text())
    # The process got SIGKILL; whether a parent reaps it depends on the machine.
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_check_leaves_no_process() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert names(run_alone("cma", Host(), 30)) == {"cma-works"}
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_check_that_raises_is_a_finding() -> None:
    def broken(host: Host) -> list[Finding]:
        raise ValueError("a file that nobody expected")

    found = Check("cpus", broken).run(Host())
    assert names(found) == {"check-died"}
    assert "a file that nobody expected" in found[0].found


def test_check_that_cannot_be_started_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like in a container with read-only files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    check = next(one for one in CHECKS if one.name == "cma")
    found = check.run(Host())
    assert names(found) == {"check-died"}
    assert str(tmp_path / "none") in found[0].found


@pytest.mark.parametrize("check", ["cma", "moves"])
def test_check_imports_no_module_from_the_current_folder(
    check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may call the doctor in /tmp, where any user may put a file."""
    ran = tmp_path / "ran"
    for module in ("json", "ctypes", "numpy", "kvferry"):
        (tmp_path / f"{module}.py").write_text(f"open({str(ran)!r}, 'w').close()")
    monkeypatch.chdir(tmp_path)
    assert "check-died" not in names(run(check, Host()))
    assert not ran.exists()


def test_check_is_not_forked(tmp_path: Path) -> None:
    """If the parent uses gRPC in a thread, gRPC's code in the child of a fork can end the child."""
    code = """
import os
from kvferry._doctor import catalogue, check
os.register_at_fork(before=lambda: print("forked", flush=True))
print(*(found.finding for found in catalogue.run_alone("cma", check.Host(), 30)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "cma-works\n"), done.stderr
