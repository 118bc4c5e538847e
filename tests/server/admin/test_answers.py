"""The answers of the admin listener: probes, state, lists; and to which clients."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from kvferry._wire.channel import connect
from kvferry_server.node.loading import configure
from kvferry_server.node.server import NodeServer
from tests.server.admin.conftest import Watched
from tests.support.admin_listeners import Got, get
from tests.support.node_servers import Kvferryd, free_port, refused
from tests.support.raw_parties import Party
from tests.support.waiting import until


def test_probes_answer_ok(watched: Watched) -> None:
    for path in ("/healthz", "/readyz"):
        got = get(watched.admin, path)
        assert (got.code, got.text) == (200, "ok\n")


def test_draining_server_is_healthy_but_not_ready_with_the_reason(tmp_path: Path) -> None:
    flags = ["--unix", str(tmp_path / "node.sock"), "--listen", "", "--admin", "127.0.0.1:0", "--drain", "60"]
    with Kvferryd(*flags) as server, connect(server.address) as channel:
        party = Party(channel, "engine")
        party.live()
        # The lease is live, so the drain lasts.
        server.signal()
        until(lambda: get(server.admin, "/readyz").code == 503)
        assert get(server.admin, "/readyz").text == "draining\n"
        assert get(server.admin, "/healthz").code == 200
        assert get(server.admin, "/statusz").json["draining"] is True
        server.signal(signal.SIGINT)
        party.close()
        assert server.wait() == 0


def test_state_shows_version_engines_and_settings(watched: Watched) -> None:
    state = get(watched.admin, "/statusz").json
    assert state["epoch"].startswith(watched.server.epoch)
    assert state["addresses"] == watched.server.addresses
    assert state["advertise"] == watched.server.advertise
    assert state["ready"] is True
    assert state["engines"] == {"ready": 1}
    assert state["leases"] == {"reading": 1}
    assert state["leases_ended"] == {"valid": 1}
    assert state["limits"]["engines"] == 1024
    assert state["settings"]["ttl"] == 600


def test_lists_come_in_pages(watched: Watched) -> None:
    lists = {"engines": "engines", "requests": "requests", "reads": "transfers"}
    engines, requests, reads = (get(watched.admin, f"/statusz/{path}").json[name] for path, name in lists.items())
    assert [row["engine"]["engine_id"] for row in engines] == [watched.party.name]
    assert {row["request_id"] for row in requests} == {"request-1", "request-2"}
    assert {row["read"]["state"] for row in reads} >= {"READ_STATE_READING", "READ_STATE_VALID"}
    for _ in range(60):
        watched.party.publish()
    page = get(watched.admin, "/statusz/requests").json
    assert len(page["requests"]) == 50
    rest = get(watched.admin, f"/statusz/requests?page_token={page['next_page_token']}").json
    assert rest["next_page_token"] == ""
    numbers = [row["publication"] for row in page["requests"] + rest["requests"]]
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    ended = get(watched.admin, "/statusz/last-reads").json["reads"]
    assert [row["state"] for row in ended] == ["valid"]
    assert ended[0]["bytes"] == 7


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/nothing", 404),
        ("/statusz/reads?page_token=%00%ff%21", 404),
        ("/?" + "&".join(f"a{index}=1" for index in range(40)), 400),
    ],
)
def test_bad_path_gets_a_plain_answer(watched: Watched, path: str, code: int) -> None:
    got = get(watched.admin, path)
    assert got.code == code
    assert "Traceback" not in got.text


async def test_page_that_cannot_be_made_is_no_malformed_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def front(*_: object) -> None:
        raise ValueError("Value out of range")

    monkeypatch.setattr("kvferry_server.admin.page.front", front)
    node = NodeServer(configure(unix=str(tmp_path / "node.sock"), listen="", admin="127.0.0.1:0"))
    await node.start()
    try:
        got = await asyncio.to_thread(get, node.admin, "/")
    finally:
        await node.stop(0)
    assert (got.code, "log has details" in got.text) == (500, True)
    assert "Value out of range" in caplog.text


def test_methods_other_than_get_and_head_are_refused(watched: Watched) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert get(watched.admin, "/", method=method).code == 405
    head = get(watched.admin, "/healthz", method="HEAD")
    assert (head.code, head.body) == (200, b"")


def test_request_with_a_foreign_host_header_is_refused(watched: Watched) -> None:
    """A web page could point its own name to loopback; the Host header then has the page's name."""
    assert get(watched.admin, "/metrics", Host="evil.example").code == 421
    for name in (
        "127.0.0.1.evil.example",
        "[::1].evil.example",
        "[::1]:1.evil.example",
        "localhost:1.evil",
        "[::1",
        ":",
    ):
        assert get(watched.admin, "/metrics", Host=name).code == 421, name
    for name in ("localhost:7424", "[::1]:7424", "127.0.0.1"):
        assert get(watched.admin, "/metrics", Host=name).code == 200


def test_answers_all_have_strict_headers_for_browsers(watched: Watched) -> None:
    answers: list[Got] = [get(watched.admin, path) for path in ("/", "/statusz", "/metrics", "/page.js", "/nothing")]
    for got in answers:
        policy = got.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert got.headers["x-content-type-options"] == "nosniff"
        assert got.headers["server"] == "kvferryd"


def test_listening_beyond_loopback_needs_the_setting() -> None:
    done = refused("--listen", "127.0.0.1:0", "--unix", "", "--admin", "0.0.0.0:0")
    assert done.returncode == 2
    assert "--admin-insecure" in done.stderr
    with Kvferryd(
        "--listen", "127.0.0.1:0", "--unix", "", "--admin", f"0.0.0.0:{free_port()}", "--admin-insecure"
    ) as server:
        port = server.admin.rpartition(":")[2]
        # Kubernetes and load balancers use names.
        assert get(f"127.0.0.1:{port}", "/readyz", Host="node7.cluster").code == 200


def listens(taken: socket.socket, port: int) -> bool:
    try:
        taken.bind(("127.0.0.1", port))
        taken.listen()
    except OSError:
        return False
    return True


def test_second_server_starts_without_the_listener_unless_it_was_set() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Another run of this test may have the port for a while; a real server that keeps it is as good.
        with suppress(AssertionError):
            until(lambda: listens(taken, 7424), 10)
        done = refused("--listen", "127.0.0.1:0", "--unix", "", "--admin", "127.0.0.1:7424")
        assert done.returncode == 1
        assert "cannot listen on 127.0.0.1:7424" in done.stderr
        assert "admin" in done.stderr
        code = "import os, sys; del os.environ['KVFERRYD_ADMIN']; from kvferry_server.node.main import main; main()"
        with Kvferryd("--listen", "127.0.0.1:0", "--unix", "", program=("-c", code)) as second:
            assert second.admin == ""
            assert "127.0.0.1:7424 is in use" in second.log
            assert "--admin" in second.log


def test_empty_setting_disables_the_listener() -> None:
    with Kvferryd("--listen", "127.0.0.1:0", "--unix", "") as server:
        assert server.admin == ""
        assert "admin" not in json.dumps(server.log)
