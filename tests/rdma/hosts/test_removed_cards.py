"""A card goes while a read is under way, and comes back."""

from __future__ import annotations

import pytest

from kvferry.errors import TransferExpired, TransferFailed
from tests.rdma.hosts.played_host import PATIENCE, SOON, TIMES, Pair
from tests.support.waiting import until


@pytest.mark.slow
@pytest.mark.parametrize("side", ["source", "reader"])
def test_a_read_whose_interface_is_set_down_fails_and_becomes_quiet(pair: Pair, side: str) -> None:
    machine = (pair.prefill if side == "source" else pair.decode).machine
    request, reading = pair.moving(timeout=SOON)
    machine.run("ip", "link", "set", "eth1", "down")
    try:
        error = reading.outcome(PATIENCE).error
    finally:
        machine.run("ip", "link", "set", "eth1", "up")
    assert isinstance(error, (TransferFailed, TransferExpired)), error
    assert reading.wait_quiet(PATIENCE)
    assert pair.reader.right()
    pair.source.released(request, TIMES.ttl + TIMES.hold + SOON)
    pair.works()


@pytest.mark.slow
@pytest.mark.parametrize("side", ["source", "reader"])
def test_a_deleted_device_stays_with_its_users(pair: Pair, side: str) -> None:
    """Its users keep the device; no other process finds it. The last test: it does not come back while it is kept."""
    machine = (pair.prefill if side == "source" else pair.decode).machine
    request, reading = pair.moving(timeout=SOON)
    # In the background, because the kernel may wait for the device's users.
    machine.start(["/usr/bin/rdma", "link", "delete", "rxe0"])
    pair.served(request, reading)
    until(lambda: "rxe0" not in machine.run("rdma", "link"), SOON)
    pair.works()
