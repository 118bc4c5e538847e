"""Whatever a tensor's layout, memory at a plane's addresses is what plain indexing of the tensor gives."""

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import BadGeometry
from kvferry.geometry import Group, GroupKind, Interval, MemoryKind, Plane, TokenShard
from kvferry.geometry.tensors import (
    Holding,
    Part,
    Tensor,
    TensorView,
    planes_of,
    planes_of_tensor,
    regions_of,
    view_of,
)
from tests.geometry.memory import Laid, cell, laid


def check(laid_out: Laid, plane: Plane, pages: int = 1, **fixed: int) -> None:
    """Every (block, unit, state) of a plane against plain indexing."""
    tokens = laid_out.size("token")
    for block in range(plane.num_blocks):
        for unit in range(plane.units.begin, plane.units.end):
            for state in range(plane.block_states):
                page, token = divmod(state, tokens)
                index = {"block": block * pages + page, "token": token, "unit": unit - plane.units.begin, **fixed}
                expected = laid_out.at(**{axis: value for axis, value in index.items() if axis in laid_out.axes})
                assert cell(plane, block, unit, state) == expected


@given(tensor=laid(("kv", "block", "token", "unit", "content"), kv=2), first=st.integers(0, 5))
def test_keys_and_values_may_have_any_order_of_axes(tensor: Laid, first: int) -> None:
    group = Group("full", block_tokens=tensor.size("token"), num_blocks=tensor.size("block"))
    units = Interval(first, first + tensor.size("unit"))
    planes = planes_of_tensor(tensor.tensor, tensor.axes, group, "l", holding=Holding(units=units, axis_size=12))
    assert [(plane.component, plane.units, plane.axis_size) for plane in planes] == [
        ("key", units, 12),
        ("value", units, 12),
    ]
    for kv, plane in enumerate(planes):
        check(tensor, plane, kv=kv)


@given(tensor=laid(("layer", "block", "token", "unit", "content"), layer=3), split=st.data())
def test_packed_content_of_a_cross_layer_tensor_becomes_planes(tensor: Laid, split: st.DataObject) -> None:
    width = tensor.size("content")
    key = split.draw(st.integers(1, max(1, width - 1)))
    components = {"key": key, "value": width - key} if width > 1 else {"key": 1}
    group = Group("full", block_tokens=tensor.size("token"), num_blocks=1)
    planes = planes_of_tensor(tensor.tensor, tensor.axes, group, ("a", "b", "c"), components)
    assert [plane.layer for plane in planes] == [name for name in "abc" for _ in components]
    for index, plane in enumerate(planes):
        layer, part = divmod(index, len(components))
        begin, end = ((0, key), (key, width))[part]
        for block in range(plane.num_blocks):
            for unit in range(len(plane.units)):
                for token in range(plane.block_states):
                    row = tensor.at(layer=layer, block=block, unit=unit, token=token)
                    assert cell(plane, block, unit, token) == row[begin * 4 : end * 4]


@given(tensor=laid(("block", "token", "unit", "content"), block=6), pages=st.sampled_from((1, 2, 3)))
def test_blocks_may_have_several_pages(tensor: Laid, pages: int) -> None:
    group = Group("full", block_tokens=tensor.size("token") * pages, num_blocks=6 // pages)
    (plane,) = planes_of_tensor(tensor.tensor, tensor.axes, group, "l", ("key",))
    assert (plane.num_blocks, plane.pages) == (6 // pages, pages)
    check(tensor, plane, pages)


@given(tensor=laid(("block", "page", "token", "unit", "content"), page=2))
def test_pages_may_have_an_axis_of_their_own(tensor: Laid) -> None:
    group = Group("full", block_tokens=tensor.size("token") * 2, num_blocks=tensor.size("block"))
    (plane,) = planes_of_tensor(tensor.tensor, tensor.axes, group, "l", ("key",))
    for block in range(plane.num_blocks):
        for state in range(plane.block_states):
            page, token = divmod(state, tensor.size("token"))
            for unit in range(len(plane.units)):
                expected = tensor.at(block=block, page=page, token=token, unit=unit)
                assert cell(plane, block, unit, state) == expected


@given(tensor=laid(("slot", "unit", "content"), slot=12), block_tokens=st.sampled_from((1, 3, 4, 5)))
def test_token_slots_need_no_block_axis(tensor: Laid, block_tokens: int) -> None:
    group = Group("full", block_tokens=block_tokens, num_blocks=12 // block_tokens)
    (plane,) = planes_of_tensor(tensor.tensor, tensor.axes, group, "l", ("key",))
    for block in range(plane.num_blocks):
        for token in range(block_tokens):
            for unit in range(len(plane.units)):
                assert cell(plane, block, unit, token) == tensor.at(slot=block * block_tokens + token, unit=unit)


@given(tensor=laid(("block", "token", "unit"), unit=10))
def test_convolution_state_is_sub_projections_in_either_row_order(tensor: Laid) -> None:
    group = Group("mamba", GroupKind.STATE, num_blocks=tensor.size("block"))
    parts = (
        Part("conv_x", channels=Interval(0, 6), units=Interval(6, 12), axis_size=18),
        Part("conv_b", channels=Interval(6, 8), units=Interval(0, 2), axis_size=2),
        Part("conv_c", channels=Interval(8, 10), units=Interval(0, 2), axis_size=2),
    )
    axes = [{"token": "row", "unit": "channel"}.get(axis, axis) for axis in tensor.axes]
    for part, plane in zip(parts, planes_of_tensor(tensor.tensor, axes, group, "l", parts), strict=True):
        assert (plane.units, plane.axis_size, plane.block_states) == (part.units, part.axis_size, tensor.size("token"))
        assert part.channels is not None
        for block in range(plane.num_blocks):
            for unit in range(plane.units.begin, plane.units.end):
                channel = unit - plane.units.begin + part.channels.begin
                for row in range(plane.block_states):
                    assert cell(plane, block, unit, row) == tensor.at(block=block, token=row, unit=channel)


def test_temporal_state_has_several_content_axes() -> None:
    state = torch.arange(2 * 4 * 3 * 5, dtype=torch.float32).reshape(2, 4, 3, 5)
    group = Group("mamba", GroupKind.STATE, num_blocks=2)
    (plane,) = planes_of_tensor(
        state, ("block", "head", "content", "content"), group, "l", ("ssm",), Holding(Interval(4, 8), 16)
    )
    assert (plane.state_bytes, plane.dtype) == (60, "float32")
    assert cell(plane, 1, 6, 0) == state[1, 2].numpy().tobytes()


def test_token_shards_and_compressed_states_shrink_the_block() -> None:
    holding = Holding(token_shard=TokenShard(1, 4, 8), tokens_per_state=Fraction(4))
    tensor = torch.zeros(3, 8, 1, 16, dtype=torch.bfloat16)
    group = Group("full", block_tokens=128, num_blocks=3)
    (plane,) = planes_of_tensor(tensor, ("block", "token", "head", "content"), group, "l", ("latent",), holding)
    assert (plane.block_states, plane.pages, plane.state_bytes) == (8, 1, 32)


def test_separate_layers_get_a_plane_each() -> None:
    caches = {f"layers.{i}": torch.zeros(2, 4, 16, 8, 32, dtype=torch.float16) for i in range(3)}
    group = Group("full", block_tokens=16, num_blocks=4)
    planes = planes_of(caches, ("kv", "block", "token", "head", "content"), group)
    assert [plane.name for plane in planes][:3] == ["layers.0/key", "layers.0/value", "layers.1/key"]
    assert {plane.dtype for plane in planes} == {"float16"}


def test_tensor_without_named_axes_is_opaque_by_page() -> None:
    tensor = torch.arange(4 * 16 * 6, dtype=torch.int32).reshape(4, 16, 6)
    (plane,) = planes_of({"l": tensor}, None, Group("full", block_tokens=16, num_blocks=4))
    assert (plane.format, plane.token_granule, plane.page_tokens, plane.units_divide) == ("opaque", 16, 16, False)
    whole = b"".join(cell(plane, 2, 0, token) for token in range(16))
    assert whole == tensor[2].numpy().tobytes()


def test_opaque_page_whose_bytes_do_not_divide_by_its_tokens_is_one_state() -> None:
    tensor = torch.zeros(4, 1001, dtype=torch.uint8)
    (plane,) = planes_of({"l": tensor}, None, Group("full", block_tokens=16, num_blocks=4))
    assert (plane.block_states, plane.state_bytes, plane.tokens_per_state) == (1, 1001, Fraction(16))


def test_opaque_halves_are_layers_of_their_own() -> None:
    tensor = torch.arange(2 * 4 * 16, dtype=torch.int32).reshape(2, 4, 16)
    group = Group("full", block_tokens=16, num_blocks=4)
    planes = planes_of({"l K": tensor[0], "l V": tensor[1]}, None, group)
    assert [plane.name for plane in planes] == ["l K/kv", "l V/kv"]
    assert cell(planes[1], 3, 0, 5) == tensor[1, 3, 5].numpy().tobytes()


def test_opaque_ranks_hold_undivided_units() -> None:
    tensor = torch.zeros(4, 16 * 64, dtype=torch.uint8)
    group = Group("full", block_tokens=16, num_blocks=4)
    (plane,) = planes_of({"l": tensor}, None, group, holding=Holding(units=Interval(2, 4), axis_size=8))
    assert (plane.units, plane.state_bytes, plane.bytes_per_block) == (Interval(2, 4), 32, 1024)


def test_memory_can_be_described_without_tensors() -> None:
    view = TensorView(1 << 30, (4, 16, 8, 64), (65536, 1024, 128, 2), 2, "bfloat16", MemoryKind.VRAM, 3)
    group = Group("full", block_tokens=16, num_blocks=4)
    (plane,) = planes_of_tensor(view, ("block", "token", "head", "content"), group, "l", ("key",))
    assert (plane.memory_kind, plane.device, plane.block_stride) == (MemoryKind.VRAM, 3, 65536)


class CudaTensor:
    """What torch answers for a tensor on a GPU, where there is none."""

    layout, dtype, shape = torch.strided, torch.bfloat16, (4, 16, 8)
    device = torch.device("cuda", 3)

    def data_ptr(self) -> int:
        return 0x7F0000001000

    def stride(self) -> tuple[int, ...]:
        return (128, 8, 1)

    def element_size(self) -> int:
        return 2

    def untyped_storage(self) -> "CudaTensor":
        return self

    def nbytes(self) -> int:
        return 1024


def check_cuda(tensor: Tensor, device: int) -> None:
    (plane,) = planes_of_tensor(tensor, ("block", "token", "content"), GROUP, "l", ("latent",))
    (region,) = regions_of([tensor])
    assert (plane.memory_kind, plane.device, plane.dtype) == (MemoryKind.VRAM, device, "bfloat16")
    assert (region.memory_kind, region.device, region.length) == (MemoryKind.VRAM, device, 1024)
    assert (region.base, plane.block_stride, plane.token_stride) == (plane.base, 256, 16)


def test_tensors_on_a_gpu_are_device_memory() -> None:
    check_cuda(CudaTensor(), 3)


@pytest.mark.parametrize("kind", ["xpu", "hpu"])
def test_devices_of_other_vendors_are_refused_by_name(kind: str) -> None:
    tensor = CudaTensor()
    tensor.device = torch.device(kind, 0)
    with pytest.raises(BadGeometry, match=f"device {kind}:0 is not supported: .* torch calls both CUDA and ROCm"):
        regions_of([tensor])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_real_tensors_on_a_gpu_are_device_memory() -> None:
    tensor = torch.zeros(4, 16, 8, dtype=torch.bfloat16, device="cuda")
    check_cuda(tensor, torch.cuda.current_device())


TENSOR = torch.zeros(2, 4, 16, 8, 32)
AXES = ("kv", "block", "token", "head", "content")
GROUP = Group("full", block_tokens=16, num_blocks=4)


@pytest.mark.parametrize(
    ("tensor", "axes", "group", "components"),
    [
        (TENSOR, AXES[1:], GROUP, None),
        (TENSOR, ("kv", "block", "token", "head", "banana"), GROUP, None),
        (TENSOR, ("kv", "block", "block", "head", "content"), GROUP, None),
        (TENSOR, ("kv", "page", "token", "head", "content"), GROUP, None),
        (TENSOR, AXES, Group("full", block_tokens=16, num_blocks=5), None),
        (TENSOR, AXES, Group("full", block_tokens=24, num_blocks=2), None),
        (TENSOR, AXES, Group("full", block_tokens=8, num_blocks=4), None),
        (TENSOR, AXES, GROUP, ("key",)),
        (TENSOR, AXES, GROUP, {"key": 16, "value": 17}),
        (TENSOR, AXES, GROUP, (Part("key", kv=2), Part("value", kv=1))),
        (TENSOR, AXES, GROUP, (Part("key", kv=0, content=Interval(0, 33)),)),
        (TENSOR, AXES, GROUP, (Part("key", kv=0, channels=Interval(4, 9)),)),
        (TENSOR.transpose(3, 4), AXES, GROUP, None),
        (TENSOR[..., ::2], AXES, GROUP, None),
        (TENSOR[:, :, :, :1].expand(2, 4, 16, 8, 32), AXES, GROUP, None),
        (TENSOR[0, :0], AXES[1:], GROUP, ("key",)),
        (torch.zeros(2, 3).to_sparse(), ("block", "content"), GROUP, ("key",)),
        (torch.zeros(4, 16, 3, device="meta"), ("block", "token", "content"), GROUP, ("key",)),
        (np.zeros((4, 16, 8))[::-1], ("block", "token", "content"), GROUP, ("key",)),
        ([[1, 2], [3, 4]], ("block", "content"), GROUP, ("key",)),
    ],
)
def test_unfit_tensors_are_refused(tensor: object, axes: tuple[str, ...], group: Group, components: object) -> None:
    with pytest.raises(BadGeometry):
        planes_of_tensor(tensor, axes, group, "l", components)  # type: ignore[arg-type]


def test_refusals_name_shape_and_strides() -> None:
    with pytest.raises(BadGeometry, match=r"content .* not contiguous .*shape \(2, 4, 16, 8, 16\), strides \(65536, "):
        planes_of_tensor(TENSOR[..., ::2], AXES, GROUP, "l")


def test_declared_units_must_be_as_many_as_the_tensor_has() -> None:
    with pytest.raises(BadGeometry, match=r"8 units here, \[0, 4\) are declared"):
        planes_of_tensor(TENSOR, AXES, GROUP, "l", holding=Holding(units=Interval(0, 4), axis_size=8))


def test_dtype_of_a_numpy_array_can_be_named() -> None:
    array = np.zeros((4, 16, 8), np.uint16)
    axes = ("block", "token", "content")
    (plane,) = planes_of_tensor(array, axes, GROUP, "l", ("key",), Holding(dtype="bfloat16"))
    assert (plane.dtype, view_of(array).dtype) == ("bfloat16", "uint16")


def test_torch_is_not_imported() -> None:
    code = "import kvferry.geometry.tensors, kvferry.geometry.formats, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
