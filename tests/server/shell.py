"""`kvferryd` in a process of its own, and certificates, for tests of the server as a whole."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry._wire.channel import TlsConfig, connect

READY = re.compile(r"ready: listens on (.+), advertises (\S+), epoch ([0-9a-f]+)")
START_TIMEOUT = 30.0
STOP_TIMEOUT = 30.0


def environment(**more: str) -> dict[str, str]:
    """This process's environment without settings of kvferry."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    return {**kept, **more}


def command(*arguments: str) -> list[str]:
    """The command line of a server."""
    return [sys.executable, "-m", "kvferry_server.node.main", *arguments]


def refused(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a server that must end by itself."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment(), timeout=START_TIMEOUT, check=False
    )


class Kvferryd:
    """A running server. A context manager, which ends it; `log` is what it has written so far.

    Args:
        arguments: flags of kvferryd.
        env: more of the environment.
        program: arguments of Python that run kvferryd.
    """

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "kvferry_server.node.main"),
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**(env or {})),
        )
        self._lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready.wait(START_TIMEOUT)
        started = READY.search(self.log)
        if started is None:
            self.end()
            raise RuntimeError(f"kvferryd did not start:\n{self.log}")
        self.addresses = started[1].split(" and ")
        self.advertise, self.epoch = started[2], started[3]

    @property
    def address(self) -> str:
        """The first address: the UNIX socket if there is one."""
        return self.addresses[0]

    @property
    def log(self) -> str:
        return "".join(self._lines)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def resident(self) -> int:
        """Bytes of memory that it has."""
        fields = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        code = self._process.wait(STOP_TIMEOUT)
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
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            if self._process.stderr is not None:
                self._process.stderr.close()

    def __enter__(self) -> Kvferryd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def _read(self) -> None:
        if self._process.stderr is None:
            return
        for line in self._process.stderr:
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


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority in a folder."""

    folder: Path
    name: str

    @classmethod
    def make(cls, folder: Path, name: str) -> Authority:
        authority = cls(folder, name)
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", f"{folder / name}.key", "-out", f"{authority.certificate}"),
        )
        return authority

    @property
    def certificate(self) -> Path:
        return self.folder / f"{self.name}.pem"

    def issue(self, name: str, names: str = "DNS:localhost,IP:127.0.0.1", subject: str = "") -> TlsConfig:
        """A certificate, for this host unless it has other `names`, and the authority to check others with. Its
        subject is its common name unless given."""
        key, cert, request = (self.folder / f"{self.name}-{name}.{ending}" for ending in ("key", "pem", "csr"))
        extensions = self.folder / f"{self.name}-{name}.ext"
        extensions.write_text(f"subjectAltName={names}\n" if names else "")
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", subject or f"/CN={name}", "-keyout", f"{key}", "-out", f"{request}"),
        )
        _openssl(
            *(
                "x509",
                "-req",
                "-in",
                f"{request}",
                "-CA",
                f"{self.certificate}",
                "-CAkey",
                f"{self.folder / self.name}.key",
            ),
            *("-set_serial", "1", "-days", "2", "-extfile", f"{extensions}", "-out", f"{cert}"),
        )
        return TlsConfig(ca=self.certificate, cert=cert, key=key)


def tls_flags(tls: TlsConfig) -> Sequence[str]:
    """The flags of a server or of the command line for these files."""
    files = (("--tls-ca", tls.ca), ("--tls-cert", tls.cert), ("--tls-key", tls.key))
    return [part for flag, path in files if path is not None for part in (flag, str(path))]


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
