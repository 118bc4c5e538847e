"""Findings of `kvferry doctor` about RDMA cards, and warnings of an engine: with real cards, and with NIXL's own
libibverbs or the distribution's in its place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry._doctor.check import Finding

OF_WHEELS = Path("/opt/nixl")
"""The machine's folder of the files that its links replace (`tests.support.machines.image`)."""

pytestmark = pytest.mark.timeout(180)

WARNING = "bytes between hosts go over TCP"

TWO_AGENTS = """
from kvferry._transport import nixl_binding
from kvferry._transport.nixl_options import NixlOptions
nixl = nixl_binding.load()
for name in ("a", "b"):
    nixl_binding.new_agent(nixl, name, NixlOptions(), progress_thread=False)
"""

LOOK = """
import dataclasses, json
from kvferry._doctor.catalogue import CHECKS
from kvferry._doctor.check import Host
(check,) = (check for check in CHECKS if check.name == "rdma")
print(json.dumps([dataclasses.asdict(found) for found in check.run(Host())]))
"""

READ_OF_ITSELF = """
import json, os, sys
import numpy as np
from kvferry._transport import nixl_binding
from kvferry._transport.nixl_options import NixlOptions
from kvferry.host_memory import HostMemory

def sent():
    return [int(open(f"/sys/class/infiniband/{card}/ports/1/hw_counters/sent_pkts").read()) for card in cards]

nixl, cards, size = nixl_binding.load(), sys.argv[1].split(), 1 << 20
for card in cards:
    # The kernel would answer with counts that are up to 10 ms old.
    with open(f"/sys/class/infiniband/{card}/ports/1/hw_counters/lifespan", "w") as lifespan:
        lifespan.write("0")
there, here = HostMemory(size), HostMemory(size)
for devices in sys.argv[2:]:
    os.environ["UCX_NET_DEVICES"] = devices
    agent, backend = nixl_binding.new_agent(nixl, devices, NixlOptions(), progress_thread=False)
    nixl_binding.register(nixl, agent, backend, [there.region, here.region])
    before = sent()
    source, target = (
        nixl.nixlXferDList(nixl.DRAM_SEG, np.array([[memory.region.base, size, 0]], np.uint64))
        for memory in (there, here)
    )
    read = agent.createXferReq(nixl.NIXL_READ, target, source, devices, b"", [backend])
    state = agent.postXferReq(read, b"")
    while state == nixl.NIXL_IN_PROG:
        state = agent.getXferStatus(read)
    assert state == nixl.NIXL_SUCCESS, state
    print(json.dumps([after - earlier for earlier, after in zip(before, sent())]), flush=True)
    agent.releaseXferReq(read)
    del agent, backend
"""


@contextmanager
def own_libibverbs() -> Iterator[None]:
    """Put back the wheels' libraries, as on a machine without links."""
    found = Path(sys.prefix).glob("lib/python*/site-packages/nixl*.libs/libibverbs-*.so*")
    links = {link: link.readlink() for link in found}
    assert links
    for link in links:
        link.unlink()
        shutil.copy(OF_WHEELS / link.parent.name / link.name, link)
    try:
        yield
    finally:
        for link, target in links.items():
            link.unlink()
            link.symlink_to(target)


@pytest.fixture(scope="module")
def faster_cards() -> Iterator[tuple[str, str]]:
    """Two more cards, at 10 Gbit/s; that of the machine has 2.5."""
    command("ip", "link", "add", "veth7", "type", "veth", "peer", "name", "veth8")
    for number in (7, 8):
        command("ip", "link", "set", f"veth{number}", "up")
        command("ip", "address", "add", f"10.88.{number}.1/24", "dev", f"veth{number}")
        command("rdma", "link", "add", f"rxe{number}", "type", "rxe", "netdev", f"veth{number}")
    yield "rxe7", "rxe8"
    for number in (7, 8):
        command("rdma", "link", "delete", f"rxe{number}")
    command("ip", "link", "delete", "veth7")


def command(*words: str) -> None:
    subprocess.run(words, check=True)


def look(*before: str, **settings: str) -> dict[str, Finding]:
    """The findings of the doctor's check, by card.

    Args:
        before: words of a command such as ``prlimit``.
        settings: of the environment.
    """
    done = subprocess.run(
        [*before, sys.executable, "-c", LOOK],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr
    found = [Finding(**one) for one in json.loads(done.stdout)]
    return {one.found.partition(":")[0]: one for one in found}


def test_nixls_own_libibverbs_has_no_driver_and_the_doctors_advice_repairs_it() -> None:
    with own_libibverbs():
        engine = subprocess.run(
            [sys.executable, "-c", TWO_AGENTS], capture_output=True, text=True, check=True, timeout=100
        )
        (line,) = [line for line in engine.stderr.splitlines() if WARNING in line]
        assert "RDMA card (rxe0), and NIXL's UCX uses none. `kvferry doctor` says why" in line
        found = look()["rxe0"]
        assert found.finding == "rdma-no-driver"
        command("sh", "-c", found.do)
        assert look()["rxe0"].finding == "rdma-usable"


def test_ports_that_are_down_and_a_card_that_ucx_refuses_are_reported(faster_cards: tuple[str, str]) -> None:
    command("ip", "link", "set", "veth7", "down")
    try:
        found = look(UCX_IB_GID_INDEX="200")
    finally:
        command("ip", "link", "set", "veth7", "up")
    down = dict.fromkeys(faster_cards, "rdma-port-down")
    assert {card: one.finding for card, one in found.items()} == {"rxe0": "rdma-refused", **down}
    assert "UCX: no usable transports" in found["rxe0"].found


def test_a_limit_of_locked_memory_is_reported() -> None:
    unprivileged = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "--")
    found = look("prlimit", "--memlock=8388608:8388608", *unprivileged)["rxe0"]
    assert found.finding == "rdma-not-registered"
    assert "RLIMIT_MEMLOCK is 8,388,608 bytes" in found.found


def test_the_fastest_cards_share_a_read_unless_one_is_named(faster_cards: tuple[str, str]) -> None:
    cards = ("rxe0", *faster_cards)
    asked = ("all", *(f"{card}:1" for card in cards[:2]))
    reader = subprocess.run(
        [sys.executable, "-c", READ_OF_ITSELF, " ".join(cards), *asked],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "UCX_TLS": "rc_verbs,ud_verbs"},
    )
    assert reader.returncode == 0, reader.stderr
    used = [[packets > 100 for packets in json.loads(line)] for line in reader.stdout.splitlines()]
    assert used == [[False, True, True], [True, False, False], [False, True, False]]
    assert WARNING not in reader.stderr
