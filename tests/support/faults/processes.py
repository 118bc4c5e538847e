"""Processes that can be stopped and killed: node servers and processes of engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import grpc

from kvferry.v1 import introspection_pb2 as ipb
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.faults.reports import Held, Job
from tests.support.node_servers import START_TIMEOUT, environment, wait_serving
from tests.support.repository import ROOT

HOSTILE = "~"
"""What the engine_ids of a hostile peer begin with."""
SOON = 30.0
"""Seconds that something may take which a busy machine does in far less."""


class Party:
    """A process.

    Args:
        prefix: of its command line: puts it into a network namespace.
    """

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self._prefix = list(prefix)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running process."""
        if self._process is None:
            raise RuntimeError("it is not running")
        return self._process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def started(self) -> bool:
        """Whether it was ever started."""
        return self._process is not None

    @property
    def alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """SIGSTOP; waits until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        self.wait_stopped()

    def wait_stopped(self) -> None:
        """Wait until somebody's SIGSTOP has stopped it."""
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    @property
    def stopped(self) -> bool:
        """Whether a SIGSTOP has stopped it."""
        return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG) is not None

    def resume(self) -> None:
        """SIGCONT. Does nothing to a process that runs or has ended."""
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; waits until it is gone. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.pipe.close()

    def call(self, command: str, *arguments: Any, **options: Any) -> Any:
        """Do something there and wait for it."""
        self.send(command, *arguments, **options)
        return self.answer()

    def send(self, command: str, *arguments: Any, **options: Any) -> None:
        """Begin something there."""
        self.pipe.send((command, arguments, options))

    def answers(self, timeout: float) -> bool:
        """Whether it has answered, waited for."""
        return self.pipe.poll(timeout)

    def answer(self, timeout: float = SOON) -> Any:
        """The answer to what was begun, or the exception that it raised there.

        Raises:
            TimeoutError: none came in `timeout` seconds.
        """
        if not self.pipe.poll(timeout):
            raise TimeoutError(f"process {self.pid} did not answer")
        value = self.pipe.recv()
        if isinstance(value, Exception):
            raise value
        return value

    def _spawn(self, module: str, *arguments: str, prefix: Sequence[str] = (), **options: Any) -> None:
        self.pipe, theirs = Pipe()
        number = theirs.fileno()
        command = [*self._prefix, *prefix, sys.executable, "-m", module, str(number), *arguments]
        with theirs:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment(), pass_fds=[number], **options)


class Node(Party):
    """kvferryd, on a UNIX socket for its engines and a TCP port for others. Can be started again at the same place.

    Args:
        folder: for its socket and log.
        listen: ``host:port``.
        settings: more of kvferryd's flags, by name.
    """

    def __init__(self, folder: Path, listen: str, prefix: Sequence[str] = (), **settings: object) -> None:
        super().__init__(prefix)
        folder.mkdir(parents=True, exist_ok=True)
        self.listen = listen
        self.address = f"unix:{folder / 'node.sock'}"
        self._log = folder / "log"
        self._flags = ["--listen", listen, "--unix", str(folder / "node.sock"), "--insecure"]
        self._flags += [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", str(value))]

    def start(self, prefix: Sequence[str] = ()) -> Node:
        """Start it, with this behind the usual prefix of its command line."""
        with self._log.open("ab") as log:
            self._spawn("tests.support.faults.node_program", *self._flags, prefix=prefix, stdout=log, stderr=log)
        return self

    def ready(self) -> Node:
        """Wait until its health service says SERVING."""
        if wait_serving(self.address, lambda: self.alive):
            return self
        raise RuntimeError(f"kvferryd did not start:\n{self._log.read_text()}")

    def drain(self) -> None:
        """SIGTERM; waits until it has ended by itself."""
        self.process.terminate()
        if self.process.wait(SOON) != 0:
            raise RuntimeError(f"kvferryd did not end well:\n{self._log.read_text()}")

    def engines(self) -> dict[str, ipb.EngineSummary]:
        """What it knows, by engine_id."""
        with grpc.insecure_channel(self.address) as channel:
            listed = IntrospectionStub(channel).ListEngines(ipb.ListEnginesRequest(), timeout=SOON).engines
        return {summary.engine.engine_id: summary for summary in listed}

    def uptime(self) -> float:
        """Seconds since its start."""
        with grpc.insecure_channel(self.address) as channel:
            info = IntrospectionStub(channel).GetServerInfo(ipb.GetServerInfoRequest(), timeout=SOON)
        return float(info.uptime.ToTimedelta().total_seconds())

    def idle(self) -> bool:
        """Whether it knows of no publication, and of no lease that lives, but a hostile peer's (`tests.soak`)."""
        return not self.left()

    def left(self) -> list[str]:
        """The publications and the leases of others that it knows of."""
        with grpc.insecure_channel(self.address) as channel:
            asked = ipb.ListRequestsRequest(page_size=1000)
            requests = IntrospectionStub(channel).ListRequests(asked, timeout=SOON).requests
        left = [str(request) for request in requests if not request.engine.engine_id.startswith(HOSTILE)]
        leases = {name: engine.leases for name, engine in self.engines().items() if not name.startswith(HOSTILE)}
        return left + [f"{count} leases on {name}" for name, count in leases.items() if count]

    def held(self) -> Held:
        """What its process holds."""
        found: Held = self.call("held")
        return found


class EngineProcess(Party):
    """A process of an engine; `tests.support.faults.engine_program.Engine` says what it can be told. Starts at once."""

    def __init__(self, job: Job, prefix: Sequence[str] = ()) -> None:
        super().__init__(prefix)
        self._spawn("tests.support.faults.engine_program")
        self._ready = False
        self.pipe.send(job)

    def ready(self) -> EngineProcess:
        """Wait until it is registered. Idempotent."""
        if not self._ready:
            self.answer(START_TIMEOUT)
            self._ready = True
        return self

    def starting(self) -> Iterator[None]:
        """`ready` in steps that wait for nothing."""
        while not self._ready and not self.answers(0.0):
            yield
        self.ready()
