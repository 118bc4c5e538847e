"""Runs a check in a separate process, because NIXL can crash its process, and look-ups of names or locks can hang.

`kvferry._doctor.catalogue.main` runs in that process: it unpickles the host and the name of a file from its input, and
pickles its findings to the file.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from kvferry._doctor.check import Finding, Host, finding

_LINES = 5
_PR_SET_PDEATHSIG = 1


def python(code: str, *arguments: str) -> list[str]:
    """Return the command that runs lines of Python without modules from the current folder: root runs the doctor, too,
    and any user may put a json.py into /tmp."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = filter(None, sys.path); {code}", *arguments]


def run(check: str, host: Host, seconds: float) -> list[Finding]:
    """Run a check of the catalogue in a new process, which is killed with its children after `seconds`."""
    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as folder:
        answer = Path(folder) / "findings"
        with (Path(folder) / "stderr").open("w+b") as written:
            process = subprocess.Popen(
                # The name is for lists of processes.
                python("from kvferry._doctor.catalogue import main; main()", check),
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=written,
                # The process's temporary files end with the folder, also if the process is killed.
                env={**host.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": folder},
                # So that its children can be ended with it. No `preexec_fn`, with which Python forks: gRPC's code in
                # the child of a fork can end the child.
                start_new_session=True,
            )
            hung = False
            try:
                process.communicate(pickle.dumps((check, host, os.getpid(), str(answer))), timeout=seconds)
            except subprocess.TimeoutExpired:
                hung = True
            finally:
                # Also after an orderly end: none of its children may stay.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            written.seek(0)
            last = " / ".join(written.read().decode(errors="replace").split("\n")[-_LINES:]).strip(" /")
        wrote = f"; it wrote last: {last}" if last else ""
        if hung:
            return [finding("check-hung", f"the check `{check}` took longer than {seconds:g} s{wrote}")]
        if process.returncode != 0 or not answer.exists():
            return [finding("check-died", f"the check `{check}` ended {ended(process.returncode)}{wrote}")]
        found: list[Finding] = pickle.loads(answer.read_bytes())
        return found


def end_with(parent: int) -> None:
    """Have the kernel end this process with its parent: a killed command cannot end a check that hangs. If the parent
    is gone already, this process ends here."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def ended(code: int) -> str:
    """Describe how a process ended, given the return code of `subprocess`: negative for a signal."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
