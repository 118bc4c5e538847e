"""A card goes while a read is under way, and comes back."""

from __future__ import annotations

import pytest

from kvferry.errors import TransferExpired, TransferFailed
from tests.rdma.hosts.host import PATIENCE, SOON, TIMES, Pair


@pytest.mark.parametrize("side", ["source", "reader"])
def test_an_interface_is_set_down(pair: Pair, side: str) -> None:
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
