"""A real etcd of Debian's package etcd-server, alone or as a cluster, and what an operator does to it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
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


MEMBERS = 3
"""Of a cluster: it goes on without one of them, and not without two."""
CALM = ("--heartbeat-interval", "100", "--election-timeout", "1000")
"""Flags of a cluster's members, which share a machine with everything else."""


def lacking() -> list[str]:
    """The programs that are not installed."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class Etcd:
    """One member of a cluster, of one if nothing is said, from the first `start` until the end of the block; its data
    stays over restarts.

    Leases last 1 s at least: its elections are quick.

    Args:
        folder: for its data and log.
        tls: its certificate, and the authority of its clients; None: no TLS.
        flags: further flags.
        name: in the cluster.
        peers: URLs for the members of the cluster, by their names; None: it is alone.
    """

    def __init__(
        self,
        folder: Path,
        tls: TlsConfig | None = None,
        flags: Sequence[str] = (),
        name: str = "one",
        peers: Mapping[str, str] | None = None,
    ) -> None:
        missing = lacking()
        if missing:
            pytest.skip(f"etcd is not installed: {', '.join(missing)}")
        self._folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.url = f"{'etcd' if tls is None else 'etcds'}://{self.address}/fleet"
        self._tls = tls
        self._flags = flags
        self._client = f"{'http' if tls is None else 'https'}://{self.address}"
        self._name = name
        self._peers = peers or {name: f"http://127.0.0.1:{free_port()}"}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        before = self._readies()
        self.launch()
        try:
            # Not by a call: with users, or a certificate that serves no clients, etcdctl has no access.
            until(lambda: self._readies() > before)
        except BaseException:
            self.stop()
            raise

    def launch(self) -> None:
        """Start it. A member of a cluster does not answer before most of them are there."""
        peer = self._peers[self._name]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("etcd", "--name", self._name, "--data-dir", str(self._folder / "data")),
                    *("--listen-client-urls", self._client, "--advertise-client-urls", self._client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", ",".join(f"{name}={url}" for name, url in self._peers.items())),
                    *("--heartbeat-interval", "10", "--election-timeout", "50"),
                    *self._flags,
                    *self._files("--cert-file", "--key-file", "--trusted-ca-file", "--client-cert-auth"),
                ],
                stdout=log,
                stderr=log,
            )

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


def cluster(folder: Path) -> tuple[str, list[Etcd]]:
    """Start a cluster of `MEMBERS`, with the data of each in a folder of its own: its URL, and the members."""
    peers = {f"member-{number}": f"http://127.0.0.1:{free_port()}" for number in range(MEMBERS)}
    members = []
    for name in peers:
        (folder / name).mkdir(parents=True)
        members.append(Etcd(folder / name, flags=CALM, name=name, peers=peers))
        members[-1].launch()
    addresses = ",".join(member.address for member in members)
    return f"etcd://{addresses}/fleet", members
