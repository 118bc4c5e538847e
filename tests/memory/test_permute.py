"""Copies out of staging memory do what their definition says, with numpy and with torch."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry._memory.access import HostAccess
from kvferry._memory.device import DeviceAccess
from kvferry._transport.nixl_agent import AgentInfo
from kvferry._transport.nixl_options import NixlOptions
from kvferry._transport.staging_pool import StagedWork, StagingPool
from kvferry._transport.transfer import Transfer, TransferState
from kvferry.errors import InvalidField, TransferFailed
from kvferry.geometry import Blocks, EngineGeometry, Group, RankGeometry
from kvferry.geometry.tensors import planes_of
from kvferry.planner import Path, PathRule, plan_read
from kvferry.planner.expansion import Copy
from tests.support import large_caches as worlds
from tests.support.examples import examples
from tests.support.simulated_memories import addresses, copy_of
from tests.support.simulated_memories import copies as copies_of

SIZE = 1 << 16


@st.composite
def copies(draw: st.DrawFn) -> tuple[int, int, Copy]:
    """A copy between places that do not overlap, at offsets into the staging memory and into the destination."""
    cell = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 24, 56]))
    counts = draw(st.lists(st.integers(1, 4), max_size=2))
    spans, sides = [], []
    for _ in range(2):
        # Each side nests the axes in an order of its own, with padding of its own.
        span, strides = cell, [0] * len(counts)
        for axis in draw(st.permutations(range(len(counts)))):
            strides[axis] = span + draw(st.integers(0, 5)) * draw(st.sampled_from([1, 8]))
            span += strides[axis] * (counts[axis] - 1)
        spans.append(span)
        sides.append(strides)
    axes = tuple(zip(counts, *sides, strict=True))
    # A source may give a block twice, so that two blocks are copied from one place.
    places = sorted(draw(st.lists(st.integers(0, 12), min_size=1, max_size=6)))
    ids = draw(st.permutations(range(12)))[: len(places)]
    stride, own_stride = (span + draw(st.integers(0, 9)) for span in spans)
    offset, own_offset = draw(st.integers(0, 64)), draw(st.integers(0, 64))
    copy = copy_of(
        offset,
        stride,
        np.array(places, np.int64),
        own_offset,
        own_stride,
        np.array(ids, np.int64),
        axes,
        cell,
    )
    return offset, own_offset, copy


def moved(copy: Copy, source: np.ndarray, destination: np.ndarray) -> None:
    """The definition, cell by cell; addresses are offsets."""
    for place, block in zip(copy.places.tolist(), copy.ids.tolist(), strict=True):
        for theirs, mine in zip(addresses(copy.source, place), addresses(copy.destination, block), strict=True):
            destination[mine : mine + copy.source.size] = source[theirs : theirs + copy.source.size]


TWICE = copy_of(0, 8, np.array([0, 0, 2]), 0, 8, np.array([3, 1, 2]), (), 8)
"""Three places from the first to the last, of which one is copied twice and one not at all."""


@pytest.mark.parametrize("library", ["numpy", "torch"])
@settings(max_examples=examples(300))
@given(drawn=copies())
@example(drawn=(0, 0, TWICE))
def test_cells_are_permuted_to_their_positions(library: str, drawn: tuple[int, int, Copy]) -> None:
    offset, own_offset, copy = drawn
    # torch's own memory on both sides; numpy takes any address.
    memory = torch.full((SIZE,), 0xA5, dtype=torch.uint8)
    space = (HostAccess() if library == "numpy" else DeviceAccess("cpu", [memory])).allocate(SIZE)
    staging = np.frombuffer((bytearray(range(251)) * (SIZE // 251 + 1))[:SIZE], np.uint8)
    source = np.ctypeslib.as_array((ctypes.c_uint8 * SIZE).from_address(space.region.base))
    source[:] = staging
    expected = memory.numpy().copy()
    moved(copy, staging, expected)
    placed = Copy(
        copy.source._replace(address=space.region.base + offset),
        copy.places,
        copy.destination._replace(address=memory.data_ptr() + own_offset),
        copy.ids,
    )
    space.memory.copy([placed])
    assert np.array_equal(memory.numpy(), expected)


def test_a_source_block_given_twice_is_read_twice_through_staging_memory() -> None:
    """Blocks 5, 5 and 7 go to the first halves of the destination's blocks; block 6, between them, to a second half."""
    source = np.arange(8 * 4 * 2 * 4, dtype=np.uint8).reshape(8, 4, 2, 4)
    destination = np.zeros((3, 2, 8, 4), np.uint8)
    engines = []
    for name, memory, axes in (
        ("p", source, "block token head content"),
        ("d", destination, "block head token content"),
    ):
        group = Group("full", block_tokens=memory.size // len(memory) // 8, num_blocks=len(memory))
        planes = planes_of({"0": memory}, axes.split(), group, ("key",))
        engines.append(EngineGeometry(name, (group,), (RankGeometry(0, planes),)))
    plan = plan_read(engines[0], engines[1], 0, rule=PathRule(Path.STAGED))
    ids = [5, 6, 5, 1, 7, 2]
    (read,) = plan.expand({"full": Blocks(ids)}, {"full": Blocks([2, 0, 1])}).sources
    space = HostAccess().allocate(SIZE)
    for batch in read.staged[0].batches(SIZE):
        for theirs, mine, length in copies_of(batch.descriptors(space.region.base, read.staged[0].lane.memory)):
            ctypes.memmove(mine, theirs, length)
        space.memory.copy(batch.copies(space.region.base))
    expected = source[ids].reshape(3, 8, 2, 4).swapaxes(1, 2)
    assert np.array_equal(destination[[2, 0, 1]], expected)


@pytest.mark.parametrize("size", [1, 4096, 3 << 20])
def test_staging_memory_begins_at_a_huge_page(size: int) -> None:
    # The kernel's copies to an odd address take more than twice as long.
    space = HostAccess().allocate(size)
    assert space.region.base % (2 << 20) == 0
    assert space.region.length == size
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(space.region.base))
    memory[:] = 0xA5
    assert (np.asarray(space.owner) == 0xA5).all()


def test_memory_of_no_tensor_is_refused() -> None:
    space = DeviceAccess("cpu", [torch.zeros(16)]).allocate(4096)
    elsewhere = np.zeros(4096, np.uint8)
    places, ids = np.zeros(1, np.int64), np.zeros(1, np.int64)
    copy = copy_of(space.region.base, 64, places, elsewhere.ctypes.data, 64, ids, (), 64)
    with pytest.raises(InvalidField, match="a tensor on cpu"):
        space.memory.copy([copy])


class Device:
    """torch as if with a device, on the CPU: queued work runs when the stream is waited for.

    There is no GPU here. This stands in for `torch.cuda`'s stream, and the order of calls on it.
    """

    type = "cuda"
    index = 0
    version = SimpleNamespace(hip=None)

    def __init__(self, *, lost: bool = False) -> None:
        self.waited = 0
        self.lost = lost

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def device(self, _: str) -> Device:
        return self

    @property
    def cuda(self) -> Device:
        return self

    def Stream(self, device: Device, priority: int) -> Device:
        assert device is self
        return self

    def stream(self, stream: Device) -> AbstractContextManager[None]:
        assert stream is self
        return nullcontext()

    def synchronize(self) -> None:
        self.waited += 1
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def memory_on() -> Callable[[Device], DeviceAccess]:
    def make(device: Device) -> DeviceAccess:
        memory = DeviceAccess("cpu", [torch.zeros(1 << 14, dtype=torch.uint8)])
        memory._torch, memory._device = device, device
        return memory

    return make


@pytest.mark.parametrize("failing", [False, True])
def test_a_device_is_waited_for_also_when_a_copy_fails(
    failing: bool, memory_on: Callable[[Device], DeviceAccess], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    memory = memory_on(device)
    made: list[int] = []

    def copies() -> Iterator[Copy]:
        for _ in range(3):
            yield copy_of(0, 64, np.zeros(1, np.int64), 0, 64, np.zeros(1, np.int64), (), 64)
            if failing:
                raise RuntimeError("CUDA out of memory")

    def queued(*_: object) -> None:
        # A kernel is queued, never run before the device is waited for.
        assert device.waited == 0
        made.append(1)

    monkeypatch.setattr(memory, "_copy", queued)
    if failing:
        with pytest.raises(RuntimeError, match="out of memory"):
            memory.copy(copies())
    else:
        memory.copy(copies())
    assert len(made) == (1 if failing else 3)
    assert device.waited == 1


def test_a_device_that_cannot_be_waited_for_leaves_the_transfer_unquiet_and_the_slot_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = DeviceAccess("cpu", [])
    space = memory.allocate(1 << 14)
    memory._threads = threading.local()
    memory._torch = memory._device = Device(lost=True)
    monkeypatch.setattr(memory, "_copy", lambda *_: None)
    pool = StagingPool(space, 1 << 14, lambda: None)
    source, destination = (worlds.plane(base, heads_first=first) for base, first in ((1 << 36, False), (1 << 40, True)))
    expansion = worlds.planned(source, destination, Path.STAGED).expand({"full": Blocks([1])}, {"full": Blocks([2])})
    (read,) = expansion.sources
    transfer = Transfer("t", expansion.total_bytes, None, lambda: 0.0, lambda: None)
    info = AgentInfo("source", b"", b"", ())
    chunk = StagedWork(transfer, info, read.staged, pool, 0.0).next(NixlOptions())
    assert chunk is not None
    assert chunk.owner.begin()
    assert transfer.quiet == transfer.state.final
    chunk.owner.landed(chunk.descriptors.total_bytes)
    assert transfer.state is TransferState.FAILED
    assert not transfer.quiet
    assert isinstance(transfer.error, TransferFailed)
    assert not transfer.error.quiet
    assert pool.in_use == 1
