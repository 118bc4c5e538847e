"""RDMA cards as the kernel's files tell of them, and NIXL's answer about cards that are not there. Real cards are in
`tests.rdma.verbs.test_seen_cards`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from kvferry._doctor import ucx
from kvferry._doctor.check import Host
from kvferry._transport import nixl_binding
from kvferry.errors import NixlMissing
from tests.doctor.looking import names, run, write
from tests.support.node_servers import environment

NIXL = pytest.mark.skipif(util.find_spec("nixl") is None, reason="NIXL is not installed")
CARD = {
    "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "/sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "/sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    "/sys/class/infiniband_verbs/abi_version": "6\n",
    "/sys/class/infiniband_verbs/uverbs3/ibdev": "mlx5_0\n",
}
FILE = {"/dev/infiniband/uverbs3": ""}


def seen(root: Path, *trees: dict[str, str]) -> Host:
    for tree in trees:
        write(root, tree)
    return Host(root=root)


def test_rdma_without_a_card(tmp_path: Path) -> None:
    assert names(ucx.rdma(Host(root=tmp_path))) == {"rdma-none"}


def test_card_whose_file_the_container_lacks(tmp_path: Path) -> None:
    found = ucx.rdma(seen(tmp_path, CARD))
    assert names(found) == {"rdma-not-given"}
    assert found[0].found == (
        "mlx5_0:1 ACTIVE, 400 Gb/sec (4X NDR), InfiniBand: /dev/infiniband/uverbs3: No such file or directory"
    )


def test_card_that_has_no_file(tmp_path: Path) -> None:
    found = ucx.rdma(seen(tmp_path, CARD, {"/sys/class/infiniband_verbs/uverbs3/ibdev": "mlx5_1\n"}))
    assert names(found) == {"rdma-not-given"}
    assert "ib_uverbs" in found[0].found


def test_port_that_is_down(tmp_path: Path) -> None:
    down = {"/sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"}
    assert names(ucx.rdma(seen(tmp_path, CARD, FILE, down))) == {"rdma-port-down"}


def test_card_where_nixl_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise NixlMissing("NIXL cannot be loaded", problem="")

    monkeypatch.setattr(nixl_binding, "load", load)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert names(ucx.rdma(seen(tmp_path, CARD, FILE))) == {"rdma-not-tried"}


@NIXL
def test_card_that_nixls_own_libibverbs_does_not_know(tmp_path: Path) -> None:
    """NIXL is asked for a card that exists only in these files."""
    found = run("rdma", seen(tmp_path, CARD, FILE))
    assert names(found) == {"rdma-no-driver"}


TWO_AGENTS = """
import logging
from kvferry._transport import nixl_binding, host_network
from kvferry._transport.nixl_options import NixlOptions
host_network.active = lambda: ["mlx5_0"]
logging.basicConfig(format="%(levelname)s %(message)s")
nixl = nixl_binding.load()
for name in ("a", "b"):
    nixl_binding.new_agent(nixl, name, NixlOptions(), progress_thread=False)
"""


@NIXL
def test_engine_warns_once_of_a_card_that_nixl_does_not_use() -> None:
    code = [sys.executable, "-c", TWO_AGENTS]
    done = subprocess.run(code, capture_output=True, text=True, check=True, timeout=60, env=environment())
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert "go over TCP: there is an RDMA card (mlx5_0)" in line
    assert "an RDMA card (mlx5_0), and NIXL's UCX uses none. `kvferry doctor` says why" in line


def test_engine_without_a_card_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    from kvferry._transport import host_network

    with host_network.expected():
        pass
    assert bool(caplog.records) == bool(host_network.active())
