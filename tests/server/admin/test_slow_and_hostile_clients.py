"""No client of the admin listener can hurt the home, keep others out or fill the log."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry_server.admin.limits import MAX_CONNECTIONS
from tests.server.admin.conftest import Watched
from tests.support.admin_listeners import get
from tests.support.waiting import until


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208


def dial(admin: str) -> socket.socket:
    host, _, port = admin.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_connections_that_say_nothing_keep_nobody_out(watched: Watched) -> None:
    before = open_files(watched.server.pid)
    with ExitStack() as stack:
        idle = [stack.enter_context(dial(watched.admin)) for _ in range(3 * MAX_CONNECTIONS)]
        for one in idle[::2]:
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        assert get(watched.admin, "/readyz").code == 200
        watched.party.works()
        until(lambda: open_files(watched.server.pid) <= before + MAX_CONNECTIONS + 8)
        # The oldest ones were ended.
        assert idle[0].recv(1) == b""


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\n" + bytes(1 << 16),
        b"GET /%00%0d%0aSet-Cookie:x HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["tls", "version", "path", "headers", "header", "body", "control", "host", "http2"],
)
def test_any_bytes_end_in_an_answer_or_the_end_of_the_connection(watched: Watched, request_bytes: bytes) -> None:
    logged = len(watched.server.log)
    with dial(watched.admin) as connection:
        answer = b""
        try:
            connection.sendall(request_bytes)
            while more := connection.recv(65536):
                answer += more
        except ConnectionError:
            pass
    assert b"Set-Cookie:x" not in answer.partition(b"\r\n\r\n")[0]
    assert get(watched.admin, "/healthz").code == 200
    assert "Traceback" not in watched.server.log
    assert len(watched.server.log) - logged < 1000


def test_one_connection_has_one_request(watched: Watched) -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with dial(watched.admin) as connection:
        connection.sendall(request * 50)
        answer = b""
        try:
            while more := connection.recv(65536):
                answer += more
        except ConnectionError:
            pass
    assert answer.count(b"HTTP/1.1 200") == 1


def test_clients_that_take_nothing_are_dropped(watched: Watched, tmp_path: Path) -> None:
    before = open_files(watched.server.pid)
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            connection = stack.enter_context(dial(watched.admin))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        watched.party.works()
        assert get(watched.admin, "/healthz").code == 200
        until(lambda: open_files(watched.server.pid) <= before + 8, within=40)
