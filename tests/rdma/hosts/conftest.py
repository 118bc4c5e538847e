"""Two hosts for all tests of this folder: booting them takes longer than any test."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rdma.hosts.played_host import Host, Pair
from tests.support.certificates import Authority
from tests.support.machines.emulated import Machine, cables
from tests.support.machines.image import FOLDER, image

POLICY = """
[[rule]]
identities = ["spiffe://fleet.example/host/1"]
engine = ["prefill-*"]

[[rule]]
identities = ["spiffe://fleet.example/host/2"]
engine = ["decode-*"]
reader = ["prefill-*"]
relay = ["prefill-*"]
"""


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    """The first is of prefill, the second of decode. Each has two cards."""
    # A machine has a /tmp of its own.
    folder = FOLDER / "hosts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    authority = Authority.make(folder, "fleet")
    (folder / "policy.toml").write_text(POLICY)
    made = image()
    ends = cables(tmp_path_factory.mktemp("cables"), 2)
    machines = [Machine(made, number, folder / str(number), cards) for number, cards in enumerate(ends, 1)]
    try:
        found = []
        for machine in machines:
            names = f"URI:spiffe://fleet.example/host/{machine.number},IP:10.77.0.{machine.number}"
            tls = authority.issue(str(machine.number), names)
            found.append(Host(machine.ready(), tls, folder / "policy.toml"))
        yield found[0], found[1]
    except BaseException:
        for machine in machines:
            print(machine.console(), file=sys.stderr)
        raise
    finally:
        for machine in machines:
            machine.close()


@pytest.fixture(scope="session")
def lasting_pair(hosts: tuple[Host, Host]) -> Pair:
    """A source and a reader for all tests of this folder."""
    return Pair(*hosts)


@pytest.fixture
def pair(lasting_pair: Pair) -> Iterator[Pair]:
    """They, in a network that is whole after every test."""
    yield lasting_pair
    lasting_pair.heal()


@pytest.fixture
def directory(hosts: tuple[Host, Host]) -> Path:
    """A file that the second host sees as it is written."""
    return hosts[1].machine.report / "directory.json"
