"""Helpers of the tests of checks: findings by name, files of another machine, and other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvferry._doctor.catalogue import CHECKS
from kvferry._doctor.check import Finding, Host, table
from tests.support.node_servers import environment


def names(findings: Sequence[Finding]) -> set[str]:
    """The names of findings, each of which has to be in the table."""
    # Printed, so that a failing test shows them.
    print(*findings, sep="\n")
    found = {finding.finding for finding in findings}
    assert found <= set(table())
    return found


def run(check: str, host: Host) -> list[Finding]:
    """Run a check as the command does."""
    return next(one for one in CHECKS if one.name == check).run(host)


def write(root: Path, files: dict[str, str]) -> Path:
    """Write files below a folder, which a `Host` then takes for the root."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


LOOK = """
import dataclasses, json, sys
from kvferry._doctor.catalogue import CHECKS
from kvferry._doctor.check import Host
check = next(one for one in CHECKS if one.name == sys.argv[1])
pid = int(sys.argv[2]) if len(sys.argv) > 2 else None
print(json.dumps([dataclasses.asdict(found) for found in check.look(Host(pid=pid))]))
"""


def look_in(
    before: Sequence[str], check: str, *arguments: str, first: str = "", **env: str
) -> dict[str, dict[str, str]]:
    """Run a check in a process of its own, after the words of a command such as ``unshare``, and after Python's lines
    `first`; the findings by name."""
    done = subprocess.run(
        [*before, sys.executable, "-c", first + LOOK, check, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment(PYTHONPATH=os.pathsep.join(path for path in sys.path if path), **env),
    )
    assert done.returncode == 0, done.stderr
    return {found["finding"]: found for found in json.loads(done.stdout.splitlines()[-1])}
