"""Which build of NIXL is loaded, with which environment, and which of its backends moves the bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry import NixlOptions
from kvferry._transport import nixl_binding
from kvferry._transport.nixl_agent import ServingAgent
from kvferry.errors import InvalidField, KvferryError, NixlMissing
from kvferry.geometry import MemoryKind, MemoryRegion
from kvferry.testing._memory import Agent, Process, Wire


def torch_of(*, cuda: str | None = None, hip: str | None = None) -> Any:
    return SimpleNamespace(version=SimpleNamespace(cuda=cuda, hip=hip))


@pytest.mark.parametrize(
    ("torch", "packages"),
    [
        (None, ("nixl_cu13", "nixl_cu12", "nixl_rocm", "nixl")),
        # Another thread imports it.
        (ModuleType("torch"), ("nixl_cu13", "nixl_cu12", "nixl_rocm", "nixl")),
        (torch_of(), ("nixl", "nixl_cu13", "nixl_cu12")),
        (torch_of(cuda="12.9"), ("nixl", "nixl_cu12")),
        (torch_of(cuda="13.0"), ("nixl", "nixl_cu13")),
        (torch_of(hip="7.2.1"), ("nixl_rocm", "nixl")),
    ],
)
def test_the_build_is_that_of_the_machine(
    torch: Any, packages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nixl_binding.packages_for(torch) == packages


def test_the_first_build_that_loads_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_binding, "packages_for", lambda _: ("nixl_absent", "nixl_played", "nixl"))
    played, bindings = ModuleType("nixl_played"), ModuleType("nixl_played._bindings")
    monkeypatch.setitem(sys.modules, "nixl_played", played)
    monkeypatch.setitem(sys.modules, "nixl_played._bindings", bindings)
    assert nixl_binding.load() is bindings
    monkeypatch.setattr(nixl_binding, "packages_for", lambda _: ("nixl_absent", "nixl_absent_too"))
    with pytest.raises(NixlMissing, match=r"nixl_absent: .*; nixl_absent_too: .*pip install 'kvferry\[nixl\]'"):
        nixl_binding.load()


RDMA = """
import ctypes
ctypes.CDLL("libefa.so.1")
"""


@pytest.mark.parametrize("imported_before", [False, True])
def test_a_process_with_an_agent_ends_in_order_beside_the_rdma_libraries_of_the_distribution(
    imported_before: bool,
) -> None:
    if subprocess.run([sys.executable, "-c", RDMA], capture_output=True, check=False).returncode:
        pytest.skip("the distribution's RDMA libraries are missing (Debian: ibverbs-providers)")
    program = f"""
import sys
from kvferry._transport import nixl_binding
if {imported_before}:
    from importlib import import_module, util
    package = next(filter(util.find_spec, nixl_binding.packages_for(None)))
    import_module(package + "._bindings")
from kvferry.host_memory import HostMemory
from kvferry._transport.nixl_agent import ServingAgent
ServingAgent("ends", [HostMemory(4096).region])
with open("/proc/self/maps") as maps:
    assert "libefa.so.1" in maps.read()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "before", "expected"),
    [({}, "", "1024 stderr"), ({"UCX_RCACHE_MAX_UNRELEASED": "7"}, "", "7 stderr"), ({}, "nixl", "None")],
    ids=["unset", "set", "too-late"],
)
def test_ucx_finds_vllms_settings_unless_they_are_set(given: dict[str, str], before: str, expected: str) -> None:
    program = f"""
import os, sys, types
if {before!r}:
    sys.modules[{before!r}] = types.ModuleType({before!r})
from kvferry._transport import nixl_binding
from kvferry.errors import NixlMissing
try:
    nixl_binding.load()
except NixlMissing:
    pass
print(os.environ.get("UCX_RCACHE_MAX_UNRELEASED"), os.environ.get("UCX_LOG_FILE"))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**environment, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().startswith(expected)
    assert ("was imported before kvferry could set UCX_RCACHE_MAX_UNRELEASED=1024" in done.stderr) == bool(before)


class Binding(Process):
    """NIXL's binding, which keeps what backend it was asked for."""

    def __init__(self) -> None:
        super().__init__(Wire())
        self.made: list[tuple[str, dict[str, str]]] = []

    def nixlAgent(self, name: str, config: SimpleNamespace) -> Agent:
        return Asked(self, name)


class Asked(Agent):
    def createBackend(self, kind: str, options: dict[str, str]) -> str:
        self.process.made.append((kind, options))  # type: ignore[attr-defined]
        return super().createBackend(kind, options)


def made(options: NixlOptions) -> tuple[str, dict[str, str]]:
    binding, memory = Binding(), np.zeros(4096, np.uint8)
    ServingAgent("a", [MemoryRegion(MemoryKind.DRAM, 0, memory.ctypes.data, 4096)], options, binding).close()
    (found,) = binding.made
    return found


def test_another_backend_gets_its_own_parameters_only() -> None:
    assert made(NixlOptions(backend="LIBFABRIC", ucx_tls="tcp")) == ("LIBFABRIC", {})
    assert made(NixlOptions(backend="LIBFABRIC", backend_parameters={"a": "1"})) == ("LIBFABRIC", {"a": "1"})


def test_ucx_gets_further_parameters_beside_those_of_kvferry() -> None:
    kind, parameters = made(NixlOptions(ucx_tls="tcp", backend_parameters={"num_threads": "2"}))
    assert (kind, parameters["num_threads"]) == ("UCX", "2")
    assert "TLS=tcp" in parameters["engine_config"]
    assert made(NixlOptions(backend_parameters={"engine_config": "TLS=rc"}))[1]["engine_config"] == "TLS=rc"


def test_a_backend_that_nixl_does_not_have_is_named() -> None:
    memory = np.zeros(4096, np.uint8)
    with pytest.raises(KvferryError, match="createBackend"):
        ServingAgent(
            "a", [MemoryRegion(MemoryKind.DRAM, 0, memory.ctypes.data, 4096)], NixlOptions(backend="NOT_THERE")
        )


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("backend", {"backend": ""}),
        ("backend", {"backend": 1}),
        ("backend_parameters", {"backend_parameters": ["a"]}),
        ("backend_parameters key", {"backend_parameters": {1: "a"}}),
        ("backend_parameters['a']", {"backend_parameters": {"a": 1}}),
    ],
)
def test_wrong_backends_are_refused_by_name(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as refused:
        NixlOptions(**options)
    assert refused.value.values["field"] == field


def test_options_stay_hashable_and_are_copied() -> None:
    parameters = {"a": "1"}
    options = NixlOptions(backend_parameters=parameters)
    parameters["a"] = "2"
    assert options == NixlOptions(backend_parameters={"a": "1"})
    assert hash(options) == hash(NixlOptions(backend_parameters={"a": "1"}))
