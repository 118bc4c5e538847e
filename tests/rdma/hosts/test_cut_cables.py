"""The network between two hosts is cut, or loses packets, and comes back."""

from __future__ import annotations

import pytest

from kvferry import KvferryError
from kvferry.errors import TransferExpired, TransferFailed
from tests.rdma.hosts.played_host import PATIENCE, SOON, TIMES, Pair


def lose_all(pair: Pair) -> None:
    """Lose all packets as a switch between the hosts would: neither end sees it."""
    for host in pair.both:
        host.shape("loss", "100%")


def test_reads_survive_lost_packets(pair: Pair) -> None:
    before = pair.decode.counter("completer_retry_err") + pair.decode.counter("rcvd_seq_err")
    for host in pair.both:
        host.shape("loss", "3%")
    pair.works()
    assert pair.decode.counter("completer_retry_err") + pair.decode.counter("rcvd_seq_err") > before


@pytest.mark.slow
def test_a_cut_while_nothing_moves_does_no_harm(pair: Pair) -> None:
    request = pair.source.publish()
    pair.plug(connected=False)
    assert pair.source.released(request, TIMES.hold + SOON).outcome.name == "UNREAD"
    pair.plug(connected=True)
    pair.works()


@pytest.mark.slow
def test_a_cut_before_a_read_may_be_repaired_while_the_read_waits(pair: Pair) -> None:
    request = pair.source.publish()
    pair.plug(connected=False)
    reading = pair.reader.read(request, timeout=SOON)
    pair.plug(connected=True)
    pair.served(request, reading)
    pair.works()


def test_a_cut_in_the_middle_may_be_repaired_within_the_lease(pair: Pair) -> None:
    request, reading = pair.moving(timeout=SOON)
    before = pair.decode.counter("completer_retry_err")
    pair.plug(connected=False)
    # A card has missed an answer, and waits for the next.
    pair.wait_counter("completer_retry_err", before)
    pair.heal()
    pair.served(request, reading)
    pair.works()


@pytest.mark.parametrize("cut", ["a cable", pytest.param("beyond a switch", marks=pytest.mark.slow)])
def test_a_cut_in_the_middle_until_the_end_fails_the_read(pair: Pair, cut: str) -> None:
    request, reading = pair.moving(timeout=SOON)
    if cut == "a cable":
        pair.plug(connected=False)
    else:
        lose_all(pair)
    failed(pair, reading.outcome(PATIENCE).error)
    pair.heal()
    assert reading.wait_quiet(PATIENCE)
    pair.source.released(request, TIMES.ttl + TIMES.hold + SOON)
    pair.works()


def failed(pair: Pair, error: KvferryError | Exception | None) -> None:
    """A read ended without good bytes: the card gave up, or the lease ended before."""
    assert isinstance(error, (TransferFailed, TransferExpired)), error
    assert pair.reader.right()
