"""An agent is not made where RDMA cards may lock too little memory: NIXL would try for ever."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvferry._transport import host_network, nixl_binding
from kvferry._transport.nixl_agent import NixlError, NixlOptions, ServingAgent
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import MemoryKind

DOCKER = 8 << 20
REGION = MemoryRegion(MemoryKind.DRAM, 0, 1 << 20, 1 << 20)


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host with a card, where a process without rights may lock 8 MiB, as in a container of Docker's."""
    (tmp_path / "uverbs0").touch()
    status = tmp_path / "status"
    status.write_text("Name:\tengine\nCapEff:\t000001ffffffbfff\n")
    driver = tmp_path / "mlx5_0" / "device" / "driver"
    driver.parent.mkdir(parents=True)
    (tmp_path / "mlx5_core").mkdir()
    driver.symlink_to(tmp_path / "mlx5_core")
    monkeypatch.setattr(host_network, "DEVICES", tmp_path)
    monkeypatch.setattr(host_network, "CARDS", tmp_path)
    monkeypatch.setattr(host_network, "STATUS", status)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (DOCKER, DOCKER))
    monkeypatch.delenv("UCX_TLS", raising=False)
    return monkeypatch


@pytest.mark.parametrize("ucx_tls", ["", "rc_verbs", "ib"])
def test_an_agent_that_a_card_may_not_serve_is_refused(card: pytest.MonkeyPatch, ucx_tls: str) -> None:
    with pytest.raises(NixlError) as raised:
        ServingAgent("refused", [REGION], NixlOptions(ucx_tls=ucx_tls))
    assert "RLIMIT_MEMLOCK is 8,388,608 bytes" in raised.value.message
    assert "ulimit -l unlimited" in raised.value.values["problem"]


def test_transports_of_the_environment_decide(card: pytest.MonkeyPatch) -> None:
    card.setenv("UCX_TLS", "tcp,self")
    assert host_network.too_little_to_begin("rc_verbs") == ""
    card.setenv("UCX_TLS", "rc_verbs,ud_verbs")
    assert host_network.too_little_to_begin("tcp")


def test_a_card_without_a_driver_in_nixl_refuses_no_agent(card: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "mlx5_0" / "device" / "driver"
    driver.unlink()
    (tmp_path / "bnxt_re").mkdir()
    driver.symlink_to(tmp_path / "bnxt_re")
    assert host_network.too_little_to_begin("") == ""
    assert host_network.too_little_to_begin("rc_verbs")


def test_transports_that_are_excluded_by_name_refuse_no_agent(card: pytest.MonkeyPatch) -> None:
    card.setenv("UCX_TLS", "^ib")
    assert host_network.too_little_to_begin("") == ""


def test_a_limit_does_not_matter_without_a_card(card: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "uverbs0").unlink()
    assert host_network.too_little() == ""


def test_a_process_that_may_lock_all_memory_is_not_limited(card: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "status").write_text("CapEff:\t000001ffffffffff\n")
    assert host_network.too_little() == ""


def test_an_unlimited_process_has_no_problem(card: pytest.MonkeyPatch) -> None:
    card.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, DOCKER))
    assert host_network.too_little() == ""


def test_memory_that_is_larger_than_the_limit_is_refused_by_its_name(card: pytest.MonkeyPatch) -> None:
    card.setattr(resource, "getrlimit", lambda _: (host_network.UCX_LOCKS, host_network.UCX_LOCKS))
    assert host_network.too_little_to_begin("") == ""

    def refuse() -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    with pytest.raises(NixlError) as raised:
        nixl_binding.call("registerMem", "", refuse)
    assert "NIXL_ERR_BACKEND; RLIMIT_MEMLOCK is 67,108,864 bytes" in raised.value.message
