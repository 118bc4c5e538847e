"""kvferryd's messages to systemd, on a socket like those of systemd's units."""

from __future__ import annotations

import re
import secrets
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.node_servers import Kvferryd, refused, serves

SOON = 30.0


class Manager:
    """The receiving end."""

    def __init__(self, name: str) -> None:
        """`name` is as in NOTIFY_SOCKET."""
        self.name = name
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"\0{name[1:]}" if name.startswith("@") else name)
        self.socket.settimeout(SOON)

    def hears(self) -> dict[str, str]:
        """Wait for the next message."""
        lines = self.socket.recv(4096).decode().split("\n")
        return {key: value for key, _, value in (line.partition("=") for line in lines)}


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify") if request.param == "path" else f"@kvferry-{secrets.token_hex(8)}")
    with made.socket:
        yield made


def test_ready_is_sent_when_the_server_serves_and_stopping_when_it_drains(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.name)
    path = tmp_path / "node.sock"
    with Kvferryd("--unix", str(path), "--listen", "", "--drain", "7") as server:
        assert manager.hears() == {"READY": "1", "STATUS": f"listens on unix:{path}"}
        # At once, because units that start after this one connect.
        assert serves(f"unix:{path}")
        server.signal(signal.SIGHUP)
        reloading = manager.hears()
        assert reloading["RELOADING"] == "1"
        assert re.fullmatch(r"\d+", reloading["MONOTONIC_USEC"])
        assert manager.hears()["READY"] == "1"
        assert serves(f"unix:{path}")
        server.signal()
        stopping = manager.hears()
        assert stopping["STOPPING"] == "1"
        # systemd does not kill kvferryd during its drain, however long --drain is.
        assert int(stopping["EXTEND_TIMEOUT_USEC"]) > 7_000_000
        assert server.wait() == 0


def test_server_that_cannot_start_is_never_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", manager.name)
    with manager.socket, socket.create_server(("127.0.0.1", 0)) as taken:
        done = refused("--unix", "", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        assert done.returncode == 1
        manager.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.hears()


def test_service_manager_that_is_gone_does_not_stop_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    with Kvferryd("--unix", str(tmp_path / "node.sock"), "--listen", "") as server:
        assert serves(server.address)
        server.signal()
        assert server.wait() == 0
        assert "could not notify the service manager of STOPPING=1" in server.log
