"""The bytes that planes declare: whether they tile their tensor, and a probe that sees which of them a write changes.

Addresses come from the fields of the planes alone, independently of the planner. Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from kvferry.errors import InvalidField, LayoutMismatch
from kvferry.geometry.model import Group
from kvferry.geometry.plane import Plane
from kvferry.geometry.tensors import view_of

SCALED = " * "
"""Separates the name of an element type from a static scale, in the `dtype` of a plane."""

POISONS = (0xA5, 0x5A)
"""Bytes to fill memory with before a write. A written byte differs from at least one of the two."""

_SHOWN = 16
"""Bytes that an error shows of each side."""

_MOST_BETWEEN = 1 << 20
"""Most bytes between a block and its neighbours that are always watched."""

_BYTES = ("uint8", "int8")
"""Types of tensors that may hold elements of any type, or of several types beside each other."""

_Addresses = npt.NDArray[np.int64]


def check_tensor(group: Group, tensor: torch.Tensor, planes: Sequence[Plane], block_bytes: int | None) -> None:
    """Check that the planes of a layer tile its tensor, without overlaps, and without gaps but for padding."""
    if not planes:
        raise InvalidField("planes", 0, "the planes of a layer")
    layer = planes[0].layer
    view, blocks = view_of(tensor), group.num_blocks
    pages, rest = divmod(view.shape[0], blocks)
    if rest or not pages:
        raise LayoutMismatch(layer, f"{view.described} is not made of {blocks} blocks")
    check_elements(view.dtype, planes)
    stride, memory = view.strides[0] * pages, f"{view.memory_kind.name} {view.device}"
    for plane in planes:
        for what, declared, expected in (
            ("its group", plane.group, group.name),
            ("the number of its blocks", plane.num_blocks, blocks),
            ("the distance of its blocks", plane.block_stride if blocks > 1 else stride, stride),
            ("its memory", f"{plane.memory_kind.name} {plane.device}", memory),
        ):
            if declared != expected:
                problem = f"{what} is not that of the tensor, for {plane.component}"
                raise mismatch(plane, problem, expected, declared)
    dims = len(view.shape)
    tail = next(axis for axis in range(1, dims + 1) if view.contiguous(range(axis, dims)))
    axes = [(pages, view.strides[0]), *zip(view.shape[1:tail], view.strides[1:tail], strict=True)]
    begins, ends, _ = _runs(_starts(view.address, axes), prod(view.shape[tail:]) * view.itemsize)
    cells = [_starts(plane.base, _axes(plane)) for plane in planes]
    of = np.repeat(np.arange(len(planes)), [len(found) for found in cells])
    sizes = np.array([plane.state_bytes for plane in planes], np.int64)[of]
    first, last, clash = _runs(np.concatenate(cells), sizes)
    if clash is not None:
        first_named, second_named = (planes[of[at]].component for at in clash)
        problem = f"{first_named} and {second_named} declare the same bytes of a block"
        raise LayoutMismatch(layer, problem, component=first_named)
    at = np.searchsorted(begins, first, "right") - 1
    outside = (at < 0) | (last > ends[at])
    if outside.any():
        byte = int(first[outside][0]) - view.address
        raise LayoutMismatch(layer, f"its planes declare bytes {byte} ... of block 0, which are not its tensor's")
    held, expected_bytes = int((last - first).sum()), int((ends - begins).sum())
    if block_bytes is not None:
        expected_bytes = block_bytes
    if held != expected_bytes:
        problem = f"its planes declare {held} bytes of a block, which holds {expected_bytes}"
        raise LayoutMismatch(layer, problem, expected=expected_bytes, found=held)


def check_elements(dtype: str, planes: Iterable[Plane]) -> None:
    """Check the planes' element types against the tensor's: the engines of a read compare only these names."""
    for plane in planes:
        if dtype not in _BYTES and plane.dtype.partition(SCALED)[0] != dtype:
            problem = f"elements of {plane.component} are declared to be {plane.dtype}, those of its tensor are {dtype}"
            raise mismatch(plane, problem, dtype, plane.dtype)


def mismatch(plane: Plane, problem: str, expected: object, found: object) -> LayoutMismatch:
    return LayoutMismatch(plane.layer, problem, component=plane.component, expected=expected, found=found)


def _axes(plane: Plane) -> list[tuple[int, int]]:
    """Return the axes of a block's cells, (count, bytes): page, state within the page, unit."""
    return [
        (plane.pages, plane.page_stride),
        (plane.page_tokens, plane.token_stride),
        (len(plane.units), plane.unit_stride),
    ]


def _starts(address: int, axes: Iterable[tuple[int, int]]) -> _Addresses:
    """Return the addresses of all indices along axes of (count, stride)."""
    found = np.full(1, address, np.int64)
    for count, stride in axes:
        found = (found[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
    return found


def _runs(starts: _Addresses, sizes: _Addresses | int) -> tuple[_Addresses, _Addresses, tuple[int, int] | None]:
    """Return the begins and ends of runs of bytes that do not touch, by rising address; and the indices of two cells
    that share a byte, or None."""
    order = np.argsort(starts, kind="stable")
    begins = starts[order]
    ends = begins + np.broadcast_to(np.asarray(sizes), starts.shape)[order]
    shared = np.flatnonzero(begins[1:] < ends[:-1])
    clash = (int(order[shared[0]]), int(order[shared[0] + 1])) if len(shared) else None
    cuts = np.flatnonzero(begins[1:] != ends[:-1])
    return begins[np.append(0, cuts + 1)], ends[np.append(cuts, len(ends) - 1)], clash


class Probe:
    """A block of a layer, with the memory near the block that a wrong write would hit.

    All bytes of the planes lie in the tensor. Selections of cells are ``bool [states, units]``, by plane; the bytes of
    cells are ``uint8 [states, units, state bytes]``.
    """

    def __init__(self, planes: Sequence[Plane], block: int, tensor: torch.Tensor, blocks: int) -> None:
        self.planes, self.block, self.device = planes, block, tensor.device
        storage = tensor.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._cells = []
        for plane in planes:
            sizes, strides = zip(*_axes(plane), strict=True)
            first = plane.base + block * plane.block_stride - storage.data_ptr()
            self._cells.append(memory.as_strided((*sizes, plane.state_bytes), (*strides, 1), first))
        self._watched = [*self._cells, _surroundings(memory, tensor, block, tensor.shape[0] // blocks)]
        self._saved = [watched.clone() for watched in self._watched]

    def fill(self, poison: int) -> None:
        for watched in self._watched:
            watched.fill_(poison)

    def restore(self) -> None:
        for watched, saved in zip(self._watched, self._saved, strict=True):
            watched.copy_(saved)

    def nothing(self) -> list[torch.Tensor]:
        """Return a selection of no cells."""
        shapes = [(plane.block_states, len(plane.units)) for plane in self.planes]
        return [torch.zeros(shape, dtype=torch.bool, device=self.device) for shape in shapes]

    def planes_in(self, view: torch.Tensor) -> list[int]:
        """Return the indices of the planes whose first byte of the block lies in a view of the block."""
        first, size = view.data_ptr(), view.numel() * view.element_size()
        begins = [plane.base + self.block * plane.block_stride for plane in self.planes]
        return [index for index, begin in enumerate(begins) if first <= begin < first + size]

    def check(
        self,
        write: Callable[[], object],
        allowed: Sequence[torch.Tensor],
        exact: Sequence[bool],
        expected: Mapping[int, torch.Tensor],
    ) -> None:
        """Check that a write changes the cells `allowed`, whatever their values before, and no others: all bytes of
        each, or, in planes that are not `exact`, some byte of each granule. For `allowed` and `expected` see `effect`.
        """
        effects = []
        for poison in POISONS:
            self.fill(poison)
            effects.append(self.effect(write, allowed, expected))
        for number, (plane, chosen, one, other) in enumerate(zip(self.planes, allowed, *effects, strict=True)):
            changed = one | other
            written = changed.all(-1) if exact[number] else of_granules(changed.any(-1), plane.token_granule)
            self.check_written(number, chosen & ~written)

    def effect(
        self, write: Callable[[], object], allowed: Sequence[torch.Tensor], expected: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Make a write, undo it, and return the bytes that it changed, by plane. It may change the cells `allowed`, and
        must write the bytes `expected`, by the index of the plane; raises `LayoutMismatch`."""
        before = [watched.clone() for watched in self._watched]
        write()
        for number, cells in expected.items():
            self._check_equal(number, cells)
        changed = []
        for cells, was, chosen in zip(self._cells, before, allowed, strict=False):
            changed.append((cells != was).flatten(0, 1))
            cells.copy_(torch.where(chosen.reshape(*cells.shape[:3], 1), was, cells))
        for watched, was in zip(self._watched, before, strict=True):
            if not torch.equal(watched, was):
                raise self._outside(watched, was)
        return changed

    def check_written(self, number: int, missed: torch.Tensor) -> None:
        """Raise `LayoutMismatch` for the first cell of a plane, if any, that a write has left unchanged."""
        if missed.any():
            token, unit = missed.nonzero()[0].tolist()
            found, problem = _hex(self._bytes(number)[token, unit]), "the engine did not write bytes that it holds"
            raise self._error(number, token, unit, "what the engine writes there", found, problem)

    def _check_equal(self, number: int, expected: torch.Tensor) -> None:
        """Raise `LayoutMismatch` for the first cell of a plane, if any, that differs."""
        found = self._bytes(number)
        differs = (found != expected).any(-1)
        if differs.any():
            token, unit = differs.nonzero()[0].tolist()
            cells = expected[token, unit], found[token, unit]
            # Begin a little before the first difference.
            first = int((cells[0] != cells[1]).nonzero()[0]) // _SHOWN * _SHOWN
            pair = _hex(cells[0][first:]), _hex(cells[1][first:])
            raise self._error(number, token, unit, *pair, "what stands there is not what the engine wrote")

    def _bytes(self, number: int) -> torch.Tensor:
        return self._cells[number].flatten(0, 1)

    def _error(self, number: int, token: int, unit: int, expected: str, found: str, problem: str) -> LayoutMismatch:
        plane = self.planes[number]
        head = plane.units.begin + unit
        return LayoutMismatch(
            plane.layer,
            f"{plane.component} of token {token}, head {head}, in block {self.block}: {problem}",
            component=plane.component,
            block=self.block,
            token=token,
            head=head,
            expected=expected,
            found=found,
        )

    def _outside(self, watched: torch.Tensor, was: torch.Tensor) -> LayoutMismatch:
        """Return the error about the first byte of watched memory that has changed."""
        index = tuple(int(each) for each in (watched != was).nonzero()[0])
        row, shown = index[:-1], slice(index[-1], index[-1] + _SHOWN)
        expected, found = _hex(was[row][shown]), _hex(watched[row][shown])
        address = int(watched[index].data_ptr())
        for number, plane in enumerate(self.planes):
            begins = _starts(plane.base + self.block * plane.block_stride, _axes(plane))
            hit = np.flatnonzero((begins <= address) & (address < begins + plane.state_bytes))
            if len(hit):
                problem = "the engine changed its bytes when it wrote others"
                return self._error(number, *divmod(int(hit[0]), len(plane.units)), expected, found, problem)
        first = self.planes[0]
        at = address - first.base - self.block * first.block_stride
        where = f"{at} bytes after the first of {first.component} in block {self.block}"
        problem = f"the engine wrote a byte that no plane declares, {where}"
        return LayoutMismatch(first.layer, problem, block=self.block, expected=expected, found=found)


def of_granules(cells: torch.Tensor, granule: int) -> torch.Tensor:
    """Return the whole granules, of so many states, of the selected cells of a plane."""
    return cells.reshape(-1, granule, cells.shape[1]).any(1).repeat_interleave(granule, 0)


def _hex(found: torch.Tensor) -> str:
    return bytes(found[:_SHOWN].tolist()).hex()


def _surroundings(memory: torch.Tensor, tensor: torch.Tensor, block: int, pages: int) -> torch.Tensor:
    """Return the bytes of a block and of its neighbours, and, unless there are too many, the bytes between them:
    padding, and other layers' pages."""
    near = tensor[max(0, block - 1) * pages : (block + 2) * pages]
    size = near.element_size()
    begin = near.storage_offset() * size
    end = begin + sum((count - 1) * step * size for count, step in zip(near.shape, near.stride(), strict=True)) + size
    if end - begin <= max(_MOST_BETWEEN, 4 * near.numel() * size):
        return memory[begin:end]
    return near.unsqueeze(-1).view(torch.uint8)
