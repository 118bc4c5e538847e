"""The content of kvferryd's log, in both formats."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry._clock import now
from kvferry._wire.channel import connect
from kvferry_server.domain.journal import MOST_IN_WINDOW, WINDOW
from tests.support.node_servers import Kvferryd, command, environment
from tests.support.raw_parties import Party
from tests.support.waiting import until


def flags(path: Path, *more: str) -> list[str]:
    return ["--unix", str(path / "node.sock"), "--listen", "", "--drain", "0", "--ttl", "1", "--engine-ttl", "1", *more]


def a_day(server: Kvferryd) -> None:
    """An engine comes, a lease of it expires, and it goes."""
    with connect(server.address) as channel:
        party = Party(channel, "engine")
        # No shorter: a read that must succeed has to end within the ttl.
        party.live()
        until(lambda: "EXPIRED" in server.log)
        party.close()
        until(lambda: "engine_dead" in server.log)


def test_log_of_restarts_and_an_expired_lease_has_their_ids(tmp_path: Path) -> None:
    for _ in range(2):
        with Kvferryd(*flags(tmp_path)) as server:
            a_day(server)
        lines = server.log.splitlines()
        words = [line.split()[4] for line in lines if "kvferry_server.events" in line]
        assert words[:3] == ["engine_opened", "rank_registered", "engine_complete"]
        assert set(words[3:]) == {"lease_ended", "engine_lost", "engine_dead", "publication_ended", "draining"}
        (expired,) = [line for line in lines if "lease_ended" in line]
        for field in ("WARNING", "lease_number=1", "engine_id=engine-", "request_id=request-1", "peer=unix"):
            assert field in expired
        (ready,) = [line for line in lines if "ready" in line]
        assert " INFO " in ready
        assert "stopped" in lines[-1]


def test_json_log_has_an_object_in_every_line(tmp_path: Path) -> None:
    with Kvferryd(*flags(tmp_path, "--log-format", "json")) as server:
        a_day(server)
    entries = [json.loads(line) for line in server.log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(entry) for entry in entries)
    (ready,) = [entry for entry in entries if entry.get("event") == "ready"]
    assert (ready["level"], ready["epoch"]) == ("INFO", server.epoch)
    (expired,) = [entry for entry in entries if entry.get("event") == "lease_ended"]
    assert (expired["level"], expired["verdict"], expired["request_id"]) == ("WARNING", "EXPIRED", "request-1")
    assert expired["lease_number"] == 1


def test_ready_line_is_written_at_every_log_level(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    process = subprocess.Popen(
        command(*flags(tmp_path, "--log-level", "error")),
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    until(path.exists)
    process.send_signal(signal.SIGTERM)
    (line,) = process.communicate(timeout=30)[1].splitlines()
    assert "INFO kvferryd" in line
    assert "ready: listens on" in line


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_cannot_be_filled_by_strangers(tmp_path: Path, form: str) -> None:
    """Neither refused calls nor bytes that are not gRPC fill it; gRPC's own lines count as well."""
    began = now()
    with Kvferryd("--unix", "", "--listen", "127.0.0.1:0", "--drain", "0", "--log-format", form) as server:
        with connect(server.address) as channel:
            call: Any = channel.unary_unary("/kvferry.v1.KVTransfer/Notify")
            for _ in range(300):
                with pytest.raises(grpc.RpcError):
                    call(b"\xff\xff", timeout=10)
        host, _, port = server.address.rpartition(":")
        for _ in range(100):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    # Once, unless the machine is very slow.
    windows = 1 + int((now() - began) // WINDOW)
    refusals = [line for line in server.log.splitlines() if "INVALID_FIELD" in line]
    assert 0 < len(refusals) <= MOST_IN_WINDOW * windows
    assert len(server.log.splitlines()) < 40 * windows
