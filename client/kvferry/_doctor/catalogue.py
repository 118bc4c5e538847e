"""The table of checks. Some run in separate processes: NIXL can crash, and look-ups of names or locks can hang."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvferry._doctor import peer, same_host, system, ucx
from kvferry._doctor.check import Finding, Host, ended, finding, python


class Check(NamedTuple):
    """A check, by its name in docs/doctor.md; `look` returns at least one finding. It may run in a separate process for
    `alone` seconds, not counting waits for a peer; 0: it runs in this process."""

    name: str
    look: Callable[[Host], list[Finding]]
    alone: float = 0.0

    def run(self, host: Host) -> list[Finding]:
        """Run the check. An exception becomes a finding."""
        try:
            # The check of a peer waits several times: for the name, the port, and answers.
            return run_alone(self.name, host, self.alone + 4 * host.timeout) if self.alone else self.look(host)
        except Exception as error:
            return [finding("check-died", f"the check `{self.name}` raised {type(error).__name__}: {error}")]


CHECKS = (
    Check("packages", system.packages),
    Check("environment", system.environment),
    Check("cma", same_host.check, 30.0),
    Check("moves", ucx.moves, 60.0),
    Check("huge-pages", system.huge_pages, 20.0),
    Check("locked-memory", system.locked_memory),
    Check("open-files", system.open_files),
    Check("cpus", system.cpus),
    Check("gpu", system.gpu),
    Check("rdma", ucx.rdma, 60.0),
    Check("peer", peer.check, 60.0),
)
"""`peer` runs only if the command names a peer."""


def examine(host: Host) -> Iterator[tuple[str, list[Finding]]]:
    """Run all checks, one after another, and yield the name and the findings of each."""
    for check in CHECKS:
        if check.name != "peer" or host.peer:
            yield check.name, check.run(host)


def run_alone(check: str, host: Host, seconds: float) -> list[Finding]:
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
                # So that its children end with it. No `preexec_fn`: gRPC can end the child of a fork that it makes.
                start_new_session=True,
            )
            hung = False
            try:
                process.communicate(pickle.dumps((check, host, str(answer))), timeout=seconds)
            except subprocess.TimeoutExpired:
                hung = True
            finally:
                # Also after an orderly end: none of its children may stay.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            written.seek(0)
            last = " / ".join(written.read().decode(errors="replace").split("\n")[-5:]).strip(" /")
        wrote = f"; it wrote last: {last}" if last else ""
        if hung:
            return [finding("check-hung", f"the check `{check}` took longer than {seconds:g} s{wrote}")]
        if process.returncode != 0 or not answer.exists():
            return [finding("check-died", f"the check `{check}` ended {ended(process.returncode)}{wrote}")]
        found: list[Finding] = pickle.loads(answer.read_bytes())
        return found


def main() -> None:
    """Run the process of one check, which `run_alone` starts."""
    name, host, answer = pickle.load(sys.stdin.buffer)
    check = next(check for check in CHECKS if check.name == name)
    Path(answer).write_bytes(pickle.dumps(check.look(host)))
    # Without the exit handlers of libraries, whose faults are not those of the check.
    os._exit(0)
