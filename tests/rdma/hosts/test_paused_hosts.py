"""One of two hosts stands still, its clocks too, and goes on."""

from __future__ import annotations

import pytest

from kvferry.errors import TransferExpired, TransferFailed
from tests.rdma.hosts.played_host import PATIENCE, SOON, TIMES, Pair


@pytest.mark.slow
def test_a_source_may_pause_for_a_moment(pair: Pair) -> None:
    request, reading = pair.moving(timeout=SOON)
    before = pair.decode.counter("completer_retry_err")
    pair.prefill.machine.pause()
    try:
        pair.wait_counter("completer_retry_err", before)
    finally:
        pair.prefill.machine.resume()
    pair.served(request, reading)
    pair.works()


@pytest.mark.slow
def test_a_source_that_pauses_until_the_read_has_ended_fails_it(pair: Pair) -> None:
    request, reading = pair.moving(timeout=SOON)
    pair.prefill.machine.pause()
    try:
        error = reading.outcome(PATIENCE).error
        assert isinstance(error, (TransferFailed, TransferExpired)), error
        assert pair.reader.right()
        assert reading.wait_quiet(PATIENCE)
    finally:
        pair.prefill.machine.resume()
    # Its home's clock stood still as well.
    pair.source.released(request, TIMES.ttl + TIMES.hold + SOON)
    pair.works()


def test_a_reader_that_pauses_until_its_blocks_have_other_bytes_fails_its_read(pair: Pair) -> None:
    """By its own clock its lease is live when the last byte arrives. Its home knows better."""
    request, reading = pair.moving(timeout=SOON)
    pair.decode.machine.pause()
    try:
        assert pair.source.released(request, TIMES.ttl + TIMES.hold + SOON).outcome.name == "UNREAD"
        pair.prefill.shape()
    finally:
        pair.decode.machine.resume()
    error = reading.outcome(PATIENCE).error
    assert isinstance(error, (TransferExpired, TransferFailed)), error
    assert reading.wait_quiet(PATIENCE)
    assert pair.reader.right()
    pair.works()
