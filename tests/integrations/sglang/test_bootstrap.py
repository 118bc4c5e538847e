"""How decode finds prefill, and what both make of a room."""

from __future__ import annotations

import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest

from kvferry._wire.reference import parse_reference
from kvferry.integrations.sglang import bootstrap
from kvferry.integrations.sglang.bootstrap import (
    KvferryBootstrapServer,
    Source,
    Sources,
    given_reference,
    register_source,
    room_is_usable,
    room_reference,
)
from tests.support.waiting import until

SOURCE = Source("prefill-0", "127.0.0.1:7300")


@pytest.fixture
def server() -> Iterator[KvferryBootstrapServer]:
    started = KvferryBootstrapServer("127.0.0.1", 0)
    yield started
    started.close()


def test_decode_finds_the_instance_that_rank_0_has_registered(server: KvferryBootstrapServer) -> None:
    address = f"127.0.0.1:{server.server_port}"
    sources = Sources()
    until(lambda: "503" in sources.get(address)[1])
    register_source(f"http://{address}", SOURCE)
    until(lambda: sources.get(address)[0] == SOURCE)


def test_rank_0_registers_until_the_bootstrap_server_answers() -> None:
    """Another program may have had the port before."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        register_source(f"http://127.0.0.1:{other.getsockname()[1]}", SOURCE)
        other.settimeout(30)
        for answer in (b"nonsense\r\n", b"HTTP/1.0 500 Busy\r\n\r\n", b"", b"HTTP/1.0 200 OK\r\n\r\n"):
            peer, _ = other.accept()
            with peer:
                assert peer.recv(1000).startswith(b"PUT /kvferry ")
                peer.sendall(answer)


def test_a_registration_without_an_answer_is_logged_every_ten_seconds_and_given_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bootstrap, "AGAIN", 0.0)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        register_source(url, SOURCE)
        until(lambda: f"{url} does not answer: decode cannot find this instance" in caplog.text)
    levels = [record.levelno for record in caplog.records if url in record.getMessage()]
    assert levels == [logging.WARNING] * 30 + [logging.ERROR]


def test_instances_with_ipv6_addresses_find_each_other() -> None:
    try:
        started = KvferryBootstrapServer("::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    try:
        address = f"[::1]:{started.server_port}"
        register_source(f"http://{address}", SOURCE)
        sources = Sources()
        until(lambda: sources.get(address)[0] == SOURCE)
    finally:
        started.close()


def test_an_instance_that_was_forgotten_is_asked_again(server: KvferryBootstrapServer) -> None:
    address = f"127.0.0.1:{server.server_port}"
    sources = Sources()
    register_source(f"http://{address}", SOURCE)
    until(lambda: sources.get(address)[0] == SOURCE)
    other = Source("prefill-1", "127.0.0.1:7301")
    register_source(f"http://{address}", other)
    assert sources.get(address)[0] == SOURCE

    def asked_again() -> bool:
        sources.forget(address)
        return sources.get(address)[0] == other

    until(asked_again)


def test_sources_do_not_wait_for_an_answer() -> None:
    """This address never answers; a step that asks goes on."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        sources = Sources()
        asked = threading.Thread(target=sources.get, args=(f"127.0.0.1:{silent.getsockname()[1]}",), daemon=True)
        asked.start()
        asked.join(2.0)
        assert not asked.is_alive()


def answered(server: KvferryBootstrapServer, method: str, path: str, body: bytes | None = None) -> int:
    asked = urllib.request.Request(f"http://127.0.0.1:{server.server_port}{path}", body, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"engine_id": 1, "home": "h:1"}',
        b'{"engine_id": "", "home": "h:1"}',
        b'{"engine_id": "e", "home": 1}',
        b'{"engine_id": "e", "home": "nowhere"}',
        b'{"engine_id": "e", "home": "\\ud800:1"}',
        b'{"engine_id": "\\ud800", "home": "h:1"}',
        b"[" * 4096,
        b"x" * 5000,
    ],
)
def test_malformed_source_is_refused(server: KvferryBootstrapServer, body: bytes) -> None:
    assert answered(server, "PUT", "/kvferry", body) == 400
    assert answered(server, "GET", "/kvferry") == 503


def test_malformed_content_lengths_are_answered(server: KvferryBootstrapServer) -> None:
    for length in ("\xb2", "9" * 5000, "-1", ""):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=5) as peer:
            peer.sendall(f"PUT /kvferry HTTP/1.0\r\nContent-Length: {length}\r\n\r\n".encode("latin-1"))
            assert b" 400 " in peer.recv(100)


def test_decode_survives_any_answer_of_an_address_in_a_request() -> None:
    """A client names the address of prefill, and may serve there itself: no answer of it ends decode's scheduler."""
    body = b'{"engine_id": "e", "home": "\\ud800:1"}'
    with socket.create_server(("127.0.0.1", 0)) as hostile:
        address = f"127.0.0.1:{hostile.getsockname()[1]}"
        sources = Sources()
        assert sources.get(address) == (None, "")
        peer, _ = hostile.accept()
        with peer:
            peer.recv(1000)
            peer.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + body)
        until(lambda: "is not the bootstrap server" in sources.get(address)[1])


def test_an_answer_that_drips_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few threads ask: addresses that never end their answers must not keep them."""
    monkeypatch.setattr(bootstrap, "ASK_TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as dripping:
        address = f"127.0.0.1:{dripping.getsockname()[1]}"
        sources = Sources()
        sources.get(address)
        peer, _ = dripping.accept()
        peer.sendall(b"HTTP/1.0 200 OK\r\nX-Drip: ")

        def ended() -> bool:
            # Slower than a line may become too long, and faster than its timeout.
            threading.Event().wait(0.05)
            with suppress(OSError):
                peer.sendall(b"x")
            return sources.get(address)[1] != ""

        with peer:
            until(ended)


def asks(sources: Sources, address: str) -> bool:
    return "others" not in sources.get(address)[1]


def test_addresses_that_are_asked_once_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests name them, and may name another one each time."""
    monkeypatch.setattr(bootstrap, "MAX_KNOWN", 4)
    sources = Sources()
    for number in range(40):
        until(partial(asks, sources, f"127.0.0.1:{number + 1}"))
    assert len(sources._asked) <= 4


def test_bootstrap_server_serves_no_other_paths(server: KvferryBootstrapServer) -> None:
    good = json.dumps({"engine_id": "prefill-0", "home": "h:1"}).encode()
    assert answered(server, "PUT", "/route", good) == 403
    assert answered(server, "GET", "/route") == 404
    assert answered(server, "GET", "/health") == 503


def test_room_references_are_equal_on_both_sides_and_differ_by_room() -> None:
    made = parse_reference(room_reference(SOURCE, 417))
    assert made == parse_reference(room_reference(Source("prefill-0", "127.0.0.1:7300"), 417))
    assert made.engine_id == "prefill-0"
    assert made.home == "127.0.0.1:7300"
    others = [room_reference(SOURCE, 418), room_reference(Source("prefill-1", "127.0.0.1:7300"), 417)]
    assert len({made.key, *(parse_reference(other).key for other in others)}) == 3


@pytest.mark.parametrize(
    ("room", "usable"), [(None, False), (-1, False), (0, False), (1, True), (2**63 - 1, True), (2**63, False)]
)
def test_rooms_that_would_end_sglangs_scheduler_are_not_usable(room: int | None, *, usable: bool) -> None:
    assert room_is_usable(room) is usable


@pytest.mark.parametrize("address", ["10.0.0.1:8998", "[fe80::1]:8998", "prefill-0.cluster:8998"])
def test_hosts_are_not_taken_for_references(address: str) -> None:
    assert given_reference(address) == ""


def test_reference_may_stand_in_place_of_the_host() -> None:
    reference = room_reference(SOURCE, 1)
    assert given_reference(f"{reference}:8998") == reference
