"""Reading memory at the addresses that planes declare, and tensors of any layout to declare them from."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kvferry.geometry import Plane


def cell(plane: Plane, block: int, unit: int, state: int) -> bytes:
    """The bytes of one unit (counted over the whole model) and state of a block, by the formula of the proto."""
    page, inside = divmod(state, plane.page_tokens)
    address = plane.base + block * plane.block_stride + page * plane.page_stride
    address += (unit - plane.units.begin) * plane.unit_stride + inside * plane.token_stride
    return ctypes.string_at(address, plane.state_bytes)


@dataclass(frozen=True)
class Laid:
    """A tensor whose axes have names, laid out in any order with any padding; every element is unique."""

    axes: tuple[str, ...]
    tensor: Any
    storage: Any

    def size(self, axis: str) -> int:
        return int(self.tensor.shape[self.axes.index(axis)]) if axis in self.axes else 1

    def at(self, **index: int) -> bytes:
        """Plain indexing; axes that are not given stay whole."""
        found = self.tensor[tuple(index.get(axis, slice(None)) for axis in self.axes)]
        return bytes(np.ascontiguousarray(found).tobytes())


def lay_out(
    logical: Sequence[str], sizes: Sequence[int], physical: Sequence[str], padding: Sequence[int], library: str
) -> Laid:
    """A tensor of `logical` axes whose memory nests them as `physical` says.

    Args:
        logical, sizes: axes as indexed, with their sizes.
        physical: the same axes, outermost first.
        padding: elements left free after each, by physical order; none after the last.
        library: ``torch`` or ``numpy``.
    """
    by_name = dict(zip(logical, sizes, strict=True))
    strides: dict[str, int] = {}
    step = 1
    for axis, free in reversed(list(zip(physical, padding, strict=True))):
        strides[axis] = step
        step = step * by_name[axis] + free
    order = [strides[axis] for axis in logical]
    values = np.arange(1, prod(sizes) + 1, dtype=np.int32).reshape(sizes)
    if library == "torch":
        storage = torch.zeros(step + 7, dtype=torch.int32)
        tensor = torch.as_strided(storage, tuple(sizes), order, storage_offset=3)
        tensor.copy_(torch.from_numpy(values))
        return Laid(tuple(logical), tensor, storage)
    array = np.zeros(step + 7, np.int32)
    view = np.lib.stride_tricks.as_strided(array[3:], sizes, [stride * 4 for stride in order])
    view[...] = values
    return Laid(tuple(logical), view, array)


@st.composite
def laid(draw: st.DrawFn, /, axes: Sequence[str], **fixed: int) -> Laid:
    """Tensors with these axes: indexed in any order, laid out in any order with ``content`` innermost, padded."""
    logical = draw(st.permutations(axes))
    sizes = [fixed.get(axis) or draw(st.integers(1, 4)) for axis in logical]
    outer = draw(st.permutations([axis for axis in axes if axis != "content"]))
    physical = [*outer, *(["content"] if "content" in axes else [])]
    padding = [draw(st.integers(0, 5)) for _ in physical[:-1]] + [0]
    # The content's own size may be followed by free space, but its elements are together.
    return lay_out(logical, sizes, physical, padding, draw(st.sampled_from(("torch", "numpy"))))
