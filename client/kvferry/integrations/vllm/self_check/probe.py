"""The memory that a check writes into: which of its bytes a write has changed, by the planes that declare them.

Addresses come from the fields of the planes alone, not from the planner that the check is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from kvferry.errors import LayoutMismatch
from kvferry.geometry.plane import Plane

POISONS = (0xA5, 0x5A)
"""Bytes to fill memory with before a write. Two, so that a written byte differs from at least one of them."""

_SHOWN = 16
"""Bytes that an error shows of each side."""


class Probe:
    """A block of a layer, with everything near it that a wrong write would hit.

    Args:
        layer: name of the layer, for errors.
        planes: the layer's planes; all of their bytes lie in `registered`'s allocation.
        block: id of the block.
        registered: the tensor that vLLM handed over.
        written: vLLM's own tensors, and the indices ``[first, end)`` of their first axis that are the block.
    """

    def __init__(
        self,
        layer: str,
        planes: Sequence[Plane],
        block: int,
        registered: torch.Tensor,
        written: Sequence[tuple[torch.Tensor, int, int]],
    ) -> None:
        self.layer, self.planes, self.block = layer, planes, block
        memory = _bytes_of_storage(registered)
        self.cells = [_cells(memory, registered.untyped_storage().data_ptr(), plane, block) for plane in planes]
        """The block's cells by plane, ``uint8 [pages, units, page tokens, state bytes]``."""
        self._watched = [*self.cells, *(_surroundings(*which) for which in written)]
        self._saved = [watched.clone() for watched in self._watched]

    def fill(self, poison: int) -> None:
        """Fill all of this memory with a byte."""
        for watched in self._watched:
            watched.fill_(poison)

    def restore(self) -> None:
        """Put everything back as it was when this object was made."""
        for watched, saved in zip(self._watched, self._saved, strict=True):
            watched.copy_(saved)

    def nothing(self) -> list[torch.Tensor]:
        """Return a selection of no cells, by plane: ``bool [pages, units, page tokens]``."""
        return [torch.zeros(cells.shape[:3], dtype=torch.bool, device=cells.device) for cells in self.cells]

    def effect(
        self, write: Callable[[], None], allowed: Sequence[torch.Tensor], inspect: Callable[[], None] | None = None
    ) -> list[torch.Tensor]:
        """Make a write, find out what it has changed, and undo it.

        Args:
            write: makes the write.
            allowed: the cells that it may change, by plane, as `nothing` returns them.
            inspect: called between the write and its undoing.

        Returns:
            The bytes that it changed, by plane, in the shape of `cells`.

        Raises:
            LayoutMismatch: it changed a byte outside the allowed cells.
        """
        before = [watched.clone() for watched in self._watched]
        write()
        if inspect is not None:
            inspect()
        changed = []
        for cells, was, chosen in zip(self.cells, before, allowed, strict=False):
            changed.append(cells != was)
            cells.copy_(torch.where(chosen[..., None], was, cells))
        for watched, was in zip(self._watched, before, strict=True):
            if not torch.equal(watched, was):
                raise self._outside(watched, was)
        return changed

    def missing(self, plane: int, cells: torch.Tensor) -> LayoutMismatch:
        """Return the error that a write left a cell unchanged, the first of those chosen in ``[pages, units, page
        tokens]``."""
        page, unit, at = (int(index) for index in cells.nonzero()[0])
        found = _hex(self.cells[plane][page, unit, at])
        return self.error(
            plane, page, unit, at, "what vLLM writes there", found, "vLLM did not write bytes that it holds"
        )

    def error(
        self, plane: int, page: int, unit: int, at: int, expected: str, found: str, problem: str
    ) -> LayoutMismatch:
        """Return the error about one cell."""
        declared = self.planes[plane]
        token, head = page * declared.page_tokens + at, declared.units.begin + unit
        return LayoutMismatch(
            self.layer,
            f"{declared.component} of token {token}, head {head}, in block {self.block}: {problem}",
            component=declared.component,
            block=self.block,
            token=token,
            head=head,
            expected=expected,
            found=found,
        )

    def _outside(self, watched: torch.Tensor, was: torch.Tensor) -> LayoutMismatch:
        index = (watched != was).nonzero()[0]
        row = tuple(int(place) for place in index[:-1])
        first = int(index[-1])
        address = int(watched.data_ptr()) + sum(
            int(place) * stride for place, stride in zip(index, watched.stride(), strict=True)
        )
        last = min(first + _SHOWN, watched.shape[-1])
        expected, found = _hex(was[row][first:last]), _hex(watched[row][first:last])
        problem = "vLLM changed its bytes when it wrote others"
        for number, plane in enumerate(self.planes):
            place = _cell_at(plane, self.block, address)
            if place is not None:
                return self.error(number, *place, expected, found, problem)
        at = address - (self.planes[0].base + self.block * self.planes[0].block_stride)
        return LayoutMismatch(
            self.layer,
            f"vLLM wrote a byte that no plane declares, {at} bytes after the first of {self.planes[0].component} in"
            f" block {self.block}",
            block=self.block,
            expected=expected,
            found=found,
        )


def shown(cell: torch.Tensor, other: torch.Tensor) -> tuple[str, str]:
    """Return two different strings of bytes as text, from a little before their first difference."""
    first = max(0, int((cell != other).nonzero()[0]) // _SHOWN * _SHOWN)
    return _hex(cell[first:]), _hex(other[first:])


def _hex(found: torch.Tensor) -> str:
    return bytes(found[:_SHOWN].tolist()).hex()


def _bytes_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _cells(memory: torch.Tensor, address: int, plane: Plane, block: int) -> torch.Tensor:
    shape = (plane.pages, len(plane.units), plane.page_tokens, plane.state_bytes)
    strides = (plane.page_stride, plane.unit_stride, plane.token_stride, 1)
    return memory.as_strided(shape, strides, plane.base + block * plane.block_stride - address)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor; its last axis is contiguous, or it is split to bytes of single elements."""
    size, memory = tensor.element_size(), _bytes_of_storage(tensor)
    shape, strides = list(tensor.shape), [stride * size for stride in tensor.stride()]
    if shape and (tensor.stride(-1) == 1 or shape[-1] == 1):
        shape[-1], strides[-1] = shape[-1] * size, 1
    else:
        shape.append(size)
        strides.append(1)
    return memory.as_strided(shape, strides, tensor.storage_offset() * size)


def _surroundings(tensor: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """The bytes of some indices of a tensor's first axis and of their neighbours. Where each index is one piece, that
    includes everything between the neighbours: padding, and other layers' pages."""
    size = tensor.element_size()
    piece, stride = prod(tensor.shape[1:]) * size, tensor.stride(0) * size
    if not tensor[0].is_contiguous() or stride > 4 * piece:
        return _as_bytes(tensor[max(0, first - 1) : end + 1])
    memory, begin = _bytes_of_storage(tensor), tensor.storage_offset() * size
    return memory[max(0, begin + first * stride - piece) : begin + (end - 1) * stride + 2 * piece]


def _cell_at(plane: Plane, block: int, address: int) -> tuple[int, int, int] | None:
    """Return the page, unit and state within the page of the cell that has an address, or None."""
    at: Any = address - plane.base - block * plane.block_stride
    page = torch.arange(plane.pages)[:, None, None] * plane.page_stride
    unit = torch.arange(len(plane.units))[:, None] * plane.unit_stride
    begins = page + unit + torch.arange(plane.page_tokens) * plane.token_stride
    found = ((begins <= at) & (at < begins + plane.state_bytes)).nonzero()
    return None if not len(found) else (int(found[0][0]), int(found[0][1]), int(found[0][2]))
