"""A card goes while a read is under way, and comes back."""

from __future__ import annotations

import pytest

from kvferry.errors import TransferExpired, TransferFailed
from tests.rdma.hosts.host import PATIENCE, SOON, TIMES, Pair


@pytest.mark.slow
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


@pytest.mark.parametrize("side", ["source", "reader"])
def test_a_device_is_deleted(pair: Pair, side: str) -> None:
    machine = (pair.prefill if side == "source" else pair.decode).machine
    request, reading = pair.moving(timeout=SOON)
    program = machine.start(["/usr/bin/rdma", "link", "delete", "rxe0"])
    error = reading.outcome(PATIENCE).error
    print("ERROR", error, program.poll(), program.log.read_text())
    print(machine.run("sh", "-c", "rdma link; dmesg | tail -5; true"))
    print("quiet", reading.wait_quiet(PATIENCE))
    print("right", pair.reader.right())
    print(pair.source.released(request, TIMES.ttl + TIMES.hold + SOON))
    print(machine.run("sh", "-c", "rdma link add rxe0 type rxe netdev eth1 2>&1; rdma link; true"))
    try:
        pair.works()
        print("WORKS")
    except BaseException as e:
        print("WORKS?", repr(e))
