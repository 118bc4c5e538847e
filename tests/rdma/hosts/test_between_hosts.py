"""Reads between two hosts, over verbs: every byte, and no other."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from kvferry.errors import NotAllowed, TransferExpired
from tests.rdma.hosts.exchanged import MODEL
from tests.rdma.hosts.played_host import PORT, SOON, TIMES, TRANSPORTS, Pair, Reader, Source, open_engine
from tests.support.caches import shards

DATAGRAM = 1024
"""Bytes in a packet of soft-RoCE at an Ethernet's usual size."""


def units(ranks: int) -> list[tuple[int, int]]:
    """The heads that each of these ranks holds."""
    return [(held.begin, held.end) for held in shards(MODEL.heads, ranks)]


def serve(source: Source, reader: Reader) -> None:
    """One request, from its publication to its release."""
    request = source.publish()
    reading = reader.read(request, timeout=SOON)
    seen = reading.outcome(SOON)
    assert seen.error is None, seen.error
    assert seen.confirmed
    assert reader.right(), "wrong bytes were handed over as good, or others changed"
    assert reading.wait_quiet(SOON)
    assert source.released(request, SOON).outcome.name == "READ"


def test_bytes_move_over_verbs_and_control_over_tcp(pair: Pair) -> None:
    before = pair.decode.counter("rcvd_pkts")
    seen = pair.works()
    assert seen.confirmed
    assert pair.decode.counter("rcvd_pkts") - before >= seen.moved // DATAGRAM
    # Connections of engines with each other would be between other ports.
    connected = pair.decode.machine.run("ss", "-Htn", "state", "established", "dst", "10.77.0.0/16").splitlines()
    assert connected
    for line in connected:
        assert str(PORT) in [address.rpartition(":")[2] for address in line.split()[-2:]], line


@pytest.mark.parametrize(("source_ranks", "reader_ranks"), [pytest.param(4, 2, marks=pytest.mark.slow), (2, 3)])
def test_ranks_read_their_shares(pair: Pair, source_ranks: int, reader_ranks: int) -> None:
    source = Source(open_engine([pair.prefill.engines] * source_ranks, "prefill", units(source_ranks)))
    reader = Reader(open_engine([pair.decode.engines] * reader_ranks, "decode", units(reader_ranks), serve=False))
    reader.warm(source)
    serve(source, reader)
    close(source, reader)


@pytest.mark.slow
def test_an_engine_may_have_a_rank_on_either_host(pair: Pair) -> None:
    """The node server of the second host relays for its rank, as the policy lets it."""
    source = Source(open_engine([pair.prefill.engines, pair.decode.engines], "prefill", units(2)))
    pair.reader.warm(source)
    serve(source, pair.reader)
    close(source)


@pytest.mark.slow
def test_a_reader_that_the_policy_does_not_allow_is_refused(pair: Pair) -> None:
    source = Source(open_engine([pair.decode.engines], "decode"))
    reader = Reader(open_engine([pair.prefill.engines], "decode", serve=False))
    request = source.publish()
    reading = reader.read(request, timeout=SOON)
    assert isinstance(reading.outcome(SOON).error, NotAllowed)
    assert reading.wait_quiet(SOON)
    close(reader, source)


@pytest.mark.slow
def test_a_directory_resolves_an_engines_address(pair: Pair, directory: Path) -> None:
    source = Source(open_engine([pair.prefill.engines], "prefill", home_in_references=False))
    engine_id = source.ranks[0].place.engine_id
    homes = [host.address for host in pair.both]
    directory.write_text(json.dumps({"homes": homes, "engines": {engine_id: {"home": homes[0]}}}))
    reader = Reader(open_engine([pair.decode.engines], "decode", serve=False, directory=f"file:{directory}"))
    serve(source, reader)
    close(reader, source)


@pytest.mark.parametrize("side", ["source", pytest.param("reader", marks=pytest.mark.slow)])
def test_node_server_that_restarts_ends_no_read(pair: Pair, side: str) -> None:
    host = pair.prefill if side == "source" else pair.decode
    request, reading = pair.moving(timeout=SOON)
    host.restart_server()
    error = reading.outcome(SOON).error
    # On a busy host a lease ends before its home is there again.
    assert error is None or isinstance(error, TransferExpired), error
    assert pair.reader.right()
    host.wait_serving()
    assert reading.wait_quiet(SOON)
    # A home that has forgotten the read holds the publication once more.
    pair.source.released(request, TIMES.ttl + TIMES.hold + SOON)
    pair.works()


@pytest.mark.slow
def test_a_clock_that_is_set_forth_and_back_changes_nothing(pair: Pair) -> None:
    for host, hours in product(pair.both, (1, -1)):
        request, reading = pair.moving(timeout=SOON)
        host.machine.run("date", "-s", f"@{int(host.machine.run('date', '+%s')) + hours * 3600}")
        assert pair.served(request, reading).confirmed


def close(*engines: Source | Reader) -> None:
    """End engines in order."""
    for engine in engines:
        for rank in reversed(engine.ranks):
            rank.close()


@pytest.mark.slow
@pytest.mark.parametrize("card", [0, 1])
def test_bytes_go_over_the_configured_card(pair: Pair, card: int) -> None:
    environment = {**TRANSPORTS, "UCX_NET_DEVICES": f"rxe{card}:1"}
    prefill, decode = (host.start_engines(environment) for host in pair.both)
    source = Source(open_engine([prefill], "prefill"))
    reader = Reader(open_engine([decode], "decode", serve=False))
    reader.warm(source)
    before = [pair.decode.counter("rcvd_pkts", each) for each in (0, 1)]
    serve(source, reader)
    received = [pair.decode.counter("rcvd_pkts", each) - earlier for each, earlier in zip((0, 1), before, strict=True)]
    assert received[card] >= 2**20 // DATAGRAM
    assert received[1 - card] == 0
    for engines in (decode, prefill):
        engines.program.kill()
