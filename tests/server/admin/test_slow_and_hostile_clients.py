"""No client of the admin listener can hurt the home, keep others out or fill the log."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web

from kvferry._wire.channel import Address
from kvferry_server.admin import page, service
from kvferry_server.admin.node_state import NodeState
from kvferry_server.admin.page import Html
from kvferry_server.admin.service import MAX_CONNECTIONS, AdminService
from kvferry_server.node.loading import configure
from kvferry_server.node.server import NodeServer
from tests.server.admin.conftest import Watched
from tests.support.admin_listeners import get
from tests.support.waiting import until


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208


def dial(admin: str) -> socket.socket:
    host, _, port = admin.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def test_silent_connections_keep_no_others_out(watched: Watched) -> None:
    before = open_files(watched.server.pid)
    with ExitStack() as stack:
        idle = [stack.enter_context(dial(watched.admin)) for _ in range(3 * MAX_CONNECTIONS)]
        for one in idle[::2]:
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        assert get(watched.admin, "/readyz").code == 200
        watched.party.works()
        until(lambda: open_files(watched.server.pid) <= before + MAX_CONNECTIONS + 8)
        # The oldest connections were ended.
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
def test_bytes_of_any_kind_end_in_an_answer_or_a_closed_connection(watched: Watched, request_bytes: bytes) -> None:
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


def test_connection_has_one_request(watched: Watched) -> None:
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


async def test_oldest_connection_ends_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "CONNECTION_SECONDS", 3600)
    monkeypatch.setattr(service, "MAX_CONNECTIONS", 4)

    async def answer(*_: object) -> web.StreamResponse:
        return web.Response(text="here")

    monkeypatch.setattr(AdminService, "_answer", answer)
    served = AdminService(cast(NodeState, None), Address(host="127.0.0.1", port=0), local=True)
    await served.start()
    try:
        opened = [await asyncio.open_connection(served.address.host, served.address.port) for _ in range(5)]
        with suppress(ConnectionError):
            assert await asyncio.wait_for(opened[0][0].read(), 30) == b""
        for reader, writer in opened[1:]:
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), 30)).endswith(b"here")
        for _, writer in opened:
            writer.close()
    finally:
        await served.close()


async def test_connection_lasts_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the client sends nothing, or never ends its request."""
    monkeypatch.setattr(service, "CONNECTION_SECONDS", 0.2)

    async def answer(*_: object) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    monkeypatch.setattr(AdminService, "_answer", answer)
    served = AdminService(cast(NodeState, None), Address(host="127.0.0.1", port=0), local=True)
    await served.start()
    try:
        for said in (b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            reader, writer = await asyncio.open_connection(served.address.host, served.address.port)
            writer.write(said)
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()
    finally:
        await served.close()


def test_clients_that_take_nothing_are_dropped(watched: Watched) -> None:
    before = open_files(watched.server.pid)
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            connection = stack.enter_context(dial(watched.admin))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        watched.party.works()
        assert get(watched.admin, "/healthz").code == 200
        until(lambda: open_files(watched.server.pid) <= before + 8, within=40)


async def test_pages_take_a_share_of_the_event_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A client that requests page after page waits; the event loop goes on."""
    node = NodeServer(configure(unix=str(tmp_path / "node.sock"), listen="", admin="127.0.0.1:0"))
    made: list[float] = []

    def slow(*_: object) -> Html:
        made.append(time.monotonic())
        time.sleep(0.05)
        return Html("")

    monkeypatch.setattr(page, "front", slow)
    await node.start()
    try:
        await asyncio.gather(*(asyncio.to_thread(get, node.admin, f"/?engines={index}") for index in range(4)))
    finally:
        await node.stop(0)
    # The pause is a lower bound, so a busy machine changes nothing.
    assert min(after - before for before, after in itertools.pairwise(made)) >= 0.4
