"""What gRPC's own library writes: kvferryd counts handshakes that fail, and nothing else gets into its log as it is."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry._clock import now
from kvferry._wire.channel import MAX_CLIENT_CHAIN_BYTES, TlsConfig, chain_bytes
from kvferry_server.domain.journal import MOST_IN_WINDOW, WINDOW
from tests.support.certificates import Authority, tls_flags
from tests.support.command_line import run_kvferry
from tests.support.node_servers import Kvferryd, command, environment, wait_serving
from tests.support.waiting import until

PORT_SCAN = b"GET / HTTP/1.1\r\n\r\n"
NAMES = ",".join(f"DNS:node-{number:05d}.some-long-fleet-name.example.internal" for number in range(200))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("theirs"), "theirs")


def mutual(ours: Authority, **env: str) -> Kvferryd:
    flags = ["--unix", "", "--listen", "127.0.0.1:0", "--drain", "0", *tls_flags(ours.issue("node"))]
    return Kvferryd(*flags, "--admin", "127.0.0.1:0", "--log-format", "json", env=env)


def counted(server: Kvferryd, least: int, reason: str) -> None:
    """Wait until so many handshakes have failed for this reason: a scrape may be half a second old."""
    sample = re.compile(rf'^kvferry_tls_handshakes_failed_total\{{reason="{reason}"\}} (.+)$', re.MULTILINE)

    def there() -> bool:
        with urllib.request.urlopen(f"http://{server.admin}/metrics", timeout=10) as answer:
            found = sample.search(answer.read().decode())
        return found is not None and float(found[1]) >= least

    until(there)


def scan(server: Kvferryd) -> None:
    """A client without TLS connects, and is rejected."""
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as stranger:
        stranger.sendall(PORT_SCAN)
        while stranger.recv(1024):
            pass


def test_failed_handshakes_are_counted_by_reason_and_logged_as_json(ours: Authority, theirs: Authority) -> None:
    with mutual(ours) as server:

        def ask(cert: TlsConfig | None) -> None:
            own = [] if cert is None else ["--tls-cert", str(cert.cert), "--tls-key", str(cert.key)]
            done = run_kvferry("engines", "--server", server.address, "--tls-ca", str(ours.certificate), *own)
            assert done.returncode == 1

        failing: dict[str, Callable[[], None]] = {
            "no_certificate": lambda: ask(None),
            "untrusted": lambda: ask(theirs.issue("client")),
            "expired": lambda: ask(ours.issue("old", days=-1)),
            "not_tls": lambda: scan(server),
        }
        for reason, fail in failing.items():
            fail()
            counted(server, 1, reason)
        # With this certificate gRPC's server writes an error that is no failed handshake.
        ask(ours.issue("large", names=NAMES))
        until(lambda: "SSL_write" in server.log)
    entries = [json.loads(line) for line in server.log.splitlines()]
    told = {entry["reason"]: entry["problem"] for entry in entries if entry.get("event") == "handshake_failed"}
    assert told.keys() == failing.keys()
    assert "expired" in told["expired"]
    assert any(entry.get("event") == "grpc" and "SSL_write" in entry["text"] for entry in entries)


def test_failed_handshakes_cannot_fill_the_log(ours: Authority) -> None:
    began = now()
    with mutual(ours) as server:
        for _ in range(5 * MOST_IN_WINDOW):
            scan(server)
        counted(server, 5 * MOST_IN_WINDOW, "not_tls")
    lines = [line for line in server.log.splitlines() if "handshake_failed" in line]
    windows = 1 + int((now() - began) // WINDOW)
    assert 0 < len(lines) <= MOST_IN_WINDOW * windows


def test_server_that_cannot_start_reports_it_in_the_format_of_the_log(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ["--unix", "", "--listen", f"127.0.0.1:{taken.getsockname()[1]}", "--log-format", "json"]
        done = subprocess.run(command(*flags), capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 1
    assert [json.loads(line)["level"] for line in done.stderr.splitlines()] == ["CRITICAL"]
    assert "cannot listen" in done.stderr


CRASH = """
import ctypes, sys
from kvferry_server.node.logs import NativeLog
native = NativeLog("info", "text", verbose=False)
how, words = sys.argv[1], b"Check failed: last words\\n"
if how == "fatal":
    ctypes.pythonapi.Py_FatalError(words)
# PyDLL keeps the interpreter's lock, so that no Python thread runs any more.
libc = (ctypes.PyDLL if how == "locked" else ctypes.CDLL)(None)
libc.write(2, words, len(words))
libc.abort()
"""


@pytest.mark.parametrize("how", ["locked", "free", "fatal"])
def test_last_words_of_aborting_native_code_are_kept(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", CRASH, how], capture_output=True, text=True, timeout=60, check=False)
    # Python's fault handler, which shows the frames of threads that run on, may itself fault.
    assert done.returncode in (-signal.SIGABRT, -signal.SIGSEGV)
    assert "Check failed: last words" in done.stderr


def test_kvferryd_serves_without_stderr(tmp_path: Path) -> None:
    socket_path = tmp_path / "node.sock"
    flags = command("--unix", str(socket_path), "--listen", "", "--drain", "0")
    with subprocess.Popen(["sh", "-c", 'exec "$@" 2>&-', "sh", *flags], env=environment()) as process:
        try:
            assert wait_serving(f"unix:{socket_path}", lambda: process.poll() is None)
        finally:
            process.terminate()
    assert process.returncode == 0


def test_failed_handshakes_are_counted_at_any_verbosity(ours: Authority) -> None:
    with mutual(ours, GRPC_VERBOSITY="ERROR") as server:
        scan(server)
        counted(server, 1, "not_tls")


def test_embedded_server_leaves_stderr_and_grpcs_settings_to_its_process() -> None:
    code = (
        "import os, kvferry\n"
        "before = os.readlink('/proc/self/fd/2'), os.environ.get('GRPC_VERBOSITY')\n"
        "with kvferry.serve(unix='', listen='127.0.0.1:0'):\n"
        "    assert (os.readlink('/proc/self/fd/2'), os.environ.get('GRPC_VERBOSITY')) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=60)


def test_command_prints_only_its_own_message(ours: Authority, theirs: Authority) -> None:
    with mutual(ours) as server:
        # A separate process, because the test reads lines of native code.
        asked = ["engines", "--server", server.address, "--tls-ca", str(theirs.certificate)]
        told = [sys.executable, "-m", "kvferry._cli", *asked]
        done = subprocess.run(told, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("kvferry: ")
    assert len(done.stderr.splitlines()) == 1
    assert "does not trust" in done.stderr


def test_certificate_too_large_for_a_client_is_named(ours: Authority) -> None:
    large = ours.issue("large", names="DNS:localhost,IP:127.0.0.1," + NAMES)
    assert large.cert is not None
    size = chain_bytes(large.cert.read_bytes())
    assert size > MAX_CLIENT_CHAIN_BYTES
    with mutual(ours) as server:
        done = run_kvferry("engines", "--server", server.address, *tls_flags(large))
    assert f"has {size} bytes of certificates" in done.stderr


def test_certificate_of_the_documented_size_connects(ours: Authority) -> None:
    """The limit is gRPC's, and may differ in newer versions."""
    names = NAMES.split(",")[:158]
    almost = ours.issue("almost", names=",".join(names))
    assert almost.cert is not None
    assert MAX_CLIENT_CHAIN_BYTES - 400 < chain_bytes(almost.cert.read_bytes()) <= MAX_CLIENT_CHAIN_BYTES
    with mutual(ours) as server:
        done = run_kvferry("engines", "--server", server.address, *tls_flags(almost))
    assert done.returncode == 0, done.stderr
