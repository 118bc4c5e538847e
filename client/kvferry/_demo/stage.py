"""The processes of the demonstration: node servers and ranks, of which nothing is left afterwards."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from kvferry._demo.rank import Progress, RankJob, run_rank
from kvferry.errors import KvferryError

START_TIMEOUT = 60.0
ANSWER_TIMEOUT = 300.0


class DemoFailed(KvferryError):
    """A process of the demonstration died or stopped answering."""


@dataclass(slots=True)
class RankProcess:
    """A rank and the pipe to it."""

    rank: int
    process: BaseProcess
    pipe: Connection

    def answer(self, timeout: float = ANSWER_TIMEOUT) -> object:
        """Wait for its next message; raises `DemoFailed` if it died or did not answer."""
        if not self.pipe.poll(timeout):
            raise DemoFailed(f"rank {self.rank} did not answer within {timeout:.0f} s")
        try:
            return self.pipe.recv()
        except EOFError:
            raise DemoFailed(f"rank {self.rank} ended with exit code {self.process.exitcode}") from None


class DemoProcesses:
    """Starts processes and ends them all, whatever happens. A context manager."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvferry-demo-"))
        self._servers: list[subprocess.Popen[str]] = []
        self._ranks: list[RankProcess] = []

    def __enter__(self) -> DemoProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_server(self, name: str) -> str:
        """Start a node server and return its address."""
        socket = self._folder / f"{name}.sock"
        log = (self._folder / f"{name}.log").open("w")
        options = ["--unix", str(socket), "--listen", "", "--admin", ""]
        command = [sys.executable, "-m", "kvferry_server.node.main", *options]
        ours = ("KVFERRY_", "KVFERRYD_")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        # A session of its own: Ctrl-C is for this process, which ends the server in the right order.
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
        )
        log.close()
        self._servers.append(server)
        return f"unix:{socket}"

    def wait_for(self, address: str) -> None:
        """Wait until a node server listens or has ended. If it has ended, the client's error is the better message."""
        socket, until = Path(address.removeprefix("unix:")), time.monotonic() + START_TIMEOUT
        while not socket.exists() and time.monotonic() < until and all(one.poll() is None for one in self._servers):
            time.sleep(0.02)

    def start_rank(self, job: RankJob) -> RankProcess:
        """Start a rank, whose first answer is "ready"."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(job, theirs), name=f"rank-{job.geometry.rank}", daemon=True)
        process.start()
        theirs.close()
        rank = RankProcess(job.geometry.rank, process, ours)
        self._ranks.append(rank)
        return rank

    def close(self) -> None:
        """End every process and remove every file. Idempotent; a further Ctrl-C does not interrupt it."""
        with _uninterrupted():
            for rank in self._ranks:
                rank.pipe.close()
            for rank in self._ranks:
                rank.process.join(10.0)
                if rank.process.is_alive():
                    rank.process.kill()
                    rank.process.join()
            for server in self._servers:
                server.send_signal(signal.SIGTERM)
            for server in self._servers:
                try:
                    server.wait(10.0)
                except subprocess.TimeoutExpired:
                    server.kill()
                    server.wait()
            self._ranks.clear()
            self._servers.clear()
            shutil.rmtree(self._folder, ignore_errors=True)


def gather(ranks: list[RankProcess], on_progress: Callable[[Progress], None]) -> dict[int, object]:
    """Collect one answer of every rank, and pass on their progress meanwhile."""
    answers: dict[int, object] = {}
    waiting = {rank.pipe: rank for rank in ranks}
    while waiting:
        ready = wait(list(waiting), ANSWER_TIMEOUT)
        if not ready:
            raise DemoFailed(f"ranks {sorted(rank.rank for rank in waiting.values())} did not answer")
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            answer = rank.answer()
            if isinstance(answer, Progress):
                on_progress(answer)
            else:
                answers[rank.rank] = answer
                del waiting[rank.pipe]
    return answers


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
