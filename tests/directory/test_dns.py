"""A directory in DNS, asked of a small real name server over UDP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from kvferry import Directory, Listing
from kvferry._directory import dns as dns_module
from kvferry.errors import EngineNotListed
from tests.directory.conftest import problem
from tests.support.waiting import until

Open = Callable[[str], Directory]

SERVICE = "_kvferry._tcp.homes.test."


class NameServer:
    """Answers questions from `records`: by name and kind, the records' data. All else is NXDOMAIN."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.silent = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        # An empty datagram ends the thread: closing a socket does not wake a thread that waits for it.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            host, port = self.address.split(":")
            last.sendto(b"", (host, int(port)))
        self._thread.join(10)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            asked, peer = self._socket.recvfrom(4096)
            if not asked:
                return
            if not self.silent:
                self._socket.sendto(self._answer(dns.message.from_wire(asked)).to_wire(), peer)

    def _answer(self, question: dns.message.Message) -> dns.message.Message:
        answer = dns.message.make_response(question)
        answer.flags |= dns.flags.RA
        (asked,) = question.question
        name, kind = asked.name.to_text(), asked.rdtype.name
        found = self.records.get((name, kind))
        if found is not None:
            answer.answer.append(dns.rrset.from_text(name, 1, "IN", kind, *found))
        elif all(name != known for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        return answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    monkeypatch.setattr(dns_module, "ASK_AT_LEAST", 0.05)
    monkeypatch.setattr(dns_module, "ASK_AT_MOST", 0.05)
    monkeypatch.setattr(dns_module, "QUESTION_TIMEOUT", 0.5)
    running = NameServer()
    yield running
    running.close()


def test_service_records_list_homes_and_pods(server: NameServer, opened: Open) -> None:
    server.records = {
        (SERVICE, "SRV"): ["0 1 7423 prefill-0.homes.test.", "0 1 7424 prefill-1.homes.test."],
        ("prefill-0.homes.test.", "A"): ["10.0.0.1"],
        ("prefill-1.homes.test.", "AAAA"): ["fd00::1"],
    }
    directory = opened(f"dns://{server.address}/homes.test")
    assert directory.wait(30)
    listed = directory.listed()
    assert listed.homes == {"prefill-0.homes.test:7423", "prefill-1.homes.test:7424"}
    assert directory.resolve("prefill-0", b"i" * 16) == Listing("prefill-0", "prefill-0.homes.test:7423")
    # References name homes by their addresses, where kvferryd advertises these.
    assert listed.covers("10.0.0.1:7423")
    assert listed.covers("[fd00::1]:7424")
    assert not listed.covers("10.0.0.1:7424")
    # A pod that has gone is no longer listed when the answer's TTL has passed.
    server.records[SERVICE, "SRV"] = ["0 1 7424 prefill-1.homes.test."]
    until(lambda: directory.listed().homes == {"prefill-1.homes.test:7424"})
    with pytest.raises(EngineNotListed):
        directory.resolve("prefill-0")


def test_addresses_without_service_records_list_homes_at_one_port(server: NameServer, opened: Open) -> None:
    server.records = {("homes.test.", "A"): ["10.0.0.1", "10.0.0.2"], ("homes.test.", "AAAA"): ["fd00::1"]}
    directory = opened(f"dns://{server.address}/homes.test:7500")
    assert directory.wait(30)
    assert directory.listed().homes == {"10.0.0.1:7500", "10.0.0.2:7500", "[fd00::1]:7500"}
    assert directory.listed().engines == ()


def test_name_server_that_fails_leaves_the_last_answer(
    server: NameServer, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    directory = opened(f"dns://{server.address}/homes.test")
    until(lambda: "no SRV, A or AAAA record" in problem(directory))
    assert not directory.wait(0)
    server.records = {("homes.test.", "A"): ["10.0.0.1"]}
    assert directory.wait(30)
    for outage in (True, False):
        server.silent, server.records = outage, {}
        until(lambda: "cannot be read" in caplog.text)
        assert directory.listed().homes == {"10.0.0.1:7423"}
        server.silent, server.records = False, {("homes.test.", "A"): ["10.0.0.1"]}
        until(lambda: not directory._problem)
        caplog.clear()
