"""kvferryd in a process of its own, with what it has used: a node server inside the measuring process would share its
interpreter, and distort whatever is measured."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_TIMEOUT = 120.0
STOP_TIMEOUT = 20.0
TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server.

    Attributes:
        address: of its UNIX socket, as gRPC writes it.
        pid: its process id.
    """

    address: str
    pid: int

    def cpu_seconds(self) -> float:
        """Seconds of CPU that the process has used, to a nanosecond where the kernel says so, else to 10 ms."""
        try:
            ran = sum(
                int(task.read_text().split()[0]) for task in Path(f"/proc/{self.pid}/task").glob("[0-9]*/schedstat")
            )
            if ran:
                return ran / 1e9
        except OSError:
            pass
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK

    def resident(self) -> int:
        """Bytes of memory that the process has."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()


@contextmanager
def server_process(arguments: list[str], socket: str) -> Iterator[ServerProcess]:
    """Run a server until the end of the block.

    Args:
        arguments: of Python.
        socket: the path of the UNIX socket that it listens on.

    Raises:
        RuntimeError: it ended before it said that it was ready; the message has its output.
    """
    ours = ("KVFERRY_", "KVFERRYD_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    with tempfile.TemporaryDirectory(prefix="kvferry-log-") as folder:
        log = Path(folder) / "log"
        # A file and not a pipe, which somebody would have to empty.
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments], stdout=output, stderr=output, env=environment, cwd=ROOT
            )
        try:
            deadline = time.monotonic() + START_TIMEOUT
            while "ready" not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start:\n{log.read_text()}")
                time.sleep(0.02)
            yield ServerProcess(f"unix:{socket}", process.pid)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def node_server(*flags: str) -> Iterator[ServerProcess]:
    """kvferryd on a UNIX socket of its own.

    Args:
        flags: more of kvferryd's flags.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        socket = f"{folder}/node.sock"
        arguments = ["-m", "kvferry_server.node.main", "--listen", "", "--unix", socket, "--drain", "0", "--admin", ""]
        with server_process([*arguments, "--log-level", "error", *flags], socket) as server:
            yield server
