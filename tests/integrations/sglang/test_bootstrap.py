"""How decode finds prefill, and what both make of a room."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from kvferry._wire.reference import parse_reference
from kvferry.integrations.sglang.bootstrap import (
    KvferryBootstrapServer,
    Source,
    Sources,
    given_reference,
    register_source,
    room_reference,
)
from tests.support.waiting import until

SOURCE = Source("prefill-0", "127.0.0.1:7300")


@pytest.fixture
def server() -> Iterator[KvferryBootstrapServer]:
    started = KvferryBootstrapServer("127.0.0.1", 0)
    yield started
    started.close()


def test_decode_finds_what_rank_0_has_registered(server: KvferryBootstrapServer) -> None:
    address = f"127.0.0.1:{server.port}"
    sources = Sources()
    until(lambda: "503" in sources.get(address)[1])
    register_source(f"http://{address}", SOURCE)
    until(lambda: sources.get(address)[0] == SOURCE)


def test_an_instance_that_was_forgotten_is_asked_again(server: KvferryBootstrapServer) -> None:
    address = f"127.0.0.1:{server.port}"
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


def test_asking_does_not_wait() -> None:
    """Nobody answers at this address; a step that asks goes on."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        sources = Sources()
        asked = threading.Thread(target=sources.get, args=(f"127.0.0.1:{silent.getsockname()[1]}",), daemon=True)
        asked.start()
        asked.join(2.0)
        assert not asked.is_alive()


def answered(server: KvferryBootstrapServer, method: str, path: str, body: bytes | None = None) -> int:
    asked = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", body, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[1]", b'{"engine_id": 1, "home": "h:1"}', b'{"engine_id": "", "home": "h:1"}', b"x" * 5000],
)
def test_what_is_no_source_is_refused(server: KvferryBootstrapServer, body: bytes) -> None:
    assert answered(server, "PUT", "/kvferry", body) == 400
    assert answered(server, "GET", "/kvferry") == 503


def test_other_paths_are_not_served(server: KvferryBootstrapServer) -> None:
    good = json.dumps({"engine_id": "prefill-0", "home": "h:1"}).encode()
    assert answered(server, "PUT", "/route", good) == 403
    assert answered(server, "GET", "/route") == 404
    assert answered(server, "GET", "/health") == 503


def test_both_sides_make_the_same_reference_of_a_room_and_others_another() -> None:
    made = parse_reference(room_reference(SOURCE, 417))
    assert made == parse_reference(room_reference(Source("prefill-0", "127.0.0.1:7300"), 417))
    assert made.engine_id == "prefill-0"
    assert made.home == "127.0.0.1:7300"
    others = [room_reference(SOURCE, 418), room_reference(Source("prefill-1", "127.0.0.1:7300"), 417)]
    assert len({made.key, *(parse_reference(other).key for other in others)}) == 3


@pytest.mark.parametrize("address", ["10.0.0.1:8998", "[fe80::1]:8998", "prefill-0.cluster:8998"])
def test_hosts_are_no_references(address: str) -> None:
    assert given_reference(address) is None


@pytest.mark.parametrize(
    ("behind", "token"), [("", None), ("+417", 417), ("+", None), ("+-1", None), ("+" + "9" * 20, None)]
)
def test_a_reference_in_place_of_the_host_may_say_the_first_token(behind: str, token: int | None) -> None:
    reference = room_reference(SOURCE, 1)
    assert given_reference(f"{reference}{behind}:8998") == (reference, token)
