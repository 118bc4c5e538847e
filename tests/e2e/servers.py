"""A node server in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry._wire.status import from_rpc_error
from kvferry.errors import EngineUnknown
from kvferry.v1.introspection_pb2 import GetEngineRequest
from kvferry.v1.introspection_pb2_grpc import IntrospectionStub

START_TIMEOUT = 30.0


def free_port() -> int:
    """A TCP port that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def start(self) -> NodeServerProcess:
        """Start it, and wait until its health service says SERVING."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KVFERRY_")}
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvferry_server.node.main", *self._listen, *self._flags],
                stdout=log,
                stderr=log,
                env=environment,
            )
        deadline = time.monotonic() + START_TIMEOUT
        with grpc.insecure_channel(self.address) as channel:
            # The health service's stubs have no types.
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while self._process.poll() is None and time.monotonic() < deadline:
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
                except grpc.RpcError:
                    continue
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return self
        raise RuntimeError(f"kvferryd did not start:\n{(self.folder / 'log').read_text()}")

    def settled(self) -> None:
        """Wait until it does not wait for the engines of a predecessor any more; until then it takes every incarnation
        of an engine_id. Give it a short `engine_ttl`."""
        deadline = time.monotonic() + START_TIMEOUT
        with grpc.insecure_channel(self.address) as channel:
            stub = IntrospectionStub(channel)
            while time.monotonic() < deadline:
                with pytest.raises(grpc.RpcError) as caught:
                    stub.GetEngine(GetEngineRequest(engine_id="nobody"), timeout=5.0)
                if isinstance(from_rpc_error(caught.value, self.address), EngineUnknown):
                    return
        raise RuntimeError("kvferryd goes on waiting for engines")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it; its exit code."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        self._process.send_signal(how)
        code = self._process.wait(30)
        self._process = None
        return code

    def ended(self) -> int:
        """Wait until it ends by itself; its exit code."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        code = self._process.wait(START_TIMEOUT)
        self._process = None
        return code

    def __enter__(self) -> NodeServerProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.stop()
