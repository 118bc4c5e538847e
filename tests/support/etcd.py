"""A real etcd of Debian's package etcd-server, and what an operator does to it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import grpc
import pytest

from kvferry._directory import etcd_v3_pb2
from kvferry._directory.etcd import PACKAGE
from kvferry._wire.channel import TlsConfig
from tests.support.node_servers import free_port
from tests.support.waiting import until

PROGRAMS = ("etcd", "etcdctl")


class Etcd:
    """One member of a cluster of one, from the first `start` until the end of the block; its data stays over restarts.

    Leases last 1 s at least: its elections are quick.

    Args:
        folder: for its data and log.
        tls: its certificate, and the authority of its clients; None: no TLS.
        flags: further flags.
    """

    def __init__(self, folder: Path, tls: TlsConfig | None = None, flags: Sequence[str] = ()) -> None:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            pytest.skip(f"etcd is not installed: {', '.join(missing)}")
        self._folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.url = f"{'etcd' if tls is None else 'etcds'}://{self.address}/fleet"
        self._tls = tls
        self._flags = flags
        self._client = f"{'http' if tls is None else 'https'}://{self.address}"
        self._peer = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        before = self._readies()
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("etcd", "--name", "one", "--data-dir", str(self._folder / "data")),
                    *("--listen-client-urls", self._client, "--advertise-client-urls", self._client),
                    *("--listen-peer-urls", self._peer),
                    *("--initial-advertise-peer-urls", self._peer, "--initial-cluster", f"one={self._peer}"),
                    *("--heartbeat-interval", "10", "--election-timeout", "50"),
                    *self._flags,
                    *self._files("--cert-file", "--key-file", "--trusted-ca-file", "--client-cert-auth"),
                ],
                stdout=log,
                stderr=log,
            )
        try:
            # Not by a call: with users, or a certificate that serves no clients, etcdctl has no access.
            until(lambda: self._readies() > before)
        except BaseException:
            self.stop()
            raise

    def ctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run etcdctl."""
        command = [
            "etcdctl",
            "--endpoints",
            self.address,
            "--command-timeout",
            "30s",
            "--dial-timeout",
            "10s",
            *arguments,
        ]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=check, timeout=60)

    def put(self, key: str, value: bytes) -> None:
        """Write a value of any size; etcdctl takes small ones only."""
        with grpc.insecure_channel(self.address) as channel:
            request = etcd_v3_pb2.PutRequest(key=key.encode(), value=value)
            put = channel.unary_unary(f"{PACKAGE}KV/Put", type(request).SerializeToString, etcd_v3_pb2.Done.FromString)
            put(request, timeout=30)

    def keys(self, *flags: str) -> list[str]:
        """All keys of the fleet."""
        return [line for line in self.ctl("get", "--prefix", "/fleet/", "--keys-only", *flags).stdout.split() if line]

    def _readies(self) -> int:
        log = self._folder / "etcd.log"
        return log.read_text().count("ready to serve client requests") if log.exists() else 0

    def _files(self, cert: str, key: str, ca: str, *more: str) -> list[str]:
        tls = self._tls
        return [] if tls is None else [cert, f"{tls.cert}", key, f"{tls.key}", ca, f"{tls.ca}", *more]

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal. After SIGSTOP, wait until it has stopped: until then it answers."""
        if self._process is None:
            raise RuntimeError("etcd is not running")
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def stop(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def __enter__(self) -> Etcd:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
