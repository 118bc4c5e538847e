"""Whether planes fit the tensor and the spec of their layer: strides, sizes and bounds. Pure: nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.errors import BadGeometry, LayoutMismatch
from kvferry.geometry.overlap import check_apart
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import TensorView, view_of
from kvferry.integrations.vllm.layouts import Layer
from kvferry.integrations.vllm.layouts.content import SCALED

Addresses = npt.NDArray[np.int64]

_BYTES = ("uint8", "int8")
"""Types of tensors in which elements of any type may stand, also of several types beside each other."""


class _Runs(NamedTuple):
    """Runs of bytes, ``[begin, end)`` each, by rising address; no two touch."""

    begins: Addresses
    ends: Addresses

    def bytes(self) -> int:
        return int((self.ends - self.begins).sum())


def check_structure(layers: Sequence[Layer], planes: Sequence[Plane]) -> None:
    """Check every layer's planes against its tensor and its spec, and that no two planes share bytes.

    Layers whose planes lie in the same way in the same kind of tensor are checked once, apart from their bounds.

    Raises:
        LayoutMismatch: planes of different layers share bytes, though their groups share no pool; or one of the errors
            of `check_page`.
    """
    seen = set()
    known = {layer.name for layer in layers}
    for plane in planes:
        if plane.layer not in known:
            raise LayoutMismatch(plane.layer, f"{plane.component} is declared, but the rank has no such layer")
    for layer in layers:
        own = [plane for plane in planes if plane.layer == layer.name]
        view = view_of(layer.cache)
        _check_bounds(layer, view, own)
        check_elements(layer.name, view.dtype, own)
        kind = pattern(layer, own)
        if kind not in seen:
            seen.add(kind)
            check_page(layer, own)
    groups = {layer.group.name: layer.group for layer in layers}
    try:
        check_apart(groups.values(), 0, planes)
    except BadGeometry as error:
        names = error.values["where"].rpartition("planes ")[2]
        raise LayoutMismatch(names.partition("/")[0], f"planes {names}: {error.values['problem']}") from None


def pattern(layer: Layer, planes: Iterable[Plane]) -> tuple[Any, ...]:
    """Return what is equal for two layers whose planes lie in the same way in tensors of the same kind."""
    view = view_of(layer.cache)
    return (
        repr(layer.spec),
        layer.group.num_blocks,
        (view.shape, view.strides, view.dtype),
        tuple(_relative(plane, view.address) for plane in planes),
    )


def check_page(layer: Layer, planes: Sequence[Plane]) -> None:
    """Check that the planes of a layer tile its page: without overlaps, and without gaps but the spec's padding.

    Raises:
        LayoutMismatch: they do not, or their blocks are not the tensor's.
    """
    view, blocks = view_of(layer.cache), layer.group.num_blocks
    pages, rest = divmod(view.shape[0], blocks)
    if rest or not pages:
        raise LayoutMismatch(layer.name, f"{view.described} is not made of {blocks} blocks")
    for plane in planes:
        if blocks > 1 and plane.block_stride != view.strides[0] * pages:
            raise LayoutMismatch(
                layer.name,
                f"blocks of {plane.component} are {plane.block_stride} bytes apart, those of its tensor"
                f" {view.strides[0] * pages}",
                component=plane.component,
                expected=view.strides[0] * pages,
                found=plane.block_stride,
            )
    declared = _declared(layer, planes)
    tail = max(1, view.contiguous_tail)
    axes = [(pages, view.strides[0]), *zip(view.shape[1:tail], view.strides[1:tail], strict=True)]
    tensor, _ = _merged(_starts(view.address, axes), view.tail_bytes(tail))
    at = np.searchsorted(tensor.begins, declared.begins, "right") - 1
    outside = (at < 0) | (declared.ends > tensor.ends[at])
    if outside.any():
        byte = int(declared.begins[outside][0])
        raise LayoutMismatch(
            layer.name, f"its planes declare bytes {byte - view.address} ... of block 0, which are not its tensor's"
        )
    size = _content_bytes(layer)
    if declared.bytes() != size:
        raise LayoutMismatch(
            layer.name,
            f"its planes declare {declared.bytes()} bytes of a block, its spec says that a block holds {size}",
            expected=size,
            found=declared.bytes(),
        )


def check_elements(layer: str, dtype: str, planes: Sequence[Plane]) -> None:
    """Check the names of the planes' elements: both engines of a read compare them, and nothing else says the type.

    Args:
        layer: name of the layer.
        dtype: type of the elements of the tensor that holds the planes.
        planes: the planes.

    Raises:
        LayoutMismatch: a plane is of another type.
    """
    if dtype in _BYTES:
        return
    for plane in planes:
        if plane.dtype.partition(SCALED)[0] != dtype:
            raise LayoutMismatch(
                layer,
                f"elements of {plane.component} are declared to be {plane.dtype}, those of its tensor are {dtype}",
                component=plane.component,
                expected=dtype,
                found=plane.dtype,
            )


def _check_bounds(layer: Layer, view: TensorView, planes: Sequence[Plane]) -> None:
    """Check what must hold before anything is read or written by a plane's addresses."""
    if not planes:
        raise LayoutMismatch(layer.name, "no planes are declared for it")
    base, length = view.storage if view.storage != (0, 0) else (view.address, view.extent[1] - view.address)
    for plane in planes:
        first, last = plane.extent
        if not base <= first < last <= base + length:
            raise LayoutMismatch(
                layer.name,
                f"bytes {first - base} ... {last - base} of {plane.component} reach past the {length} bytes that its"
                " tensor is a view of",
                component=plane.component,
                expected=length,
                found=last - base,
            )
        if (plane.memory_kind, plane.device) != (view.memory_kind, view.device):
            raise LayoutMismatch(
                layer.name,
                f"{plane.component} is declared on {plane.memory_kind.name} {plane.device}, its tensor is on"
                f" {view.memory_kind.name} {view.device}",
                component=plane.component,
                expected=f"{view.memory_kind.name} {view.device}",
                found=f"{plane.memory_kind.name} {plane.device}",
            )


def _relative(plane: Plane, address: int) -> tuple[Any, ...]:
    """Return everything about a plane but its layer's name and where its tensor begins."""
    return tuple(
        plane.base - address if name == "base" else getattr(plane, name) for name in Plane.__slots__ if name != "layer"
    )


def _declared(layer: Layer, planes: Sequence[Plane]) -> _Runs:
    starts, sizes, owners = [], [], []
    for index, plane in enumerate(planes):
        axes = [
            (plane.pages, plane.page_stride),
            (len(plane.units), plane.unit_stride),
            (plane.page_tokens, plane.token_stride),
        ]
        found = _starts(plane.base, axes)
        starts.append(found)
        sizes.append(np.full(len(found), plane.state_bytes))
        owners.append(np.full(len(found), index))
    runs, clash = _merged(np.concatenate(starts), np.concatenate(sizes))
    if clash is not None:
        one, other = (planes[int(np.concatenate(owners)[at])].component for at in clash)
        raise LayoutMismatch(layer.name, f"{one} and {other} declare the same bytes of a block", component=one)
    return runs


def _starts(address: int, axes: Iterable[tuple[int, int]]) -> Addresses:
    """Return an address for every choice of an index along each axis of (count, stride)."""
    found = np.full(1, address, np.int64)
    for count, stride in axes:
        found = (found[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
    return found


def _merged(starts: Addresses, sizes: Addresses | int) -> tuple[_Runs, tuple[int, int] | None]:
    """Return cells as runs, and the indices of two cells that share a byte, or None."""
    order = np.argsort(starts, kind="stable")
    begins = starts[order]
    ends = begins + np.broadcast_to(np.asarray(sizes), starts.shape)[order]
    shared = np.flatnonzero(begins[1:] < ends[:-1])
    clash = (int(order[shared[0]]), int(order[shared[0] + 1])) if len(shared) else None
    cuts = np.flatnonzero(begins[1:] != ends[:-1])
    return _Runs(begins[np.append(0, cuts + 1)], ends[np.append(cuts, len(ends) - 1)]), clash


def _content_bytes(layer: Layer) -> int:
    """Return the bytes of a block without padding, as the spec of the layer says."""
    spec = layer.spec
    for name in ("unpadded_page_size_bytes", "real_page_size_bytes"):
        if hasattr(spec, name):
            return int(getattr(spec, name))
    return int(spec.page_size_bytes)
