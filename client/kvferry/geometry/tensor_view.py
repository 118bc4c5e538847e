"""The memory of a tensor, of torch and numpy alike, and its axes by name. Neither library is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

from kvferry._arguments import check_fields, integer, several
from kvferry.errors import BadGeometry
from kvferry.geometry.model import MemoryRegion
from kvferry.geometry.plane import ADDRESS_LIMIT, MemoryKind


class Tensor(Protocol):
    """A torch tensor, a numpy array, a `TensorView`, or an object that shares memory through ``__array_interface__``,
    DLPack or the buffer protocol. Type checkers know the first three."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...


AXES = ("layer", "kv", "block", "page", "slot", "token", "unit", "content")
_ALIASES = {"head": "unit", "channel": "unit", "row": "token", "state": "token"}

# torch uses the name "cuda" for ROCm as well. Others (xpu, hpu, tpu ...) are refused: `torch.cuda` does not set their
# devices, and no known build of NIXL can register their memory.
_KINDS = {"cpu": MemoryKind.DRAM, "cuda": MemoryKind.VRAM}


@dataclass(frozen=True, slots=True)
class TensorView:
    """The memory of a tensor. Made from tensors by `view_of`, or by hand from addresses.

    Attributes:
        address: of the first element.
        shape: elements along each axis.
        strides: bytes along each axis.
        itemsize: bytes of an element.
        dtype: name of the element type, e.g. ``bfloat16``.
        memory_kind, device: address space, as NIXL counts devices.
        storage: address and length of the allocation around the tensor; (0, 0) if unknown.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    memory_kind: MemoryKind = MemoryKind.DRAM
    device: int = 0
    storage: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for name in ("shape", "strides", "storage"):
            values = several(name, getattr(self, name), object, "several integers")
            object.__setattr__(self, name, tuple(integer(name, value) for value in values))
        check_fields(self)
        if len(self.shape) != len(self.strides) or self.itemsize < 1:
            raise BadGeometry("tensor", f"{self.described} is no tensor")
        if not self.shape or min(self.shape) < 1:
            raise BadGeometry("tensor", f"{self.described} holds nothing")
        if min(self.strides) < 0:
            raise BadGeometry("tensor", f"{self.described} runs backwards")
        if self.address < 0 or self.device < 0 or self.extent[1] >= ADDRESS_LIMIT:
            raise BadGeometry("tensor", f"{self.described} at {self.address:#x}, device {self.device}, is nowhere")

    @property
    def described(self) -> str:
        """Shape, strides and dtype, for error messages."""
        return f"a tensor of shape {self.shape}, strides {self.strides} bytes, dtype {self.dtype or 'unknown'}"

    @property
    def extent(self) -> tuple[int, int]:
        """First address and one past the last, holes included."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.address, self.address + last + self.itemsize

    def contiguous(self, axes: Iterable[int]) -> int | None:
        """Elements along these axes, if they are one piece, the last axis innermost; None: they are not."""
        count = 1
        for axis in sorted(axes, reverse=True):
            if self.shape[axis] > 1 and self.strides[axis] != count * self.itemsize:
                return None
            count *= self.shape[axis]
        return count

    def split(self, axis: int, inner: int) -> TensorView:
        """The same memory with one axis split in two: ``[n]`` becomes ``[n // inner, inner]``; raises `BadGeometry`."""
        size, stride = self.shape[axis], self.strides[axis]
        if inner < 1 or size % inner:
            raise BadGeometry("tensor", f"axis {axis} of {self.described} does not divide by {inner}")
        return replace(
            self,
            shape=(*self.shape[:axis], size // inner, inner, *self.shape[axis + 1 :]),
            strides=(*self.strides[:axis], stride * inner, stride, *self.strides[axis + 1 :]),
        )

    def merge_tail(self, axis: int, shape: tuple[int, ...]) -> TensorView:
        """The same memory with the axes from `axis` on reshaped to `shape`; raises `BadGeometry` if they are not one
        contiguous piece, or hold another number of elements."""
        if self.contiguous(range(axis, len(self.shape))) != prod(shape):
            raise BadGeometry("tensor", f"the axes from {axis} on of {self.described} are not one piece of {shape}")
        strides = tuple(prod(shape[i + 1 :]) * self.itemsize for i in range(len(shape)))
        return replace(self, shape=(*self.shape[:axis], *shape), strides=(*self.strides[:axis], *strides))


def view_of(tensor: object) -> TensorView:
    """The memory of a torch tensor (CPU or CUDA), a numpy array, or an object that shares its memory as one of them.

    Raises:
        BadGeometry: the object is not a strided tensor; its memory is read-only, out of NIXL's reach, or smaller than
            the strides need; or its elements are not plain numbers in this machine's byte order.
    """
    if isinstance(tensor, TensorView):
        return tensor
    known = _known(tensor)
    view = _view_of_torch(known) if hasattr(known, "untyped_storage") else _view_of_numpy(known)
    first, last = view.extent
    base, length = view.storage
    if view.storage != (0, 0) and not base <= first < last <= base + length:
        raise BadGeometry("tensor", f"{view.described} reaches past the {length} bytes that it is a view of")
    return view


def _known(tensor: object) -> Any:
    """The object itself if it is a torch tensor or numpy array, else one over its memory; raises `BadGeometry`."""
    for names in (
        ("data_ptr", "stride", "element_size", "untyped_storage"),
        ("__array_interface__", "dtype", "strides", "itemsize"),
    ):
        if not isinstance(tensor, type) and all(hasattr(tensor, name) for name in names):
            return tensor
    return _adopted(tensor)


def _view_of_torch(tensor: Any) -> TensorView:
    if str(tensor.layout) != "torch.strided":
        raise BadGeometry("tensor", f"a {tensor.layout} tensor of shape {tuple(tensor.shape)} has no strides")
    kind = _KINDS.get(tensor.device.type)
    if kind is None:
        known = "kvferry knows cpu, and cuda, as torch calls both CUDA and ROCm"
        advice = "describe other memory that NIXL can register with a TensorView or Planes"
        raise BadGeometry("tensor", f"device {tensor.device} is not supported: {known}; {advice}")
    if getattr(tensor, "is_quantized", False):
        problem = f"a tensor of {tensor.dtype} has scales and zero points of its own, which would not move"
        advice = "keep integers and scales in tensors of their own, each a component"
        raise BadGeometry("tensor", f"{problem}; {advice}")
    itemsize = int(tensor.element_size())
    storage = tensor.untyped_storage()
    return TensorView(
        address=int(tensor.data_ptr()),
        shape=tuple(int(size) for size in tensor.shape),
        strides=tuple(int(stride) * itemsize for stride in tensor.stride()),
        itemsize=itemsize,
        dtype=str(tensor.dtype).removeprefix("torch."),
        memory_kind=kind,
        device=0 if kind is MemoryKind.DRAM else int(tensor.device.index or 0),
        storage=(int(storage.data_ptr()), int(storage.nbytes())),
    )


def _view_of_numpy(array: Any) -> TensorView:
    interface: Mapping[str, Any] = array.__array_interface__
    address, read_only = interface["data"]
    _check_elements(array.dtype)
    if read_only:
        raise BadGeometry("tensor", f"an array of shape {tuple(array.shape)}, dtype {array.dtype} is read-only")
    root = array
    while hasattr(getattr(root, "base", None), "__array_interface__"):
        root = root.base
    return TensorView(
        address=int(address),
        shape=tuple(array.shape),
        strides=tuple(array.strides),
        itemsize=int(array.itemsize),
        dtype=str(array.dtype),
        storage=_bounds(root),
    )


def _check_elements(dtype: Any) -> None:
    """Check that elements are bytes that mean the same on another machine: no pointers, no records, no text."""
    problem = ""
    if dtype.hasobject:
        problem = "holds pointers to Python objects"
    elif dtype.names is not None or dtype.subdtype is not None:
        problem = "is structured; give a view of it for each component"
    elif dtype.itemsize == 0 or dtype.kind in "SUMm":
        # The types of ml_dtypes, such as bfloat16, are of kind V.
        problem = "is no number"
    elif not dtype.isnative:
        problem = "is not in this machine's byte order, in which kernels read"
    if problem:
        raise BadGeometry("tensor", f"dtype {dtype} {problem}")


def _bounds(root: Any) -> tuple[int, int]:
    """Address and length of the memory of an array that is no view of another; (0, 0) if unknown."""
    shape, strides = getattr(root, "shape", None), getattr(root, "strides", None)
    if not shape or strides is None or min(shape) < 1:
        return 0, 0
    steps = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    below, above = sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
    return int(root.__array_interface__["data"][0]) + below, above - below + int(root.itemsize)


def held(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of our own, in case its owner points it at other memory. Raises `BadGeometry`."""
    if isinstance(tensor, TensorView):
        return tensor
    given = _known(tensor)
    own: Tensor = given.detach() if hasattr(given, "untyped_storage") else given.view()
    return own


def regions_of(tensors: Iterable[Tensor]) -> tuple[MemoryRegion, ...]:
    """The memory to register with NIXL so that every tensor lies within one region.

    Each allocation gives one region, from the first to the last byte that a tensor uses: a descriptor may not span two
    regions, so tensors of one storage (layers, K and V) stay in one. Overlapping ranges are merged; neighbouring ranges
    of different allocations are not, since they may be freed separately.
    """
    found: dict[tuple[MemoryKind, int, int], tuple[int, int]] = {}
    for view in map(view_of, tensors):
        first, last = view.extent
        # A view whose storage is unknown, or that reaches outside its storage, is its own allocation.
        base, length = view.storage
        key = view.memory_kind, view.device, base if base <= first < last <= base + length else first
        known = found.get(key, (first, last))
        found[key] = min(first, known[0]), max(last, known[1])
    merged: list[tuple[MemoryKind, int, int, int]] = []
    for (kind, device, _), (first, last) in sorted(found.items(), key=lambda item: (*item[0][:2], *item[1])):
        if merged and merged[-1][:2] == (kind, device) and first < merged[-1][3]:
            *_, first, end = merged.pop()
            last = max(last, end)
        merged.append((kind, device, first, last))
    return tuple(MemoryRegion(kind, device, first, last - first) for kind, device, first, last in merged)


def _adopted(tensor: object) -> Any:
    """A torch tensor or numpy array over the memory of another library's tensor, which has ``__array_interface__``,
    ``__dlpack__``, or a buffer. Nothing is copied. Raises `BadGeometry` if the tensor does not share its memory."""
    problem = "gives copies of its memory instead of sharing it"
    try:
        # Both are alive: a library that hands out copies, as DLPack lets it, cannot give the same memory twice.
        found, again = _over(tensor), _over(tensor)
        if _address(found) == _address(again):
            return found
    except Exception as error:
        # The other library's code may raise anything.
        problem = f"does not share its memory: {type(error).__name__}: {error}"
    raise BadGeometry("tensor", f"{type(tensor).__name__} {problem}; describe its memory with a TensorView")


def _over(tensor: Any) -> Any:
    import numpy as np

    if hasattr(tensor, "__array_interface__") and not isinstance(tensor, type):
        return np.asarray(tensor)
    if not hasattr(tensor, "__dlpack__"):
        return np.asarray(memoryview(tensor))
    try:
        # numpy before torch, which ignores that memory is read-only.
        return np.from_dlpack(tensor, copy=False)
    except (RuntimeError, TypeError, BufferError):
        # Devices, and types that numpy lacks, such as bfloat16; or `copy`, before 2.1, when numpy did not write to such
        # memory.
        torch = sys.modules.get("torch")
        if torch is None:
            raise
        return torch.from_dlpack(tensor.__dlpack__())


def _address(tensor: Any) -> int:
    return int(tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data)


class Axes:
    """A tensor's axes by name; `content` has the elements of a unit and token."""

    def __init__(self, view: TensorView, axes: Sequence[str]) -> None:
        self.view = view
        self.names = [_ALIASES.get(name, name) for name in axes]
        if len(self.names) != len(view.shape):
            raise self.problem(f"{len(self.names)} axes are named: {', '.join(axes)}")
        for name in self.names:
            if name not in AXES:
                raise self.problem(f"axis {name!r} is none of {', '.join((*AXES, *_ALIASES))}")
            if name != "content" and self.names.count(name) > 1:
                raise self.problem(f"axis {name!r} is named twice")
        if "slot" in self.names and {"block", "token", "page"} & set(self.names):
            raise self.problem("a slot axis holds blocks and tokens, so there is no other axis of them")
        if "slot" not in self.names and "block" not in self.names:
            raise self.problem("no axis is named block or slot")
        content = view.contiguous(index for index, name in enumerate(self.names) if name == "content")
        if content is None:
            raise self.problem("the content of a unit and token is not contiguous")
        self.content = content

    def problem(self, text: str) -> BadGeometry:
        return BadGeometry("tensor", f"{text} ({self.view.described})")

    def has(self, name: str) -> bool:
        return name in self.names

    def size(self, name: str) -> int:
        return self.view.shape[self.names.index(name)] if name in self.names else 1

    def stride(self, name: str) -> int:
        """Bytes; 0 for an axis of one element, whose stride means nothing."""
        return self.view.strides[self.names.index(name)] if self.size(name) > 1 else 0
