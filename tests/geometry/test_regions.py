"""Memory regions: every plane within one, merged within an allocation, never across two."""

import numpy as np
import torch
from hypothesis import given

from kvferry.geometry import Group, MemoryKind, MemoryRegion, RankGeometry, check_regions
from kvferry.geometry.tensors import TensorView, planes_of, regions_of
from tests.geometry.memory import Laid, laid


def view(address: int, length: int, storage: tuple[int, int] = (0, 0), device: int = 0) -> TensorView:
    return TensorView(address, (length,), (1,), 1, "uint8", MemoryKind.VRAM, device, storage)


@given(tensor=laid(("kv", "block", "token", "unit", "content"), kv=2))
def test_planes_of_a_tensor_lie_in_its_region(tensor: Laid) -> None:
    group = Group("full", block_tokens=tensor.size("token"), num_blocks=tensor.size("block"))
    planes = planes_of({"l": tensor.tensor}, tensor.axes, group)
    regions = regions_of([tensor.tensor])
    assert len(regions) == 1
    check_regions(RankGeometry(0, planes), regions)


def test_views_of_one_storage_share_a_region() -> None:
    storage = torch.zeros(10, 64)
    layers = [storage[i] for i in range(1, 9)]
    assert regions_of(layers) == (MemoryRegion(MemoryKind.DRAM, 0, layers[0].data_ptr(), 8 * 64 * 4),)


def test_views_of_one_array_share_a_region() -> None:
    array = np.zeros((10, 64), np.uint8)
    found = regions_of([array[7], array[2]])
    assert [(region.base - array.ctypes.data, region.length) for region in found] == [(128, 384)]


def test_allocations_have_a_region_each() -> None:
    tensors = [torch.zeros(1000) for _ in range(3)]
    assert sorted(region.base for region in regions_of(tensors)) == sorted(t.data_ptr() for t in tensors)


def test_neighbouring_allocations_stay_apart() -> None:
    found = regions_of([view(0x1000, 0x100, (0x1000, 0x100)), view(0x1100, 0x100, (0x1100, 0x100))])
    assert [(region.base, region.length) for region in found] == [(0x1000, 0x100), (0x1100, 0x100)]


def test_overlapping_ranges_are_merged_even_without_a_known_storage() -> None:
    found = regions_of([view(0x1000, 0x200), view(0x1100, 0x300), view(0x1000, 0x200)])
    assert [(region.base, region.length) for region in found] == [(0x1000, 0x400)]


def test_devices_are_not_mixed() -> None:
    found = regions_of([view(0x1000, 0x200), view(0x1000, 0x200, device=1)])
    assert [region.device for region in found] == [0, 1]


def test_range_inside_another_does_not_hide_what_follows() -> None:
    found = regions_of([view(0, 100), view(10, 10), view(90, 60), view(150, 5)])
    assert [(region.base, region.length) for region in found] == [(0, 150), (150, 5)]
