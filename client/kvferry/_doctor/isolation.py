"""Runs a check in a process of its own, because NIXL can end its process, and names or locks can hang.

`python -m kvferry._doctor CHECK` is that process: it reads the host as JSON from its input, and writes its findings to
the file that is named there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from kvferry._doctor.finding import Finding, Kind, Level
from kvferry._doctor.host import Host

DIED = Kind(
    "check-died",
    Level.PROBLEM,
    "The check could not end. If it was NIXL that ended its process, it ends engines as well.",
    "Read what the process wrote last.",
)
HUNG = Kind(
    "check-hung",
    Level.PROBLEM,
    "What the check did does not end. An engine that does the same waits until its own deadline.",
    "Look at the other findings first; a host without free CPUs can be the reason too.",
)
KINDS = (DIED, HUNG)

_LINES = 5


def run(check: str, host: Host, seconds: float) -> list[Finding]:
    """Run a check in a new process.

    Args:
        check: its name in `kvferry._doctor.catalogue`.
        host: what it looks at.
        seconds: how long it may take; then it and what it started are killed.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as folder:
        answer = Path(folder) / "findings"
        asked = dataclasses.asdict(host) | {"root": str(host.root), "environ": {}, "answer": str(answer)}
        with (Path(folder) / "stderr").open("w+") as written:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvferry._doctor", check],
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=written,
                text=True,
                env={**host.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                # So that what it starts can be ended with it.
                start_new_session=True,
            )
            hung = False
            try:
                process.communicate(json.dumps(asked), timeout=seconds)
            except subprocess.TimeoutExpired:
                hung = True
            finally:
                # Also after an orderly end: nothing that it started may stay.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            written.seek(0)
            last = " / ".join(written.read().split("\n")[-_LINES:]).strip(" /")
        if hung:
            return [HUNG.found(f"the check `{check}` took longer than {seconds:g} s{_wrote(last)}")]
        if process.returncode != 0 or not answer.exists():
            return [DIED.found(f"the check `{check}` ended {_ended(process.returncode)}{_wrote(last)}")]
        return [Finding.from_dict(found) for found in json.loads(answer.read_text())]


def _ended(code: int) -> str:
    if code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def _wrote(last: str) -> str:
    return f"; it wrote last: {last}" if last else ""
