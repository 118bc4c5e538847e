"""Device memory is summed and cleared as host memory is: torch on the CPU, against numpy on the same bytes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry._memory.access import HostAccess
from kvferry._memory.device import DeviceAccess
from kvferry._memory.rank_memory import RankMemory
from kvferry.errors import InvalidField
from kvferry.geometry import Interval, MemoryKind, Plane
from kvferry.planner.token_line import AlikeBlocks, StateRun
from tests.support.examples import examples
from tests.support.simulated_memories import copy_of

BLOCKS = 6


@st.composite
def planes(draw: st.DrawFn) -> Plane:
    """A plane at address 0: heads first or tokens first, in pages, with holes."""
    units, page_tokens, pages = (draw(st.integers(1, 4)) for _ in range(3))
    state = draw(st.sampled_from([1, 2, 3, 8, 24]))
    if draw(st.booleans()):
        token = state
        unit = token * page_tokens
    else:
        unit = state
        token = unit * units
    page = state * units * page_tokens + draw(st.integers(0, 3))
    return Plane(
        "layer",
        "key",
        "full",
        "plain",
        "",
        MemoryKind.DRAM,
        device=0,
        base=0,
        num_blocks=BLOCKS,
        block_stride=page * pages + draw(st.integers(0, 5)),
        page_tokens=page_tokens,
        page_stride=page,
        block_states=page_tokens * pages,
        unit_stride=unit,
        token_stride=token,
        state_bytes=state,
        axis_size=units,
        units=Interval(0, units),
    )


@st.composite
def runs(draw: st.DrawFn, plane: Plane) -> AlikeBlocks:
    """Some states of some blocks."""
    first = draw(st.integers(0, plane.block_states - 1))
    count = draw(st.integers(1, plane.block_states - first))
    ids = draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True))
    return AlikeBlocks(np.arange(len(ids)), (StateRun(first, count),), np.array(ids, np.int64)[:, None])


def placed(plane: Plane, base: int) -> Plane:
    return Plane(**{name: getattr(plane, name) for name in Plane.__dataclass_fields__} | {"base": base})


@settings(max_examples=examples(100))
@given(st.data())
def test_a_device_sums_and_clears_as_the_host_does(data: st.DataObject) -> None:
    plane = data.draw(planes())
    blocks = data.draw(runs(plane))
    size = plane.extent[1] + 3
    mine = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    theirs = torch.from_numpy(mine.copy())
    own, other = placed(plane, mine.ctypes.data), placed(plane, theirs.data_ptr())
    host, device = HostAccess(), DeviceAccess("cpu", [theirs])
    first = data.draw(st.integers(0, len(plane.units) - 1))
    units = Interval(first, data.draw(st.integers(first + 1, len(plane.units))))
    assert np.array_equal(host.sums(own, units, blocks), device.sums(other, units, blocks))
    host.clear(own, blocks)
    device.clear(other, blocks)
    assert np.array_equal(mine, theirs.numpy())
    cleared = len(blocks.ids) * len(plane.units) * blocks.runs[0].count * plane.state_bytes
    assert np.count_nonzero(mine == 0) >= cleared


def test_memory_that_begins_in_a_tensor_and_ends_outside_of_it_is_refused_and_no_tensor_is_resized() -> None:
    """torch would make the tensor's storage larger, and move it."""
    tensor = torch.zeros(4096, dtype=torch.uint8)
    memory = DeviceAccess("cpu", [tensor])
    space = memory.allocate(4096)
    copy = copy_of(
        space.region.base, 64, np.zeros(1, np.int64), tensor.data_ptr(), 64, np.array([64], np.int64), (), 64
    )
    with pytest.raises(InvalidField, match="a tensor on cpu"):
        memory.copy([copy])
    assert tensor.untyped_storage().nbytes() == 4096


def test_a_storage_off_the_boundaries_of_words_is_copied_to_byte_by_byte() -> None:
    """The copy's addresses divide by 8, but the words of a tensor are counted from its storage."""
    whole = np.zeros(4104, np.uint8)
    offset = -whole.ctypes.data % 8 + 4
    tensor = torch.from_numpy(whole[offset : offset + 4096])
    memory = DeviceAccess("cpu", [tensor])
    space = memory.allocate(64)
    np.ctypeslib.as_array((ctypes.c_uint8 * 64).from_address(space.region.base))[:] = np.arange(64)
    places, ids = np.zeros(1, np.int64), np.array([1], np.int64)
    memory.copy([copy_of(space.region.base, 64, places, tensor.data_ptr() + 4, 64, ids, (), 64)])
    assert tensor[68:132].tolist() == list(range(64))
    assert int(tensor.count_nonzero()) == 63


def test_a_rank_without_tensors_on_a_device_has_no_memory_there() -> None:
    memory = RankMemory(tensors=[torch.zeros(16), np.zeros(16)])
    assert memory.devices == frozenset()
    assert memory.at(MemoryKind.VRAM, 0) is None
    assert memory.at(MemoryKind.DRAM, 0) is memory.at(MemoryKind.DRAM, 1) is not None
