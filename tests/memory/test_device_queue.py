"""The work given to a device: on a stream of its own, with few uploads; and errors when it has no memory left.

There is no GPU here. torch's streams and its allocators are played, on the CPU's memory; the copies are torch's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry._loop import Loop
from kvferry._memory.access import StillCopying
from kvferry._memory.device import DeviceAccess, check_stable
from kvferry._memory.rank_memory import RankMemory
from kvferry._reads.runtime import _MeasuredCosts
from kvferry._transport.nixl_agent import AgentInfo
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.staging_pool import StagedWork, StagingPool
from kvferry._transport.transfer import Transfer, TransferState
from kvferry._transport.transport import Transport
from kvferry.errors import InvalidField, TransferFailed
from kvferry.geometry import Blocks, MemoryKind, MemoryRegion, RankGeometry
from kvferry.planner import Path
from kvferry.planner.expansion import Copy
from kvferry.planner.path_choice import PathRule
from tests.support import large_caches as worlds
from tests.support.simulated_memories import copy_of

SLOT = 1 << 14


class Cuda:
    """`torch.cuda`: counts streams, and knows each thread's current stream."""

    def __init__(self) -> None:
        self.streams: list[Cuda] = []
        self.current = threading.local()
        self.lost = False
        self.priority = 0

    def Stream(self, device: Any, priority: int = 0) -> Cuda:
        self.streams.append(Cuda())
        self.streams[-1].priority = priority
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: Cuda) -> Iterator[None]:
        self.current.stream = stream
        yield
        self.current.stream = None

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")

    def get_allocator_backend(self) -> str:
        return "native"


class Torch:
    """torch with a device: allocations there are counted, and may be refused."""

    version = SimpleNamespace(hip=None)

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.room = 1 << 40
        """Bytes that a single allocation may have."""
        self.allocated: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, *, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        assert getattr(self.cuda.current, "stream", None) is not None, "not on a stream of its own"
        made = torch.empty(size, dtype=dtype)
        if made.nbytes > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB.\nProcess 4711 has 79.1 GiB")
        if made.nbytes:
            self.allocated.append(made.nbytes)
        return made


@pytest.fixture
def played() -> Torch:
    return Torch()


def access(played: Torch, *tensors: torch.Tensor) -> DeviceAccess:
    made = DeviceAccess("cpu", tensors)
    made._torch, made._device = played, SimpleNamespace(type="cuda", index=0)
    return made


def copies(source: int, target: torch.Tensor, ids: np.ndarray, places: np.ndarray, count: int) -> list[Copy]:
    """So many columns of the same blocks, as the planes of a lane give them."""
    return [
        copy_of(source + 64 * column, 1024, places, target.data_ptr() + 64 * column, 1024, ids, (), 64)
        for column in range(count)
    ]


def test_indices_of_a_batch_are_uploaded_once_and_consecutive_indices_never(played: Torch) -> None:
    target, source = torch.zeros(SLOT, dtype=torch.uint8), torch.arange(SLOT).to(torch.uint8)
    memory = access(played, target, source)
    scattered, places = np.array([7, 2, 5]), np.array([0, 1, 2])
    memory.copy(copies(source.data_ptr(), target, scattered, places, 16))
    assert played.allocated == [3 * 8]
    rows = source.view(-1, 1024)
    for place, block in enumerate(scattered.tolist()):
        assert torch.equal(target.view(-1, 1024)[block], rows[place])
    played.allocated.clear()
    memory.copy(copies(source.data_ptr(), target, np.array([9, 10, 11]), places, 16))
    assert played.allocated == []
    assert torch.equal(target.view(-1, 1024)[9:12], rows[:3])
    many = np.random.default_rng(0).permutation(5000)
    one = torch.zeros(8 * len(many), dtype=torch.uint8)
    other = torch.arange(8 * len(many)).to(torch.uint8)
    memory = access(played, one, other)
    memory.copy([copy_of(other.data_ptr(), 8, np.arange(len(many)), one.data_ptr(), 8, many, (), 8)])
    assert torch.equal(one.view(-1, 8)[torch.from_numpy(many)], other.view(-1, 8))


def test_threads_have_a_stream_of_their_own_and_keep_it(played: Torch) -> None:
    target, source = torch.zeros(SLOT, dtype=torch.uint8), torch.zeros(SLOT, dtype=torch.uint8)
    memory = access(played, target, source)

    def run() -> None:
        for _ in range(3):
            memory.copy(copies(source.data_ptr(), target, np.array([3, 1]), np.array([0, 2]), 2))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(played.cuda.streams) == 2
    # torch gives out few streams of a priority, in turns: none of these is one that an engine captures a graph on.
    assert all(stream.priority not in (0, -1, -3) for stream in played.cuda.streams)


def test_copies_whose_end_the_device_does_not_confirm_may_go_on(played: Torch) -> None:
    target, source = torch.zeros(SLOT, dtype=torch.uint8), torch.zeros(SLOT, dtype=torch.uint8)
    memory = access(played, target, source)
    made = copies(source.data_ptr(), target, np.array([7, 2, 5]), np.array([0, 1, 2]), 1)
    memory.copy(made)
    (stream,) = played.cuda.streams
    stream.lost = True
    with pytest.raises(StillCopying):
        memory.copy(made)


def test_a_device_without_room_for_staging_fails_one_read_only(
    played: Torch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = RankMemory([MemoryRegion(MemoryKind.VRAM, 0, 1 << 30, SLOT)])
    memory._devices = {0: access(played)}
    transport = Transport(memory)
    played.room = 0
    with pytest.raises(TransferFailed, match=r"has no memory left: CUDA out of memory\. Tried to allocate") as raised:
        transport.pool(MemoryKind.VRAM, 0)
    assert raised.value.quiet
    assert "4711" not in raised.value.message
    played.room = 1 << 40
    assert transport.pool(MemoryKind.VRAM, 0).in_use == 0
    assert transport.close()


def test_staging_memory_that_does_not_stay_mapped_leaves_costs_unmeasured(
    played: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source whose blocks are read directly can be met all the same."""

    def refuse(_: object) -> None:
        raise InvalidField("regions", "in an expandable segment", "memory that stays mapped")

    memory = RankMemory([MemoryRegion(MemoryKind.VRAM, 0, 1 << 30, SLOT)])
    memory._devices = {0: access(played)}
    transport = Transport(memory)
    monkeypatch.setattr("kvferry._memory.device.check_stable", refuse)
    plane = replace(worlds.plane(1 << 30, heads_first=True), memory_kind=MemoryKind.VRAM)
    loop = Loop()
    costs = _MeasuredCosts(loop, PathRule(), RankGeometry(0, (plane,), {}), transport, measured=True)
    assert loop.run(costs.rule_of("home", AgentInfo("source", b"", b"", ()), 0.0)) is None
    loop.close()
    assert transport.close()


def test_a_device_that_runs_out_of_memory_while_it_permutes_fails_one_read_quietly(
    played: Torch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = access(played)
    space = memory.allocate(SLOT)
    pool = StagingPool(space, SLOT, lambda: None)
    source, destination = (worlds.plane(base, heads_first=first) for base, first in ((1 << 36, False), (1 << 40, True)))
    info = AgentInfo("source", b"", b"", ())

    def copy(*_: object) -> None:
        played.empty(8, dtype=torch.int64, device="cuda")

    monkeypatch.setattr(memory, "_copy", copy)

    def read() -> Transfer:
        world = worlds.planned(source, destination, Path.STAGED)
        expansion = world.expand({"full": Blocks([1])}, {"full": Blocks([2])})
        (planned,) = expansion.sources
        transfer = Transfer("t", expansion.total_bytes, None, lambda: 0.0, lambda: None)
        chunk = StagedWork(transfer, info, planned.staged, pool, 0.0).next(NixlOptions())
        assert chunk is not None
        assert chunk.owner.begin()
        chunk.owner.landed(chunk.descriptors.total_bytes)
        return transfer

    played.room = 0
    with caplog.at_level(logging.DEBUG):
        failed = read()
    assert failed.state is TransferState.FAILED
    assert isinstance(failed.error, TransferFailed)
    assert "has no memory left" in failed.error.message
    # Nothing writes to its blocks, and its slot is free again.
    assert failed.quiet
    assert failed.error.quiet
    assert pool.in_use == 0
    assert not [record for record in caplog.records if record.exc_info]
    played.room = 1 << 40
    assert read().state is TransferState.DONE
    assert pool.in_use == 0


def segment(address: int, *, expandable: bool, device: int = 0) -> dict[str, object]:
    return {"address": address, "total_size": 1 << 20, "device": device, "is_expandable": expandable}


@pytest.mark.parametrize(
    ("segments", "backend", "refused"),
    [
        ([segment(1 << 30, expandable=True)], "native", True),
        ([segment((1 << 30) - (1 << 19), expandable=True)], "native", True),
        ([segment(1 << 30, expandable=False), segment(1 << 40, expandable=True)], "native", False),
        ([segment(1 << 30, expandable=True, device=1)], "native", False),
        ([segment(1 << 30, expandable=True)], "cudaMallocAsync", False),
        ([], "native", False),
    ],
)
def test_memory_in_an_expandable_segment_is_refused(
    segments: list[dict[str, object]], backend: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    regions = [MemoryRegion(MemoryKind.VRAM, 0, 1 << 30, 4096)]
    if refused:
        with pytest.raises(InvalidField, match="expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF"):
            check_stable(regions)
    else:
        check_stable(regions)
    check_stable([MemoryRegion(MemoryKind.DRAM, 0, 1 << 30, 4096)])
