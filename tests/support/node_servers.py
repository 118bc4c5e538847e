"""Node servers in processes of their own: one that can be started again at its place, and one whose log is read."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry._wire.channel import TlsConfig, connect
from kvferry._wire.status import from_rpc_error
from kvferry.errors import EngineUnknown
from kvferry.v1.introspection_pb2 import GetEngineRequest
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub
from tests.support.loaded_processes import LOADED
from tests.support.waiting import stop, until

READY = re.compile(r"ready: listens on (.+), advertises ([^\s,]+), epoch ([0-9a-f]+)(?:, admin http://([^/\s]+)/)?")
SIZE = ("LINES", "COLUMNS")
"""Variables that win over the size of the terminal that a program has."""
START_TIMEOUT = 120.0
"""Seconds; an emulated machine takes ten times as long as its host."""
OFTEN = [(f"grpc.{name}_reconnect_backoff_ms", 50) for name in ("initial", "min", "max")]
"""A channel's options: it tries to connect again at once, and not after a second, to what is being started."""
STOP_TIMEOUT = 30.0


def free_port() -> int:
    """A TCP port that nobody has at the moment, and that the kernel gives to no connection of anybody."""
    first, last = (int(port) for port in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    while True:
        port = random.randrange(1024, 65536)
        if first <= port <= last:
            continue
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def wait_serving(address: str, alive: Callable[[], bool]) -> bool:
    """Wait until the health service at an address says SERVING, as long as its process is alive; whether it does."""
    deadline = time.monotonic() + START_TIMEOUT
    with grpc.insecure_channel(address, OFTEN) as channel:
        # The health service's stubs have no types.
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while alive() and time.monotonic() < deadline:
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
            except grpc.RpcError:
                continue
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return True
    return False


def environment(**more: str) -> dict[str, str]:
    """This process's environment without settings of kvferry, and without what kvferryd sets where it runs. Node
    servers have no admin listener unless they are told to: only one could have its default port. Nor has it a
    terminal's size, which pytest-xdist's workers are given: readline sets it in the process that starts them."""
    ours = ("KVFERRY_", "KVFERRYD_", "GRPC_VERBOSITY")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours) and name not in SIZE}
    return {**kept, "KVFERRYD_ADMIN": "", **more}


MODULE = ("-m", "kvferry_server.node.main")
"""Arguments of Python that run kvferryd."""


def kvferryd(
    flags: Sequence[str],
    outputs: Mapping[int, Path | Connection],
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = (),
) -> BaseProcess:
    """Start kvferryd in a process that has imported it already, which is quicker than a new one.

    Args:
        flags: of kvferryd.
        outputs: where its stdout (1) and its stderr (2) go; as this process's, if they are not named.
        env: more of the environment.
        program: arguments of a new Python that runs it instead.
    """
    job = (tuple(flags), dict(outputs), environment(**(env or {})), Path.cwd(), tuple(program))
    process = LOADED.Process(target=_run, args=job, daemon=True)
    process.start()
    return process


def _run(
    flags: Sequence[str],
    outputs: Mapping[int, Path | Connection],
    env: Mapping[str, str],
    folder: Path,
    program: Sequence[str],
) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for number, output in outputs.items():
        with output.open("ab") if isinstance(output, Path) else output as file:
            os.dup2(file.fileno(), number)
    if program:
        os.execv(sys.executable, [sys.executable, *program, *flags])
    # Imported here, so that the clients of a server need nothing of the extra `server`.
    from kvferry_server.node.main import run

    sys.exit(run(flags))


class NodeServerProcess:
    """kvferryd on a socket or a free port of its own, until the end of the block.

    Args:
        folder: for its socket and log.
        tcp: on a TCP port of loopback; else on a UNIX socket.
        settings: more of kvferryd's flags, by name.
    """

    def __init__(self, folder: Path, *, tcp: bool = False, **settings: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}" if tcp else f"unix:{folder / 'node.sock'}"
        self._listen = ["--listen", self.address, "--unix", ""] if tcp else ["--listen", "", "--unix", self.address[5:]]
        self._flags = [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        self._process: BaseProcess | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        if self._process is None or self._process.pid is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def start(self) -> NodeServerProcess:
        """Start it, and wait until its health service says SERVING."""
        log = self.folder / "log"
        process = self._process = kvferryd((*self._listen, *self._flags), {1: log, 2: log})
        if wait_serving(self.address, process.is_alive):
            return self
        raise RuntimeError(f"kvferryd did not start:\n{log.read_text()}")

    def settled(self) -> None:
        """Wait until it does not wait for the engines of a predecessor any more; until then it takes every incarnation
        of an engine_id. Give it a short `engine_ttl`."""
        with grpc.insecure_channel(self.address) as channel:
            get_engine = IntrospectionStub(channel).GetEngine

            def waits_for_nobody() -> bool:
                with pytest.raises(grpc.RpcError) as caught:
                    get_engine(GetEngineRequest(engine_id="nobody"), timeout=5.0)
                return isinstance(from_rpc_error(caught.value, self.address), EngineUnknown)

            until(waits_for_nobody, START_TIMEOUT)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it; its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, how)
        return self._ended(STOP_TIMEOUT)

    def ended(self) -> int:
        """Wait until it ends by itself; its exit code."""
        return self._ended(START_TIMEOUT)

    def _ended(self, within: float) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        self._process.join(within)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"kvferryd has not ended within {within} s")
        self._process = None
        return code

    def __enter__(self) -> NodeServerProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.stop()


def command(*arguments: str) -> list[str]:
    """The command line of a server."""
    return [sys.executable, *MODULE, *arguments]


def refused(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a server that must end by itself."""
    with TemporaryDirectory() as folder:
        said, complained = Path(folder, "stdout"), Path(folder, "stderr")
        process = kvferryd(arguments, {1: said, 2: complained})
        process.join(START_TIMEOUT)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"kvferryd has not ended:\n{complained.read_text()}")
        return subprocess.CompletedProcess(arguments, process.exitcode, said.read_text(), complained.read_text())


class Kvferryd:
    """A running server. A context manager, which ends it; `log` is what it has written so far.

    Args:
        arguments: flags of kvferryd.
        env: more of the environment.
        program: arguments of a new Python that runs kvferryd; none: a process that has imported it already.
    """

    def __init__(self, *arguments: str, env: Mapping[str, str] | None = None, program: Sequence[str] = ()) -> None:
        said, theirs = LOADED.Pipe(duplex=False)
        self._process = kvferryd(arguments, {2: theirs}, env, program)
        theirs.close()
        self._lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(said,), daemon=True)
        self._reader.start()
        self._ready.wait(START_TIMEOUT)
        started = READY.search(self.log)
        if started is None:
            self.end()
            raise RuntimeError(f"kvferryd did not start:\n{self.log}")
        self.addresses = started[1].split(" and ")
        self.advertise, self.epoch = started[2], started[3]
        self.admin = started[4] or ""

    @property
    def address(self) -> str:
        """The first address: the UNIX socket if there is one."""
        return self.addresses[0]

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return "".join(self._lines)

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def resident(self) -> int:
        """Bytes of memory that it has."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send it a signal. After SIGSTOP, wait until it has stopped: until then it answers."""
        if number == signal.SIGSTOP:
            stop(self.pid)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code.

        Raises:
            TimeoutError: it does not end.
        """
        self._process.join(STOP_TIMEOUT)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"kvferryd has not ended within {STOP_TIMEOUT} s:\n{self.log}")
        self._reader.join(STOP_TIMEOUT)
        return code

    def kill(self) -> None:
        """As the kernel would: nothing is cleaned up."""
        self._process.kill()
        self.wait()

    def end(self) -> None:
        if self.running:
            self.signal()
        try:
            self.wait()
        except TimeoutError:
            self.kill()
            raise

    def __enter__(self) -> Kvferryd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def _read(self, said: Connection) -> None:
        with os.fdopen(os.dup(said.fileno()), encoding="utf-8", errors="replace") as lines, said:
            for line in lines:
                self._lines.append(line)
                if READY.search(line):
                    self._ready.set()
        self._ready.set()


def serves(address: str, tls: TlsConfig | None = None) -> bool:
    """Whether a server answers that it serves."""
    with connect(address, tls) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
