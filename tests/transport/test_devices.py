"""Agents of device memory are made, used and ended with their memory's device set, on every thread that calls NIXL.

There is no GPU here. The test plays torch's setting of devices, and NIXL's binding, which checks it in every call.
The agents, their threads and the transport are real, and the bytes lie in host memory.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry._memory import device as device_memory
from kvferry._memory.rank_memory import RankMemory
from kvferry._transport import nixl_binding
from kvferry._transport.nixl_agent import ServingAgent
from kvferry._transport.transport import Transport
from kvferry.errors import InvalidField
from kvferry.geometry import MemoryKind, MemoryRegion
from kvferry.planner.descriptors import Descriptors, MemoryPair
from kvferry.testing._memory import Agent, Process, Wire
from tests.transport.sources import raw_part

RANKS = 8
SIZE = 4096


class Devices:
    """The current device of each thread, and the calls that NIXL got with it."""

    def __init__(self) -> None:
        self.current = threading.local()
        self.seen: list[tuple[str, str, int | None]] = []

    def set_device(self, device: int) -> None:
        self.current.value = device

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        before = getattr(self.current, "value", None)
        self.current.value = device
        yield
        self.current.value = before

    def call(self, agent: str, name: str) -> None:
        self.seen.append((agent, name, getattr(self.current, "value", None)))


class Binding(Process):
    """NIXL's binding: device memory is host memory, and each call says with which device it came."""

    VRAM_SEG = Process.DRAM_SEG

    def __init__(self, devices: Devices) -> None:
        super().__init__(Wire())
        self.devices = devices

    def nixlAgent(self, name: str, config: SimpleNamespace) -> Agent:
        self.devices.call(name, "nixlAgent")
        return Called(self, name)


class Called(Agent):
    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if callable(found) and not name.startswith("_") and name != "process":
            self.process.devices.call(self.name, name)  # type: ignore[attr-defined]
        return found

    def __del__(self) -> None:
        self.process.devices.call(self.name, "__del__")  # type: ignore[attr-defined]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    made = Devices()
    binding = Binding(made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", made.set_device)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(device_memory, "ignore_captures", lambda *, hip: None)
    monkeypatch.setattr(nixl_binding, "load", lambda: binding)
    return made


def on_threads(do: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=do, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_ranks_use_a_device_each(devices: Devices) -> None:
    memory = [np.full((2, SIZE), rank + 1, np.uint8) for rank in range(RANKS)]
    regions = [
        MemoryRegion(MemoryKind.VRAM, rank, array.ctypes.data, array.nbytes) for rank, array in enumerate(memory)
    ]
    serving: dict[int, ServingAgent] = {}
    names: dict[str, int] = {}

    def serve(rank: int) -> None:
        # Set by the engine, for its own needs.
        devices.set_device(99)
        serving[rank] = ServingAgent(f"rank {rank}", [regions[rank]])
        assert devices.current.value == 99

    on_threads(serve)
    names = {f"rank {rank}": rank for rank in range(RANKS)}
    transports = [Transport(RankMemory([region])) for region in regions]

    def read(rank: int) -> None:
        source = (rank + 1) % RANKS
        pair = MemoryPair((MemoryKind.VRAM, source), (MemoryKind.VRAM, rank))
        here, there = (np.array([regions[each].base], np.uint64) for each in (rank, source))
        raw = Descriptors(pair, there, here + np.uint64(SIZE), np.array([SIZE], np.uint64))
        transfer = transports[rank].start([raw_part(serving[source].info, (raw,))], deadline=None, label=str(rank))
        assert transfer.wait(30)
        assert transfer.error is None

    on_threads(read)
    for rank, transport in enumerate(transports):
        (thread,) = transport.living
        names[thread.name] = rank
        assert transport.close()
        assert (memory[rank][1] == (rank + 1) % RANKS + 1).all()

    on_threads(lambda rank: serving[rank].close())
    wrong = {(name, call, device) for name, call, device in devices.seen if device != names[name]}
    assert not wrong
    calls = {call for _, call, _ in devices.seen}
    assert calls >= {"nixlAgent", "registerMem", "loadRemoteMD", "postXferReq", "releaseXferReq", "__del__"}


def test_memory_of_two_devices_is_refused(devices: Devices) -> None:
    regions = [MemoryRegion(MemoryKind.VRAM, device, 1 << 20, SIZE) for device in (0, 1)]
    with pytest.raises(InvalidField, match=r"memory of devices \[0, 1\]"):
        ServingAgent("a", regions)
    with pytest.raises(InvalidField, match=r"memory of devices \[0, 1\]"):
        Transport(RankMemory(regions)).prepare(10.0)
    assert not devices.seen


def test_device_memory_is_refused_where_torch_cannot_set_devices() -> None:
    with pytest.raises(InvalidField, match="has no CUDA and no ROCm here"):
        ServingAgent("a", [MemoryRegion(MemoryKind.VRAM, 0, 1 << 20, SIZE)])


@pytest.mark.parametrize("hip", [False, True])
def test_a_driver_without_a_capture_mode_is_logged(
    hip: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    device_memory.ignore_captures(hip=hip)
    assert set(asked) == ({"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"} if hip else {"libcuda.so.1"})
    assert "while a graph is captured" in caplog.text


def test_threads_leave_other_threads_captures_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modes: list[int] = []

    def exchange(mode: Any) -> int:
        modes.append(mode._obj.value)
        return 0

    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    device_memory.ignore_captures(hip=False)
    assert modes == [1]
    assert not caplog.text
